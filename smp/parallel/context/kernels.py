"""Partial attention (output, log-sum-exp) of a query block over a key block, merged across ranks: a kernel per device.

Scores with a soft cap have a kernel of their own, :mod:`smp.parallel.context.capped`.

The kernels are torch's, called below autograd: each returns the logarithm of its sum of exponentials, by which results
over different keys are merged, and its backward takes the merged output and logarithm.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867; Dao et al.,
FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from smp.parallel.context import capped
from smp.parallel.context.layout import Piece, Range, Span, pieces
from smp.parallel.microbatch import to_device

GPU_DTYPES = [torch.bfloat16, torch.float16]  # of the kernels of GPUs
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclasses.dataclass
class Attended:
    """The output of queries for the keys so far.

    Attributes:
        out: ``(batch, heads, queries, width)``, in at least fp32.
        lse: logarithm of the sum of exponentials, ``(batch, heads, queries)``, in at least fp32.
    """

    out: torch.Tensor
    lse: torch.Tensor


class Scores(NamedTuple):
    """Of a query ``q`` and a key ``k``: ``scale q k``, or ``cap tanh(scale q k / cap)``."""

    scale: float
    cap: float | None = None


class Seen:
    """What queries see of keys: spans, and the same for the kernels of GPUs once they have been asked for.

    Attributes:
        spans: from :func:`smp.parallel.context.layout.find_spans`.
        window: tokens that a query sees at most, itself among them; None: all.
    """

    def __init__(self, spans: tuple[Span, ...], window: int | None = None):
        self.spans, self.window = spans, window
        self._groups: tuple[_Packed, ...] = ()

    def packed(self, query: torch.Tensor, key_value: torch.Tensor) -> tuple[_Packed, ...]:
        """Return the spans as packed sequences, on the device; the sizes of all calls are the same."""
        if not self._groups:
            sizes = query.shape[0], query.shape[2], key_value.shape[3]
            self._groups = _packed(self.spans, *sizes, self.window, query.device)
        return self._groups


class Gradients(NamedTuple):
    """Gradients that are added up: of queries, and of keys and values ``(2, batch, heads, keys, width)``."""

    query: torch.Tensor
    key_value: torch.Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results are added up."""
    return torch.promote_types(dtype, torch.float32)


def empty_result(query: torch.Tensor) -> Attended:
    """Return the result of queries that have seen no key yet."""
    batch, heads, length, width = query.shape
    dtype = wide(query.dtype)
    # In the order of the tokens, as transformers takes it from an attention function.
    out = query.new_zeros(batch, length, heads, width, dtype=dtype).transpose(1, 2)
    return Attended(out, query.new_full((batch, heads, length), -math.inf, dtype=dtype))


def _merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add a result over other keys, in place."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _in_pieces(query: torch.Tensor, scores: Scores) -> bool:
    return query.device.type == "cpu" or scores.cap is not None


def attend(found: Attended, query: torch.Tensor, key_value: torch.Tensor, seen: Seen, scores: Scores) -> None:
    """Add to ``found`` what queries see of keys.

    Args:
        query: ``(batch, heads, queries, width)``.
        key_value: keys and values, ``(2, batch, heads or fewer, keys, width)``.
    """
    (_attend_in_pieces if _in_pieces(query, scores) else _attend_on_gpu)(found, query, key_value, seen, scores)


def add_gradients(
    gradients: Gradients,
    gradient: torch.Tensor,
    query: torch.Tensor,
    key_value: torch.Tensor,
    found: Attended,
    seen: Seen,
    scores: Scores,
) -> None:
    """Add the gradients of what :func:`attend` did with the same arguments.

    Args:
        gradients: as the queries, and as the keys and values, in at least fp32.
        gradient: of the full output, ``(batch, heads, queries, width)``.
        found: the full output, in any dtype, and its logarithm.
    """
    (_add_gradients_in_pieces if _in_pieces(query, scores) else _add_gradients_on_gpu)(
        gradients, gradient, query, key_value, found, seen, scores
    )


def add_sinks(found: Attended, sinks: torch.Tensor) -> None:
    """Add to each query's sum of exponentials that of its head's sink, a score without a value, in place.

    Args:
        found: of all keys.
        sinks: ``(heads,)``.

    Source: Xiao et al., Efficient streaming language models with attention sinks, arXiv:2309.17453, as in gpt-oss.
    """
    each = sinks.to(found.lse.dtype).unsqueeze(-1)
    found.out.mul_(torch.sigmoid(found.lse - each).unsqueeze(-1))
    torch.logaddexp(found.lse, each, out=found.lse)


