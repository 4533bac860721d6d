"""Which tokens each context-parallel rank holds, and what its queries see, against a dense mask."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from smp.parallel.context import layout as layouts
from smp.parallel.context.layout import Range, SequenceLayout, find_spans, located, pieces, split_columns


def columns_of(ranges: tuple[Range, ...]) -> list[int]:
    return [column for first, last in ranges for column in range(first, last)]


@pytest.mark.parametrize("balanced", [False, True])
def test_every_column_is_held_once(balanced):
    for length, ranks, multiple in itertools.product(range(1, 50), (1, 2, 3, 4, 8), (1, 2, 3)):
        layout = split_columns(length, ranks, balanced=balanced, multiple=multiple)
        held = [columns_of(ranges) for ranges in layout.ranges]
        assert len(held) == ranks and sorted(itertools.chain(*held)) == list(range(layout.columns))
        assert {len(columns) for columns in held} == {layout.columns // ranks}
        parts = (2 if balanced else 1) * ranks * multiple
        # No more is added than makes all parts alike.
        assert layout.columns % parts == 0 and 0 <= layout.columns - length < parts


@pytest.mark.parametrize("balanced", [False, True])
def test_the_parts_of_all_ranks_can_be_put_in_order(balanced):
    layout = split_columns(41, 4, balanced=balanced)
    held = [columns_of(ranges) for ranges in layout.ranges]
    found = [column for rank, _, (first, last) in layout.in_order for column in held[rank][first:last]]
    assert found == list(range(layout.columns))
    assert all(columns_of((columns,)) == held[rank][first:last] for rank, columns, (first, last) in layout.in_order)


def seen_by_dense_mask(layout: SequenceLayout, rows: int, window: int | None) -> np.ndarray:
    """``(rows, columns, columns)``: whether a query of a row sees a key."""
    starts = layout.starts if len(layout.starts) == rows else layout.starts * rows
    query, key = np.arange(layout.columns)[:, None], np.arange(layout.columns)[None]
    document = np.array([np.searchsorted(row, np.arange(layout.columns), side="right") for row in starts])
    near = (key <= query) & (True if window is None else query - key < window)
    return near & (document[:, :, None] == document[:, None])


def work_of(layout: SequenceLayout, rank: int) -> int:
    """Pairs of a query of the rank and a key."""
    spans = find_spans(layout, layout.ranges[rank], ((0, layout.columns),), None)
    return sum(1 for span in spans for i in range(*span.queries) for j in range(*span.keys)
               if j - span.keys[0] <= i - span.queries[0] + span.shift)  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_balanced_ranks_have_the_same_causal_work(ranks):
    for length in (2 * ranks, 6 * ranks - 1, 77):
        work = [work_of(split_columns(length, ranks, balanced=True), rank) for rank in range(ranks)]
        assert len(set(work)) == 1
        in_order = [work_of(split_columns(length, ranks, balanced=False), rank) for rank in range(ranks)]
        assert in_order == sorted(in_order) and in_order[0] < in_order[-1]


def exchanges_of(layout: SequenceLayout) -> list[tuple[tuple[Range, ...], tuple[Range, ...]]]:
    """Queries and keys of each attention of all_gather, of p2p and of all_to_all."""
    whole = ((0, layout.columns),)
    return [
        *((own, whole) for own in layout.ranges),
        *itertools.product(layout.ranges, layout.ranges),
        (whole, whole),
    ]


def random_layouts(count: int):
    """Rows cut into documents anywhere, some alike; windows shorter and longer than documents, parts and blocks."""
    draw = random.Random(11)
    for _ in range(count):
        ranks, balanced = draw.choice((1, 2, 3, 4)), draw.random() < 0.5
        length, rows = draw.randint(1, 48), draw.choice((1, 2, 3))
        starts: tuple[tuple[int, ...], ...] = ((0,),)
        if draw.random() < 0.7:
            cuts = (draw.sample(range(1, length), min(length - 1, draw.choice((0, 1, 2, 7)))) for _ in range(rows))
            starts = tuple((0, *sorted(row)) for row in cuts)
        window = draw.choice((None, 1, 2, 3, 5, 8, 13, 40, 100))
        yield split_columns(length, ranks, balanced=balanced, multiple=draw.choice((1, 2)), starts=starts), rows, window


def rows_of(row: int | None) -> slice:
    return slice(None) if row is None else slice(row, row + 1)


@pytest.mark.parametrize(("block", "leaf"), [(256, 128), (256, 3), (4, 2), (1, 1)])
def test_spans_and_pieces_are_those_of_a_dense_mask(block, leaf, monkeypatch):
    monkeypatch.setattr(layouts, "_BLOCK", block)
    monkeypatch.setattr(layouts, "_LEAF", leaf)
    for layout, rows, window in random_layouts(60):
        dense = seen_by_dense_mask(layout, rows, window)
        for queries, keys in exchanges_of(layout):
            expected = dense[:, columns_of(queries)][:, :, columns_of(keys)]
            by_span, by_piece = (np.zeros(expected.shape, int) for _ in range(2))
            for span in find_spans(layout, queries, keys, window):
                i, j = (np.arange(last - first) for first, last in (span.queries, span.keys))
                seen = j <= i[:, None] + span.shift
                if window is not None:
                    seen &= j > i[:, None] + span.shift - window
                # The kernels of GPUs align a span by its last query and key, and take a negative window for none.
                assert seen.any(1).all()
                by_span[rows_of(span.row), slice(*span.queries), slice(*span.keys)] += seen
                for piece in pieces(span, window):
                    seen = mask_of(piece)
                    # Torch's kernel gives a query that sees nothing the logarithm 0.
                    assert seen.any(1).all()
                    by_piece[rows_of(span.row), slice(*piece.queries), slice(*piece.keys)] += seen
                    assert piece.kind != "causal" or len(seen) < 2 * leaf
            assert (by_span == expected).all() and (by_piece == expected).all(), (layout, queries, keys, window)


def mask_of(piece) -> np.ndarray:
    i, j = (np.arange(last - first) for first, last in (piece.queries, piece.keys))
    match piece.kind:
        case "causal":
            assert len(i) == len(j)
            return j <= i[:, None]
        case "band":
            return j - i[:, None] > piece.above
        case "full":
            return np.ones((len(i), len(j)), bool)


@pytest.mark.parametrize(("block", "leaf"), [(256, 128), (256, 3), (4, 2)])
def test_a_query_sees_its_own_key_before_others(block, leaf, monkeypatch):
    monkeypatch.setattr(layouts, "_BLOCK", block)
    monkeypatch.setattr(layouts, "_LEAF", leaf)
    for layout, rows, window in random_layouts(60):
        whole = ((0, layout.columns),)
        for queries, keys in ((layout.ranges[-1], whole), (layout.ranges[0], layout.ranges[0]), (whole, whole)):
            query_columns, key_columns = columns_of(queries), columns_of(keys)
            met: set[tuple[int, int]] = set()
            for span in find_spans(layout, queries, keys, window):
                for piece, row in itertools.product(pieces(span, window), range(rows)[rows_of(span.row)]):
                    for index, query in enumerate(range(*piece.queries)):
                        first = (row, query) not in met
                        assert first == (piece.kind == "causal")
                        if first:
                            met.add((row, query))
                            assert key_columns[piece.keys[0] + index] == query_columns[query]
            assert len(met) == rows * len(query_columns)


def test_places_among_those_held():
    assert located(((4, 6), (9, 14))) == [((4, 6), (0, 2)), ((9, 14), (2, 7))]
