"""Attention over the ranks of a sequence by one of three collectives, as autograd functions of queries, keys, values.

Per layer and micro-batch, with n ranks:

=========== =============================== ================================================
comm_type   forward                         backward
=========== =============================== ================================================
all_gather  1 all_gather of keys and values 1 all_gather, 1 reduce_scatter of their gradients
p2p         n - 1 shifts to the next rank   n - 1 shifts, and n of the gradients, home
all_to_all  1 of all three, 1 of the output 1 of the output's gradient, 1 of all three
=========== =============================== ================================================

Recomputation of a block repeats its forward's collectives.

Source: all_gather: Llama 3, arXiv:2407.21783, section 3.3.2; p2p: Liu et al., Ring Attention, arXiv:2310.01889;
all_to_all: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function

from smp.comm.cuda import all_gather_single, batch_isend_irecv, reduce_scatter_single
from smp.mesh import Role
from smp.parallel.context.kernels import (
    Attended,
    Gradients,
    Scores,
    Seen,
    add_gradients,
    add_sinks,
    attend,
    empty_result,
    gradient_of_sinks,
    wide,
)
from smp.parallel.context.layout import Range, SequenceLayout, find_spans


class SequenceShard:
    """A rank's part of the sequences of a batch.

    Attributes:
        role: the ranks of the sequence.
        layout: the tokens that each of them holds.
    """

    def __init__(self, role: Role, layout: SequenceLayout):
        self.role, self.layout = role, layout
        self._seen: dict[Any, Seen] = {}

    @property
    def own(self) -> tuple[Range, ...]:
        """The columns of this rank."""
        return self.layout.ranges[self.role.rank]

    @property
    def full(self) -> tuple[Range, ...]:
        """All columns."""
        return ((0, self.layout.columns),)

    def seen(self, queries: tuple[Range, ...], keys: tuple[Range, ...], window: int | None) -> Seen:
        """Return what queries see of keys, both in columns; every layer asks for the same."""
        asked = queries, keys, window
        if asked not in self._seen:
            self._seen[asked] = Seen(find_spans(self.layout, *asked), window)
        return self._seen[asked]


class Attention(NamedTuple):
    """How the ranks of a sequence attend.

    Attributes:
        shard: the tokens of each rank.
        scores: of a query and a key.
        window: tokens that a query sees at most, itself among them; None: all.
    """

    shard: SequenceShard
    scores: Scores
    window: int | None

    def seen(self, queries: tuple[Range, ...], keys: tuple[Range, ...]) -> Seen:
        """Return what queries see of keys, both in columns."""
        return self.shard.seen(queries, keys, self.window)

    def attend(self, query: torch.Tensor, key_value: torch.Tensor, seen: Seen) -> Attended:
        """Return the output for all keys."""
        found = empty_result(query)
        attend(found, query, key_value, seen, self.scores)
        return found

    def gradients(
        self, gradient: torch.Tensor, query: torch.Tensor, key_value: torch.Tensor, found: Attended, seen: Seen
    ) -> Gradients:
        """Return the gradients of :meth:`attend`."""
        sums = Gradients(*(torch.zeros_like(tensor, dtype=wide(tensor.dtype)) for tensor in (query, key_value)))
        add_gradients(sums, gradient, query, key_value, found, seen, self.scores)
        return sums


def in_order(parts: Sequence[torch.Tensor], layout: SequenceLayout, dim: int) -> torch.Tensor:
    """Put the ranks' tokens, along ``dim``, in the order of the columns."""
    pieces = [parts[rank].narrow(dim, first, last - first) for rank, _, (first, last) in layout.in_order]
    return torch.cat(pieces, dim)


