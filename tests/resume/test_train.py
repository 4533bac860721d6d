"""The job end to end: it trains, resumes bit for bit, resumes at another layout, and finetunes."""

from __future__ import annotations

import gzip
import json
import pathlib
import random
import shutil

import pytest
import torch

from smp.checkpoint.safetensors_io import read_header
from smp.cpu_bf16 import try_bf16_product
from tests.job import LLAMA, NEOX, assert_resumes, losses, read_metrics, run_job, tensors

DROPOUT = {"llama": [*LLAMA, "--attn_pdrop", 0.2], "neox": [*NEOX, "--attn_pdrop", 0.2, "--resid_pdrop", 0.1]}
SAMPLE = pathlib.Path(__file__).parents[2] / "data" / "sample"


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    """A folder of gzipped JSON lines: 29 rows of several lengths, so that 20 steps pass the end of an epoch."""
    folder = tmp_path_factory.mktemp("jsonl")
    rng = random.Random(0)
    for part, rows in enumerate((15, 14)):
        with gzip.open(folder / f"part{part}.jsonl.gz", "wt") as file:
            for _ in range(rows):
                length = rng.choice([9, 16, 16])
                tokens = [rng.randrange(64) for _ in range(length)]
                file.write(json.dumps({"input_ids": tokens, "attention_mask": [1] * length}) + "\n")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = (SAMPLE / "validation.txt").read_text()
    (folder / "a.txt").write_text(words[:3000])
    (folder / "b.txt").write_text(words[3000:5000])
    return folder


def data_flags(kind: str, jsonl: pathlib.Path, text: pathlib.Path, cache: pathlib.Path) -> list[object]:
    if kind == "jsonl":
        return ["--training_dir", jsonl, "--data_cache_dir", cache]
    tokenizer = SAMPLE / "tokenizer"
    return [
        "--dataset_type", "text", "--training_dir", text, "--tokenizer_name_or_dir", tokenizer,
        "--data_cache_dir", cache, "--vocab_size", 2048,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "kind", "accumulation", "world_size"),
    [("llama", "jsonl", 1, 2), pytest.param("neox", "text", 2, 2, marks=pytest.mark.slow)],
)
@pytest.mark.full
def test_resume_is_bit_identical(family, kind, accumulation, world_size, jsonl, text, tmp_path):
    flags = [
        *DROPOUT[family], *data_flags(kind, jsonl, text, tmp_path / "cache"), "--lr", 1e-2, "--lr_decay_iters", 20,
        "--gradient_accumulation_steps", accumulation, "--checkpoint_freq", 10, "--train_batch_size", 1,
        # In the very step of the checkpoint: it must neither disturb the randomness nor leave parameters gathered.
        "--validation_freq", 5, "--validation_batches", 2, "--test_dir", jsonl if kind == "jsonl" else text,
    ]  # fmt: skip
    parts = assert_resumes(tmp_path, *flags, at=10, steps=20, world_size=world_size)
    assert len(tensors(parts, 20)) > 20


@pytest.mark.full
def test_one_flipped_rng_byte_is_noticed(jsonl, tmp_path):
    flags = [*DROPOUT["neox"], "--training_dir", jsonl, "--data_cache_dir", tmp_path / "cache", "--lr_decay_iters", 20]
    run_job(*flags, "--max_steps", 6, "--output_dir", tmp_path / "whole").succeeded()
    run_job(*flags, "--max_steps", 3, "--output_dir", tmp_path / "parts").succeeded()
    (file,) = (tmp_path / "parts" / "checkpoints" / "gpt_neox-3steps").glob("*.safetensors")
    spoil_rng(file)
    resume = [*flags, "--max_steps", 6, "--output_dir", tmp_path / "parts", "--resume_from_checkpoint", "latest"]
    refused = run_job(*resume)
    assert refused.statuses == [2] and "none of the 1 checkpoints" in refused.output, refused.output
    run_job(*resume, "--verify_checkpoint", "size").succeeded()
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert parts[:3] == whole[:3] and parts[3:] != whole[3:]


def spoil_rng(file: pathlib.Path) -> None:
    with file.open("r+b") as opened:
        place = read_header(opened.fileno())["rng.cpu.00000"].start + 2000
        opened.seek(place)
        byte = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte[0] ^ 1]))


@pytest.mark.full
def test_resume_at_other_world_sizes_continues_the_same_curve(jsonl, tmp_path):
    flags = [
        *LLAMA, "--training_dir", jsonl, "--data_cache_dir", tmp_path / "cache", "--lr_decay_iters", 12,
        "--sharding_strategy", "full_shard",
    ]  # fmt: skip
    start = [*flags, "--global_batch_size", 6, "--max_steps", 6]
    run_job(*start, "--output_dir", tmp_path / "start", world_size=2).succeeded()
    for name, world_size in (("two", 2), ("one", 1), ("four", 4)):
        shutil.copytree(tmp_path / "start", tmp_path / name, symlinks=True)
        resume = [*flags, "--max_steps", 12, "--output_dir", tmp_path / name, "--resume_from_checkpoint", "latest"]
        # The batch of 6 is remembered; 4 processes share it unevenly.
        run_job(*resume, world_size=world_size).succeeded()
    two, one, four = (losses(tmp_path / name) for name in ("two", "one", "four"))
    assert len(two) == 12
    assert one == pytest.approx(two, rel=1e-5) and four == pytest.approx(two, rel=1e-5)


