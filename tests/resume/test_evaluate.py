"""``--evaluate_only 1``: the loss that Hugging Face's own loop finds, at every layout, with nothing changed."""

from __future__ import annotations

import json
import math
import pathlib
import random

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import smp
from smp.faults.lock import lock_directories
from tests.distributed import run_distributed
from tests.job import LLAMA, flip, losses, run_job

TRAIN = [*LLAMA, "--use_synthetic_data", 1, "--lr", 1e-2, "--lr_decay_iters", 9]


@pytest.fixture(scope="module")
def rows():
    """Thirteen samples of several lengths: no batch size below divides them."""
    rng = random.Random(3)
    return [[rng.randrange(64) for _ in range(rng.choice([5, 11, 16]))] for _ in range(13)]


@pytest.fixture(scope="module")
def files(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, part in (("a", rows[:8]), ("b", rows[8:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in part))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps by two processes, with a checkpoint of each and the final model; never changed."""
    run = tmp_path_factory.mktemp("finished") / "run"
    words = ["--max_steps", 2, "--checkpoint_freq", 1, "--save_final_model", 1, "--output_dir", run]
    run_job(*TRAIN, *words, world_size=2).succeeded()
    return run


def content(folder: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    """Every entry below a folder, with its time and content."""
    paths = sorted(folder.rglob("*"))
    return {str(p): (p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in paths}


def reference(directory: pathlib.Path, rows: list[list[int]]) -> tuple[float, int]:
    """The mean loss and the number of predicted tokens, by Hugging Face's own loss, row by row."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for row in map(torch.tensor, rows):
            total += float(model(row[None], labels=row[None]).loss) * (len(row) - 1)
            count += len(row) - 1
    return total / count, count


def evaluate(*words, files, tmp_path, world_size=1):
    """The result, the last line of the output."""
    job = ["--evaluate_only", 1, "--test_dir", files, "--data_cache_dir", tmp_path / "cache"]
    outcome = run_job(*words, *job, world_size=world_size).succeeded()
    result = json.loads(outcome.output.splitlines()[-1])
    assert f"Validation loss: {result['val_loss']:.5f}" in outcome.output
    assert f"Validation perplexity: {result['val_ppl']:.4f}" in outcome.output
    return result, outcome.output


@pytest.mark.full
def test_a_checkpoint_and_its_export_have_hugging_faces_loss(finished, files, rows, tmp_path):
    before = content(finished)
    latest = [*LLAMA, "--output_dir", finished, "--resume_from_checkpoint", "latest"]
    with lock_directories([finished]):  # as by a run that goes on
        held = content(finished)
        found, output = evaluate(*latest, files=files, tmp_path=tmp_path)
        assert content(finished) == held
    loss, tokens = reference(finished / "final", rows)
    assert found["val_loss"] == pytest.approx(loss, rel=1e-5) and found["val_ppl"] == pytest.approx(
        math.exp(loss), 1e-4
    )
    assert (found["tokens"], found["samples"], found["step"]) == (tokens, 13, 2)
    assert "Evaluated " in output and output.count("llama_v2-2steps on 13 sequences") == 1
    url = ["--checkpoint_dir", f"file://{finished}/checkpoints", "--resume_from_checkpoint", "latest"]
    there, output = evaluate(*LLAMA, "--output_dir", tmp_path / "run", *url, files=files, tmp_path=tmp_path)
    assert there["val_loss"] == found["val_loss"] and f"Evaluated file://{finished}/checkpoints/llama_v2-2s" in output
    final = ["--hf_pretrained_model_name_or_dir", finished / "final", "--output_dir", tmp_path / "run"]
    exported, _ = evaluate(*final, files=files, tmp_path=tmp_path)
    assert exported["val_loss"] == pytest.approx(found["val_loss"], rel=1e-6) and exported["step"] is None
    assert {k: v for k, v in content(finished).items() if k in before and k != str(finished)}.keys() == before.keys()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (1, ["--val_batch_size", 5]),
        (2, ["--sharding_strategy", "full_shard", "--val_batch_size", 3]),
        (4, ["--tensor_parallel_degree", 2, "--sharding_strategy", "full_shard", "--val_batch_size", 1]),
    ],
    ids=["1", "full_shard 2", "tp 2 x shard 2"],
)
@pytest.mark.full
def test_every_layout_finds_the_same(processes, words, finished, files, rows, tmp_path):
    path = finished / "checkpoints" / "llama_v2-2steps"
    job = [*LLAMA, "--output_dir", tmp_path / "run", "--resume_from_checkpoint", path, *words]
    found, _ = evaluate(*job, files=files, tmp_path=tmp_path, world_size=processes)
    loss, tokens = reference(finished / "final", rows)
    assert found["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert (found["tokens"], found["samples"]) == (tokens, 13)


@pytest.mark.full
def test_what_is_evaluated_on(finished, files, rows, tmp_path):
    """All files and batches; less where that is asked for, also in the file of a run's settings."""
    job = ["--config", finished / "config.yaml", "--resume_from_checkpoint", "latest", "--use_synthetic_data", 0]
    assert evaluate(*job, files=files, tmp_path=tmp_path)[0]["samples"] == 13
    assert evaluate(*job, "--fast_validation", 1, files=files, tmp_path=tmp_path)[0]["samples"] == 5
    few = ["--validation_batches", 2, "--val_batch_size", 3]
    assert evaluate(*job, *few, files=files, tmp_path=tmp_path)[0]["samples"] == 6


@pytest.mark.full
def test_a_damaged_checkpoint_is_passed_over_or_refused(finished, files, tmp_path):
    words = [*TRAIN, "--max_steps", 2, "--checkpoint_freq", 1, "--output_dir", tmp_path / "run"]
    run_job(*words, world_size=2).succeeded()
    newest = tmp_path / "run" / "checkpoints" / "llama_v2-2steps"
    flip(newest / "rank00001-000.safetensors")
    before = content(tmp_path / "run")
    job = [*LLAMA, "--output_dir", tmp_path / "run", "--resume_from_checkpoint"]
    found, output = evaluate(*job, "latest", files=files, tmp_path=tmp_path, world_size=2)
    assert found["step"] == 1 and "Passed over: checkpoint" in output
    test = ["--evaluate_only", 1, "--test_dir", files, "--data_cache_dir", tmp_path / "cache"]
    refused = run_job(*job, newest, *test)
    assert refused.statuses == [2], refused.output
    assert [line[:7] for line in refused.output.splitlines()] == ["error: "] and "is damaged" in refused.output
    assert content(tmp_path / "run") == before


@pytest.mark.full
def test_a_local_checkpoint(files, tmp_path):
    words = [*LLAMA, "--checkpoint_type", "local", "--output_dir", tmp_path / "run"]
    run_job(*TRAIN, *words, "--max_steps", 2, "--save_final_model", 1, world_size=2).succeeded()
    final = ["--hf_pretrained_model_name_or_dir", tmp_path / "run" / "final"]
    exported, _ = evaluate(*final, files=files, tmp_path=tmp_path)
    for named in ("latest", tmp_path / "run" / "checkpoints" / "llama_v2-2steps"):
        resume = [*words, "--resume_from_checkpoint", named]
        found, _ = evaluate(*resume, files=files, tmp_path=tmp_path, world_size=2)
        assert found["val_loss"] == pytest.approx(exported["val_loss"], rel=1e-6)
    test = ["--evaluate_only", 1, "--test_dir", files]
    refused = run_job(*words, "--checkpoint_type", "sharded", "--resume_from_checkpoint", "latest", *test)
    assert refused.statuses == [2] and "contains local checkpoints" in refused.output, refused.output


def _save(final: str, folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(final)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    smp.Checkpointer(folder, model, optimizer).save(7)


@pytest.mark.full
def test_a_checkpoint_of_a_script_whatever_its_optimizer(finished, files, rows, tmp_path):
    run_distributed(_save, str(finished / "final"), str(tmp_path / "script"), world_size=2)
    resume = [*LLAMA, "--output_dir", tmp_path / "run", "--resume_from_checkpoint", tmp_path / "script/model-7steps"]
    found, _ = evaluate(*resume, files=files, tmp_path=tmp_path)
    assert found["val_loss"] == pytest.approx(reference(finished / "final", rows)[0], rel=1e-5) and found["step"] == 7


def validations(run: pathlib.Path) -> list[int]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "val_loss" in line]


@pytest.mark.full
def test_a_run_validates_before_its_first_step(finished, files, rows, tmp_path):
    """Once: not again where it is resumed. It is the loss of what is finetuned, and training is as without it."""
    words = [*LLAMA, "--attn_pdrop", 0.2, *TRAIN[len(LLAMA) :], "--lr_decay_iters", 9]
    check = ["--validation_freq", 3, "--val_batch_size", 1, "--data_cache_dir", tmp_path / "cache"]
    plain, run = tmp_path / "plain", tmp_path / "run"
    run_job(*words, "--max_steps", 4, "--output_dir", plain, world_size=2).succeeded()
    run_job(*words, *check, "--max_steps", 2, "--output_dir", run, world_size=2).succeeded()
    assert validations(run) == [0]
    resume = [*words, *check, "--max_steps", 4, "--output_dir", run, "--resume_from_checkpoint", "latest"]
    run_job(*resume, world_size=2).succeeded()
    assert validations(run) == [0, 3] and losses(run) == losses(plain) and len(losses(run)) == 4
    tune = ["--hf_pretrained_model_name_or_dir", finished / "final", "--training_dir", files, "--test_dir", files]
    tune += [*check, "--validation_batches", 99, "--fast_validation", 0, "--max_steps", 1]
    run_job(*tune, "--output_dir", tmp_path / "tuned").succeeded()
    first = json.loads((tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0 and first["val_loss"] == pytest.approx(reference(finished / "final", rows)[0], rel=1e-5)
