"""The configs of a directory that is exported, and the files that are copied into it."""

from __future__ import annotations

import copy
import json
import logging
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import torch

from smp.models.family import Family
from smp.models.text_part import PART_OF, as_whole

logger = logging.getLogger(__name__)


def write_configs(
    partial: pathlib.Path,
    hf_config: Any,
    family: Family,
    *,
    generation: Any,
    dtype: torch.dtype,
    with_model: bool,
    copied: Mapping[str, pathlib.Path],
    whole: dict[str, Any] | None,
    quantization: dict[str, Any] | None,
) -> None:
    """Write ``config.json`` and ``generation_config.json`` of an export, and the files that are copied.

    Args:
        partial: directory of the export.
        hf_config: of the model; ``generation`` is its generation config, if it has one.
        dtype: of the files.
        with_model: whether the export has a model, and not only what is beside one.
        copied: files to copy, by name.
        whole: config.json of the larger model that is written.
        quantization: the ``quantization_config`` of tensors that are quantised.
    """
    from transformers import GenerationConfig

    values = {key: value for key, value in hf_config.to_dict().items() if key != PART_OF}
    config = type(hf_config).from_dict(values)  # which leaves out what is of generation alone
    config.architectures = [family.architecture]
    config.dtype = dtype
    config.use_cache = True  # off in training only
    if with_model and whole is not None:
        content = as_whole(whole, config)
        if quantization is not None:  # where the original has it
            of = content if "quantization_config" in whole else content["text_config"]
            of["quantization_config"] = quantization
        text = json.dumps(content, indent=2)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
    elif with_model:  # an adapter's directory has none: from_pretrained would take it for a model's
        if quantization is not None:
            config.quantization_config = quantization
        config.save_pretrained(partial)
    plain = GenerationConfig.from_model_config(config)
    generation = copy.deepcopy(generation) or plain
    if generation._from_model_config:  # made while training had it off
        generation.use_cache = True
    try:
        generation.save_pretrained(partial)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        logger.warning("the model's generation_config is left out, as transformers refuses it: %s", reason)
        plain.save_pretrained(partial)
    for name, file in copied.items():
        (partial / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, partial / name)
