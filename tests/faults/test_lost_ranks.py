"""A rank that dies or fails: the cause is told once, the others leave and say whom they have lost.

That they leave within five seconds is the watchdog's, see ``test_watchdog.py``; here its clock stands still.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time

import pytest

from tests.clock import SharedClock, wait_until
from tests.faults.jobs import JOB, LONG, at_call, checkpoints, last_step, slowly, watched_by, wrapped
from tests.job import run_job, running_job


def watched(clock: SharedClock):
    """``prepare``: only what a rank's main thread notices ends it."""

    def prepare(rank: int) -> None:
        slowly(rank)
        watched_by(clock)

    return prepare


def kill(job, run: pathlib.Path, rank: int) -> None:
    """Kill a rank between two steps or in one."""
    job.wait_until(lambda: last_step(run) >= 2)
    job.signal(signal.SIGKILL, rank)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("rank", "backend"),
    [
        (0, "smddp"),
        pytest.param(1, "smddp", marks=SLOW),
        pytest.param(0, "gloo", marks=SLOW),
        pytest.param(1, "gloo", marks=SLOW),
    ],
)
@pytest.mark.smoke
def test_survivors_leave_and_name_the_dead(rank, backend, tmp_path):
    words = [*LONG, "--distributed_backend", backend, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=3, prepare=watched(SharedClock(tmp_path / "clock"))) as job:
        kill(job, tmp_path / "run", rank)
        outcome = job.wait()
    assert outcome.statuses == [-9 if r == rank else 1 for r in range(3)], outcome.output
    assert "Traceback" not in outcome.output, outcome.output
    for survivor in {0, 1, 2} - {rank}:
        lines = [line for line in outcome.output.splitlines() if f"rank {survivor}: lost rank" in line]
        assert len(lines) == 1 and f"rank {rank} (pid {job.pids[rank]})" in lines[0], outcome.output
        assert " of step " in lines[0]
    assert checkpoints(tmp_path / "run") == []


@SLOW
def test_rank_0_that_serves_the_store_itself_is_named_too(tmp_path):
    words = [*LONG, "--train_batch_size", 64, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=2) as job:
        kill(job, tmp_path / "run", 0)
        outcome = job.wait()
    assert outcome.statuses == [-9, 1], outcome.output
    assert f"rank 1: lost rank 0 (pid {job.pids[0]})" in outcome.output


@pytest.mark.parametrize("asked", [pytest.param(False, marks=SLOW), True])
def test_a_survivor_that_does_not_notice_is_ended(asked, tmp_path):
    """Its main thread is in a call that returns to Python only long after; a launcher may also ask it to stop."""
    here, clock = tmp_path / "here", SharedClock(tmp_path / "clock")

    def prepare(rank: int) -> None:
        def hang() -> None:
            here.touch()
            time.sleep(3600)

        if rank == 1:
            wrapped("forward", at_call(2, hang))
        watched_by(clock)

    with running_job(*LONG, "--output_dir", tmp_path / "run", world_size=2, prepare=prepare) as job:
        job.wait_until(here.exists)
        job.signal(signal.SIGKILL, 0)
        if asked:
            job.signal(signal.SIGTERM, 1)
            wait_until(lambda: "SIGTERM: all ranks stop" in job.output)
        clock.run()
        outcome = job.wait()
    assert outcome.statuses == [-9, 1], outcome.output
    assert f"rank 1: lost rank 0 (pid {job.pids[0]}) in 'forward' of step 2" in outcome.output
    assert checkpoints(tmp_path / "run") == []


PLACES = {"forward": "forward", "optimizer": "clip_grad_norm_", "checkpoint": "_save_if_due"}


@pytest.mark.parametrize(
    ("place", "rank"),
    [
        ("forward", 1),
        ("checkpoint", 0),
        pytest.param("forward", 0, marks=SLOW),
        pytest.param("optimizer", 1, marks=SLOW),
        pytest.param("checkpoint", 1, marks=SLOW),
    ],
)
def test_an_error_of_one_rank_is_told_once_with_its_place(place, rank, tmp_path):
    def prepare(own: int) -> None:
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / f"error{own}.json")

        def fail() -> None:
            raise KeyError("the third of the keys")

        if own == rank:
            wrapped(PLACES[place], at_call(2, fail))
        watched_by(SharedClock(tmp_path / "clock"))

    outcome = run_job(*LONG, "--output_dir", tmp_path / "run", world_size=2, prepare=prepare)
    assert outcome.statuses == [1, 1], outcome.output
    assert f"error: rank {rank} failed in '{place}' of step 2:" in outcome.output
    assert outcome.output.count("Traceback") == 1 and outcome.output.count("KeyError: 'the third of the keys'") == 1
    other = [line for line in outcome.output.splitlines() if f"rank {1 - rank}: " in line]
    assert len(other) == 1 and f"rank {rank}" in other[0], outcome.output
    said = json.loads((tmp_path / f"error{rank}.json").read_text())["message"]
    assert said["message"].startswith("KeyError") and "Traceback" in said["extraInfo"]["py_callstack"]
    assert not (tmp_path / f"error{1 - rank}.json").exists()


def test_the_same_error_of_all_ranks_is_told_once(tmp_path):
    def prepare(rank: int) -> None:
        def fail() -> None:
            raise KeyError("everywhere")

        wrapped("forward", fail)
        watched_by(SharedClock(tmp_path / "clock"))

    outcome = run_job(*JOB, "--output_dir", tmp_path / "run", world_size=3, prepare=prepare)
    assert outcome.statuses == [1, 1, 1] and outcome.output.count("Traceback") == 1, outcome.output


def test_a_data_worker_that_dies_is_told_with_rank_and_phase(tmp_path):
    words = [*LONG, "--data_num_workers", 1, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=2) as job:
        job.wait_until(lambda: last_step(tmp_path / "run") >= 2)
        workers = data_workers(job.pids[1])
        assert workers
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        outcome = job.wait()
    assert outcome.statuses == [1, 1], outcome.output
    assert "error: rank 1 failed in 'data' of step" in outcome.output, outcome.output
    assert f"the data worker process {workers[0]} has ended (status -9)" in outcome.output
    assert outcome.output.count("Traceback (most recent call last)") <= 3  # of one error and its causes


def data_workers(pid: int) -> list[int]:
    """The processes that a rank's fork server has started."""
    found = []
    for server in children(pid):
        found += children(server)
    return found


def children(pid: int) -> list[int]:
    return [int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
