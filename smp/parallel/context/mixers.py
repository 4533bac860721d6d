"""Layers that mix tokens outside of attention: linear attention, state spaces and short convolutions.

Each rank gathers the tokens of the whole sequence before such a layer, computes it as it is, and goes on with its own
tokens. That is exact for any layer of any type, and costs each rank the layer's time and activations of all tokens.

=======  ==========================================================
forward  1 all_gather of the layer's input
backward 1 reduce_scatter of its gradient
=======  ==========================================================
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Function
from torch.utils._pytree import tree_map

from smp.comm.cuda import all_gather_single, reduce_scatter_single
from smp.parallel.context.attention import SHARD, no_part
from smp.parallel.context.functions import SequenceShard, by_rank, in_order
from smp.parallel.documents import no_documents

_LINEAR = "linear_attention"  # in transformers' layer types
# Of the block that runs: not every block hands its keywords on to such a layer.
_shard: contextvars.ContextVar[SequenceShard | None] = contextvars.ContextVar("smp_sequence_shard", default=None)


def block_kinds(hf_config: Any, blocks: int) -> list[str | None]:
    """Return transformers' type of each block; None: it names none."""
    types = getattr(hf_config, "layer_types", None) or getattr(hf_config, "layers_block_type", None) or ()
    return [types[index] if index < len(types) else None for index in range(blocks)]


def mixers_of(block: nn.Module, kind: str | None) -> list[nn.Module]:
    """Return a block's layers that convolve over tokens, or its linear attention without a convolution (MiniMax's)."""
    convolve = [m for m in block.modules() if any(isinstance(child, nn.Conv1d) for child in m.children())]
    if convolve or kind != _LINEAR:
        return convolve
    attention = getattr(block, "self_attn", None)
    return [attention] if isinstance(attention, nn.Module) else []


def gather_for_mixers(blocks: Sequence[nn.Module], hf_config: Any) -> None:
    """Let layers that mix tokens compute all tokens of a sequence, in place."""
    for block, kind in zip(blocks, block_kinds(hf_config, len(blocks)), strict=True):
        if mixers := mixers_of(block, kind):
            block.forward = _told(block.forward)  # type: ignore[method-assign]
        for mixer in mixers:
            mixer.forward = _gathered(mixer.forward)  # type: ignore[method-assign]


def _told(forward: Any) -> Any:
    @functools.wraps(forward)
    def told(*args: Any, **kwargs: Any) -> Any:
        token = _shard.set(kwargs.get(SHARD))
        try:
            return forward(*args, **kwargs)
        finally:
            _shard.reset(token)

    return told


def _gathered(forward: Any) -> Any:
    @functools.wraps(forward)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        shard = _shard.get()
        if shard is None:
            raise no_part()
        if any(len(row) > 1 for row in shard.layout.starts):
            raise no_documents("it has layers that carry a state, or convolve, over all tokens of a row")
        kwargs.pop(SHARD, None)
        local, columns = sum(last - first for first, last in shard.own), shard.layout.columns

        def full(value: Any) -> Any:
            return _Gather.apply(value, shard) if _has_tokens(value, local) else value

        def own(value: Any) -> Any:
            return take(value, shard) if _has_tokens(value, columns) else value

        return tree_map(own, forward(*map(full, args), **{name: full(value) for name, value in kwargs.items()}))

    return gathered


def _has_tokens(value: Any, tokens: int) -> bool:
    """Return whether a value is ``(batch, tokens, ...)``."""
    return isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == tokens


def take(full: torch.Tensor, shard: SequenceShard) -> torch.Tensor:
    """Return this rank's tokens of ``(batch, columns, ...)``."""
    return torch.cat([full[:, first:last] for first, last in shard.own], 1)


class _Gather(Function):
    """Args of ``apply``: a rank's tokens ``(batch, tokens, ...)``, and the tokens of each rank; returns all columns."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, shard: SequenceShard) -> torch.Tensor:  # type: ignore[override]
        ctx.shard = shard
        parts = own.new_empty(shard.role.size, *own.shape)
        all_gather_single(parts.view(-1), own.contiguous().view(-1), group=shard.role.group)
        return in_order(parts.unbind(), shard.layout, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        parts = by_rank(gradient, ctx.shard.layout, 1, gradient.dtype)
        own = cast(torch.Tensor, parts.new_empty(parts.shape[1:]))
        reduce_scatter_single(own.view(-1), parts.view(-1), group=ctx.shard.role.group)
        return own, None
