"""What the model of an SMP v2 script has to take or to say when it is called, as forward pre-hooks."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp.errors import UserError
from smp.log import get_logger
from smp.loss import IGNORE_INDEX
from smp.mesh import Mesh
from smp.parallel.context.attention import SHARD
from smp.parallel.context.functions import SequenceShard
from smp.parallel.context.layout import split_columns
from smp.parallel.refusals import batches_of

_logger = get_logger("smp.sagemaker")

# Of transformer_engine, by version.
_FP8_MODULES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")


def tell_of_fp8(model: nn.Module) -> None:
    """Let the model warn once if it is called inside ``fp8_autocast``, which its modules do not follow.

    Looked for until the first training step.
    """

    def tell(module: nn.Module, args: Any) -> None:
        managers = [getattr(sys.modules.get(name), "FP8GlobalStateManager", None) for name in _FP8_MODULES]
        enabled = any(manager is not None and manager.is_fp8_enabled() for manager in managers)
        if enabled or module.training:
            handle.remove()
        if enabled and not any(type(each).__module__.startswith("transformer_engine") for each in module.modules()):
            _logger.warning(
                "fp8_autocast has no effect: no module of the model is transformer_engine's, and nothing is computed "
                "in fp8; leave it out (--fp8 0 of AWS's scripts)"
            )

    handle = model.register_forward_pre_hook(tell)


def take_cut_batches(model: nn.Module, mesh: Mesh) -> None:
    """Let a model that computes on parts of sequences take ``input_ids`` and ``labels`` as SMP v2's scripts cut them.

    The cut is Megatron-LM's: of twice as many pieces as ranks, each rank has one from the front and one from the back.
    Positions and what attention needs are added, and labels shifted over the cuts. What ``smp.shard_sequence`` returns
    is taken as it is.

    Args:
        model: split over the ranks of a sequence.
        mesh: its ``cp`` ranks call the model together.
    """
    compared: set[bool] = set()
    model.register_forward_pre_hook(functools.partial(_complete, mesh, compared), with_kwargs=True)


def _complete(
    mesh: Mesh, compared: set[bool], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with what ``smp.shard_sequence`` would have added; collective.

    Raises:
        UserError: the arguments are not the parts of a batch.
    """
    ids = args[0] if args else kwargs.get("input_ids")
    if kwargs.get(SHARD) is not None or not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return None
    if kwargs.get("position_ids") is not None:
        raise UserError(
            "under context parallelism positions follow from the cut: leave position_ids out; for packed documents "
            "call model(**smp.shard_sequence(batch)) with the batch as it was before it was cut"
        )
    multiple = 2 * mesh.tp.size
    if ids.shape[1] % multiple:
        raise UserError(
            f"under context parallelism a rank's part of a sequence has {ids.shape[1]} tokens: make sequences a "
            f"multiple of {multiple * mesh.cp.size} long, or call model(**smp.shard_sequence(batch)), which pads"
        )
    if model.training not in compared:
        _refuse_uncut(ids, mesh)
        compared.add(model.training)
    layout = split_columns(ids.shape[1] * mesh.cp.size, mesh.cp.size, balanced=True)
    own = [torch.arange(first, last, device=ids.device) for first, last in layout.ranges[mesh.cp.rank]]
    kwargs = {**kwargs, "position_ids": torch.cat(own).expand(ids.shape), SHARD: SequenceShard(mesh.cp, layout)}
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        kwargs["labels"] = kwargs["shift_labels"] = _shift(kwargs["labels"], mesh)
    return args, kwargs


def _refuse_uncut(ids: torch.Tensor, mesh: Mesh) -> None:
    """Refuse a batch that all ranks of a sequence were given alike; collective."""
    if len(set(batches_of(ids, mesh.cp))) == 1:
        raise UserError(
            "under context parallelism a model takes a rank's part of a batch, and all ranks of a sequence gave the "
            "same tokens: call model(**smp.shard_sequence({'input_ids': input_ids, 'labels': labels})) in the "
            "training step and in the validation"
        )


def _shift(labels: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the label of what each token predicts, the last of a piece that of the next piece; collective."""
    pieces = labels.unflatten(1, (2, -1))
    first = pieces[:, :, 0].contiguous()
    firsts = [torch.empty_like(first) for _ in range(mesh.cp.size)]
    dist.all_gather(firsts, first, group=mesh.cp.group)
    end = torch.full_like(first[:, 0], IGNORE_INDEX)
    # By piece: the ranks' front ones in order, then their back ones in reverse.
    order = [*(each[:, 0] for each in firsts), *(each[:, 1] for each in reversed(firsts)), end]
    rank = mesh.cp.rank
    following = torch.stack([order[rank + 1], order[2 * mesh.cp.size - rank]], 1)
    return torch.cat([pieces[:, :, 1:], following[:, :, None]], 2).flatten(1)
