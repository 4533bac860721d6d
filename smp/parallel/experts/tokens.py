"""Which tokens a rank's router sees: of which sequences, at which positions, and whether they are padding."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from smp.config import ParallelConfig
from smp.errors import UserError
from smp.mesh import Role
from smp.parallel.context.attention import SHARD
from smp.parallel.context.functions import SequenceShard
from smp.parallel.experts.dispatch import count
from smp.parallel.technique import Setup

# Of the forward that runs: tokens of each row before its padding, on the host; None: no row is padded.
_row_tokens: contextvars.ContextVar[torch.Tensor | None] = contextvars.ContextVar("smp_row_tokens", default=None)


@contextlib.contextmanager
def told_row_tokens(tokens: torch.Tensor | None) -> Iterator[None]:
    """Let the experts of a model not count the padding of rows, given ``(batch,)`` tokens of each before it."""
    token = _row_tokens.set(tokens)
    try:
        yield
    finally:
        _row_tokens.reset(token)


class Tokens(NamedTuple):
    """The tokens of a forward on a rank, in the order in which its routers get them.

    Attributes:
        batch: sequences, of which the rank may have some alone.
        length: tokens of each on all ranks, without padding.
        sequences: ``(tokens,)`` int64, below ``batch``.
        positions: ``(tokens,)`` int64, of each in its sequence.
        parts: consecutive tokens of each of the rank's sequences.
        first: the sequence of the first token.
        counted: ``(tokens,)`` bool: no padding, of rows, and to a length that ranks divide; None: all.
        roles: the ranks that have other tokens of the same sequences.
    """

    batch: int
    length: int
    sequences: torch.Tensor
    positions: torch.Tensor
    parts: list[int]
    first: int
    counted: torch.Tensor | None
    roles: tuple[Role, ...]

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums over this rank's tokens of each sequence, ``(tokens, n)`` to ``(batch, n)``."""
        if self.counted is not None:
            values = values.masked_fill(~self.counted.unsqueeze(1), 0)
        # Not by index_add, which adds up in any order on GPUs.
        sums = torch.stack([part.sum(0) for part in values.split(self.parts)])
        return F.pad(sums, (0, 0, self.first, self.batch - self.first - len(sums)))

    def count_chosen(self, index: torch.Tensor, experts: int) -> torch.Tensor:
        """Count the tokens of each sequence that have chosen an expert, ``(tokens, top)`` to ``(batch, experts)``."""
        numbers = self.sequences.unsqueeze(1) * experts + index.view(len(self.sequences), -1)
        ones = None if self.counted is None else self.counted.long().unsqueeze(1).expand_as(numbers).reshape(-1)
        return count(numbers.view(-1), self.batch * experts, ones).view(self.batch, experts)

    def add_up_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums over all tokens of each sequence; collective, an all-reduce for each role."""
        sums = self.add_up(values)
        for role in self.roles:
            sums = torch.ops.smp.sum_for_choice(sums, role.group.group_name)
        return sums


def find_tokens(ids: torch.Tensor, shard: SequenceShard | None, cp: Role, tp: Role) -> Tokens:
    """Find the tokens of a forward.

    Args:
        ids: ``(batch, sequence)``, of a rank's part of sequences with ``shard``.
        cp: the ranks of a sequence.
        tp: the ranks that have consecutive parts of the flattened tokens.
    """
    batch, length = ids.shape
    if shard is None:
        columns = torch.arange(length + -length % tp.size, device=ids.device)
    else:
        length = shard.layout.length
        columns = torch.cat([torch.arange(first, last, device=ids.device) for first, last in shard.own])
    width, total = len(columns), len(columns) * batch
    begin, end = total * tp.rank // tp.size, total * (tp.rank + 1) // tp.size
    first, last = begin // width, -(-end // width)
    parts = [min(end, width * (number + 1)) - max(begin, width * number) for number in range(first, last)]
    indices = torch.arange(begin, end, device=ids.device)
    positions = columns[indices % width]
    counted = positions < length if (shard.layout.columns if shard else width) > length else None
    if (tokens := _row_tokens.get()) is not None:
        real = positions < tokens.to(ids.device)[indices // width]
        counted = real if counted is None else counted & real
    roles = tuple(role for role in (cp, tp) if role.size > 1)
    return Tokens(batch, length, indices // width, positions, parts, first, counted, roles)


def token_ranks(setup: Setup) -> tuple[Role, ...]:
    """Return the tensor-parallel ranks, where they have different tokens."""
    tp = setup.mesh.tp
    return (tp,) if tp.size > 1 and setup.settings[ParallelConfig].sequence_parallel else ()


def follow_tokens(model: nn.Module, setup: Setup) -> Callable[[], Tokens]:
    """Return a function that returns the tokens of the model's running forward, or of its last one."""
    found: list[Tokens] = []
    (tp,) = token_ranks(setup) or (Role(1),)

    def find(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        ids = next(each for each in given if isinstance(each, torch.Tensor))
        found[:] = [find_tokens(ids.flatten(2)[..., 0] if ids.ndim > 2 else ids, kwargs.get(SHARD), setup.mesh.cp, tp)]

    def last() -> Tokens:
        if not found:
            raise UserError(
                "the experts of a model are balanced by the tokens that the model is called with: call the model, and "
                "no part of it alone"
            )
        return found[0]

    model.register_forward_pre_hook(find, with_kwargs=True)
    return last
