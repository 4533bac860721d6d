"""Results that the host reads a step late, as on a GPU: the same run, to the step that each message names."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from smp.data.data_pipeline import StepBatch
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.train import trainer
from smp.train.step import train_step
from tests.distributed import run_distributed
from tests.faults.disk import fail
from tests.faults.jobs import JOB, checkpoints, last_step, stopped_in_forward, writes_end_first
from tests.faults.test_nonfinite import broken_loss, record
from tests.job import assert_same_tensors, losses, read_metrics, run_job, tensors
from tests.reference import build_reference, setup_of

SKIP = ["--nonfinite", "skip"]


def late(prepare=lambda rank: None):
    """``prepare``: as on a GPU."""

    def both(rank: int) -> None:
        trainer.LAG = {"cpu": 1}
        prepare(rank)

    return both


def same(run, other, step: int) -> None:
    """Metrics but for times, and the checkpoints of a step, are equal."""
    timeless = [
        [{k: v for k, v in line.items() if k in ("step", "loss", "lr", "grad_norm", "tokens")} for line in lines]
        for lines in (read_metrics(run), read_metrics(other))
    ]
    assert timeless[0] == timeless[1]
    assert_same_tensors(tensors(run, step), tensors(other, step))
    assert progress(run, step) == progress(other, step)


def progress(run, step: int) -> dict:
    [folder] = run.glob(f"checkpoints/*-{step}steps")
    return json.loads((folder / "manifest.json").read_text())["run"]["progress"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--checkpoint_freq", 2, "--checkpoint_type", "async_sharded", "--validation_freq", 3, "--logging_freq", 2],
        pytest.param([*SKIP, "--checkpoint_freq", 3, "--attn_pdrop", 0.2], marks=pytest.mark.slow),
    ],
    ids=["asynchronous", "skip"],
)
def test_the_run_is_the_same(flags, tmp_path):
    prepare = broken_loss(math.nan, at={2, 4, 6}) if "skip" in flags else lambda rank: None
    job = [*JOB, *flags, "--max_steps", 7, "--num_kept_checkpoints", 9]
    run_job(*job, "--output_dir", tmp_path / "now", world_size=2, prepare=prepare).succeeded()
    run_job(*job, "--output_dir", tmp_path / "late", world_size=2, prepare=late(prepare)).succeeded()
    same(tmp_path / "now", tmp_path / "late", 7)
    assert checkpoints(tmp_path / "now") == checkpoints(tmp_path / "late")
    if "skip" in flags:
        now, then = ([{**line, "time": 0} for line in record(tmp_path / run)] for run in ("now", "late"))
        assert now == then and [line["step"] for line in now] == [2, 4, 6]


@pytest.mark.parametrize(("bad", "kept"), [(4, [2]), (5, [2, 4])])
def test_a_bad_step_ends_the_run_before_any_checkpoint_of_it(bad, kept, tmp_path):
    """At the step of a checkpoint; after one."""
    job = [*JOB, "--max_steps", 6, "--checkpoint_freq", 2, "--num_kept_checkpoints", 9, "--output_dir", tmp_path]
    outcome = run_job(*job, world_size=2, prepare=late(broken_loss(math.nan, at={bad})))
    assert outcome.statuses == [1, 1], outcome.output
    assert checkpoints(tmp_path) == kept
    assert f"Step {bad}: the loss is not finite on rank 1" in outcome.output
    [line] = record(tmp_path)
    assert (line["step"], line["action"]) == (bad, "stop")
    assert [each["step"] for each in read_metrics(tmp_path)] == list(range(1, bad))


def test_a_failed_write_is_not_made_up_for_by_a_step_that_was_not_looked_at(tmp_path):
    """The write of step 3 has failed at step 4, which is read at step 5, whose loss is not finite."""
    run = tmp_path / "run"

    def prepare(rank: int) -> None:
        if rank == 1:
            fail(run / "checkpoints", "fsync data", {0})
        writes_end_first()
        broken_loss(math.nan, at={5})(rank)

    words = ["--max_steps", 6, "--checkpoint_freq", 3, "--checkpoint_type", "async_sharded", "--output_dir", run]
    outcome = run_job(*JOB, *words, world_size=2, prepare=late(prepare))
    assert outcome.statuses == [1, 1] and "Step 5: the loss is not finite" in outcome.output, outcome.output
    assert checkpoints(run) == []


def test_the_budget_counts_alike(tmp_path):
    job = [*JOB, *SKIP, "--nonfinite_budget", 1, "--max_steps", 8, "--checkpoint_freq", 100, "--output_dir", tmp_path]
    outcome = run_job(*job, world_size=2, prepare=late(broken_loss(math.nan, at={2, 5})))
    assert outcome.statuses == [1, 1] and "2 updates have not been finite" in outcome.output, outcome.output
    assert [(line["step"], line["action"]) for line in record(tmp_path)] == [(2, "skip"), (5, "stop")]
    assert checkpoints(tmp_path) == []


def test_a_stopped_run_continues_bit_for_bit(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    job = [*JOB, "--max_steps", 9]
    run_job(*job, "--output_dir", whole, world_size=2).succeeded()
    resume = [*job, "--output_dir", parts, "--resume_from_checkpoint", "latest"]
    outcome = stopped_in_forward(resume, tmp_path, 4, late())
    assert outcome.statuses == [75, 75], outcome.output
    assert "1 of 2 ranks were asked to stop: ending at step 5." in outcome.output
    assert checkpoints(parts) == [5] and last_step(parts) == 5
    run_job(*resume, world_size=2, prepare=late()).succeeded()
    assert losses(parts) == losses(whole)
    same(whole, parts, 9)


class Reads(TorchDispatchMode):
    """Lists the dtypes of the numbers that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _step_without_tokens() -> None:
    model = fully_shard(build_reference("llama_gqa", torch.float32), mesh=init_device_mesh("cpu", (1,)))
    optimizer = build_optimizer(model, OptimConfig(), lr=0.1)
    ids = torch.arange(8)[None]
    batch = StepBatch([{"input_ids": ids, "targets": torch.full_like(ids, -100)}], torch.arange(1))
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with Reads() as reads:
        train_step(model, optimizer, batch, setup=setup_of(model), device=torch.device("cpu"), grad_clip=1.0)
    # On the host, the labels of a batch are counted and compared with the vocabulary.
    assert torch.float32 not in reads.found and torch.float64 not in reads.found and len(reads.found) <= 3
    assert all(torch.equal(old, new.to_local()) for old, new in zip(before, model.parameters(), strict=True))
    assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}


def test_a_step_reads_no_result_and_without_tokens_changes_nothing():
    run_distributed(_step_without_tokens, world_size=1)
