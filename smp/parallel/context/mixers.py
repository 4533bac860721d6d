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

from torch import nn
from torch.utils._pytree import tree_map

from smp.parallel.context.attention import SHARD, no_part
from smp.parallel.context.functions import SequenceShard
from smp.parallel.context.scans import functions_of, gather, install, splitting, take
from smp.parallel.mixers import by_document, has_tokens, mixers_by_block

# Of the block that runs: not every block hands its keywords on to such a layer.
_shard: contextvars.ContextVar[SequenceShard | None] = contextvars.ContextVar("smp_sequence_shard", default=None)


def split_mixers(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Let layers that mix tokens compute a sequence over its ranks, in place."""
    for block, mixers in zip(blocks, mixers_by_block(model, blocks), strict=True):
        if mixers:
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
        UserError: the model was not given a part of a batch.
    """
    shard = _shard.get()
    if shard is None:
        raise no_part()
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
            return gather(value, shard, 1) if has_tokens(value, local) else value

        def own(value: Any) -> Any:
            return take(value, shard, 1) if has_tokens(value, columns) else value

        given = tuple(map(full, args)), {name: full(value) for name, value in kwargs.items()}
        rows = shard.layout.documents
        return tree_map(own, forward(*given[0], **given[1]) if rows is None else by_document(forward, rows, *given))

    return gathered
