"""Samples packed into sequences: each once, none split, and what is left out is said."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest

from smp.data.best_fit import best_fit
from smp.data.data_pipeline import BatchShape, DataPipeline
from smp.data.packing import Collator, columns_for
from smp.data.samples import Choice, PackedSamples
from smp.data.token_cache import Columns
from smp.errors import UserError


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_takes_each_sample_once_and_wastes_little(seed):
    lengths = np.random.default_rng(seed).integers(1, 101, 1000)
    members, offsets = best_fit(lengths, 100)
    assert sorted(members.tolist()) == list(range(1000))
    filled = np.add.reduceat(lengths[members], offsets[:-1])
    assert filled.max() <= 100 and len(filled) <= 11 / 9 * -(-lengths.sum() // 100) + 1
    firsts = members[offsets[:-1]]
    assert (np.diff(firsts) > 0).all()
    assert all((np.diff(members[a:b]) > 0).all() for a, b in itertools.pairwise(offsets))


def test_best_fit_fills_what_can_be_filled():
    members, offsets = best_fit(np.array([60, 50, 40, 30, 20]), 100)
    assert [members[a:b].tolist() for a, b in itertools.pairwise(offsets)] == [[0, 2], [1, 3, 4]]
    assert best_fit(np.array([7]), 7)[1].tolist() == [0, 1]


def stored(*samples: str, first: int = 1) -> Columns:
    """Rows of ids that count on from ``first``; of each sample ``x`` is trained on and ``.`` is not."""
    text = "".join(samples)
    ids = np.arange(first, first + len(text), dtype=np.uint16)
    labels = np.where(np.array([*text]) == "x", ids.astype(np.int32), -100)
    return Columns(ids, np.cumsum([0, *map(len, samples)]), None, labels)


def packed(stores, length=8, **choice) -> PackedSamples:
    return PackedSamples(stores, length, "f", Choice(**choice), what="training data", origins=["a.jsonl", "b.jsonl"])


def test_rows_are_samples_of_all_files_with_their_lengths(caplog):
    caplog.set_level(logging.INFO, "smp.data")
    rows = packed([stored("..xx", ".xxxx"), stored(".xx", first=100)]).rows(np.array([0, 1]))
    assert [row.documents.tolist() for row in rows] == [[4], [5, 3]]
    assert rows[1].tokens.tolist() == [5, 6, 7, 8, 9, 100, 101, 102]
    assert rows[1].labels.tolist() == [-100, 6, 7, 8, 9, -100, 101, 102]
    assert "3 samples in 2 sequences (75.0 % full), 66.7 % of their tokens trained on" in caplog.text


def test_long_samples_and_those_without_a_trained_token(caplog):
    caplog.set_level(logging.INFO, "smp.data")
    # The third is trained on behind the end of a sequence alone, the fourth in its first token, which nothing predicts.
    data = [stored(".xx", ".xxxxxxxxx", "........xx", "x..")]
    cut = packed(data)
    assert [row.documents.tolist() for row in cut.rows(np.arange(len(cut)))] == [[3], [8]]
    assert "2 cut as too long, 2 left out as nothing of them is trained on" in caplog.text
    dropped = packed(data, overlong="drop")
    assert [row.documents.tolist() for row in dropped.rows(np.arange(len(dropped)))] == [[3]]
    with pytest.raises(UserError, match=r"a\.jsonl, sample 2 has 10 tokens, more than --max_context_width 8"):
        packed(data, overlong="refuse")
    for sample, way in (("....", "--train_on all"), ("........xx", "raise --max_context_width")):
        with pytest.raises(UserError, match=f"no token to train on: all 1 samples .*; {way}"):
            packed([stored(sample)])
    assert len({cut.fingerprint, dropped.fingerprint}) == 2


def test_the_end_is_that_of_the_first_sample_that_is_not_cut():
    assert packed([stored(".xxxxxxxxx", ".x.x..", ".xx")]).end == 14
    assert packed([stored(".xxxxxxxxx")]).end is None


def test_validation_is_the_samples_that_are_not_trained_on():
    train, validation = (Choice(validation_split=0.1, validation=part, most=200) for part in (False, True))
    assert len(train.of(1000)) == 180 and len(validation.of(1000)) == 20
    assert sorted([*train.of(1000), *validation.of(1000)]) == list(range(200))
    assert Choice(most=5).of(3).tolist() == [0, 1, 2]
    assert [len(Choice(validation_split=0.02, validation=part).of(2)) for part in (False, True)] == [1, 1]


def test_what_is_beside_a_sample_changes_nothing_of_it():
    """Positions restart with each sample, of which the first token is not predicted, whatever token ends it."""
    collate = Collator(sequence_length=8, pad_token_id=0, document_end=3)
    row = packed([stored("xxx", ".xx")]).rows(np.array([0]))[0]
    batch = collate([row, None])
    assert batch["input_ids"][0].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]  # 3 ends the first by chance, 4 begins the next
    assert batch["targets"][0].tolist() == [2, 3, -100, 5, 6, -100, -100, -100]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1], list(range(8))]
    assert batch["document_bounds"].tolist() == [0, 3, 6, 8, 16] and batch["longest_document"] == 8
    inside = packed([stored("xxxx", ".xx")]).rows(np.array([0]))[0]
    assert collate([inside])["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]  # 3 is inside


def one_each(stores, length=512, *, pairs=False, **choice) -> PackedSamples:
    origins = [f"{name}.jsonl" for name in "abc"[: len(stores)]]
    return PackedSamples(
        stores, length, "f", Choice(**choice), what="training data", origins=origins, pairs=pairs, pack=False
    )


def test_a_width_is_one_of_few_and_pads_less_than_half():
    widths = {tokens: columns_for(tokens, 4096) for tokens in range(5000)}
    assert sorted({*widths.values()}) == [
        64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    ]  # fmt: skip
    assert all(min(tokens, 4096) <= width and (width == 64 or width < 1.5 * tokens) for tokens, width in widths.items())
    assert columns_for(3, 40) == 40 and columns_for(65, 80) == 80


LENGTHS = [70, 5, 300, 64, 90, 6, 300, 130, 65, 20]


def steps_of(source, *, batch=6, micro=2, size=1, start=0, sort=True, steps=3):
    """Of each step and rank the micro-batches: their sample_ids, rows' tokens and columns."""
    found = [[] for _ in range(steps)]
    for rank in range(size):
        shape = BatchShape(
            sequence_length=512, vocab_size=2048, global_batch_size=batch, micro_batch_size=micro, data_rank=rank,
            data_size=size, seed=4,
        )  # fmt: skip
        collate = Collator(sequence_length=512, pad_token_id=0, fitted=True)
        data = DataPipeline(source, collate, shape, shuffle=True, workers=0, sort=sort)
        data.seek(start)
        for step, mine in zip(found, data, strict=False):
            step.append([
                (each["sample_ids"].tolist(), (each["input_ids"] != 0).sum(1).tolist(), each["input_ids"].shape[1])
                for each in mine.microbatches
            ])  # fmt: skip
            assert mine.sample_ids.tolist() == sorted({n for ids, _, _ in step[-1] for n in ids if n >= 0})
    return found


