"""Log-probabilities of sequences: sums over the labelled tokens of each, at any layout, without full logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function

from smp.errors import UserError
from smp.loss import IGNORE_INDEX, shift_labels
from smp.mesh import Mesh, Role
from smp.models.hf_values import rope_limit
from smp.parallel.attention import document_lengths
from smp.parallel.context.batch import check_batch, cut
from smp.parallel.documents import bounds_of, document_index
from smp.parallel.loss import is_in_chunks, model_loss_sum
from smp.parallel.microbatch import Microbatch, to_device
from smp.parallel.sharding import averages_gradients
from smp.parallel.targets import chosen_tokens


class _Sum(Function):
    """The sum over the ranks of a sequence: each rank's gradient is that of its summand, times a weight."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any, weight: int) -> torch.Tensor:  # type: ignore[override]
        total, ctx.weight = own.clone(), weight
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return gradient * ctx.weight, None, None


def sum_over_ranks(own: torch.Tensor, ranks: Role, *, averaged: bool = False) -> torch.Tensor:
    """Return the sum of what the ranks of a sequence have of it, on each; one all-reduce, none in backward.

    Gradients of parameters are summed over these ranks, so that each differentiates the whole of what follows from the
    sum, by its summand; where they are averaged, times the number of ranks.
    """
    weight = ranks.size if averaged else 1
    return own if ranks.size == 1 else cast(torch.Tensor, _Sum.apply(own, ranks.group, weight))


def log_probs(model: nn.Module, batch: Mapping[str, Any], mesh: Mesh | None, *, balanced: bool = True) -> torch.Tensor:
    """Return what ``smp.sequence_log_probs`` does.

    Args:
        batch: of this data rank, on the host.
        mesh: of the model; None: one process.
        balanced: as :func:`smp.parallel.context.layout.split_columns`'s.

    Raises:
        UserError: the model's loss is not in chunks, or the batch has no labels, or what cannot be cut by tokens, or
            sequences that would get another rotary embedding than alone.
    """
    caller = "smp.sequence_log_probs"
    if not is_in_chunks(model):
        raise UserError(
            f"{caller} needs a model whose loss is in chunks: call smp.parallelize(model, loss=smp.LossConfig()), or "
            f"smp.chunk_loss(model)"
        )
    batch = _padded_on_the_right(caller, batch)
    check_batch(caller, batch)
    microbatch = _numbered(caller, batch)
    _refuse_other_rotations(caller, getattr(model, "config", None), microbatch)
    splits = mesh is not None and mesh.cp.size > 1
    own = cut(microbatch, mesh, balanced=balanced) if mesh is not None and splits else microbatch
    device = torch.device(mesh.device_type) if mesh is not None and mesh.device_type else batch["input_ids"].device
    inputs: dict[str, Any] = {
        name: to_device(value, device) if isinstance(value, torch.Tensor) else value
        for name, value in own.items()
        if name in ("input_ids", "position_ids", "attention_mask", "sequence_shard")
    }
    if "document_bounds" in own:
        inputs |= document_lengths(to_device(own["document_bounds"], device), own["longest_document"])
    chosen = chosen_tokens(own["targets"], part=splits)
    sequences = own["sequences"], len(own["sequence_tokens"])
    sums = -model_loss_sum(model, inputs, own["targets"], chosen, sequences)
    return sums if mesh is None else sum_over_ranks(sums, mesh.cp, averaged=averages_gradients(model))


