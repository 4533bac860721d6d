"""A rank that dies or fails: the cause is told once, the others leave within seconds and say whom they have lost."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time

import pytest

from tests.faults.jobs import JOB, LONG, checkpoints, last_step, slowly, wrapped
from tests.job import run_job, running_job

SURVIVORS_SECONDS = 5.0


def killed(job, run: pathlib.Path, rank: int) -> float:
    """Kill a rank between two steps or in one; when."""
    job.wait_until(lambda: last_step(run) >= 2)
    job.signal(signal.SIGKILL, rank)
    return time.monotonic()


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
def test_survivors_leave_and_name_the_dead(rank, backend, tmp_path):
    words = [*LONG, "--distributed_backend", backend, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=3, prepare=slowly) as job:
        since = killed(job, tmp_path / "run", rank)
        outcome = job.wait(30)
        seconds = time.monotonic() - since
    assert outcome.statuses == [-9 if r == rank else 1 for r in range(3)], outcome.output
    assert seconds < SURVIVORS_SECONDS and "Traceback" not in outcome.output, outcome.output
    for survivor in {0, 1, 2} - {rank}:
        lines = [line for line in outcome.output.splitlines() if f"rank {survivor}: lost rank" in line]
        assert len(lines) == 1 and f"rank {rank} (pid {job.pids[rank]})" in lines[0], outcome.output
        assert " of step " in lines[0]
    assert checkpoints(tmp_path / "run") == []


@SLOW
def test_rank_0_that_serves_the_store_itself_is_named_too(tmp_path):
    words = [*LONG, "--train_batch_size", 64, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=2) as job:
        since = killed(job, tmp_path / "run", 0)
        outcome = job.wait(30)
    assert outcome.statuses == [-9, 1] and time.monotonic() - since < SURVIVORS_SECONDS, outcome.output
    assert f"rank 1: lost rank 0 (pid {job.pids[0]})" in outcome.output


@pytest.mark.parametrize("asked", [pytest.param(False, marks=SLOW), True])
def test_a_survivor_that_does_not_notice_is_ended(asked, tmp_path):
    """Its main thread is in a call that returns to Python only long after; a launcher may also ask it to stop."""
    here = tmp_path / "here"

    def prepare(rank: int) -> None:
        def hang() -> None:
            if rank == 1 and last_step(tmp_path / "run") >= 1:
                here.touch()
                time.sleep(600)

        wrapped("forward", hang)

    with running_job(*LONG, "--output_dir", tmp_path / "run", world_size=2, prepare=prepare) as job:
        job.wait_until(here.exists)
        job.signal(signal.SIGKILL, 0)
        since = time.monotonic()
        if asked:
            time.sleep(0.1)
            job.signal(signal.SIGTERM, 1)
        outcome = job.wait(30)
    assert outcome.statuses == [-9, 1] and time.monotonic() - since < SURVIVORS_SECONDS, outcome.output
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
            if own == rank and last_step(tmp_path / "run") >= (2 if place == "checkpoint" else 1):
                raise KeyError("the third of the keys")

        wrapped(PLACES[place], fail)

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
        outcome = job.wait(30)
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
