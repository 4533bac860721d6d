"""Which tokens of a sequence each context-parallel rank holds, and which keys its queries see; without processes."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

Range = tuple[int, int]  # first and, not included, last

# Queries of a window are taken in blocks, so that no mask is larger than a block by a block.
_BLOCK = 256
# Causal pieces are halved down to fewer queries than twice this: the CPU's kernel also computes the keys that the mask
# hides, as far as the end of their block of 512.
_LEAF = 128


@dataclasses.dataclass(frozen=True)
class SequenceLayout:
    """Rows of tokens split over ranks.

    Attributes:
        ranges: for each rank, the ranges of columns that it holds, in order; the same number of columns for all.
        length: columns of a row without padding.
        starts: for each row, the columns at which its documents begin, from 0 on; a single entry stands for all rows.
    """

    ranges: tuple[tuple[Range, ...], ...]
    length: int
    starts: tuple[tuple[int, ...], ...] = ((0,),)

    @property
    def columns(self) -> int:
        """Columns of a row, padding included."""
        return sum(stop - first for ranges in self.ranges for first, stop in ranges)

    @property
    def documents(self) -> tuple[tuple[int, ...], ...] | None:
        """For each row, where its documents begin, and the columns; None: each row is one document."""
        packed = any(len(row) > 1 for row in self.starts)
        return tuple((*row, self.columns) for row in self.starts) if packed else None

    @property
    def in_order(self) -> list[tuple[int, Range, Range]]:
        """Rank, columns, and where the rank holds them, in the order of the columns."""
        return sorted(
            ((rank, columns, here) for rank, ranges in enumerate(self.ranges) for columns, here in located(ranges)),
            key=lambda each: each[1],
        )


def located(ranges: tuple[Range, ...]) -> list[tuple[Range, Range]]:
    """Return each range of columns with its position among those of the rank."""
    lengths = [stop - first for first, stop in ranges]
    ends = itertools.accumulate(lengths)
    return [(each, (end - length, end)) for each, length, end in zip(ranges, lengths, ends, strict=True)]


def split_columns(
    length: int, ranks: int, *, balanced: bool, multiple: int = 1, starts: tuple[tuple[int, ...], ...] = ((0,),)
) -> SequenceLayout:
    """Split rows over ranks.

    Args:
        length: tokens of a row; as few as possible are added on the right, so that every rank holds as many.
        balanced: cut twice as many parts as ranks, and give each rank one from the front and one from the back, whose
            causal attention is as much work on every rank.
        multiple: of which each part has a multiple of tokens.
        starts: as :class:`SequenceLayout`'s.

    Source: the order of Zhu's ring-flash-attention and Megatron-LM's context parallelism.
    """
    parts = 2 * ranks if balanced else ranks
    part = -(-length // (parts * multiple)) * multiple
    ranges = [(index * part, (index + 1) * part) for index in range(parts)]
    by_rank = [(ranges[rank], ranges[parts - 1 - rank]) if balanced else (ranges[rank],) for rank in range(ranks)]
    return SequenceLayout(tuple(by_rank), length, starts)


class Span(NamedTuple):
    """Consecutive queries that see consecutive keys.

    Query i sees key j if ``i + shift - window < j <= i + shift``; without a window, all up to the second.

    Attributes:
        row: of the batch; None: every row.
        queries, keys: positions among those of the rank.
        shift: how far the first query is behind the first key.
    """

    row: int | None
    queries: Range
    keys: Range
    shift: int


def find_spans(
    layout: SequenceLayout, queries: tuple[Range, ...], keys: tuple[Range, ...], window: int | None
) -> tuple[Span, ...]:
    """Return what the queries of some columns see of the keys of some columns: earlier tokens of their document.

    Later keys come first, so that of the query's token before others.

    Args:
        queries, keys: ranges of columns.
        window: tokens that a query sees at most, itself among them; None: all.
    """
    rows: list[int | None] = [None] if len(layout.starts) == 1 else list(range(len(layout.starts)))
    found = []
    for row, starts in zip(rows, layout.starts, strict=True):
        for (first, stop), (here, _) in located(queries):
            inside = [start for start in starts if first < start < stop]
            for begin, end in itertools.pairwise([first, *inside, stop]):
                document = starts[bisect.bisect_right(starts, begin) - 1]
                lowest = document if window is None else max(document, begin - window + 1)
                for (key_first, key_stop), (there, _) in sorted(located(keys), reverse=True):
                    low, high = max(key_first, lowest), min(key_stop, end)
                    if low < high:
                        # Queries that see the last of these keys, or an earlier one.
                        last = end if window is None else min(end, high - 1 + window)
                        at = (here + begin - first, here + last - first)
                        found.append(Span(row, at, (there + low - key_first, there + high - key_first), begin - low))
    return tuple(found)


class Piece(NamedTuple):
    """A part of a span that one call of a kernel computes.

    Attributes:
        queries, keys: positions among those of the rank.
        kind: ``causal``: as many queries as keys, of which the i-th sees the first i; ``full``: all see all;
            ``band``: query i sees the keys j with ``j - i > above``.
    """

    queries: Range
    keys: Range
    kind: Literal["causal", "full", "band"]
    above: int = 0


def pieces(span: Span, window: int | None) -> Iterator[Piece]:
    """Cut a span into pieces in which every query sees a key; that of the queries' tokens comes first."""
    count = span.queries[1] - span.queries[0]
    if window is None or count + span.shift <= window:
        yield from _cut(span, None)
        return
    step = min(_BLOCK, window)
    for begin in range(0, count, step):
        end = min(begin + step, count)
        low = max(0, begin + span.shift - window + 1)
        keys = span.keys[0] + low, min(span.keys[1], span.keys[0] + end + span.shift)
        if keys[0] < keys[1]:
            queries = span.queries[0] + begin, span.queries[0] + end
            yield from _cut(Span(span.row, queries, keys, begin + span.shift - low), window)


def _cut(span: Span, window: int | None) -> Iterator[Piece]:
    """Cut a span of no more queries than the window is long."""
    (query, query_end), (key, key_end), shift = span.queries, span.keys, span.shift
    past = min(key + shift, key_end) if key_end - key > shift else key_end
    if key_end > past:
        yield from _halved((query, query_end), (past, key_end))
    count = query_end - query
    # The keys before `full` are out of the window of some queries.
    full = min(past, key + max(0, count + shift - window)) if window is not None else key
    if full < past:
        yield Piece((query, query_end), (full, past), "full")
    if key < full and window is not None:
        seeing = min(count, full - key - 1 - shift + window)
        if seeing > 0:
            yield Piece((query, query + seeing), (key, full), "band", shift - window)


def _halved(queries: Range, keys: Range) -> Iterator[Piece]:
    """Cut a causal piece into smaller ones, and full ones of what remains."""
    half = (queries[1] - queries[0]) // (2 * _LEAF) * _LEAF
    if half == 0:
        yield Piece(queries, keys, "causal")
        return
    middle = queries[0] + half, keys[0] + half
    yield from _halved((queries[0], middle[0]), (keys[0], middle[1]))
    yield from _halved((middle[0], queries[1]), (middle[1], keys[1]))
    yield Piece((middle[0], queries[1]), (keys[0], middle[1]), "full")
