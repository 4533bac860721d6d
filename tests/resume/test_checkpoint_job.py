"""Kinds of checkpoints in the job: asynchronous, local, the best, at measured intervals; and resuming from them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import threading
import types
from collections.abc import Callable

import pytest

from smp.checkpoint import background, safetensors_io, saver, writer
from smp.checkpoint.background import PendingWrite
from smp.checkpoint.checkpointer import Checkpointer
from smp.checkpoint.config import CheckpointConfig
from smp.checkpoint.manifest import read_manifest
from smp.errors import UserError
from smp.faults import watchdog
from smp.train import __main__ as job
from smp.train import history, start, trainer
from smp.train import step as one_step
from smp.train.validation import Validation
from tests.clock import HANG_SECONDS, Clock, wait_until
from tests.faults.disk import fail
from tests.faults.jobs import wrapped, writes_end_first
from tests.job import LLAMA, assert_same_tensors, flip, losses, run_job, tensors, tensors_in
from tests.job import steps_of_valid as steps

JOB = [*LLAMA, "--use_synthetic_data", 1, "--lr_decay_iters", 8, "--sharding_strategy", "full_shard"]


def on_a_disk(write_takes: Callable[[], None], joined: Callable[[], None] = lambda: None) -> None:
    """Let a write in the background take until ``write_takes()`` returns; ``joined()`` is called by who waits for it.

    Training continues when it has begun. For ``prepare``.
    """
    write, wait, begin = safetensors_io.write_tensors, PendingWrite.wait, PendingWrite.start
    begun = threading.Semaphore(0)

    def slowly(*args):
        if threading.current_thread().name == "smp-checkpoint":
            begun.release()
            write_takes()
        return write(*args)

    def begins(self):
        begin(self)
        assert begun.acquire(timeout=HANG_SECONDS)

    def waits(self):
        if self._thread is not None:
            joined()
        wait(self)

    writer.write_tensors, PendingWrite.wait, PendingWrite.start = slowly, waits, begins


def passed_by(count: int):
    """``prepare``: a write in the background ends when training has begun so many more steps."""

    def prepare(rank: int) -> None:
        steps = []

        def write_takes() -> None:
            end = len(steps) + count
            wait_until(lambda: len(steps) >= end)

        on_a_disk(write_takes)
        wrapped("forward", lambda: steps.append(None))

    return prepare


@pytest.mark.full
def test_asynchronous_checkpoints_are_those_of_their_step(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    words = [*JOB, "--max_steps", 8, "--checkpoint_freq", 3, "--num_kept_checkpoints", 5]
    run_job(*words, "--output_dir", one, world_size=2).succeeded()
    prepare = passed_by(2)
    outcome = run_job(
        *words, "--checkpoint_type", "async_sharded", "--output_dir", two, world_size=2, prepare=prepare
    ).succeeded()
    lines = [line for line in outcome.output.splitlines() if "Batch " in line or "Sav" in line]
    begun = next(i for i, line in enumerate(lines) if "Saving llama_v2-3steps in the background" in line)
    ended = next(i for i, line in enumerate(lines) if "Saved" in line and "llama_v2-3steps" in line)
    assert any("Batch 4 " in line for line in lines[begun:ended]), outcome.output  # training went on meanwhile
    assert steps(one / "checkpoints") == steps(two / "checkpoints") == [3, 6, 8]
    for step in (3, 6, 8):
        assert_same_tensors(tensors(one, step), tensors(two, step))
    assert losses(one) == losses(two)


@pytest.mark.full
def test_one_write_at_a_time_and_none_is_left_out_at_the_end(tmp_path):
    def prepare(rank: int) -> None:
        waited_for = threading.Event()

        def write_takes() -> None:
            assert waited_for.wait(HANG_SECONDS)
            waited_for.clear()

        on_a_disk(write_takes, waited_for.set)

    words = [*JOB, "--max_steps", 3, "--checkpoint_freq", 1, "--num_kept_checkpoints", 9]
    words += ["--checkpoint_type", "async_sharded", "--output_dir", tmp_path / "run"]
    outcome = run_job(*words, world_size=2, prepare=prepare).succeeded()
    assert steps(tmp_path / "run" / "checkpoints") == [1, 2, 3]
    order = [line.split("llama_v2-")[1][:1] for line in outcome.output.splitlines() if "Sav" in line]
    assert order == ["1", "1", "2", "2", "3"], outcome.output


@pytest.mark.full
def test_a_writing_thread_that_has_died_is_noticed(tmp_path):
    def prepare(rank: int) -> None:
        if rank == 1:
            write = background.write_part

            def die(*args, **settings):
                if threading.current_thread().name == "smp-checkpoint":
                    raise SystemExit  # ends the thread, and nothing else
                write(*args, **settings)

            background.write_part = die
        writes_end_first()

    words = [*JOB, "--max_steps", 5, "--checkpoint_freq", 2, "--checkpoint_type", "async_sharded"]
    outcome = run_job(*words, "--output_dir", tmp_path / "run", world_size=2, prepare=prepare).succeeded()
    assert outcome.output.count("rank 1: the thread that wrote it has died") == 2, outcome.output
    assert steps(tmp_path / "run" / "checkpoints") == [4, 5] or steps(tmp_path / "run" / "checkpoints")[-1] == 5


@pytest.mark.parametrize("kind", [pytest.param("local", marks=pytest.mark.slow), "async_local"])
@pytest.mark.full
def test_local_checkpoints_resume_where_every_rank_has_the_step(kind, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    words = [*JOB, "--checkpoint_freq", 2, "--num_kept_checkpoints", 3, "--checkpoint_type", kind]
    run_job(*words, "--max_steps", 8, "--output_dir", whole, world_size=2).succeeded()
    run_job(*words, "--max_steps", 6, "--output_dir", run, world_size=2).succeeded()
    ranks = [run / "checkpoints" / f"rank0000{rank}-of-00002" for rank in (0, 1)]
    assert [steps(folder) for folder in ranks] == [[2, 4, 6]] * 2
    shutil.rmtree(ranks[1] / "llama_v2-6steps")  # as if it had been killed before
    resume = [*words, "--max_steps", 8, "--output_dir", run, "--resume_from_checkpoint", "latest"]
    outcome = run_job(*resume, world_size=2).succeeded()
    assert "llama_v2-4steps at step 4" in outcome.output and "not every rank has" in outcome.output
    assert losses(run) == losses(whole)
    for rank in (0, 1):
        name = f"checkpoints/rank0000{rank}-of-00002/llama_v2-8steps"
        assert_same_tensors(tensors_in(run / name), tensors_in(whole / name))
    refused = run_job(*resume, world_size=1)
    assert refused.statuses == [2] and "local checkpoints of 2 processes and this run has 1" in refused.output
    refused = run_job(*[w if w != kind else "sharded" for w in resume], world_size=2)
    assert refused.statuses == [2, 2] and "contains local checkpoints" in refused.output
    # Damage in one rank's files takes all ranks back to a step that all have.
    flip(next((ranks[0] / "llama_v2-8steps").glob("*.safetensors")))
    outcome = run_job(*resume, world_size=2).succeeded()
    assert "llama_v2-8steps is damaged: rank 0: " in outcome.output and "at step 6" in outcome.output


@pytest.mark.full
def test_a_local_run_that_was_ended_in_its_first_save_starts_afresh_and_one_without_its_disk_does_not(tmp_path):
    run = tmp_path / "run"
    words = [*JOB, "--checkpoint_freq", 2, "--checkpoint_type", "local", "--output_dir", run]
    words += ["--resume_from_checkpoint", "latest"]
    run_job(*words, "--max_steps", 2, world_size=2).succeeded()
    lost = run / "checkpoints" / "rank00000-of-00002"
    (lost / "llama_v2-2steps").rename(lost / "llama_v2-2steps.tmp")  # as it is before it is published
    history = run / "history.jsonl"
    events = history.read_text().splitlines(keepends=True)
    history.write_text("".join(event for event in events if json.loads(event)["event"] != "end"))
    run_job(*words, "--max_steps", 4, world_size=2).succeeded()
    assert len(losses(run)) == 4
    ranks = [run / "checkpoints" / f"rank0000{rank}-of-00002" for rank in (0, 1)]
    assert [steps(folder) for folder in ranks] == [[2, 4]] * 2
    shutil.rmtree(ranks[0])
    refused = run_job(*words, "--max_steps", 6, world_size=2)
    assert refused.statuses == [2, 2] and "bring back the missing disks" in refused.output, refused.output


@pytest.mark.parametrize("ranks", [(1,), pytest.param((0, 1), marks=pytest.mark.slow)])
@pytest.mark.full
def test_a_local_run_whose_only_checkpoint_is_damaged_does_not_start_afresh(ranks, tmp_path):
    run = tmp_path / "run"
    words = [*JOB, "--checkpoint_freq", 9, "--checkpoint_type", "local", "--output_dir", run]
    words += ["--resume_from_checkpoint", "latest"]
    run_job(*words, "--max_steps", 4, world_size=2).succeeded()
    for rank in ranks:
        flip(next(run.glob(f"checkpoints/rank0000{rank}-of-00002/*-4steps/*.safetensors")))
    refused = run_job(*words, "--max_steps", 6, world_size=2)
    assert refused.statuses == [2, 2] and "a copy of what is damaged" in refused.output, refused.output
    assert "Batch 1 " not in refused.output and len(losses(run)) == 4


@pytest.mark.full
def test_the_best_by_validation_loss_is_kept(tmp_path):
    def prepare(rank: int) -> None:
        values = iter([0.5, 3.0, 1.0, 2.0, 4.0, 5.0])  # the first of step 0, which has no checkpoint
        trainer.validate = lambda *_, **__: Validation(next(values), 1, 1)

    words = [
        *JOB, "--max_steps", 5, "--checkpoint_freq", 1, "--num_kept_checkpoints", 1, "--keep_best", 2,
        "--validation_freq", 1, "--output_dir", tmp_path / "run",
    ]  # fmt: skip
    run_job(*words, world_size=2, prepare=prepare).succeeded()
    assert steps(tmp_path / "run" / "checkpoints") == [2, 3, 5]
    assert os.readlink(tmp_path / "run" / "checkpoints" / "best") == "llama_v2-2steps"
    assert read_manifest(tmp_path / "run" / "checkpoints" / "best").run["val_loss"] == 1.0


@pytest.mark.full
def test_a_damaged_newer_one_is_set_aside_and_does_not_push_out_good_ones(tmp_path):
    run = tmp_path / "run"
    words = [*JOB, "--checkpoint_freq", 2, "--num_kept_checkpoints", 1, "--output_dir", run]
    run_job(*words[:-4], "--num_kept_checkpoints", 2, "--output_dir", run, "--max_steps", 4, world_size=2).succeeded()
    flip(run / "checkpoints" / "llama_v2-4steps" / "rank00001-000.safetensors")
    resume = [*words, "--checkpoint_freq", 9, "--max_steps", 3, "--resume_from_checkpoint", "latest"]
    outcome = run_job(*resume, world_size=2).succeeded()
    assert "Set aside: " in outcome.output and "at step 2" in outcome.output
    assert steps(run / "checkpoints") == [3]
    assert (run / "checkpoints" / "llama_v2-4steps.aside1").is_dir()
    assert os.readlink(run / "checkpoints" / "latest") == "llama_v2-3steps"


@pytest.mark.parametrize(("kind", "freq", "most", "written"), [("sharded", 9, 2, 2), ("async_sharded", 3, 6, 3)])
def test_one_directory_that_fails_does_not_keep_a_checkpoint_from_the_other(kind, freq, most, written, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"

    def prepare(rank: int) -> None:
        if rank == 0:
            fail(a, "rename directory", set(range(9)))

    words = [*JOB, "--checkpoint_dir", a, b, "--checkpoint_freq", freq, freq, "--num_kept_checkpoints", 2, 2]
    words += ["--checkpoint_type", kind, "--max_steps", most, "--output_dir", tmp_path / "run"]
    outcome = run_job(*words, world_size=2, prepare=prepare)
    assert outcome.statuses == [1, 1], outcome.output
    assert f"a/llama_v2-{written}steps could not be written" in outcome.output, outcome.output
    assert steps(a) == [] and steps(b) == [written]


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.full
def test_a_directory_that_a_rank_does_not_see_at_once_is_waited_for(late, tmp_path):
    def prepare(rank: int) -> None:
        writer.VISIBLE_WITHIN = 60.0 if late else 0.0
        stat, looks = os.stat, [0]

        def not_yet(path, *args, **settings):
            if str(path).endswith("4steps.tmp"):
                looks[0] += 1
                if looks[0] < 3 or not late:  # as a network file system remembers that there was none
                    raise FileNotFoundError(2, "No such file or directory")
            return stat(path, *args, **settings)

        if rank == 1:
            os.stat = not_yet

    words = [*JOB, "--checkpoint_freq", 2, "--num_kept_checkpoints", 9, "--on_save_error", "continue"]
    words += ["--max_steps", 6, "--output_dir", tmp_path / "run"]
    outcome = run_job(*words, world_size=2, prepare=prepare).succeeded()
    assert ("rank 1: it does not see" in outcome.output) != late, outcome.output
    assert steps(tmp_path / "run" / "checkpoints") == ([2, 4, 6] if late else [2, 6])
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.full
def test_hosts_that_do_not_share_the_directory_are_refused_before_the_first_step(tmp_path):
    def prepare(rank: int) -> None:
        writer.VISIBLE_WITHIN = 0.2
        (tmp_path / str(rank)).mkdir()
        os.chdir(tmp_path / str(rank))
        read = job.read_launch
        job.read_launch = lambda: dataclasses.replace(read(), local_rank=0, local_world_size=1)

    outcome = run_job(*JOB, "--max_steps", 2, "--output_dir", "run", world_size=2, prepare=prepare)
    assert outcome.statuses == [2, 2] and "Traceback" not in outcome.output, outcome.output
    assert outcome.output.count("could not be begun: rank 1: it does not see ") == 2, outcome.output  # of each host
    assert not list(tmp_path.rglob("*steps*")) and not list(tmp_path.rglob("metrics.jsonl"))


def test_a_write_under_way_is_published_when_the_numbers_end_the_run(tmp_path):
    def prepare(rank: int) -> None:
        clock, ends = Clock(), []

        def joined() -> None:
            ends.append(clock.now + 15)  # more than the time of an update, less than that of a checkpoint
            clock.pace = 1.0

        def write_takes() -> None:
            wait_until(lambda: ends and clock.now >= ends[0])
            clock.pace = 0.0

        on_a_disk(write_takes, joined)
        watchdog.time = clock
        forward, seen = one_step.forward, [0]

        def call(*args):
            seen[0] += 1
            return forward(*args) * (float("nan") if seen[0] == 4 else 1.0)

        one_step.forward = call

    # It is waited for in a phase of its own: the update's time would be over.
    words = [*JOB, "--max_steps", 9, "--checkpoint_freq", 3, "--checkpoint_type", "async_sharded"]
    words += ["--watchdog_timeout", 3]
    outcome = run_job(*words, "--output_dir", tmp_path / "run", world_size=2, prepare=prepare)
    assert outcome.statuses == [1, 1] and "loss is not finite" in outcome.output, outcome.output
    assert steps(tmp_path / "run" / "checkpoints") == [3]


@pytest.mark.full
def test_metrics_without_their_checkpoints_are_not_written_over(tmp_path):
    run = tmp_path / "run"
    words = [*JOB, "--checkpoint_freq", "auto", "--output_dir", run]
    run_job(*words, "--max_steps", 14, world_size=1).succeeded()
    shutil.rmtree(run / "checkpoints")  # a disk that is not there
    refused = run_job(*words, "--max_steps", 20, "--resume_from_checkpoint", "latest", world_size=1)
    assert refused.statuses == [2] and "contains the metrics of a run, up to step 14" in refused.output
    assert len(losses(run)) == 14


@pytest.mark.parametrize(
    ("checkpoint", "end", "logged", "interrupted", "restarts"),
    [
        (None, None, 3, [], True),
        (None, (1, "RunError"), 3, [], True),
        (None, (0, ""), 3, [], False),
        (None, (75, ""), 3, [], False),
        ("other/llama-2steps", None, 3, [], False),
        (None, None, 9, [], False),  # by the frequency that it had
        (None, None, 9, [4], True),  # asynchronously, in its first save
        (None, None, 9, [8], False),
    ],
)
def test_latest_begins_a_run_anew_that_died_before_its_first_checkpoint(
    checkpoint, end, logged, interrupted, restarts, tmp_path
):
    settings = {"checkpoint_freq": [4], "checkpoint_dir": ["there"]}
    history.append(tmp_path, "start", checkpoint=None, settings={})
    history.append(tmp_path, "end", status=0, reason="")
    history.append(tmp_path, "start", checkpoint=checkpoint, settings=settings)
    if end:
        history.append(tmp_path, "end", status=end[0], reason=end[1])
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {logged}}}\n')
    for step in interrupted:
        (tmp_path / f"llama-{step}steps.tmp").mkdir()
    config = types.SimpleNamespace(checkpoint=CheckpointConfig(resume_from_checkpoint="latest"))
    plan = types.SimpleNamespace(config=config, run_dir=tmp_path, checkpoint_dirs=[tmp_path])
    with contextlib.nullcontext() if restarts else pytest.raises(UserError, match="--checkpoint_dir there, where"):
        start._refuse_logged(plan, fresh=True)


def by_clock(step: float, write: float, save: float = 0.0):
    """``prepare``: seconds that a step, a write in the background and a save take, by a clock."""

    def prepare(rank: int) -> None:
        clock, joined, saving = Clock(), threading.Event(), Checkpointer.write
        saver.MEASURED_STEPS = 2
        saver.time = background.time = clock

        def go_on(seconds: float) -> None:
            clock.now += seconds

        def write_takes() -> None:
            end = clock.now + write
            wait_until(lambda: clock.now >= end or joined.is_set())
            clock.now = max(clock.now, end)
            joined.clear()

        def writes(self, manifest, *, wait, verify):
            go_on(save if wait else 0.0)
            return saving(self, manifest, wait=wait, verify=verify)

        Checkpointer.write = writes
        on_a_disk(write_takes, joined.set)
        wrapped("forward", lambda: go_on(step))

    return prepare


@pytest.mark.full
def test_the_interval_leaves_an_asynchronous_write_its_time(tmp_path):
    words = [*JOB, "--max_steps", 20, "--checkpoint_freq", "auto", "--checkpoint_overhead", 0.9]
    words += ["--checkpoint_type", "async_sharded", "--num_kept_checkpoints", 20, "--output_dir", tmp_path / "run"]
    outcome = run_job(*words, world_size=2, prepare=by_clock(step=0.0625, write=0.5)).succeeded()
    said = [line for line in outcome.output.splitlines() if "A checkpoint takes" in line]
    assert all("a step 0.062 s" in line for line in said[:2]), outcome.output  # the second waits for the first's write
    found = steps(tmp_path / "run" / "checkpoints")
    assert found[0] == 2 and found[-1] == 20 and len(found) <= 8, found  # 19 if it were not seen


@pytest.mark.slow
def test_the_interval_follows_from_what_saving_costs(tmp_path):
    prepare = by_clock(step=0.05, write=0.0, save=0.4)
    words = [*JOB, "--max_steps", 12, "--checkpoint_freq", "auto", "--num_kept_checkpoints", 12]
    rare, often = tmp_path / "rare", tmp_path / "often"
    outcome = run_job(*words, "--output_dir", rare, world_size=2, prepare=prepare).succeeded()
    assert steps(rare / "checkpoints") == [2, 12] and "(--checkpoint_overhead 0.03)" in outcome.output
    run_job(*words, "--checkpoint_overhead", 0.99, "--output_dir", often, world_size=2, prepare=prepare).succeeded()
    assert steps(often / "checkpoints") == list(range(2, 13))
