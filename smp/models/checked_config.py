"""Checks of Hugging Face configurations from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from smp.errors import UserError
from smp.models.hf_values import range_problems
from smp.models.registry import count_parameters, family_of


def checked_config(where: object, content: Mapping[str, Any], load: Callable[[], Any]) -> Any:
    """Return a configuration from which a model of a supported family can be built; nothing in it is run or fetched.

    Args:
        where: its file or directory, for messages.
        content: its JSON object.
        load: returns Hugging Face's configuration object; called after the checks of ``content``.

    Raises:
        UserError: it asks to run code, is of an unknown architecture or of quantised weights, or no model can be built.
    """
    if "auto_map" in content:
        raise UserError(
            f"{where} asks to run code from the checkpoint (auto_map), which is never done: use another model"
        )
    if "quantization_config" in content:
        raise UserError(f"{where} describes quantized weights, which cannot be trained: use the model's full weights")
    family_of(content.get("model_type"))
    if problems := range_problems(content):
        raise UserError(f"{where} describes no model that can be built: {'; '.join(problems)}")
    try:
        hf_config = load()
        if not isinstance(hf_config.dtype, (torch.dtype, type(None))):
            raise TypeError(f"dtype {hf_config.dtype!r}")
        count_parameters(hf_config)
    except UserError:
        raise
    except Exception as error:  # of any type, for malformed values
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{where} is refused by transformers ({reason}): mend it or give another directory") from error
    return hf_config
