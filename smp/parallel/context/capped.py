"""Partial attention with a soft cap on its scores, which torch's kernels that return the log-sum-exp do not have.

The arguments are those of torch's flash attention for CPUs, with ``cap``. Products are in the inputs' dtype and the
softmax in at least fp32, as in transformers' eager attention; of a block of queries at a time, so that the scores in
memory are of a block by the keys.

Source: Gemma 2, arXiv:2408.00118, section 2; the backward is that of Dao et al., FlashAttention-2, arXiv:2307.08691,
with the derivative of tanh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

_BLOCK = 256  # queries


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool, *, scale: float,
    cap: float, attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output, and the logarithm of the sum of exponentials ``(batch, heads, queries)``.

    Args:
        query: ``(batch, heads, queries, width)``; ``key`` and ``value`` may have fewer heads.
        causal: query i sees the first i keys, which are as many.
        attn_mask: ``(queries, keys)``, added to the scores.
    """
    out, sums = [], []
    keys, values = (each.unsqueeze(2) for each in (key, value))
    for block, mask in _blocks(query, causal, attn_mask):
        scores = _capped(_grouped(query[:, :, block], key), keys, scale, cap)
        scores = scores if mask is None else scores + mask
        sums.append(scores.logsumexp(-1))
        weights = (scores - sums[-1].unsqueeze(-1)).exp().to(value.dtype)
        out.append(weights @ values)
    return torch.cat(out, 3).flatten(1, 2), torch.cat(sums, 3).flatten(1, 2)


def backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, dropout: float, causal: bool, *, scale: float, cap: float,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values.

    Args:
        gradient, out, lse: of the queries' output for all their keys, of which these may be a part.
    """
    keys, values = (each.unsqueeze(2) for each in (key, value))
    of_query, of_key, of_value = [], torch.zeros_like(key, dtype=lse.dtype), torch.zeros_like(value, dtype=lse.dtype)
    for block, mask in _blocks(query, causal, attn_mask):
        queries, slope = (_grouped(each[:, :, block], key) for each in (query, gradient))
        scores = _capped(queries, keys, scale, cap)
        masked = scores if mask is None else scores + mask
        weights = (masked - _grouped(lse[:, :, block], key).unsqueeze(-1)).exp()
        of_value += (weights.to(value.dtype).mT @ slope).sum(2)
        along = (slope.to(lse.dtype) * _grouped(out[:, :, block], key)).sum(-1, keepdim=True)
        of_scores = weights * ((slope @ values.mT).to(lse.dtype) - along)
        of_scores = (of_scores * (1 - (scores / cap).square()) * scale).to(key.dtype)
        of_query.append(of_scores @ keys)
        of_key += (of_scores.mT @ queries).sum(2)
    return torch.cat(of_query, 3).flatten(1, 2), of_key, of_value


def _blocks(
    query: torch.Tensor, causal: bool, attn_mask: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """Yield blocks of queries, and what is added to their scores."""
    count = query.shape[2]
    if causal:
        attn_mask = torch.full((count, count), -math.inf, dtype=query.dtype, device=query.device).triu(1)
    for first in range(0, count, _BLOCK):
        block = slice(first, first + _BLOCK)
        yield block, None if attn_mask is None else attn_mask[block]


def _grouped(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``(batch, heads, queries, ...)`` to ``(batch, key heads, queries' heads of each, queries, ...)``."""
    return tensor.unflatten(1, (key.shape[1], -1))


def _capped(queries: torch.Tensor, keys: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    scores = queries @ keys.mT
    return torch.tanh(scores.to(torch.promote_types(scores.dtype, torch.float32)) * (scale / cap)) * cap
