"""Linear attention by heads and short convolutions by channels: each rank computes all tokens of its own.

transformers' layers call functions of their module for what mixes tokens, and the rest of such a layer is of single
tokens. All that these functions are given is redistributed with all_to_all, from the tokens of a rank to its heads or
channels, and their output back; where the ranks do not divide those, each gathers all tokens and computes all of them.

=======  ===================================================
forward  1 all_to_all of each argument, and 1 of the output
backward as many, of the gradients
=======  ===================================================

Source: the redistribution is that of Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Function
from torch.utils._pytree import tree_map

from smp.comm.cuda import all_gather_single, reduce_scatter_single
from smp.parallel.context.functions import SequenceShard, all_to_all, by_rank, in_order

# Functions that mix tokens: the axes of tokens, and of heads or channels, of their arguments of three axes and more;
# others have heads or channels first.
_AXES = {
    "causal_conv1d_fn": (2, 1),
    "torch_chunk_gated_delta_rule": (1, 2),
    "chunk_kimi_delta_attention": (1, 2),
}
# Of single tokens, or called with a cache alone.
_OTHERS = {
    "apply_mask_to_padding_states",
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
}


class _Running(NamedTuple):
    shard: SequenceShard
    called: set[str]


_running: contextvars.ContextVar[_Running | None] = contextvars.ContextVar("smp_scans", default=None)


def functions_of(layer: nn.Module) -> set[str]:
    """Return the functions by which a layer mixes tokens; empty: they are not all known."""
    forward = inspect.unwrap(type(layer).forward)
    called = {name for name in forward.__code__.co_names if inspect.isfunction(forward.__globals__.get(name))}
    known = called & _AXES.keys()
    return known if called <= known | _OTHERS else set()


def install(layer: nn.Module, names: set[str]) -> None:
    """Let the functions of a layer's module redistribute their arguments within :func:`splitting`."""
    functions = inspect.unwrap(type(layer).forward).__globals__
    for name in names:
        if not hasattr(functions[name], "_smp_splits"):
            functions[name] = _splitting(functions[name], name)


@contextlib.contextmanager
def splitting(shard: SequenceShard, names: set[str]) -> Iterator[None]:
    """Let these functions be of a rank's part of sequences.

    Raises:
        RuntimeError: one of them was not called, so that tokens have met in another way.
    """
    running = _Running(shard, set())
    token = _running.set(running)
    try:
        yield
    finally:
        _running.reset(token)
    if running.called != names:
        raise RuntimeError(f"a layer has not called {sorted(names - running.called)}, by which it mixes tokens")


def _splitting(function: Any, name: str) -> Any:
    tokens, parts = _AXES[name]

    @functools.wraps(function)
    def split(*args: Any, **kwargs: Any) -> Any:
        running = _running.get()
        if running is None:
            return function(*args, **kwargs)
        running.called.add(name)
        shard, size = running.shard, running.shard.role.size
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        divides = all(each.shape[parts] % size == 0 for each in given if each.ndim > 2)

        def before(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.ndim > 2:
                return _ToParts.apply(value, shard, tokens, parts) if divides else gather(value, shard, tokens)
            return value.chunk(size)[shard.role.rank] if divides else value

        def after(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return _ToTokens.apply(value, shard, tokens, parts) if divides else take(value, shard, tokens)

        found = function(*map(before, args), **{key: before(value) for key, value in kwargs.items()})
        return tree_map(after, found)

    split._smp_splits = True  # type: ignore[attr-defined]
    return split


def gather(own: torch.Tensor, shard: SequenceShard, axis: int) -> torch.Tensor:
    """Return all columns of a rank's tokens, which are along an axis."""
    return _GatherTokens.apply(own, shard, axis)


def take(full: torch.Tensor, shard: SequenceShard, axis: int) -> torch.Tensor:
    """Return this rank's tokens of all columns, which are along an axis."""
    return torch.cat([full.narrow(axis, first, last - first) for first, last in shard.own], axis)


class _GatherTokens(Function):
    """Args of ``apply``: a rank's tokens, the tokens of each rank, and their axis; returns all columns."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, shard: SequenceShard, axis: int) -> torch.Tensor:  # type: ignore[override]
        ctx.shard, ctx.axis = shard, axis
        parts = own.new_empty(shard.role.size, *own.shape)
        all_gather_single(parts.view(-1), own.contiguous().view(-1), group=shard.role.group)
        return in_order(parts.unbind(), shard.layout, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        parts = by_rank(gradient, ctx.shard.layout, ctx.axis, gradient.dtype)
        own = parts.new_empty(parts.shape[1:])
        reduce_scatter_single(own.view(-1), parts.view(-1), group=ctx.shard.role.group)
        return own, None, None


def _to_parts(own: torch.Tensor, shard: SequenceShard, tokens: int, parts: int) -> torch.Tensor:
    received = all_to_all(torch.stack(own.chunk(shard.role.size, parts)).contiguous(), shard.role)
    return in_order(received.unbind(), shard.layout, tokens)


def _to_tokens(full: torch.Tensor, shard: SequenceShard, tokens: int, parts: int) -> torch.Tensor:
    received = all_to_all(by_rank(full, shard.layout, tokens, full.dtype), shard.role)
    return torch.cat(received.unbind(), parts)


class _ToParts(Function):
    """Args of ``apply``: a rank's tokens, the tokens of each rank, and the axes of tokens and of heads or channels."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, *how: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.how = how
        return _to_parts(own, *how)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _to_tokens(gradient, *ctx.how), None, None, None


class _ToTokens(Function):
    """Args as :class:`_ToParts`'s, of all columns of a rank's heads or channels."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, *how: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.how = how
        return _to_tokens(full, *how)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _to_parts(gradient, *ctx.how), None, None, None
