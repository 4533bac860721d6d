"""Checks of Hugging Face configurations from outside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from smp.errors import UserError, one_line
from smp.models.hf_values import number, range_problems
from smp.models.meta_model import count_parameters
from smp.models.stored_weights import FORMATS, METHODS
from smp.models.text_part import is_whole, text_config

_LEFT_OUT = ("auto_map", "quantization_config")


def _class_of(where: object, content: Mapping[str, Any]) -> Any:
    """Return transformers' class for the configuration of a language model, or of a larger one with a text model.

    Raises:
        UserError: there is none.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    name = content.get("model_type")
    if name is None:
        raise UserError(f"{where} names no model_type: add the one that transformers knows the architecture by")
    known = CONFIG_MAPPING[name] if isinstance(name, str) and name in CONFIG_MAPPING else None
    if known is None and "auto_map" in content:
        raise UserError(
            f"{where} is of a type that transformers does not know, {str(name)[:40]!r}, and asks to run code from the "
            f"checkpoint (auto_map), which is never done: use a model of a type that transformers has"
        )
    if known is None or (known not in MODEL_FOR_CAUSAL_LM_MAPPING and not is_whole(known, content)):
        what = "transformers does not know it" if known is None else "it is no causal language model"
        raise UserError(f"architecture {str(name)[:40]!r} is not supported: {what}; give another model than {where}")
    return known


def config_from(where: object, content: Mapping[str, Any]) -> Any:
    """Return Hugging Face's configuration object of a causal language model; nothing is run or fetched.

    Of a larger model, such as one of vision and language, it is that of the text model.

    Args:
        where: the file or directory of ``content``, for messages.
        content: of a config.json.

    Raises:
        UserError: it is of an unknown architecture, or holds values that cannot be.
    """
    known = _class_of(where, content)
    # Of a type that transformers knows its own class is built, and an export holds no such code.
    # Quantised weights are read as what they stand for.
    content = {key: value for key, value in content.items() if key not in _LEFT_OUT}
    if isinstance(text := content.get("text_config"), dict):
        content["text_config"] = text = {key: value for key, value in text.items() if key not in _LEFT_OUT}
    problems = range_problems(content, known.attribute_map)
    problems += range_problems(text, known.attribute_map) if isinstance(text, dict) else []
    if problems:
        raise UserError(f"{where} describes no model that can be built: {'; '.join(problems)}")
    try:
        hf_config = known.from_dict(json.loads(json.dumps(content), object_hook=number))
        if not isinstance(hf_config.dtype, (torch.dtype, type(None))):
            raise TypeError(f"dtype {hf_config.dtype!r}")
    except Exception as error:  # of any type, for malformed values
        raise _refusal(where, error) from error
    return text_config(where, hf_config) if is_whole(known, content) else hf_config


def _check_quantised(where: object, found: Any) -> None:
    """Check that weights are stored in a form that is read.

    Raises:
        UserError: naming the form.
    """
    found = found if isinstance(found, dict) else {}
    method, form = found.get("quant_method"), found.get("format", "float-quantized")
    if method not in METHODS or (method == "compressed-tensors" and form not in FORMATS):
        shown = f"{method} {form}" if method == "compressed-tensors" else str(method)[:40]
        raise UserError(
            f"{where} describes weights that are quantized as {shown!r}, and only fp8 and mxfp4 are read: use the "
            f"model's full weights"
        )


def _refusal(where: object, error: Exception) -> UserError:
    return UserError(f"{where} is refused by transformers ({one_line(error)}): mend it or give another directory")


def checked_config(where: object, content: Mapping[str, Any]) -> Any:
    """Return a configuration from which a model can be built and trained; nothing in it is run or fetched.

    Raises:
        UserError: as :func:`config_from`; or its weights are in a form that is not read, or no model can be built.
    """
    for each in (content, content.get("text_config")):
        if isinstance(each, dict) and (found := each.get("quantization_config")) is not None:
            _check_quantised(where, found)
    hf_config = config_from(where, content)
    try:
        count_parameters(hf_config)
    except UserError:
        raise
    except Exception as error:
        raise _refusal(where, error) from error
    return hf_config
