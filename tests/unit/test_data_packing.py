"""Rows, windows, padding and documents: data/packing.py."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from smp.data.packing import Collator, PackedRows, Row, WindowRows
from smp.data.token_cache import Columns
from smp.errors import UserError
from tests.reference import build_reference

END = 1


def columns(*rows, mask=None):
    tokens = np.concatenate([np.array(row) for row in rows])
    offsets = np.cumsum([0, *map(len, rows)])
    return Columns(tokens, offsets, mask, None)


def tokens_of(source):
    return [source.rows(np.array([index]))[0].tokens.tolist() for index in range(len(source))]


def test_long_rows_become_windows_and_short_ones_stay_alone():
    source = WindowRows([columns([1, 2, 3, 4, 5], [6]), columns([7, 8])], 2, "x")
    assert tokens_of(source) == [[1, 2], [3, 4], [5], [6], [7, 8]]


MASKS = [
    ([0, 1, 1, 1, 1, 1], 6), ([1, 1, 0, 1, 1, 1], 6), ([1, 0, 1, 1, 0, 1], 7), ([1, 0, 0, 0, 1, 1], 0),
    ([1, 0, 1, 0, 1, 1], 0), ([1, 1, 0, 0, 1, 0], 0),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "row"), MASKS)
def test_padding_on_the_left_of_a_window_is_refused(mask, row, monkeypatch):
    """Windows are [0, 1], [2, 3] of the first row, and the second row; whatever blocks a mask is read in."""
    stores = [columns([1, 2]), columns([1, 2, 3, 4], [5, 6], mask=np.array(mask))]
    for block in (1, 2, 100):
        monkeypatch.setattr("smp.data.packing.BLOCK", block)
        source = WindowRows(stores, 2, "x", [("f", 0), ("g", 5)])
        collated = [Collator(sequence_length=2, pad_token_id=0)([each]) for each in source.rows(np.arange(len(source)))]
        assert any("attention_mask" in each for each in collated) == bool(row)
        if row:
            with pytest.raises(UserError, match=f"g, row {row}: attention_mask hides .*, and XY takes padding on"):
                source.refuse_left_padding("XY")
        else:
            source.refuse_left_padding("XY")


def test_packed_rows_cross_file_boundaries_and_drop_nothing():
    source = PackedRows([columns([1, 2, 3]), columns([4]), columns([5, 6, 7, 8])], 3, "x")
    assert tokens_of(source) == [[1, 2, 3], [4, 5, 6], [7, 8]]


@pytest.mark.parametrize("rows,width", [(1, 1), (3, 4), (50, 7)])
def test_every_token_is_in_exactly_one_row(rows, width):
    lengths = np.random.default_rng(rows).integers(1, 20, rows)
    stored = np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1])
    for kind in (WindowRows, PackedRows):
        source = kind(
            [columns(*stored[: rows // 2 + 1]), *([columns(*stored[rows // 2 + 1 :])] if rows > 2 else [])], width, "x"
        )
        assert np.concatenate(tokens_of(source)).tolist() == list(range(lengths.sum()))
        assert max(map(len, tokens_of(source))) <= width


def test_padding_is_on_the_right_without_labels_and_needs_no_mask():
    batch = Collator(sequence_length=4, pad_token_id=9)([Row(np.array([5, 6])), None])
    assert batch["input_ids"].tolist() == [[5, 6, 9, 9], [9, 9, 9, 9]]
    assert batch["targets"].tolist() == [[6, -100, -100, -100], [-100] * 4]
    assert set(batch) == {"input_ids", "targets", "row_tokens"} and batch["row_tokens"].tolist() == [2, 0]


def test_masked_tokens_leave_the_loss():
    """The original trained on padding; here trailing masked tokens need no mask, leading ones do."""
    collate = Collator(sequence_length=4, pad_token_id=0)
    right = collate([Row(np.array([5, 6, 0, 0]), np.array([1, 1, 0, 0]))])
    left = collate([Row(np.array([0, 0, 5, 6]), np.array([0, 0, 1, 1])), Row(np.array([5])), None])
    assert right["targets"].tolist() == [[6, -100, -100, -100]] and "attention_mask" not in right
    # 5 has nothing before it to be predicted from.
    assert left["targets"][0].tolist() == [-100, -100, 6, -100]
    assert left["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_own_labels_are_kept_and_masked():
    batch = Collator(sequence_length=3, pad_token_id=0)(
        [Row(np.array([5, 6, 7]), np.array([1, 1, 0]), np.array([-100, 6, 7]))]
    )
    assert batch["targets"].tolist() == [[6, -100, -100]]


def test_positions_restart_at_each_document():
    collate = Collator(sequence_length=7, pad_token_id=END, document_end=END)
    batch = collate([Row(np.array([5, 6, END, 7, 8])), Row(np.array([0, 5, 6]), np.array([0, 1, 1])), None])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 0, 1, 2, 3], list(range(7))]
    assert batch["targets"][0].tolist() == [6, END, -100, 8, -100, -100, -100]
    assert batch["targets"][1].tolist() == [-100, 6, -100, -100, -100, -100, -100]
    assert batch["document_bounds"].tolist() == [0, 3, 5, 7, 8, 10, 14, 21] and batch["longest_document"] == 7
    assert "attention_mask" not in batch


@pytest.mark.parametrize("family", ["llama_gqa", "gpt_neox"])
@pytest.mark.parametrize("size", [1, 2])
def test_packed_documents_have_the_logits_they_have_apart(family, size):
    model = build_reference(family, torch.float64)
    first, second = np.array([5, 6, 7, END]), np.array([9, 8, 10, 11, END])
    collate = Collator(sequence_length=9, pad_token_id=0, document_end=END)
    batch = collate([Row(np.concatenate([first, second]))] * size)
    packed = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    for begin, document in ((0, first), (4, second)):
        apart = model(torch.from_numpy(document)[None], use_cache=False).logits[0]
        for row in packed:
            torch.testing.assert_close(row[begin : begin + len(document)], apart, rtol=1e-9, atol=1e-12)
    assert (batch["targets"][:, 3] == -100).all()
    joined = model(batch["input_ids"], use_cache=False).logits[0, 4:]
    assert (joined - packed[0, 4:]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama_gqa", "gpt_neox"])
def test_left_padding_and_padding_rows_have_finite_gradients(family):
    model = build_reference(family, torch.float64)
    collate = Collator(sequence_length=5, pad_token_id=0)
    batch = collate([Row(np.array([0, 0, 5, 6, 7]), np.array([0, 0, 1, 1, 1])), Row(np.array([5, 6])), None])

    def mean_loss(batch):
        targets = batch.pop("targets").flatten()
        return F.cross_entropy(model(**batch, use_cache=False).logits.flatten(0, 1), targets, ignore_index=-100)

    loss = mean_loss(batch)
    loss.backward()
    alone = mean_loss(collate([Row(np.array([5, 6, 7])), Row(np.array([5, 6]))]))
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    torch.testing.assert_close(loss, alone, rtol=1e-9, atol=0)
