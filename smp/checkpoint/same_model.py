"""Whether a checkpoint's values mean in a model what they meant in the one that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from smp.checkpoint.manifest import Manifest
from smp.checkpoint.remote import RemoteCheckpoint
from smp.errors import UserError
from smp.models.added import added_parameters, files_apart
from smp.models.hf_values import changed_config, is_of_training
from smp.parallel.adapter_config import saved_settings

# Settings of adapters that scale their factors' product. The rank and the layers are in the tensors' shapes and names.
SCALES = ("lora_alpha", "lora_use_rslora")
_MOST = 8


def check_architecture(path: Path | RemoteCheckpoint, saved: dict[str, Any], hf_config: Any) -> None:
    """Refuse a checkpoint of another model.

    Args:
        saved: the configuration in its manifest.

    Raises:
        UserError: naming the differences.
    """
    found = [
        f"{key} {str(theirs)[:40]} there, {str(mine)[:40]} here"
        for key, (theirs, mine) in changed_config(saved, hf_config).items()
        if not is_of_training(key)
    ]
    if found:
        more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
        raise UserError(
            f"checkpoint {path} is of another model: {'; '.join(found[:_MOST])}{more}; resume with the model it was "
            f"made with"
        )


def adapter_settings(path: Path | RemoteCheckpoint, model: dict[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a checkpoint's adapters by the names of the flags; None: it has none.

    Args:
        model: of its manifest.

    Raises:
        UserError: it does not say what they are.
    """
    try:
        return saved_settings(model)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"checkpoint {path} does not say how its adapters are scaled ({error}): resume from another "
                        f"one") from error  # fmt: skip


def _settings_of(model: nn.Module) -> dict[str, Any] | None:
    return saved_settings({"apart": files_apart(added_parameters(model).values())})


def check_adapters(path: Path | RemoteCheckpoint, manifest: Manifest, model: nn.Module) -> None:
    """Raise a UserError for adapters that are scaled otherwise than the model's."""
    theirs, mine = (
        adapter_settings(path, manifest.model),
        _settings_of(model),
    )
    if theirs is None or mine is None:
        return
    if found := [f"{name} {theirs[name]} there, {mine[name]} here" for name in SCALES if theirs[name] != mine[name]]:
        raise UserError(
            f"checkpoint {path} has adapters that are scaled otherwise: {'; '.join(found)}; make the model's as they "
            f"were trained"
        )


def changes_in_training(path: Path | RemoteCheckpoint, manifest: Manifest, model: nn.Module) -> list[str]:
    """Return what a model has otherwise than the saved one and only training reads, as ``key before -> now``."""
    config = getattr(model, "config", None)
    found = changed_config(manifest.model["config"], config) if hasattr(config, "to_json_string") else {}
    theirs, mine = (
        adapter_settings(path, manifest.model),
        _settings_of(model),
    )
    if theirs is not None and mine is not None and theirs["lora_dropout"] != mine["lora_dropout"]:
        found["lora_dropout"] = (theirs["lora_dropout"], mine["lora_dropout"])
    return [f"{key} {before} -> {now}" for key, (before, now) in found.items() if is_of_training(key)]