@pytest.mark.full
def test_loss_falls_and_the_curve_is_the_same_at_any_layout(text, tmp_path):
    flags = [
        *LLAMA, *data_flags("text", None, text, tmp_path / "cache"), "--lr", 1e-2, "--global_batch_size", 8,
        "--max_steps", 15,
    ]  # fmt: skip
    runs = {1: ["--train_batch_size", 8], 4: ["--train_batch_size", 2, "--shard_degree", 2]}
    for world_size, extra in runs.items():
        run_job(*flags, *extra, "--output_dir", tmp_path / str(world_size), world_size=world_size).succeeded()
    one, four = (losses(tmp_path / str(world_size)) for world_size in runs)
    assert one[-1] < one[0] - 0.5
    assert four == pytest.approx(one, rel=1e-5)


@pytest.mark.full
def test_bf16_computes_in_bf16_and_keeps_fp32(text, tmp_path):
    if try_bf16_product(None):
        pytest.skip("this CPU stops the process at a bf16 matrix product")
    flags = [*LLAMA, *data_flags("text", None, text, tmp_path / "cache"), "--lr", 1e-2, "--max_steps", 5]
    for bf16 in (0, 1):
        out = run_job(*flags, "--bf16", bf16, "--output_dir", tmp_path / str(bf16), world_size=2).succeeded().output
        assert f"computing in {'bfloat16' if bf16 else 'float32'}" in out
    full, half = losses(tmp_path / "0"), losses(tmp_path / "1")
    assert half != full and half == pytest.approx(full, rel=0.02)
    assert {v.dtype for k, v in tensors(tmp_path / "1", 5).items() if "rng" not in k} == {torch.float32}


@pytest.mark.slow
def test_the_main_job_beats_the_unigram_baseline(tmp_path):
    baseline = json.loads((SAMPLE / "baseline.json").read_text())["unigram_nll_validation"]
    root = SAMPLE.parent.parent
    words = ["--config", root / "configs" / "demo.yaml", "--output_dir", tmp_path / "run"]
    run_job(*words, "--data_cache_dir", tmp_path / "cache", world_size=2).succeeded()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validation = [line["val_loss"] for line in lines if "val_loss" in line]
    # Well below what word frequencies alone explain, and falling to the end.
    assert validation[-1] < baseline - 1 and validation == sorted(validation, reverse=True)


def test_epochs_end_the_run(jsonl, tmp_path):
    flags = [*LLAMA, "--training_dir", jsonl, "--data_cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "run"]
    run_job(*flags, "--epochs", 2, "--train_batch_size", 4).succeeded()
    # 29 rows twice in batches of 4.
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, 16))


@pytest.mark.full
def test_no_run_writes_over_another(jsonl, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    flags = ["--training_dir", jsonl, "--data_cache_dir", tmp_path / "cache", "--resume_from_checkpoint", "latest"]
    words = [*flags, "--checkpoint_freq", 2, "--num_kept_checkpoints", 5]
    run_job(*LLAMA, *words, "--max_steps", 6, "--output_dir", run).succeeded()
    before = (run / "metrics.jsonl").read_text()
    old = run / "checkpoints" / "llama_v2-2steps"
    cases = [
        ([*NEOX, *flags, "--output_dir", run], "does not continue"),  # another model in the same directory
        ([*LLAMA, *flags, "--checkpoint_dir", other, "--checkpoint_freq", 2, "--output_dir", run], "up to step 6"),
        ([*LLAMA, *flags[:-1], old, "--output_dir", run], "newer than the checkpoint to resume from"),
    ]
    for case, sentence in cases:
        outcome = run_job(*case, "--max_steps", 8)
        assert outcome.statuses == [2] and sentence in outcome.output, outcome.output
    assert (run / "metrics.jsonl").read_text() == before
    # A branch goes into a directory of its own; a start that died before its first checkpoint may be begun again.
    run_job(*LLAMA, *flags[:-1], old, "--max_steps", 4, "--output_dir", other).succeeded()
    assert [line["step"] for line in read_metrics(other)] == [3, 4]
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "metrics.jsonl").write_text(before.splitlines(True)[0])
    run_job(*LLAMA, *words, "--max_steps", 2, "--output_dir", tmp_path / "dead").succeeded()
    assert len(losses(tmp_path / "dead")) == 2


def test_a_global_batch_that_is_changed_is_told(tmp_path):
    words = [*LLAMA, "--use_synthetic_data", 1, "--output_dir", tmp_path, "--resume_from_checkpoint", "latest"]
    run_job(*words, "--max_steps", 1, "--global_batch_size", 2).succeeded()
    outcome = run_job(*words, "--max_steps", 2, "--global_batch_size", 4).succeeded()
    assert "Changed since the checkpoint: the global batch, 2 -> 4 samples" in outcome.output


@pytest.mark.full
def test_a_small_validation_set_counts_each_row_once(jsonl, tmp_path):
    words = [*LLAMA, "--training_dir", jsonl, "--test_dir", jsonl / "part1.jsonl.gz", "--global_batch_size", 4]
    words += ["--max_steps", 1, "--validation_freq", 1, "--validation_batches", 50, "--train_batch_size", 1]
    words += ["--data_cache_dir", tmp_path / "c"]
    found = []
    for world_size, size in ((1, 4), (2, 8)):  # 14 rows; 16 in a batch of 2 x 8
        run = tmp_path / f"run{world_size}"
        run_job(*words, "--val_batch_size", size, "--output_dir", run, world_size=world_size).succeeded()
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found += [line["val_loss"] for line in lines if "val_loss" in line and line["step"]]
    assert found == pytest.approx([found[0]] * 2, rel=1e-5)
