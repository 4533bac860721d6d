"""What a script gives to the library, or asks of its models, that cannot be: a sentence in time."""

from __future__ import annotations

import functools
import inspect
import zlib
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from smp.errors import UserError
from smp.mesh import Mesh, Role
from smp.parallel.sharding import fsdp_modules


def require_model(caller: str, model: Any, *, changes: bool = True) -> None:
    """Refuse what is no Hugging Face model, which has a config.

    Args:
        changes: whether the caller changes its modules, which it cannot from outside of what ``torch.compile`` returns.
    """
    if not isinstance(model, nn.Module) or getattr(model, "config", None) is None:
        raise UserError(
            f"{caller} takes a Hugging Face causal language model, got a {type(model).__name__}: build one, by "
            f"AutoModelForCausalLM.from_pretrained(directory) or smp.meta_init(config)"
        )
    if changes:
        require_uncompiled(caller, model)


def require_uncompiled(caller: str, model: nn.Module) -> None:
    """Refuse what ``torch.compile`` has returned, the model being inside of it."""
    if hasattr(model, "_orig_mod"):
        raise UserError(
            f"{caller} changes the model's modules, and this one is inside of torch.compile's: call {caller} before "
            f"torch.compile(model), or compile in place by model.compile()"
        )


def require_unsharded(caller: str, model: nn.Module) -> None:
    """Refuse a model of which each rank has a part already."""
    if any(fsdp_modules(model)):
        raise UserError(f"{caller}: the {type(model).__name__} is sharded already: shard a model once")


def require_kind(caller: str, name: str, value: Any, kind: type, example: str) -> None:
    """Refuse an argument of another type than ``kind``, which would not be heeded; None is none."""
    if value is not None and not isinstance(value, kind):
        raise UserError(f"{caller}: {name} {value!r} is not allowed: give a {kind.__name__}, such as {example}")


def batches_of(ids: torch.Tensor, ranks: Role) -> list[tuple[tuple[int, ...], int]]:
    """Return the shape and a checksum of each rank's token ids, by rank of the group; collective."""
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, (tuple(ids.shape), zlib.crc32(ids.cpu().numpy().tobytes())), group=ranks.group)
    return found


def require_same_batch(caller: str, ids: torch.Tensor, ranks: Role, mesh: Mesh) -> None:
    """Refuse batches that differ between ranks that compute one together, which no one else notices; collective."""
    found = batches_of(ids, ranks)
    if len(set(found)) > 1:
        raise UserError(
            f"{caller}: the {ranks.size} ranks that compute a batch together have different ones, of the shapes "
            f"{', '.join(str(shape) for shape, _ in found)}: read the samples of mesh.data_rank {mesh.data_rank} on all"
        )


def refuse_under_tensor_parallelism(model: Any) -> None:
    """Refuse transformers' generation, and its recomputation, which replaced forwards of blocks do not do."""

    def enable(*args: Any, **kwargs: Any) -> None:
        raise UserError(
            "transformers' gradient checkpointing has no effect under tensor parallelism: leave it out, and call "
            "smp.parallelize(model, activation_checkpointing=True) or smp.apply_activation_checkpointing"
        )

    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        enable()
    model.gradient_checkpointing_enable = model.activation_checkpointing_enable = enable

    def generate(*args: Any, **kwargs: Any) -> None:
        raise UserError(
            "generate is not available under tensor parallelism: export the model by smp.export_hf, and load it with "
            "from_pretrained"
        )

    model.generate = generate


class _NoReplica:
    """What ``DistributedDataParallel`` iterates over before all else."""

    def __init__(self, call: str):
        self._call = call

    def __iter__(self) -> NoReturn:
        raise UserError(
            f"DistributedDataParallel, in which Accelerator.prepare and Trainer wrap a model, cannot take one that "
            f"{self._call} has sharded or split, and which reduces its gradients itself: train it in a loop of your "
            f"own, and give accelerator.prepare the optimizer and the dataloader alone"
        )


def refuse_ddp(model: Any, call: str) -> None:
    """Let ``DistributedDataParallel`` of a model be a sentence.

    Args:
        call: that has sharded or split it.
    """
    model._ddp_params_and_buffers_to_ignore = _NoReplica(call)


def refuse_changes(model: Any, call: str) -> None:
    """Let what transformers would begin, and fail at halfway, of a sharded or split model be a sentence.

    Args:
        call: that has sharded or split it.
    """

    def resize(*args: Any, **kwargs: Any) -> None:
        raise UserError(
            f"resize_token_embeddings cannot change a model of which each rank has a part: call it before {call}"
        )

    model.resize_token_embeddings = resize
    refuse_ddp(model, call)
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
