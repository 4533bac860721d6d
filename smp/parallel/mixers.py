"""Layers that mix tokens outside of attention: linear attention, state spaces and short convolutions."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

# For each row, the columns at which its documents begin, from 0 on, and the number of columns.
Bounds = tuple[tuple[int, ...], ...]

LINEAR = "linear_attention"
# Among transformers' layer types.
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")
OF_SINGLE_TOKENS = ("mlp", "moe")


def block_kinds(hf_config: Any, blocks: int) -> list[str | None]:
    """Return transformers' type of each block; None: it names none."""
    types = getattr(hf_config, "layer_types", None) or getattr(hf_config, "layers_block_type", None) or ()
    return [types[index] if index < len(types) else None for index in range(blocks)]


def mixers_of(block: nn.Module, kind: str | None) -> list[nn.Module]:
    """Return a block's layers that convolve over tokens, or its linear attention without a convolution (MiniMax's)."""
    convolve = [m for m in block.modules() if any(isinstance(child, nn.Conv1d) for child in m.children())]
    if convolve or kind != LINEAR:
        return convolve
    attention = getattr(block, "self_attn", None)
    return [attention] if isinstance(attention, nn.Module) else []


def mixers_by_block(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return :func:`mixers_of` each block of a model."""
    kinds = block_kinds(model.config, len(blocks))
    return [mixers_of(block, kind) for block, kind in zip(blocks, kinds, strict=True)]


def elsewhere(model: nn.Module, blocks: Sequence[nn.Module]) -> str | None:
    """Return what mixes tokens that is neither attention nor a layer of :func:`mixers_of`, if there is such a thing."""
    inside = {id(module) for block in blocks for module in block.modules()}
    if any(isinstance(module, nn.Conv1d) and id(module) not in inside for module in model.modules()):
        return "it has convolutions over tokens before or after its blocks"
    known = (None, *_ATTENTION, *OF_SINGLE_TOKENS)
    kinds = zip(block_kinds(model.config, len(blocks)), mixers_by_block(model, blocks), strict=True)
    kind = next((kind for kind, mixers in kinds if not mixers and kind not in known), None)
    return f"it has {kind} layers" if kind else None


def has_tokens(value: Any, tokens: int, axis: int = 1) -> bool:
    """Return whether a value is of tokens, along an axis: ``(batch, tokens, ...)``."""
    return isinstance(value, torch.Tensor) and value.ndim > axis and value.shape[axis] == tokens


def by_document(
    function: Callable[..., Any], rows: Bounds, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, axis: int = 1
) -> Any:
    """Call a causal function of tokens on each document by itself.

    Documents of similar lengths are one call, in which the shorter ones' last token is repeated: as no token sees later
    ones, that changes none, and padding at most doubles what is computed.

    Args:
        axis: of tokens, in arguments and outputs that are of tokens; their first axis is of rows, or of any row.

    Returns:
        What it gives of all tokens, in their order; None for what is not of tokens, as a last state.
    """
    columns, similar = rows[0][-1], collections.defaultdict[int, list[tuple[int, int, int]]](list)
    for row, bounds in enumerate(rows):
        for first, last in itertools.pairwise(bounds):
            similar[(last - first - 1).bit_length()].append((row, first, last - first))
    found, of_tokens = dict[tuple[int, int], list[Any]](), list[bool]()
    for documents in similar.values():
        longest = max(length for _, _, length in documents)

        def part(value: Any, longest: int = longest, documents: list[tuple[int, int, int]] = documents) -> Any:
            if not has_tokens(value, columns, axis):
                return value
            value = value.expand(len(rows), *value.shape[1:])
            one_each = (value[row : row + 1].narrow(axis, first, length) for row, first, length in documents)
            return torch.cat([_lengthened(one, longest, axis) for one in one_each])

        leaves, form = tree_flatten(function(*tree_map(part, args), **tree_map(part, dict(kwargs))))
        fits = [has_tokens(leaf, longest, axis) and len(leaf) == len(documents) for leaf in leaves]
        of_tokens = [a and b for a, b in zip(of_tokens or fits, fits, strict=True)]
        for index, (row, first, length) in enumerate(documents):
            own = [leaf[index : index + 1] if fit else None for leaf, fit in zip(leaves, fits, strict=True)]
            found[row, first] = [None if leaf is None else leaf.narrow(axis, 0, length) for leaf in own]

    def joined(leaf: int) -> torch.Tensor:
        return torch.cat(
            [torch.cat([found[row, first][leaf] for first in bounds[:-1]], axis) for row, bounds in enumerate(rows)]
        )

    return tree_unflatten([joined(leaf) if fit else None for leaf, fit in enumerate(of_tokens)], form)


def _lengthened(document: torch.Tensor, longest: int, axis: int) -> torch.Tensor:
    """Repeat a document's last token."""
    length = document.shape[axis]
    last = document.narrow(axis, length - 1, 1)
    return document if length == longest else torch.cat([document, *[last] * (longest - length)], axis)
