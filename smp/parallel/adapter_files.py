"""The files of an adapter in peft's format: those that training starts from, and the settings of a written one."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from smp.config import Settings
from smp.delayed_init import values_rule
from smp.errors import UserError
from smp.models.added import AddedParameter
from smp.models.experts import expert_modules
from smp.models.family import Family
from smp.models.file_names import FileNames, Rename
from smp.models.init_rules import InitRule
from smp.models.model_config import ModelConfig
from smp.models.text_part import PartNames, names_in
from smp.models.weight_files import ADAPTER_CONFIG
from smp.parallel.adapter_config import WEIGHT, WEIGHTS, target_names
from smp.parallel.linear import is_transposed
from smp.parallel.lora_config import Config
from smp.parallel.token_rows import ROWS

# Trained rows are stored as rows by peft, too, though it calls them differences.
_ROWS_KEY = "token_adapter.trainable_tokens_delta"
# Of peft's utils/transformers_weight_conversion.py: what experts were called while each had layers of its own.
_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
NAMES = FileNames(
    to_module=(
        Rename(r"^base_model\.model\.", ""),
        Rename(r"(\.lora_[AB])\.weight$", r"\1"),
        Rename(rf"\.{re.escape(_ROWS_KEY)}$", f".{ROWS}"),
    ),
    to_file=(
        Rename(r"^", "base_model.model."),
        Rename(r"(\.lora_[AB])$", r"\1.weight"),
        Rename(rf"\.{ROWS}$", f".{_ROWS_KEY}"),
    ),
)


def base_of(model: nn.Module, settings: Settings) -> str | None:
    """Return the directory of the base model, if one is named; whoever reads it later may be in another one."""
    hf_config: Any = model.config
    base = settings[ModelConfig].hf_pretrained_model_name_or_dir or getattr(hf_config, "_name_or_path", None)
    return os.path.abspath(base) if base and os.path.isdir(base) else base or None


def names_beside(base: str | None, family: Family) -> FileNames:
    """Return the names in the files of an adapter, given the directory of its base model, which may be a larger one."""
    part = names_in(pathlib.Path(base), family) if base and os.path.isdir(base) else family.file_names
    if not isinstance(part, PartNames):
        return NAMES
    prefix, *others = NAMES.to_module
    return FileNames(to_module=(prefix, *part.back, *others), to_file=(*part.forward, *NAMES.to_file))


class GivenAdapter:
    """The tensors of an adapter's file.

    Raises:
        UserError: it cannot be read.
    """

    def __init__(self, config: Config):
        self._file = pathlib.Path(str(config.adapter_path)).expanduser() / WEIGHTS
        try:
            with safe_open(self._file, "pt") as content:
                self._tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors raises its own
            raise UserError(
                f"--adapter_path: {self._file} cannot be read ({error}): give a directory that peft's save_pretrained "
                f"has written"
            ) from error

    def require(self, keys: Set[str], *, of: str = "") -> None:
        """Check that of the keys with ``of`` in them, without it of all others than factors, there are these.

        Raises:
            UserError: the file lacks one, or has another.
        """
        found = {key for key in self._tensors if (of in key if of else ".lora_" not in key)}
        if not of and (weights := sorted(found - keys)):
            raise UserError(
                f"--adapter_path: {self._file} has {weights[0]}, no factor but a weight, as peft saves of a vocabulary "
                f"that was resized: merge the adapter with peft's merge_and_unload"
            )
        if wrong := sorted(keys ^ found):
            what = "lacks" if wrong[0] in keys else "has"
            raise UserError(
                f"--adapter_path: {self._file} {what} {wrong[0]}: it is an adapter of another model: give the one that "
                f"it was trained with"
            )

    def rule(self, each: AddedParameter) -> InitRule:
        """Return the values of a parameter as its initial ones.

        Raises:
            UserError: it has another shape.
        """
        rows = each.rows
        (key, shape, *_), found = rows[0], self._tensors[rows[0].key]
        if tuple(found.shape) != shape:
            raise UserError(
                f"--adapter_path: {self._file}: {key} is {tuple(found.shape)}, and by {ADAPTER_CONFIG} and the model "
                f"it would be {shape}: give the base model that it was trained with, and undo changes of that file"
            )
        values = torch.empty(each.shape, dtype=found.dtype)
        for row in rows:
            row.of_parameter(values).copy_(found[row.in_tensor])
        return values_rule(values)


def taken_for_experts(model: nn.Module, targets: Iterable[str]) -> list[str]:
    """Return the layers that peft takes for those of routed experts, so that it leaves their factors out.

    It takes their weights, as ``target_parameters``, for what they are.

    Args:
        targets: ends of names of layers.
    """
    return sorted(t for t in targets if t.rpartition(".")[2] in _OF_EXPERTS) if expert_modules(model) else []


def config_text(
    model: nn.Module,
    family: Family,
    config: Config,
    settings: Settings,
    layers: Mapping[str, nn.Module],
    beside: Mapping[str, Any],
) -> str:
    """Return ``adapter_config.json``.

    Args:
        layers: that have adapters, by path.
        beside: the fields of what is trained besides them.
    """
    base = base_of(model, settings)
    names = names_in(pathlib.Path(base), family) if base and os.path.isdir(base) else family.file_names
    targets = target_names(model, layers, names)
    as_weights = [] if config.lora_dropout else taken_for_experts(model, targets)  # peft has no dropout beside weights
    parameters = [*config.lora_target_parameters, *(f"{name}{WEIGHT}" for name in as_weights)]
    return json.dumps(
        {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": config.lora_rank, "lora_alpha": config.lora_alpha,
            "lora_dropout": config.lora_dropout, "use_rslora": config.lora_use_rslora, "bias": "none",
            "target_modules": [name for name in targets if name not in as_weights], "base_model_name_or_path": base,
            **({"target_parameters": parameters} if parameters else {}),
            "fan_in_fan_out": any(map(is_transposed, layers.values())), "inference_mode": True, **beside,
        },
        indent=2,
    )  # fmt: skip
