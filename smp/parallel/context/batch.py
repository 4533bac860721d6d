"""A rank's part of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F

from smp.errors import UserError
from smp.loss import IGNORE_INDEX, shift_labels
from smp.mesh import Mesh
from smp.parallel.context.functions import SequenceShard
from smp.parallel.context.layout import Range, split_columns
from smp.parallel.documents import bounds_of
from smp.parallel.microbatch import Microbatch

_TAKEN = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask", "document_bounds")


def shard_batch(batch: Mapping[str, Any], mesh: Mesh, *, balanced: bool = True) -> dict[str, Any]:
    """Cut a rank's tokens out of a script's batch.

    Args:
        batch: ``input_ids`` ``(batch, sequence)``, on the host; ``labels`` in Hugging Face's convention, or
            ``shift_labels``, whose every token has the label of what it predicts; ``position_ids`` which restart at
            every document.
        mesh: its ``cp`` ranks have the same batch.
        balanced: as :func:`smp.parallel.context.layout.split_columns`'s.

    Returns:
        The arguments of the model: ``input_ids``, ``position_ids`` and ``shift_labels`` of the rank's tokens, and
        ``labels``, which are the same, so that Hugging Face's loss is computed.

    Raises:
        UserError: a batch with other tensors, padding on the left, or a mask of its own.
    """
    targets = batch.get("shift_labels")
    if targets is None and batch.get("labels") is not None:
        targets = shift_labels(batch["labels"])
    own = dict(batch)
    if mesh.cp.size > 1:
        check_batch("smp.shard_sequence", batch)
        given = {name: batch.get(name) for name in ("input_ids", "position_ids", "document_bounds")}
        given = {name: each for name, each in {**given, "targets": targets}.items() if each is not None}
        own = dict(cut(cast(Microbatch, given), mesh, balanced=balanced))
        targets = own.pop("targets", None)
    return own if targets is None else {**own, "labels": targets, "shift_labels": targets}


def cut(batch: Microbatch, mesh: Mesh, *, balanced: bool) -> Microbatch:
    """Cut a rank's tokens out of the rows of a batch, which are padded on the right where ranks do not divide them.

    Args:
        batch: without ``document_bounds``, where documents begin is read from ``position_ids``.
        balanced: as :func:`smp.parallel.context.layout.split_columns`'s.
    """
    ids = batch["input_ids"]
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    starts = _starts(batch, positions)
    layout = split_columns(ids.shape[1], mesh.cp.size, balanced=balanced, multiple=mesh.tp.size, starts=starts)
    own, extra = layout.ranges[mesh.cp.rank], layout.columns - ids.shape[1]
    last = positions[:, -1:].expand(-1, extra)  # one more would be another length to some rotary embeddings
    found: Microbatch = {
        "input_ids": _take(F.pad(ids, (0, extra)), own),
        "position_ids": _take(torch.cat([positions, last], 1), own),
        "sequence_shard": SequenceShard(mesh.cp, layout),
    }
    if "targets" in batch:
        found["targets"] = _take(F.pad(batch["targets"], (0, extra), value=IGNORE_INDEX), own)
    if "sequences" in batch:
        found["sequences"] = _take(F.pad(batch["sequences"], (0, extra)), own)
        found["sequence_tokens"] = batch["sequence_tokens"]
    return found


def _take(rows: torch.Tensor, ranges: tuple[Range, ...]) -> torch.Tensor:
    return torch.cat([rows[:, first:last] for first, last in ranges], 1)


def check_batch(caller: str, batch: Mapping[str, Any]) -> None:
    """Refuse a batch that cannot be cut by tokens.

    Raises:
        UserError: saying so.
    """
    others = sorted(name for name in batch if name not in _TAKEN and batch[name] is not None)
    if others:
        raise UserError(f"{caller}: {others[0]} cannot be cut by tokens: give {', '.join(_TAKEN[:-1])}")
    if batch.get("input_ids") is None:
        raise UserError(f"{caller}: the batch has no input_ids, only {', '.join(batch)}: give them")
    mask = batch.get("attention_mask")
    if mask is None:
        return
    if mask.ndim != 2:
        raise UserError(
            f"attention_mask has {mask.ndim} axes, and {caller} takes one of (batch, sequence): leave it out, and give "
            f"position_ids that restart at each document"
        )
    if (mask[:, 1:] > mask[:, :-1]).any():
        raise UserError(
            "attention_mask hides a token before one that it shows, and context parallelism takes padding on the right "
            "alone: pad there (a tokenizer's padding_side='right'), or leave the mask out and give position_ids that "
            "restart after the padding, as --document_mask 1 does"
        )


def _starts(batch: Microbatch, positions: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Return where each row's documents begin, or ``((0,),)`` where every row is one."""
    rows, length = positions.shape
    bounds = batch.get("document_bounds")
    if bounds is None and "position_ids" not in batch:
        return ((0,),)
    found = [[0] for _ in range(rows)]
    for place in (bounds_of(positions) if bounds is None else bounds).tolist()[:-1]:
        if place % length:
            found[place // length].append(place % length)
    return tuple(map(tuple, found)) if any(len(row) > 1 for row in found) else ((0,),)