def _padded_on_the_right(caller: str, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch with each row's tokens moved to its begin, where they are predicted as without padding.

    Positions then count from a sequence's first token, and no token attends to the padding behind it.

    Raises:
        UserError: a row has padding in between, or it is on the left of packed documents.
    """
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim != 2 or not (mask[:, 1:] > mask[:, :-1]).any():
        return batch
    shown = mask != 0
    if (shown[:, 1:] & ~shown[:, :-1]).sum(1).add(shown[:, 0]).max() > 1:
        raise UserError(
            f"{caller}: attention_mask hides tokens between ones that it shows, and padding is at an end of each "
            f"sequence: take these tokens out"
        )
    if others := [name for name in ("position_ids", "document_bounds") if batch.get(name) is not None]:
        raise UserError(
            f"{caller}: attention_mask pads on the left, with {others[0]}, which are of packed documents: leave "
            f"{others[0]} out (positions count from a sequence's first token), or the mask"
        )
    order = shown.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    found = dict(batch)
    for name in ("labels", "shift_labels"):
        if found.get(name) is not None:  # padding before a sequence's first token neither predicts nor is predicted
            found[name] = found[name].masked_fill(~shown, IGNORE_INDEX)
    for name in ("input_ids", "labels", "shift_labels", "attention_mask"):
        if found.get(name) is not None:
            found[name] = found[name].gather(1, order)
    return found


def _refuse_other_rotations(caller: str, hf_config: Any, batch: Microbatch) -> None:
    """Refuse sequences whose rotary embedding would depend on the others of the batch, or on earlier batches.

    Raises:
        UserError: saying so.
    """
    if (limit := rope_limit(hf_config)) is None:
        return
    (kind, most), targets, mask = limit, batch["targets"], batch.get("attention_mask")
    if "document_bounds" in batch:
        lengths = batch["document_bounds"].diff()
        longest = int(lengths.max())
    else:
        longest = targets.shape[1]
        columns = torch.arange(longest, device=targets.device)
        # Without a mask, up to what the last token with a target predicts.
        ends = (columns + 2).clamp(max=longest) * (targets != IGNORE_INDEX)
        lengths = ends.amax(1) if mask is None else mask.sum(1)
    lengths = lengths[batch["sequence_tokens"] > 0]
    if longest <= most or not len(lengths) or (kind == "longrope" and int(lengths.min()) > most):
        return
    alone = ", or longer sequences in batches of their own" if kind == "longrope" else ""
    raise UserError(
        f"{caller}: beyond {most} tokens the rotary embedding ({kind}) is that of the longest sequence for all of a "
        f"batch, and this one has {longest} tokens with padding: give at most {most}{alone}"
    )


def _numbered(caller: str, batch: Mapping[str, Any]) -> Microbatch:
    """Return a script's batch as a micro-batch, with the number of each token's sequence."""
    ids: torch.Tensor = batch["input_ids"]
    positions: Any = batch.get("position_ids")
    bounds: Any = batch.get("document_bounds")
    targets = batch.get("shift_labels")
    if targets is None:
        if batch.get("labels") is None:
            raise UserError(f"{caller}: the batch has no labels: give them, -100 where a token does not count")
        targets = shift_labels(batch["labels"])
    rows, length = ids.shape
    found: Microbatch = {"input_ids": ids}
    if positions is None and bounds is None:
        sequences = torch.arange(rows, device=ids.device)[:, None].expand(rows, length).contiguous()
        if batch.get("attention_mask") is not None:
            found["attention_mask"] = batch["attention_mask"]
    else:
        if bounds is None:
            bounds = bounds_of(positions)
        sequences = document_index(ids, bounds).to(torch.int64) - 1
        if positions is None:
            tokens = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
            positions = tokens - bounds.to(torch.int64)[sequences]
        found |= {
            "position_ids": positions,
            "document_bounds": bounds,
            "longest_document": int(bounds.diff().max()),
        }
        ends = torch.ones_like(targets, dtype=torch.bool)
        ends[:, :-1] = sequences[:, 1:] != sequences[:, :-1]
        targets = targets.masked_fill(ends, IGNORE_INDEX)  # the first token of the next document
    count = rows if "document_bounds" not in found else len(found["document_bounds"]) - 1
    valid = sequences[targets != IGNORE_INDEX]
    tokens = torch.zeros(count, dtype=torch.int64, device=ids.device).index_add_(0, valid, torch.ones_like(valid))
    return {**found, "targets": targets, "sequences": sequences, "sequence_tokens": tokens}