@pytest.mark.parametrize(("size", "micro"), [(1, 6), (1, 1), (2, 2), (3, 1), (4, 1)])
def test_rows_of_a_step_are_sorted_and_which_samples_it_has_does_not_change(size, micro):
    source = one_each([stored(*("." + "x" * (n - 1) for n in LENGTHS))])
    expected = steps_of(source, micro=6, sort=False)
    found = steps_of(source, micro=micro, size=size)
    for (((ids, tokens, _),),), step in zip(expected, found, strict=True):
        of_sample = dict(zip(ids, tokens, strict=True))
        together = [each for parts in zip(*step, strict=True) for each in parts]  # as ranks compute them
        assert sorted(n for numbers, _, _ in together for n in numbers if n >= 0) == ids
        order = []
        for numbers, tokens, columns in together:
            if numbers == [-1]:
                assert tokens == [0] and columns == 64
                continue
            assert tokens == [of_sample[n] for n in numbers] and columns == columns_for(max(tokens), 512)
            order += tokens
        assert order == sorted(of_sample.values(), reverse=True)
    assert steps_of(source, micro=micro, size=size, start=6, steps=2) == found[1:]


def test_a_pair_that_is_not_packed_is_two_rows_of_full_length(caplog):
    caplog.set_level(logging.INFO, "smp.data")
    texts = ["." + "x" * 600, "." + "x" * 600, ".xx", "." + "x" * 90, "x..", ".x"]
    source = one_each([stored(*texts)], pairs=True)  # nothing of the third pair's chosen answer is trained on
    assert [len(row.tokens) for row in source.rows(np.array([1, 0]))] == [3, 91, 512, 512]
    assert source.lengths().tolist() == [512, 91] and source.packed(np.array([1])).tolist() == [1]
    assert "2 samples in 4 sequences (279.5 tokens each)" in caplog.text and "1 cut as too long" in caplog.text
    ((((ids, tokens, columns),),),) = steps_of(source, batch=2, steps=1)
    assert (tokens, columns) == ([512, 512, 3, 91], 512) and ids[::2] == ids[1::2] and sorted(ids[::2]) == [0, 1]
    assert len(one_each([stored(*texts)], pairs=True, overlong="drop")) == 1
