"""What a script gives to the library, or asks of its models, that cannot be: a sentence in time."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from smp.errors import UserError
from smp.parallel.sharding import fsdp_modules


def require_model(caller: str, model: Any) -> None:
    """Refuse what is no Hugging Face model, which has a config."""
    if not isinstance(model, nn.Module) or getattr(model, "config", None) is None:
        raise UserError(
            f"{caller} takes a Hugging Face causal language model, got a {type(model).__name__}: build one, by "
            f"AutoModelForCausalLM.from_pretrained(directory) or smp.meta_init(config)"
        )


def require_unsharded(caller: str, model: nn.Module) -> None:
    """Refuse a model of which each rank has a part already."""
    if any(fsdp_modules(model)):
        raise UserError(f"{caller}: the {type(model).__name__} is sharded already: shard a model once")


def require_kind(caller: str, name: str, value: Any, kind: type, example: str) -> None:
    """Refuse an argument of another type than ``kind``, which would not be heeded; None is none."""
    if value is not None and not isinstance(value, kind):
        raise UserError(f"{caller}: {name} {value!r} is not allowed: give a {kind.__name__}, such as {example}")


def refuse_saving(model: Any) -> None:
    """Let ``save_pretrained`` of a sharded or split model say what writes it: transformers fails halfway."""
    save = getattr(type(model), "save_pretrained", None)
    if save is None:
        return
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(model, *args, **kwargs).arguments
        if given.get("state_dict") is None:
            raise UserError(
                f"save_pretrained cannot write a model of which each rank has a part: call smp.export_hf(model, "
                f"{str(given['save_directory'])!r}) on every rank, or give full tensors as state_dict="
            )
        return save(model, *args, **kwargs)

    model.save_pretrained = save_pretrained
