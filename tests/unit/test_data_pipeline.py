"""What the training loop gets: data/pipelines/data_pipeline.py."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from smp.data.data_pipeline import BatchShape, DataConfig, DataPipeline, create_data_pipeline
from smp.data.packing import Collator, Row, RowSource
from smp.data.synthetic import SyntheticRows
from smp.errors import ConfigError, RunError, UserError
from smp.processes import LONGEST_TMPDIR
from smp.train.arguments import parse_args
from tests.clock import HANG_SECONDS, wait_until
from tests.unit.test_data_convert import alive

WIDTH = 4


@pytest.fixture
def config(tmp_path):
    """23 rows of 4 tokens; row i begins with i."""
    lines = [json.dumps({"input_ids": [i, 30 + i, 60, 61]}) for i in range(23)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    return DataConfig(training_dir=str(tmp_path), test_dir=str(tmp_path), data_cache_dir=str(tmp_path / "cache"))


def shape(batch=6, micro=2, rank=0, size=1, **more):
    return BatchShape(
        sequence_length=WIDTH, vocab_size=64, global_batch_size=batch, micro_batch_size=micro, data_rank=rank,
        data_size=size, seed=3, **more,
    )  # fmt: skip


def take(config, steps, *, start=0, split="train", **shaped):
    """The samples of each step, by their first token, in the order of ranks."""
    size = shaped.pop("size", 1)
    found = [[] for _ in range(steps)]
    for rank in range(size):
        pipeline = create_data_pipeline(config, split=split, batch=shape(rank=rank, size=size, **shaped))
        pipeline.seek(start)
        for step, mine in zip(range(steps), pipeline, strict=False):
            for micro in mine.microbatches:
                found[step] += micro["input_ids"][micro["sample_ids"] >= 0, 0].tolist()
        pipeline.close()
    return found


@pytest.mark.parametrize("size,micro", [(1, 1), (1, 6), (2, 1), (2, 3), (3, 2), (4, 1), (4, 2)])
def test_order_is_the_same_at_any_layout_and_accumulation(config, size, micro):
    assert take(config, 6, size=size, micro=micro) == take(config, 6, micro=2)


def test_every_sample_once_per_epoch_and_the_last_batch_is_completed(config):
    stream = list(itertools.chain(*take(config, 23, batch=5, size=3)))
    epochs = [stream[i : i + 23] for i in range(0, 115, 23)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("start", [1, 22, 23, 40, 7_000_000_000])
def test_resuming_anywhere_equals_the_tail(config, start):
    tail = list(itertools.chain(*take(config, 4, batch=5, start=start - start % 5)))[start % 5 :]
    assert list(itertools.chain(*take(config, 3, batch=5, start=start, size=2)))[:15] == tail[:15]


def test_resuming_with_another_batch_size_continues_the_stream(config):
    whole = list(itertools.chain(*take(config, 10, batch=6)))
    assert list(itertools.chain(*take(config, 3, batch=6), *take(config, 4, batch=4, start=18))) == whole[:34]


class _Mixed(RowSource):
    """Two rows of one source, then one of another, each in an order of its own."""

    fingerprint = digest = "mixed"

    def __init__(self, one, two):
        self.one, self.two = one, two

    def __len__(self):
        return 30

    def samples_at(self, positions, *, seed, shuffle):
        third, rest = positions // 3, positions % 3
        ones = self.one.samples_at(2 * third + np.minimum(rest, 1), seed=seed, shuffle=shuffle)
        twos = len(self.one) + self.two.samples_at(third, seed=seed, shuffle=shuffle)
        return np.where(rest == 2, twos, ones)

    def rows(self, indices):
        return [Row(np.full(WIDTH, index)) for index in indices]


@pytest.mark.parametrize("start", [0, 25])
def test_a_source_has_an_order_of_its_own(start):
    one, two = (SyntheticRows(n, WIDTH, vocab_size=64, seed=0, stream="train") for n in (20, 10))
    expected = _Mixed(one, two).samples_at(np.arange(start, start + 40), seed=3, shuffle=True)
    assert (np.flatnonzero(expected >= 20) % 3 == (2 - start) % 3).all()
    for size in (1, 2):
        found = [[] for _ in range(8)]
        for rank in range(size):
            collate = Collator(sequence_length=WIDTH, pad_token_id=0)
            pipeline = DataPipeline(
                _Mixed(one, two), collate, shape(batch=5, rank=rank, size=size), shuffle=True, workers=0
            )
            pipeline.seek(start)
            for step, mine in zip(found, pipeline, strict=False):
                for micro in mine.microbatches:
                    step += micro["input_ids"][micro["sample_ids"] >= 0, 0].tolist()
        assert [*itertools.chain(*found)] == expected.tolist()


@pytest.mark.full
def test_workers_change_nothing(config, tmp_path, monkeypatch):
    """Also where the path of a socket in TMPDIR would be too long."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * LONGEST_TMPDIR)))
    os.mkdir(tempfile.tempdir)
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)
    with_workers = dataclasses.replace(config, data_num_workers=2)
    assert take(with_workers, 9, start=17) == take(config, 9, start=17)


