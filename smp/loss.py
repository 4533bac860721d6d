"""Cross entropy of a causal language model, as a sum, so that the caller divides by the global token count."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Shard

IGNORE_INDEX = -100


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Shift labels left by one, so that position t has the token that position t predicts.

    Args:
        labels: ``(batch, sequence)`` int64 in Hugging Face's convention (equal to the inputs, -100 ignored).

    Returns:
        Same shape; the last column is ignored.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def count_valid_tokens(labels: torch.Tensor, *, shifted: bool = False) -> int:
    """Count the predictions that are in the loss, after the shift.

    Args:
        labels: as in :func:`shift_labels`.
        shifted: they are what it returns.
    """
    return int((labels[:, 0 if shifted else 1 :] != IGNORE_INDEX).sum())


def check_ids(ids: torch.Tensor, vocabulary: int, *, labels: bool = False) -> None:
    """Refuse tokens outside the vocabulary; on GPUs the error is raised asynchronously.

    Args:
        labels: they are labels, of which some may be ignored.

    Raises:
        ValueError: on a CPU, naming one.
    """
    good = (ids >= 0) & (ids < vocabulary)
    if labels:
        good |= ids == IGNORE_INDEX
    if type(good) is not torch.Tensor or good.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(good.all())  # without waiting for the GPU; fake and traced tensors have no values to read
    elif not good.all():
        what, end = ("label", " and not ignored") if labels else ("input id", "")
        raise ValueError(f"{what} {int(ids[~good][0])} is outside the vocabulary of {vocabulary}{end}")


def causal_lm_loss_sum(logits: torch.Tensor, labels: torch.Tensor, *, shifted: bool = False) -> torch.Tensor:
    """Sum the token losses in nats, computed in at least fp32.

    The labels are shifted, not the logits: slicing the logits would copy the largest tensor of the step.

    Args:
        logits: ``(batch, sequence, vocabulary)``; a DTensor that is split by the vocabulary is never gathered.
        labels: ``(batch, sequence)`` as in :func:`shift_labels`.
        shifted: they are what it returns.

    Returns:
        0-d tensor; divide by the number of valid tokens of the global batch.

    Raises:
        ValueError, IndexError: a label is neither ignored nor in the vocabulary.
    """
    labels = labels if shifted else shift_labels(labels)
    if isinstance(logits, DTensor):
        return _split_loss_sum(logits, labels)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.reshape(-1, logits.shape[-1]).to(dtype)
    return F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum")


def _split_loss_sum(logits: DTensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the token losses, by shifted labels, of logits whose last axis a 1-D mesh splits as ``torch.chunk`` does."""
    (placement,), mesh = logits.placements, logits.device_mesh
    if not isinstance(placement, Shard) or placement.dim not in (-1, logits.ndim - 1):
        raise ValueError(f"logits are laid out as {placement}: the vocabulary must be split")
    check_ids(labels, logits.shape[-1], labels=True)
    first = mesh.get_local_rank() * -(-logits.shape[-1] // mesh.size())
    own = logits.to_local()
    flat = own.reshape(-1, own.shape[-1])
    return _SplitCrossEntropy.apply(flat, labels.reshape(-1), first, mesh.get_group())


def token_losses_(
    logits: torch.Tensor, labels: torch.Tensor, *, first: int = 0, group: Any = None, z_loss: float = 0.0,
    slopes: torch.Tensor | None = None, factors: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the token losses ``(tokens,)``, 0 of ignored ones; the logits are overwritten.

    With a ``group``, two all-reduces of one or two numbers per token.

    Args:
        logits: ``(tokens, vocabulary)``, at least fp32; of a split vocabulary this rank's columns.
        labels: ``(tokens,)``, shifted.
        first: this rank's first column.
        group: the ranks that split the vocabulary; None: it is not split.
        z_loss: factor of the squared log-partition, added to each token's loss.
        slopes: of the logits' shape and any dtype, for their gradient: the logits themselves, or another tensor.
        factors: of each token's loss in the gradient, ``(tokens,)``; None: 1.

    Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
    """
    greatest = logits.amax(-1)
    if group is not None:
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
    logits.sub_(greatest.unsqueeze(-1))
    rows = labels - first
    here = (rows >= 0) & (rows < logits.shape[-1])  # an ignored label is negative: nobody has it
    rows = torch.where(here, rows, 0).unsqueeze(-1)
    target = logits.gather(-1, rows).squeeze(-1) * here
    total = logits.exp_().sum(-1)
    if group is not None:
        both = torch.stack([total, target])
        dist.all_reduce(both, group=group)
        total, target = both
    valid = labels != IGNORE_INDEX
    log_total = total.log()
    losses = log_total - target
    counted = valid if factors is None else valid * factors
    slope = counted / total  # of a loss by a logit: probability, less 1 at the label
    if z_loss:
        log_z = log_total + greatest
        losses = losses + z_loss * log_z.square()
        slope = slope * (1 + 2 * z_loss * log_z)
    if slopes is not None:
        at_label = logits.gather(-1, rows) * slope.unsqueeze(-1) - (counted * here).unsqueeze(-1).to(logits.dtype)
        torch.mul(logits, slope.unsqueeze(-1), out=slopes)
        slopes.scatter_(-1, rows, at_label.to(slopes.dtype))
    return losses * valid


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor, factors: torch.Tensor | None, z_loss: float, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the token losses ``(tokens,)`` and the gradients of the logits in ``dtype``, if it is given.

    As :func:`token_losses_` of an unsplit vocabulary, without overwriting: for ``torch.compile``, of which it is one
    reduction and one pass.
    """
    log_z = logits.logsumexp(-1)
    valid = labels != IGNORE_INDEX
    rows = torch.where(valid, labels, 0)
    losses = log_z - logits.gather(-1, rows.unsqueeze(-1)).squeeze(-1)
    if z_loss:
        losses = losses + z_loss * log_z.square()
    if dtype is None:
        return losses * valid, None
    counted = (valid if factors is None else valid * factors).to(logits.dtype)
    slope = counted * (1 + 2 * z_loss * log_z) if z_loss else counted
    at_label = torch.arange(logits.shape[-1], device=logits.device) == rows.unsqueeze(-1)
    slopes = (logits - log_z.unsqueeze(-1)).exp() * slope.unsqueeze(-1) - at_label * counted.unsqueeze(-1)
    return losses * valid, slopes.to(dtype)


class _SplitCrossEntropy(Function):
    """Sum of :func:`token_losses_` of each rank's columns, for autograd; backward needs no collective."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, group: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.dtype = logits.dtype
        slopes = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        loss = token_losses_(slopes, labels, first=first, group=group, slopes=slopes).sum()
        ctx.save_for_backward(slopes)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (slopes,) = ctx.saved_tensors
        return (slopes * gradient).to(ctx.dtype), None, None, None
