"""The job under tensor parallelism, end to end: the same curve, counts, checkpoints and final model."""

from __future__ import annotations

import gzip
import json
import pathlib
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.job import LLAMA, NEOX, assert_resumes, losses, read_metrics, run_job, tensors
from tests.resume.test_train import DROPOUT

LENGTHS = (9, 15)
WIDTH = ["--max_context_width", 15]  # which two ranks do not divide


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A folder of 31 rows of two lengths, gzipped JSON lines."""
    folder, rng = tmp_path_factory.mktemp("rows"), random.Random(0)
    with gzip.open(folder / "rows.jsonl.gz", "wt") as file:
        for _ in range(31):
            file.write(json.dumps({"input_ids": [rng.randrange(64) for _ in range(rng.choice(LENGTHS))]}) + "\n")
    return folder


def flags(rows, tmp_path, *words: object) -> list[object]:
    data = ["--training_dir", rows, "--test_dir", rows, "--data_cache_dir", tmp_path / "cache"]
    return [*data, *WIDTH, "--lr", 1e-2, "--lr_decay_iters", 20, *words]


def lines(run_dir: pathlib.Path, key: str) -> list:
    """A quantity in the order of the log."""
    every = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in every if key in line]


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "neox"])
@pytest.mark.full
def test_resume_is_bit_identical(family, rows, tmp_path):
    words = [
        *DROPOUT[family], *flags(rows, tmp_path), "--tensor_parallel_degree", 2, "--checkpoint_freq", 4,
        "--gradient_accumulation_steps", 2, "--train_batch_size", 2, "--validation_freq", 2, "--validation_batches", 2,
    ]  # fmt: skip
    parts = assert_resumes(tmp_path, *words, at=4, steps=8)
    # Both ranks read the same data, so their generators are in the same state.
    states = [value for key, value in tensors(parts, 8).items() if "rng.cpu" in key]
    assert len(states) == 2 and torch.equal(*states)


@pytest.fixture(scope="module")
def one(rows, tmp_path_factory):
    """A run of one process, for comparison."""
    folder = tmp_path_factory.mktemp("one")
    run_job(*LLAMA, *flags(rows, folder), *COMMON, "--output_dir", folder / "run").succeeded()
    return folder / "run"


COMMON = [
    "--global_batch_size", 4, "--train_batch_size", 2, "--max_steps", 12, "--validation_freq", 6,
    "--validation_batches", 50, "--val_batch_size", 4,
]  # fmt: skip


@pytest.mark.parametrize(
    ("processes", "words"),
    [(2, ["--sequence_parallel", 0]), (4, ["--sharding_strategy", "full_shard"])],
    ids=["without sequence parallelism", "tp2 x shard 2"],
)
@pytest.mark.full
def test_curve_and_counts_are_those_of_one_process(processes, words, one, rows, tmp_path):
    run = tmp_path / "run"
    job = [*LLAMA, *flags(rows, tmp_path), *COMMON, "--tensor_parallel_degree", 2, *words, "--output_dir", run]
    run_job(*job, world_size=processes).succeeded()
    assert losses(run) == pytest.approx(losses(one), rel=1e-5) and losses(run)[-1] < losses(run)[0]
    assert (
        lines(run, "val_loss") == pytest.approx(lines(one, "val_loss"), rel=1e-5) and len(lines(run, "val_loss")) == 3
    )
    assert lines(run, "tokens") == lines(one, "tokens") and len(losses(run)) == 12
    for got, expected in zip(read_metrics(run), read_metrics(one), strict=True):
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert got["samples_per_sec"] * got["step_time_s"] == pytest.approx(4)
        # Work of the whole job, over its devices.
        of_job, of_one = (
            line["model_tflops_per_device"] * devices / line["tokens_per_sec"]
            for line, devices in ((got, processes), (expected, 1))
        )
        assert of_job == pytest.approx(of_one)


@pytest.mark.full
def test_checkpoints_go_from_one_degree_to_another_and_back(one, rows, tmp_path):
    run, words = tmp_path / "run", [*LLAMA, *flags(rows, tmp_path), *COMMON]
    words += ["--output_dir", run, "--resume_from_checkpoint", "latest", "--sharding_strategy", "full_shard"]
    for stop, processes, degree in ((3, 2, 2), (6, 1, 1), (9, 4, 4)):
        job = [*words, "--max_steps", stop, "--tensor_parallel_degree", degree]
        run_job(*job, world_size=processes).succeeded()
    assert [line["step"] for line in read_metrics(run)] == list(range(1, 10))
    assert losses(run) == pytest.approx(losses(one)[:9], rel=1e-5)
    assert lines(run, "tokens") == lines(one, "tokens")[:9]


@pytest.mark.full
def test_the_final_model_is_hugging_face_s(rows, tmp_path):
    run = tmp_path / "run"
    job = [*NEOX, *flags(rows, tmp_path), *COMMON, "--tensor_parallel_degree", 2, "--save_final_model", 1]
    out = run_job(*job, "--vocab_size", 65, "--output_dir", run, world_size=2).succeeded().output
    assert "redistributing" not in out
    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32).eval()
    total, count = 0.0, 0
    for line in gzip.decompress((rows / "rows.jsonl.gz").read_bytes()).splitlines():
        ids = torch.tensor([json.loads(line)["input_ids"]])
        with torch.no_grad():
            total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert total / count == pytest.approx(lines(run, "val_loss")[-1], rel=1e-5)
