"""``adapter_config.json`` in peft's format: what of it is obeyed, and what changes the model and is refused."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from smp.errors import UserError
from smp.json_input import read_object, strict_json
from smp.models.file_names import FileNames
from smp.models.text_part import PartNames
from smp.models.weight_files import ADAPTER_CONFIG

WEIGHTS = "adapter_model.safetensors"
WEIGHT = ".weight"  # behind the name of a layer that is one of target_parameters
ALL_LINEAR, NO_LAYERS = "all-linear", "none"
_OBEYED = {
    "peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "trainable_token_indices",
    "modules_to_save", "target_parameters",
}  # fmt: skip
# What says where an adapter is from, is of initial values alone, or of what is refused itself, and computes nothing.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "task_type",
}  # fmt: skip
# With others peft subtracts the initial product from the frozen weights, quantises them, or freezes a factor.
_BASE_UNCHANGED = (True, False, None, "gaussian", "orthogonal", "eva")


def read_settings(folder: pathlib.Path) -> dict[str, Any]:
    """Return the settings of an adapter by the names of the flags.

    Raises:
        UserError: it cannot be read, or has what would be computed otherwise here.
    """
    file = folder / ADAPTER_CONFIG
    try:
        found = read_object(file)
        kind = found["peft_type"]
        theirs = _settings(found) if kind == "LORA" else {}
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise UserError(
            f"--adapter_path {folder}: no adapter that can be read ({error}): give a directory with {ADAPTER_CONFIG} "
            f"and {WEIGHTS}, as peft's save_pretrained writes them"
        ) from error
    if kind != "LORA":
        raise UserError(
            f"{file}: peft_type is {kind!r}, and only LORA is known here: give a LoRA adapter, or merge this one with "
            f"peft's merge_and_unload, which most types have"
        )
    start = found.get("init_lora_weights")
    if start not in _BASE_UNCHANGED:
        raise UserError(
            f"{file}: init_lora_weights is {start!r}, with which peft trains beside other weights than the base "
            f"model's, or one factor alone: merge it with peft's merge_and_unload, or convert it (PiSSA, OLoRA, "
            f"CorDA, LoRA-GA) with save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    for name, value in found.items():
        if name not in {*_OBEYED, *_WITHOUT_EFFECT, "init_lora_weights"} and not _is_left_out(name, value):
            raise UserError(
                f"{file}: {name} is {value!r}, which is not known here and would be ignored: give an adapter that was "
                f"trained without it, or merge it with peft's merge_and_unload"
            )
    tokens = {number for ids in _indices(file, found).values() for number in ids}
    given = _names(file, found, "target_parameters")
    parameters = tuple(name for name in given if not name.endswith(WEIGHT))
    layers = [name.removesuffix(WEIGHT) for name in given if name.endswith(WEIGHT)]
    return {
        **theirs,
        "lora_target_modules": _targets(file, found.get("target_modules"), layers, parameters),
        "lora_target_parameters": parameters,
        "lora_train_tokens": tuple(sorted(map(str, tokens))),
        "lora_modules_to_save": _names(file, found, "modules_to_save"),
    }


def _names(file: pathlib.Path, found: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = found.get(field) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UserError(f"{file}: {field} is {value!r}, and must be a list of the ends of names")
    return tuple(sorted(value))


def token_indices(folder: pathlib.Path) -> dict[str | None, list[int]]:
    """Return the tokens whose rows an adapter has, in order, by the end of a module's name; None: the embedding."""
    file = folder / ADAPTER_CONFIG
    return _indices(file, read_object(file))


def _indices(file: pathlib.Path, found: dict[str, Any]) -> dict[str | None, list[int]]:
    given = found.get("trainable_token_indices") or {}
    by_name: dict[Any, Any] = given if isinstance(given, dict) else {None: given}
    for ids in by_name.values():
        if not isinstance(ids, list) or not all(type(number) is int and number >= 0 for number in ids):
            raise UserError(f"{file}: trainable_token_indices is {given!r}, and must be ids, or for each module ids")
        if len(set(ids)) < len(ids):
            raise UserError(f"{file}: trainable_token_indices has a token twice: {given!r}")
    return by_name


def other_base(folder: pathlib.Path, base: str) -> str | None:
    """Return the base model that an adapter says it is of, if that is another than ``base``: a path or a hub's name.

    Where one of them is not on this machine the names are compared, without case: a path's last part, or the model's in
    a hub's cache.
    """
    theirs = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(theirs, str) or not theirs:
        return None
    path, own = pathlib.Path(theirs).expanduser(), pathlib.Path(base).expanduser()
    same = path.samefile(own) if path.exists() and own.exists() else _model_name(path) == _model_name(own)
    return None if same else theirs


def _model_name(path: pathlib.Path) -> str:
    cached = next((part for part in path.parts if part.startswith("models--")), path.name)
    return cached.rpartition("--")[2].lower()


def _settings(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "lora_rank": int(found["r"]),
        "lora_alpha": float(found["lora_alpha"]),
        "lora_use_rslora": bool(found.get("use_rslora", False)),
        "lora_dropout": float(found.get("lora_dropout", 0.0)),
    }


def saved_settings(model: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a model's adapters by the names of the flags; None: its entry in a manifest has none.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, ArithmeticError: it does not say what they are.
    """
    if WEIGHTS not in model.get("apart", {}):
        return None
    return _settings(strict_json(model["apart"][WEIGHTS][ADAPTER_CONFIG].encode()))


def _is_left_out(name: str, value: Any) -> bool:
    # Not by truth: layers_to_transform 0 is the first layer.
    return value is None or value is False or value in ("", [], {}) or (name == "bias" and value == "none")


def _targets(file: pathlib.Path, value: Any, layers: list[str], parameters: tuple[str, ...]) -> tuple[str, ...]:
    if not value and (layers or parameters):
        return tuple(layers) or (NO_LAYERS,)
    if value == ALL_LINEAR:
        return (ALL_LINEAR,)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UserError(
            f"{file}: target_modules is {value!r}, and a list of the ends of layers' names is known here, or "
            f"{ALL_LINEAR!r}, no regular expression: write the names that it matches there"
        )
    return tuple(sorted({*value, *layers}))


def target_names(model: nn.Module, paths: Collection[str], names: FileNames) -> list[str]:
    """Return ``target_modules`` that match these layers alone: the last part of a path, or all where others have it.

    Args:
        names: of the base model's files; of a larger model they are its modules' names.
    """
    last = {path: path.rpartition(".")[2] for path in paths}
    others = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in last}
    full = dict(zip(last, last, strict=True))
    if isinstance(names, PartNames):
        others |= names.beside
        full = {path: names.in_whole(path) for path in last}
    return sorted({full[path] if name in others else name for path, name in last.items()})
