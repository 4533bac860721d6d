"""Column-parallel layers with a fused QKV (or gate-up) weight, and norms over all heads; no fused kernels.

The outputs of a fused weight are all queries, then all keys, then all values. It is sharded by consecutive rows as any
other, so that files, checkpoints and initial values need no special case. The rows that a rank computes with, its share
of queries, keys and values, arrive by one all_to_all in forward, and their gradients return by one in backward. That is
a rank's share of the weight: less than a hidden state where a rank has more tokens than the layer has outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function

from smp.local_shards import local_tensor
from smp.parallel.tensor.group import TPGroup


def share_of(kind: str, rows: int, *, heads: int, rank: int, tp: TPGroup) -> tuple[int, int]:
    """Return the bounds [first, last) of a rank's rows of one thing.

    Args:
        kind: ``heads`` or ``key_value``, none of which is cut, or ``width``.
        rows: of the unsplit one.
        heads: of the thing; where there are fewer than ranks, several ranks have the same.
    """
    if kind == "width":
        step = -(-rows // tp.size)
        return min(rank * step, rows), min((rank + 1) * step, rows)
    width = rows // heads
    count, first = max(1, heads // tp.size), rank * heads // tp.size
    return first * width, (first + count) * width


def fused_rows(kinds: Sequence[str], rows: int, *, heads: int, key_value: int, rank: int, tp: TPGroup) -> torch.Tensor:
    """Return the rows of a fused layer that a rank computes, in order.

    Args:
        kinds: of its outputs, one after the other.
        rows: of the unsplit layer.
        heads, key_value: numbers of heads.
    """
    counts = {"heads": heads, "key_value": key_value, "width": 1}
    unit = rows // sum(counts[kind] for kind in kinds)
    found, start = [], 0
    for kind in kinds:
        size = counts[kind] * unit
        first, last = share_of(kind, size, heads=counts[kind], rank=rank, tp=tp)
        found.append(torch.arange(start + first, start + last))
        start += size
    return torch.cat(found)


class RowRedistribution:
    """All-to-all of a weight's rows: each rank stores consecutive ones, and needs others.

    Args:
        needed: of each rank, the rows that it needs; one may be needed by several.
        rows: of the full weight.
    """

    def __init__(self, tp: TPGroup, needed: Sequence[torch.Tensor], rows: int):
        step = -(-rows // tp.size)
        self.tp = tp
        owners = [other // step for other in needed]
        mine = [other[owner == tp.rank] - tp.rank * step for other, owner in zip(needed, owners, strict=True)]
        own = owners[tp.rank]
        self.send = torch.cat(mine).to(tp.device)
        self.sent = [len(rows) for rows in mine]
        self.received = [int((own == rank).sum()) for rank in range(tp.size)]
        # Rows arrive by owner.
        self.order = torch.argsort(own, stable=True).to(tp.device)

    def gather_rows(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the rows that this rank needs; collective.

        Args:
            stored: ``(rows stored here, columns)``.
        """
        arrived = stored.new_empty(len(self.order), stored.shape[1])
        dist.all_to_all_single(arrived, stored[self.send], self.received, self.sent, group=self.tp.group)
        return torch.empty_like(arrived).index_copy_(0, self.order, arrived)

    def reduce_rows(self, gradient: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the sum of the ranks' gradients of the rows that this rank stores; collective."""
        arrived = gradient.new_empty(len(self.send), gradient.shape[1])
        dist.all_to_all_single(arrived, gradient[self.order], self.sent, self.received, group=self.tp.group)
        return gradient.new_zeros(rows, gradient.shape[1]).index_add_(0, self.send, arrived)


class RedistributeRows(Function):
    """Rows stored to rows needed; gradients go back."""

    @staticmethod
    def forward(ctx: Any, stored: torch.Tensor, redistribution: RowRedistribution) -> torch.Tensor:
        ctx.redistribution, ctx.rows = redistribution, len(stored)
        return redistribution.gather_rows(stored)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.redistribution.reduce_rows(gradient, ctx.rows), None


class SumOverRanks(Function):
    """Sum of all ranks' tensors; each rank's gradient of it is partial, and they are summed, too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: TPGroup) -> torch.Tensor:
        ctx.tp = tp
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=tp.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.tp.group)
        return total, None


def split_norm(tp: TPGroup, norm: nn.Module, weight: Any, *, copies: int) -> None:
    """Let an RMS norm over all heads compute this rank's heads; the squares are summed over the ranks.

    Args:
        norm: of transformers: in fp32, the weight last.
        weight: returns this rank's part of it.
        copies: ranks that have the same heads.
    """
    epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
    width = norm.weight.shape[0]  # type: ignore[union-attr,index]

    def normalised(x: torch.Tensor) -> torch.Tensor:
        exact = x.to(torch.float32)
        squares = SumOverRanks.apply(exact.pow(2).sum(-1, keepdim=True), tp)
        exact = exact * torch.rsqrt(squares / (width * copies) + epsilon)
        return (local_tensor(weight()) * exact).to(x.dtype)

    norm.forward = normalised  # type: ignore[method-assign,assignment]