def gradient_of_sinks(gradient: torch.Tensor, found: Attended, sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient of sinks; ``gradient`` is of the full output ``found``."""
    if sinks is None:
        return None
    weight = (sinks.to(found.lse.dtype).unsqueeze(-1) - found.lse).exp()
    along = (gradient.to(weight.dtype) * found.out).sum(-1)
    return -(weight * along).sum((0, 2)).to(sinks.dtype)


# On CPUs, and of capped scores: a call for each piece.


def _rows(row: int | None) -> slice:
    return slice(None) if row is None else slice(row, row + 1)


def _at(tensor: torch.Tensor, rows: slice, positions: Range) -> torch.Tensor:
    """Return some rows' positions of ``(batch, heads, positions, ...)``."""
    return tensor[rows, :, positions[0] : positions[1]]


def _band(queries: int, keys: int, above: int, like: torch.Tensor) -> torch.Tensor:
    seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).triu(above + 1)
    return torch.zeros(queries, keys, dtype=like.dtype, device=like.device).masked_fill_(~seen, -math.inf)


def _options(piece: Piece, like: torch.Tensor, scores: Scores) -> dict[str, Any]:
    found: dict[str, Any] = {"scale": scores.scale} | ({} if scores.cap is None else {"cap": scores.cap})
    if piece.kind == "band":
        queries, keys = (last - first for first, last in (piece.queries, piece.keys))
        found["attn_mask"] = _band(queries, keys, piece.above, like)
    return found


def _pieces(seen: Seen) -> Iterator[tuple[slice, Piece]]:
    for span in seen.spans:
        for piece in pieces(span, seen.window):
            yield _rows(span.row), piece


def _attend_in_pieces(
    found: Attended, query: torch.Tensor, key_value: torch.Tensor, seen: Seen, scores: Scores
) -> None:
    kernel, (key, value) = _CPU if scores.cap is None else capped.forward, key_value.unbind()
    for rows, piece in _pieces(seen):
        part, lse = kernel(
            _at(query, rows, piece.queries), _at(key, rows, piece.keys), _at(value, rows, piece.keys), 0.0,
            piece.kind == "causal", **_options(piece, query, scores),
        )  # fmt: skip
        out, sums = (_at(tensor, rows, piece.queries) for tensor in (found.out, found.lse))
        if piece.kind == "causal":  # the key of the query's token comes first
            out.copy_(part)
            sums.copy_(lse)
        else:
            _merge_(out, sums, part, lse)


def _add_gradients_in_pieces(
    gradients: Gradients, gradient: torch.Tensor, query: torch.Tensor, key_value: torch.Tensor, found: Attended,
    seen: Seen, scores: Scores,
) -> None:  # fmt: skip
    kernel, (key, value) = _CPU_BACKWARD if scores.cap is None else capped.backward, key_value.unbind()
    for rows, piece in _pieces(seen):
        parts = kernel(
            _at(gradient, rows, piece.queries), _at(query, rows, piece.queries), _at(key, rows, piece.keys),
            _at(value, rows, piece.keys), _at(found.out, rows, piece.queries), _at(found.lse, rows, piece.queries),
            0.0, piece.kind == "causal", **_options(piece, query, scores),
        )  # fmt: skip
        positions_of_each = piece.queries, piece.keys, piece.keys
        for full, part, positions in zip(
            (gradients.query, *gradients.key_value), parts, positions_of_each, strict=True
        ):
            _at(full, rows, positions).add_(part)


# On GPUs: the flash kernels of packed sequences, which align the last query with the last key; a call for all spans
# that are masked alike.


