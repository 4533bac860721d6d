"""Linear attention by heads and short convolutions by channels: each rank computes all tokens of its own.

transformers' layers call functions of their module for what mixes tokens, and the rest of such a layer is of single
tokens. All that these functions are given is redistributed with all_to_all, from the tokens of a rank to its heads or
channels, and their output back. A group of heads that several ranks share is gathered by them; where the ranks do not
divide the heads, each gathers all tokens and computes all of them.

=======  ===================================================
forward  1 all_to_all of each argument, and 1 of the output
backward as many, of the gradients
=======  ===================================================

Source: the redistribution is that of Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dis
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
from smp.parallel.mixers import by_document

# Functions that mix tokens: the axes of tokens, and of heads or channels, of their arguments of three axes and more;
# others have heads or channels first.
_AXES = {
    "causal_conv1d_fn": (2, 1),
    "torch_chunk_gated_delta_rule": (1, 2),
    "chunk_kimi_delta_attention": (1, 2),
    "mamba2_chunk_scan": (1, 2),
}
# Convolves, scans and projects in one kernel, or gives None where there is none and those are called after it.
_FUSED = "mamba2_split_conv1d_scan_combined"
# Of single tokens, or called with a cache alone.
_OTHERS = {
    "apply_mask_to_padding_states",
    "causal_conv1d_update",
    "fix_query_key_value_ordering",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
    _FUSED,
}


class _Running(NamedTuple):
    shard: SequenceShard
    called: set[str]


_running: contextvars.ContextVar[_Running | None] = contextvars.ContextVar("smp_scans", default=None)


def functions_of(layer: nn.Module) -> set[str]:
    """Return the functions by which a layer mixes tokens; empty: it calls some that are not known."""
    forward = inspect.unwrap(type(layer).forward)
    loaded = collections.defaultdict(set)
    for each in dis.get_instructions(forward):
        loaded["global" if each.opname == "LOAD_GLOBAL" else "attribute"].add(str(each.argval))
    functions = {name for name in loaded["global"] if _is_function(forward.__globals__.get(name))}
    methods = {name for name in loaded["attribute"] - set(dir(nn.Module)) if _is_function(getattr(layer, name, None))}
    known = functions & _AXES.keys()
    return known if functions | methods <= known | _OTHERS else set()


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (type, nn.Module))


def install(layer: nn.Module, names: set[str]) -> None:
    """Let the functions of a layer's module redistribute their arguments within :func:`splitting`."""
    functions = inspect.unwrap(type(layer).forward).__globals__
    for name in {*names, _FUSED} & functions.keys():
        if not hasattr(functions[name], "_smp_splits"):
            functions[name] = (_left_out if name == _FUSED else _splitting)(functions[name], name)
            functions[name]._smp_splits = True


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


def _left_out(function: Any, name: str) -> Any:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _running.get() is None else None

    return called


def _splitting(function: Any, name: str) -> Any:
    @functools.wraps(function)
    def split(*args: Any, **kwargs: Any) -> Any:
        running = _running.get()
        if running is None:
            return function(*args, **kwargs)
        running.called.add(name)
        how = _How(running.shard, *_AXES[name], [*args, *kwargs.values()])
        given = tuple(map(how.before, args)), {key: how.before(value) for key, value in kwargs.items()}
        return tree_map(how.after, how.compute(function, *given))

    return split


class _How:
    """How the arguments and the output of a function are redistributed.

    Attributes:
        tokens, parts: the axes of tokens, and of heads or channels.
        divides: whether each rank gets as many heads or channels, in groups of which it has some, or a part of one.
    """

    def __init__(self, shard: SequenceShard, tokens: int, parts: int, given: list[Any]):
        self.shard, self.tokens, self.parts = shard, tokens, parts
        size = shard.role.size
        counts = [each.shape[parts] for each in given if isinstance(each, torch.Tensor) and each.ndim > 2]
        self.divides = max(counts) % size == 0 and all(n % size == 0 or size % n == 0 for n in counts)

    def before(self, value: Any) -> Any:
        """Return an argument with all tokens, and this rank's heads or channels."""
        if not isinstance(value, torch.Tensor):
            return value
        role = self.shard.role
        if value.ndim <= 2:  # a parameter
            return value.chunk(role.size)[role.rank] if self.divides else value
        count = value.shape[self.parts]
        if self.divides and count % role.size == 0:
            return _ToParts.apply(value, self.shard, self.tokens, self.parts)
        full = gather(value, self.shard, self.tokens)
        # A group of heads that several ranks share.
        return full.narrow(self.parts, role.rank * count // role.size, 1) if self.divides else full

    def compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a function gives of all tokens, of each document by itself."""
        rows = self.shard.layout.documents
        return (
            function(*args, **kwargs) if rows is None else by_document(function, rows, args, kwargs, axis=self.tokens)
        )

    def after(self, value: Any) -> Any:
        """Return an output with this rank's tokens, and all heads or channels."""
        if not isinstance(value, torch.Tensor):
            return value
        if self.divides:
            return _ToTokens.apply(value, self.shard, self.tokens, self.parts)
        return take(value, self.shard, self.tokens)


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