class NotShared(Dataset):
    """Batches for which there is no shared memory."""

    source = SyntheticRows(9, WIDTH, vocab_size=64, seed=0, stream="train")

    def __getitem__(self, index):
        return self

    def __reduce__(self):
        if multiprocessing.parent_process() is None:
            return NotShared, ()
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


@pytest.mark.full
def test_a_batch_without_shared_memory_ends_the_run(config, capfd):
    workers = dataclasses.replace(config, data_num_workers=1)
    pipeline = create_data_pipeline(workers, split="train", batch=shape())
    pipeline._microbatches = NotShared()
    with pytest.raises(RunError, match="for the reason above: --data_num_workers 0 does without"):
        next(iter(pipeline))
    assert "into shared memory: unable to allocate shared memory(shm) for file" in capfd.readouterr().err


KILLED = """
import multiprocessing, os, signal
from smp.data.data_pipeline import BatchShape, DataConfig, create_data_pipeline
if __name__ == "__main__":
    shape = BatchShape(
        sequence_length=4, vocab_size=64, global_batch_size=2, micro_batch_size=2, data_rank=0, data_size=1, seed=0
    )
    config = DataConfig(use_synthetic_data=True, data_num_workers=2)
    pipeline = create_data_pipeline(config, split="train", batch=shape)
    next(iter(pipeline))
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_workers_end_with_a_killed_training_process(tmp_path):
    (tmp_path / "job.py").write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with open(tmp_path / "out", "w+") as out:
        subprocess.run([sys.executable, str(tmp_path / "job.py")], stdout=out, env=environment, timeout=HANG_SECONDS)
    workers = [int(pid) for pid in (tmp_path / "out").read_text().split()]
    assert len(workers) == 2
    wait_until(lambda: not any(alive(pid) for pid in workers))


def test_more_workers_than_a_machine_can_hold_are_refused(config):
    with pytest.raises(UserError, match="--data_num_workers 100000 is more than this machine can use: at most"):
        take(dataclasses.replace(config, data_num_workers=100_000), 1)


def test_iterating_leaves_the_global_random_numbers_alone(config):
    """Dropout after a resume continues where it was only if loading data draws nothing."""
    before = torch.get_rng_state()
    take(config, 3)
    assert torch.equal(before, torch.get_rng_state())


def test_ranks_without_samples_hold_a_padding_row(config):
    pipeline = create_data_pipeline(config, split="train", batch=shape(batch=2, micro=1, rank=0, size=4))
    step = next(iter(pipeline))
    assert len(step.sample_ids) == 0 and len(step.microbatches) == 1
    assert step.microbatches[0]["sample_ids"].tolist() == [-1]
    assert (step.microbatches[0]["targets"] == -100).all()
    assert step.microbatches[0]["input_ids"].shape == (1, WIDTH)


def test_another_global_batch_goes_on_at_the_same_sample(config):
    pipeline = create_data_pipeline(config, split="train", batch=shape(batch=4))
    first = [step.sample_ids.tolist() for step in itertools.islice(pipeline, 2)]
    pipeline.seek(8, global_batch_size=3)
    then = [step.sample_ids.tolist() for step in itertools.islice(pipeline, 2)]
    assert first + then == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [11, 12, 13]]


def test_sample_ids_are_stream_positions(config):
    pipeline = create_data_pipeline(config, split="train", batch=shape(batch=5, rank=1, size=2))
    pipeline.seek(21)
    steps = list(itertools.islice(pipeline, 2))
    assert [step.sample_ids.tolist() for step in steps] == [[23, 24, 25], [28, 29, 30]]
    assert [len(step.microbatches) for step in steps] == [2, 2]


def test_each_iteration_begins_again(config):
    pipeline = create_data_pipeline(config, split="validation", batch=shape())
    first = next(iter(pipeline)).microbatches[0]["input_ids"]
    assert torch.equal(first, next(iter(pipeline)).microbatches[0]["input_ids"])
    assert first[:, 0].tolist() == [0, 1]  # validation is not shuffled


def test_fingerprint_names_data_and_cut_but_not_place_or_layout(config, tmp_path):
    def fingerprint(settings=config, width=WIDTH, **shaped):
        batch = dataclasses.replace(shape(**shaped), sequence_length=width)
        return create_data_pipeline(settings, split="train", batch=batch).fingerprint

    other = tmp_path / "moved"
    other.mkdir()
    (other / "train.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    moved = DataConfig(training_dir=str(other), data_cache_dir=str(tmp_path / "cache"))
    assert fingerprint() == fingerprint(moved) == fingerprint(size=2, micro=1)
    assert fingerprint() != fingerprint(width=2)
    (other / "train.jsonl").write_text(json.dumps({"input_ids": [1]}))
    assert fingerprint(moved) != fingerprint()


@pytest.mark.parametrize("kind", ["json", "parquet", "arrow"])
def test_rows_in_another_order_have_another_digest(tmp_path, kind):
    """Files of the same names and sizes; the checkpoint of a run on the others would go on at wrong samples."""
    import datasets

    rows, found = [[1, 2, 3], [4, 5, 6], [7, 8, 9]], []
    for order in (rows, rows[::-1], rows):
        data = datasets.Dataset.from_dict({"input_ids": order})
        if kind == "arrow":
            data.save_to_disk(str(tmp_path / "d" / "t.arrow"))
        else:
            (tmp_path / "d").mkdir(exist_ok=True)
            getattr(data, f"to_{kind}")(str(tmp_path / "d" / f"t.{kind}"))
        path = tmp_path / "d" / f"t.{kind}"
        config = DataConfig(training_dir=str(path), data_cache_dir=str(tmp_path / str(len(found))))
        found.append(create_data_pipeline(config, split="train", batch=shape()))
    assert len({each.fingerprint for each in found}) == 1
    assert found[0].digest == found[2].digest != found[1].digest


def test_synthetic_data_is_the_same_at_any_layout_and_differs_by_rank_split_and_seed():
    """The original drew the same tokens on every rank."""
    config = DataConfig(use_synthetic_data=True, synthetic_samples=50, shuffle_data=False)

    def ids(rank, size, split="train", seed=3):
        batch = dataclasses.replace(shape(rank=rank, size=size, batch=4, micro=4), seed=seed)
        return next(iter(create_data_pipeline(config, split=split, batch=batch))).microbatches[0]["input_ids"]

    whole = ids(0, 1)
    assert torch.equal(torch.cat([ids(0, 2), ids(1, 2)]), whole)
    assert not torch.equal(ids(0, 2), ids(1, 2))
    assert not torch.equal(ids(0, 1, "validation"), whole) and not torch.equal(ids(0, 1, seed=4), whole)
    assert len(np.unique(whole.numpy(), axis=0)) == 4


def test_synthetic_tokens_cover_the_vocabulary_evenly():
    config = DataConfig(use_synthetic_data=True, synthetic_samples=2000)
    step = next(iter(create_data_pipeline(config, split="train", batch=shape(batch=2000, micro=2000))))
    counts = torch.bincount(step.microbatches[0]["input_ids"].flatten(), minlength=64)
    assert counts.min() > 80 and counts.max() < 175  # 125 expected, 11 standard deviation


def test_settings_that_cannot_work_are_named_together():
    with pytest.raises(ConfigError) as caught:
        parse_args(["--dataset_type", "text", "--validation_freq", "5", "--synthetic_samples", "0", "--lr", "x"])
    assert len(caught.value.problems) == 2  # without those of a section that is not whole
    for words in ("--synthetic_samples", "--lr"):
        assert words in str(caught.value)
    missing = DataConfig(validation_freq=5).missing()
    assert len(missing) == 2 and "--training_dir" in missing[0] and "--test_dir" in missing[1]
    with pytest.raises(ConfigError) as caught:
        parse_args(["--validation_freq", "5", "--lr", "x"])
    assert caught.value.rest.data.missing() == missing and "--lr" in caught.value.problems[0]
    assert DataConfig(use_synthetic_data=True, validation_freq=5).missing() == []


def test_document_mask_needs_an_end_of_document(config):
    masked = dataclasses.replace(config, document_mask=True)
    with pytest.raises(UserError, match="which token ends a document"):
        create_data_pipeline(masked, split="train", batch=shape())
    with pytest.raises(UserError, match="which token ends a document, and 64 is outside the vocabulary"):
        create_data_pipeline(masked, split="train", batch=shape(eos_token_id=64))
    step = next(iter(create_data_pipeline(masked, split="train", batch=shape(eos_token_id=60))))
    assert step.microbatches[0]["position_ids"].tolist() == [[0, 1, 2, 0]] * 2