class _Packed(NamedTuple):
    """Spans as packed sequences.

    Attributes:
        queries, keys: positions in the flattened batch, ``(tokens,)`` int64.
        query_bounds, key_bounds: where each span begins, and the end, ``(spans + 1,)`` int32.
        longest_query, longest_key: tokens, of keys at least as many as of queries.
        left, right: tokens that a query sees before and after the one it is aligned with; None: all.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    longest_query: int
    longest_key: int
    left: int | None
    right: int | None


def _packed(
    spans: tuple[Span, ...], batch: int, queries: int, keys: int, window: int | None, device: torch.device
) -> tuple[_Packed, ...]:
    """Group spans by the mask of their queries, relative to the alignment of the kernel.

    Queries are in a group once, so that their results over several ranges of keys are merged one after the other.
    """
    groups: dict[tuple[int | None, int | None, int], list[tuple[Range, Range]]] = {}
    met: collections.Counter[tuple[int | None, int]] = collections.Counter()
    for span in spans:
        queries_from = span.row, span.queries[0]  # of spans that share queries, the same
        turn = met[queries_from]
        met[queries_from] += 1
        count, others = (last - first for first, last in (span.queries, span.keys))
        aligned = others - count  # where the kernel puts the first query
        # A document of one token is causal, as the longer ones in the batch.
        right = span.shift - aligned if others - 1 > span.shift or span.shift == aligned else None
        cut = window is not None and count + span.shift > window
        left = window - 1 - span.shift + aligned if cut and window is not None else None
        for row in range(batch) if span.row is None else (span.row,):
            positions = tuple(
                (row * length + first, row * length + last)
                for length, (first, last) in ((queries, span.queries), (keys, span.keys))
            )
            groups.setdefault((left, right, turn), []).append(positions)  # type: ignore[arg-type]
    return tuple(_pack(members, left, right, device) for (left, right, _), members in groups.items())


def _pack(members: list[tuple[Range, Range]], left: int | None, right: int | None, device: torch.device) -> _Packed:
    positions, bounds, longest = [], [], []
    for ranges in zip(*members, strict=True):
        lengths = [last - first for first, last in ranges]
        positions.append(torch.cat([torch.arange(first, last) for first, last in ranges]))
        bounds.append(F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int())
        longest.append(max(lengths))
    queries, keys, query_bounds, key_bounds = (to_device(each, device) for each in (*positions, *bounds))
    # With a bound on one side, the kernel takes none on the other for one of the longest keys: too few for the first
    # of more queries than keys.
    return _Packed(queries, keys, query_bounds, key_bounds, longest[0], max(longest), left, right)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """``(batch, heads, positions, width)`` to ``(batch x positions, heads, width)``."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _flash_options(group: _Packed, scale: float) -> dict[str, Any]:
    left, right = (-1 if side is None else side for side in (group.left, group.right))
    return {"scale": scale, "window_size_left": left, "window_size_right": right}


def _is_causal(group: _Packed) -> bool:
    return group.right == 0 and group.left is None


def _attend_on_gpu(found: Attended, query: torch.Tensor, key_value: torch.Tensor, seen: Seen, scores: Scores) -> None:
    flat_query, (key, value) = _flat(query), map(_flat, key_value)
    out, sums = _flat(found.out), found.lse.transpose(1, 2).flatten(0, 1)
    for group in seen.packed(query, key_value):
        part, lse, *_ = torch.ops.aten._flash_attention_forward(
            flat_query[group.queries], key[group.keys], value[group.keys], group.query_bounds, group.key_bounds,
            group.longest_query, group.longest_key, 0.0, _is_causal(group), False,
            **_flash_options(group, scores.scale),
        )  # fmt: skip
        so_far, sum_so_far, lse = out[group.queries], sums[group.queries], lse.transpose(0, 1)
        _merge_(so_far, sum_so_far, part, lse)
        out[group.queries], sums[group.queries] = so_far, sum_so_far
    batch, length = query.shape[0], query.shape[2]
    found.out.copy_(out.view(batch, length, *out.shape[1:]).transpose(1, 2))
    found.lse.copy_(sums.view(batch, length, -1).transpose(1, 2))


def _add_gradients_on_gpu(
    gradients: Gradients, gradient: torch.Tensor, query: torch.Tensor, key_value: torch.Tensor, found: Attended,
    seen: Seen, scores: Scores,
) -> None:  # fmt: skip
    flat_query, flat_gradient, out = _flat(query), _flat(gradient), _flat(found.out)
    key, value = map(_flat, key_value)
    sums = found.lse.transpose(1, 2).flatten(0, 1)
    # Of the generator's state, which only dropout uses.
    state, unused = (query.new_zeros(size, dtype=torch.uint64) for size in (2, 0))
    for group in seen.packed(query, key_value):
        parts = torch.ops.aten._flash_attention_backward(
            flat_gradient[group.queries], flat_query[group.queries], key[group.keys], value[group.keys],
            out[group.queries].to(query.dtype), sums[group.queries].transpose(0, 1).contiguous(), group.query_bounds,
            group.key_bounds, group.longest_query, group.longest_key, 0.0,
            _is_causal(group), state, unused, **_flash_options(group, scores.scale),
        )  # fmt: skip
        for full, part, positions in zip(
            (gradients.query, *gradients.key_value), parts, (group.queries, group.keys, group.keys), strict=True
        ):
            batch, _, length, _ = full.shape
            added = torch.zeros_like(full).transpose(1, 2).flatten(0, 1).index_add_(0, positions, part.to(full.dtype))
            full.add_(added.view(batch, length, *added.shape[1:]).transpose(1, 2))