def by_rank(full: torch.Tensor, layout: SequenceLayout, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the columns of each rank, along ``dim``: ``(ranks, ...)``."""
    shape = list(full.shape)
    shape[dim] //= len(layout.ranges)
    parts = full.new_empty(len(layout.ranges), *shape, dtype=dtype)
    for part, ranges in zip(parts, layout.ranges, strict=True):
        torch.cat([full.narrow(dim, first, last - first) for first, last in ranges], dim, out=part)
    return parts


def _finish(
    ctx: Any, attention: Attention, found: Attended, sinks: torch.Tensor | None, *saved: torch.Tensor
) -> torch.Tensor:
    """Add sinks, once all keys were seen, and save for backward; returns ``(batch, heads, tokens, width)``."""
    if sinks is not None:
        add_sinks(found, sinks)
    out = found.out.to(saved[0].dtype)
    ctx.attention = attention
    ctx.save_for_backward(*saved, out, found.lse, sinks)
    return out


class GatheredAttention(Function):
    """Args of ``apply``: queries ``(batch, heads, tokens, width)``, keys and values of maybe fewer heads, attention,
    and sinks ``(heads,)`` or None.

    The gathered keys and values are not kept: backward gathers them again.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention: Attention,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        full = _gather(torch.stack([key, value]), attention)
        found = attention.attend(query, full, attention.seen(attention.shard.own, attention.shard.full))
        return _finish(ctx, attention, found, sinks, query, key, value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        attention, (query, key, value, out, lse, sinks) = ctx.attention, ctx.saved_tensors
        full, found = _gather(torch.stack([key, value]), attention), Attended(out, lse)
        seen = attention.seen(attention.shard.own, attention.shard.full)
        sums = attention.gradients(gradient, query, full, found, seen)
        del full
        parts = by_rank(sums.key_value, attention.shard.layout, 3, key.dtype)
        own = parts.new_empty(parts.shape[1:])
        reduce_scatter_single(own.view(-1), parts.view(-1), group=attention.shard.role.group)
        return sums.query.to(query.dtype), own[0], own[1], None, gradient_of_sinks(gradient, found, sinks)


def _gather(key_value: torch.Tensor, attention: Attention) -> torch.Tensor:
    """Gather keys and values ``(2, batch, heads, tokens, width)`` of all ranks, in the order of the columns."""
    parts = key_value.new_empty(attention.shard.role.size, *key_value.shape)
    all_gather_single(parts.view(-1), key_value.view(-1), group=attention.shard.role.group)
    return in_order(parts.unbind(), attention.shard.layout, 3)


class RingAttention(Function):
    """Args as :class:`GatheredAttention`'s: keys and values of one other rank at a time are here."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention: Attention,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        found = empty_result(query)
        for key_value, seen in _passing(torch.stack([key, value]), attention):
            attend(found, query, key_value, seen, attention.scores)
        return _finish(ctx, attention, found, sinks, query, key, value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        attention, (query, key, value, out, lse, sinks) = ctx.attention, ctx.saved_tensors
        found, of_query = Attended(out, lse), torch.zeros_like(query, dtype=wide(query.dtype))
        travelling: _Shift | None = None
        for key_value, seen in _passing(torch.stack([key, value]), attention):
            sums = Gradients(of_query, torch.zeros_like(key_value, dtype=wide(key_value.dtype)))
            add_gradients(sums, gradient, query, key_value, found, seen, attention.scores)
            # The gradients of these keys by the ranks that had them before.
            total = sums.key_value if travelling is None else sums.key_value.add_(travelling.wait())
            travelling = _Shift(total, attention.shard.role)
        assert travelling is not None
        of_key, of_value = travelling.wait().to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, gradient_of_sinks(gradient, found, sinks)


class _Shift:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    def __init__(self, tensor: torch.Tensor, role: Role):
        self.sent, self.received = tensor, torch.empty_like(tensor)
        towards, source = (role.rank + 1) % role.size, (role.rank - 1) % role.size
        self.works = batch_isend_irecv([
            dist.P2POp(dist.isend, tensor, group=role.group, group_peer=towards),
            dist.P2POp(dist.irecv, self.received, group=role.group, group_peer=source),
        ])  # fmt: skip

    def wait(self) -> torch.Tensor:
        """Return the previous rank's tensor."""
        for work in self.works:
            work.wait()
        return self.received


def _passing(key_value: torch.Tensor, attention: Attention) -> Iterator[tuple[torch.Tensor, Seen]]:
    """Yield the keys and values of this rank, then of each one before it, with what this rank's queries see of them.

    The next ones are on their way meanwhile.
    """
    role = attention.shard.role
    for step in range(role.size):
        shift = _Shift(key_value, role) if step < role.size - 1 else None
        source = (role.rank - step) % role.size
        yield key_value, attention.seen(attention.shard.own, attention.shard.layout.ranges[source])
        if shift is not None:
            key_value = shift.wait()


class UlyssesAttention(Function):
    """Args as :class:`GatheredAttention`'s, with heads that the ranks divide: each attends all tokens of its heads."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention: Attention,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        size = attention.shard.role.size
        ctx.heads = [tensor.shape[1] // size for tensor in (query, key, value)]
        full = _to_heads([query, key, value], attention)
        seen = attention.seen(attention.shard.full, attention.shard.full)
        found = attention.attend(*_split(full, ctx.heads[0]), seen)
        if sinks is not None:  # of this rank's heads
            sinks = sinks.chunk(size)[attention.shard.role.rank]
        (own,) = _to_tokens(_finish(ctx, attention, found, sinks, full), ctx.heads[:1], attention)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        attention, (full, out, lse, sinks) = ctx.attention, ctx.saved_tensors
        gradient = _to_heads([gradient], attention)
        seen = attention.seen(attention.shard.full, attention.shard.full)
        sums = torch.zeros_like(full, dtype=wide(full.dtype))
        (query, key_value), gradients = _split(full, ctx.heads[0]), Gradients(*_split(sums, ctx.heads[0]))
        found = Attended(out, lse)
        add_gradients(gradients, gradient, query, key_value, found, seen, attention.scores)
        of_sinks = gradient_of_sinks(gradient, found, sinks)
        if of_sinks is not None:
            before = attention.shard.role.rank * ctx.heads[0]
            after = (attention.shard.role.size - 1) * ctx.heads[0] - before
            of_sinks = F.pad(of_sinks, (before, after))
        return *_to_tokens(sums.to(full.dtype), ctx.heads, attention), None, of_sinks


def _split(full: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries, which are the first ``heads``, and keys and values ``(2, batch, heads, tokens, width)``."""
    return full[:, :heads], full[:, heads:].unflatten(1, (2, -1)).transpose(0, 1)


def all_to_all(sent: torch.Tensor, role: Role) -> torch.Tensor:
    """Redistribute ``(ranks, ...)``, of which each rank gets its entry."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), group=role.group)
    return received


def _to_heads(tensors: list[torch.Tensor], attention: Attention) -> torch.Tensor:
    """``(batch, heads, tokens, width)`` of a rank's tokens to all tokens of its heads, one tensor's after another's."""
    size = attention.shard.role.size
    by_rank = zip(*(tensor.chunk(size, 1) for tensor in tensors), strict=True)
    sent = torch.cat([part for parts in by_rank for part in parts], 1).unflatten(1, (size, -1)).transpose(0, 1)
    received = all_to_all(sent.contiguous(), attention.shard.role)
    return in_order(received.unbind(), attention.shard.layout, 2)


def _to_tokens(full: torch.Tensor, heads: list[int], attention: Attention) -> list[torch.Tensor]:
    """Undo :func:`_to_heads` of tensors of which each rank has these heads; they lie in the order of the tokens."""
    received = all_to_all(by_rank(full, attention.shard.layout, 2, full.dtype), attention.shard.role)
    parts = received.transpose(2, 3).split(heads, 3)
    return [torch.cat(part.unbind(), 2).transpose(1, 2) for part in parts]


def copies_of_heads(heads: int, ranks: int) -> int:
    """Return how often each key and value head is repeated under all_to_all, so that every rank gets as many."""
    return math.lcm(heads, ranks) // heads


CP_COMM_TYPES: dict[str, type[Function]] = {
    "all_gather": GatheredAttention,
    "p2p": RingAttention,
    "all_to_all": UlyssesAttention,
}
