"""A rank's part of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from smp.config import ParallelConfig
from smp.errors import UserError
from smp.loss import IGNORE_INDEX, shift_labels
from smp.mesh import Mesh
from smp.parallel.context.attention import SHARD
from smp.parallel.context.exchange import SequenceShard
from smp.parallel.context.layout import Range, split_columns

_TAKEN = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask", "document_bounds")
_HANDED_ON = ("sample_ids",)


def shard_batch(batch: Mapping[str, Any], mesh: Mesh, *, balanced: bool = True) -> dict[str, Any]:
    """Cut a rank's tokens out of the rows of a batch, which are padded on the right where ranks do not divide them.

    Args:
        batch: ``input_ids`` ``(batch, sequence)``, on the host; ``labels`` in Hugging Face's convention, or
            ``shift_labels``, whose every token has the label of what it predicts; ``position_ids`` which restart at
            every document, or ``document_bounds``, where documents begin in the flattened batch, and its end.
        mesh: its ``cp`` ranks have the same batch.
        balanced: as :func:`smp.parallel.context.layout.split_columns`'s.

    Returns:
        The arguments of the model: ``input_ids``, ``position_ids`` and ``shift_labels`` of the rank's tokens, and
        ``labels``, which are the same, so that Hugging Face's loss is computed.

    Raises:
        UserError: a batch with other tensors, padding on the left, or a mask of its own.
    """
    if mesh.cp.size == 1:
        return _shifted(batch)
    _check(batch)
    ids = batch["input_ids"]
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    starts = _starts(batch, positions)
    layout = split_columns(ids.shape[1], mesh.cp.size, balanced=balanced, multiple=mesh.tp.size, starts=starts)
    own, extra = layout.held[mesh.cp.rank], layout.columns - ids.shape[1]
    last = positions[:, -1:].expand(-1, extra)  # one more would be another length to some rotary embeddings
    found = {
        "input_ids": _take(F.pad(ids, (0, extra)), own),
        "position_ids": _take(torch.cat([positions, last], 1), own),
        SHARD: SequenceShard(mesh.cp, layout),
    }
    labels = _shifted(batch).get("shift_labels")
    if labels is not None:
        found["shift_labels"] = found["labels"] = _take(F.pad(labels, (0, extra), value=IGNORE_INDEX), own)
    return found | {name: batch[name] for name in _HANDED_ON if name in batch}


def _shifted(batch: Mapping[str, Any]) -> dict[str, Any]:
    labels = batch.get("shift_labels")
    if labels is None and batch.get("labels") is not None:
        labels = shift_labels(batch["labels"])
    return dict(batch) if labels is None else {**batch, "labels": labels, "shift_labels": labels}


def _take(rows: torch.Tensor, ranges: tuple[Range, ...]) -> torch.Tensor:
    return torch.cat([rows[:, first:last] for first, last in ranges], 1)


def _check(batch: Mapping[str, Any]) -> None:
    others = sorted(name for name in batch if name not in (*_TAKEN, *_HANDED_ON) and batch[name] is not None)
    if others:
        raise UserError(f"smp.shard_sequence: {others[0]} cannot be cut by tokens: give {', '.join(_TAKEN[:-1])}")
    if batch.get("input_ids") is None:
        raise UserError(f"smp.shard_sequence: the batch has no input_ids, only {', '.join(batch)}: give them")
    mask = batch.get("attention_mask")
    if mask is None:
        return
    if mask.ndim != 2:
        raise UserError(
            f"attention_mask has {mask.ndim} axes, and under context parallelism a mask is "
            f"(batch, sequence): leave it out, and give position_ids that restart at each document"
        )
    if (mask[:, 1:] > mask[:, :-1]).any():
        raise UserError(
            "attention_mask hides a token before one that it shows, and context parallelism takes padding on the right "
            "alone: pad there (a tokenizer's padding_side='right'), or leave the mask out and give position_ids that "
            "restart after the padding, as --document_mask 1 does"
        )


def _starts(batch: Mapping[str, Any], positions: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Return where each row's documents begin, or ``((0,),)`` where every row is one."""
    rows, length = positions.shape
    bounds = batch.get("document_bounds")
    if bounds is not None:
        first = bounds[:-1].long().cpu()
    elif batch.get("position_ids") is not None:
        restarts = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)
        first = restarts.flatten().nonzero().flatten().cpu()
    else:
        return ((0,),)
    found = [[0] for _ in range(rows)]
    for place in first.tolist():
        if place % length:
            found[place // length].append(place % length)
    return tuple(map(tuple, found)) if any(len(row) > 1 for row in found) else ((0,),)


def sharder(mesh: Mesh, parallel: ParallelConfig) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what takes a rank's tokens out of a micro-batch; without context parallelism, all of them."""
    if mesh.cp.size == 1:
        return lambda microbatch: microbatch
    return functools.partial(shard_batch, mesh=mesh, balanced=parallel.cp_load_balance)
