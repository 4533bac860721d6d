"""Layers that mix tokens outside of attention: linear attention, state spaces and short convolutions.

Of a layer that is computed by heads or channels, :mod:`smp.parallel.context.scans`, each rank computes its own; for any
other it gathers the tokens of the whole sequence, computes the layer as it is, and goes on with its own tokens. That is
exact for any layer of any type, and costs each rank the layer's time and activations of all tokens: 1 all_gather of the
layer's input in forward, and 1 reduce_scatter of its gradient in backward.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from smp.parallel.context.attention import SHARD, no_part
from smp.parallel.context.functions import SequenceShard
from smp.parallel.context.scans import functions_of, gather, install, splitting, take
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


def split_mixers(blocks: Sequence[nn.Module], hf_config: Any) -> None:
    """Let layers that mix tokens compute a sequence over its ranks, in place."""
    for block, kind in zip(blocks, block_kinds(hf_config, len(blocks)), strict=True):
        if mixers := mixers_of(block, kind):
            block.forward = _told(block.forward)  # type: ignore[method-assign]
        for mixer in mixers:
            forward = mixer.forward
            if names := functions_of(mixer):
                install(mixer, names)
            mixer.forward = _split(forward, names) if names else _gathered(forward)  # type: ignore[method-assign]


def _told(forward: Any) -> Any:
    @functools.wraps(forward)
    def told(*args: Any, **kwargs: Any) -> Any:
        token = _shard.set(kwargs.get(SHARD))
        try:
            return forward(*args, **kwargs)
        finally:
            _shard.reset(token)

    return told


def _part() -> SequenceShard:
    """Return the rank's part of the sequences of the block that runs.

    Raises:
        UserError: the model was not given a part of a batch, or one of several documents.
    """
    shard = _shard.get()
    if shard is None:
        raise no_part()
    if any(len(row) > 1 for row in shard.layout.starts):
        raise no_documents("it has layers that carry a state, or convolve, over all tokens of a row")
    return shard


def _split(forward: Any, names: set[str]) -> Any:
    @functools.wraps(forward)
    def split(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(SHARD, None)
        with splitting(_part(), names):
            return forward(*args, **kwargs)

    return split


def _gathered(forward: Any) -> Any:
    @functools.wraps(forward)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        shard = _part()
        kwargs.pop(SHARD, None)
        local, columns = sum(last - first for first, last in shard.own), shard.layout.columns

        def full(value: Any) -> Any:
            return gather(value, shard, 1) if _has_tokens(value, local) else value

        def own(value: Any) -> Any:
            return take(value, shard, 1) if _has_tokens(value, columns) else value

        return tree_map(own, forward(*map(full, args), **{name: full(value) for name, value in kwargs.items()}))

    return gathered


def _has_tokens(value: Any, tokens: int) -> bool:
    """Return whether a value is ``(batch, tokens, ...)``."""
    return isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == tokens
