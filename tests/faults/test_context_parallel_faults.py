"""A rank that fails, dies or stands still between the exchanges of a sequence: all end, and say who it was."""

from __future__ import annotations

import os
import signal

import pytest

from smp.parallel.context import functions
from tests.clock import SharedClock, wait_until
from tests.faults.jobs import LONG, at_call, checkpoints, watched_by
from tests.job import run_job, running_job

CP = [*LONG, "--context_parallel_degree", 2, "--activation_checkpointing", 0]
SECOND_OF_STEP_2 = 4  # of two blocks in each step: the first exchange is over, and the other rank waits in the second


def inside(exchanged: type, way: str, then) -> None:
    """Call ``then`` in the second block's attention of step 2, forward or backward, before its exchange."""
    function, before = getattr(exchanged, way), at_call(SECOND_OF_STEP_2, then)

    def call(*args):
        before()
        return function(*args)

    setattr(exchanged, way, staticmethod(call))


@pytest.mark.parametrize(
    ("name", "way", "backend"),
    [
        ("p2p", "backward", "smddp"),
        pytest.param("all_gather", "forward", "gloo", marks=pytest.mark.slow),
        pytest.param("all_to_all", "backward", "smddp", marks=pytest.mark.slow),
    ],
)
def test_an_error_between_two_exchanges_ends_all(name, way, backend, tmp_path):
    def prepare(rank: int) -> None:
        def fail() -> None:
            raise KeyError("the third of the keys")

        if rank == 1:
            inside(functions.CP_COMM_TYPES[name], way, fail)
        watched_by(SharedClock(tmp_path / "clock"))

    words = [*CP, "--cp_comm_type", name, "--distributed_backend", backend, "--output_dir", tmp_path / "run"]
    outcome = run_job(*words, world_size=2, prepare=prepare)
    assert outcome.statuses == [1, 1], outcome.output
    assert f"error: rank 1 failed in '{way}' of step 2:" in outcome.output
    assert outcome.output.count("Traceback") == 1 and outcome.output.count("KeyError: 'the third of the keys'") == 1
    assert checkpoints(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("name", "way", "backend"),
    [
        ("all_gather", "forward", "smddp"),
        pytest.param("p2p", "forward", "smddp", marks=pytest.mark.slow),
        pytest.param("p2p", "backward", "gloo", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_between_two_exchanges_is_named(name, way, backend, tmp_path):
    def prepare(rank: int) -> None:
        if rank == 1:
            inside(functions.CP_COMM_TYPES[name], way, lambda: os.kill(os.getpid(), signal.SIGKILL))
        watched_by(SharedClock(tmp_path / "clock"))

    words = [*CP, "--cp_comm_type", name, "--distributed_backend", backend, "--output_dir", tmp_path / "run"]
    outcome = run_job(*words, world_size=2, prepare=prepare)
    assert outcome.statuses == [1, -9], outcome.output
    assert "rank 0: lost rank 1" in outcome.output and f"in '{way}' of step 2" in outcome.output


def test_a_rank_that_stands_still_between_two_exchanges_is_named(tmp_path):
    here, clock = tmp_path / "here", SharedClock(tmp_path / "clock")

    def prepare(rank: int) -> None:
        def stop() -> None:
            here.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

        if rank == 1:
            inside(functions.CP_COMM_TYPES["p2p"], "forward", stop)
        watched_by(clock, silent=1)

    words = [*CP, "--cp_comm_type", "p2p", "--watchdog_timeout", 2, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=2, prepare=prepare) as job:
        job.wait_until(here.exists)
        clock.run()
        waiting = job.processes[0]
        wait_until(lambda: not waiting.is_alive(), said=lambda: job.output)
        output = job.output
        assert waiting.exitcode == 1, output
    report = next(line for line in output.splitlines() if "no progress within --watchdog_timeout 2: " in line)
    assert "rank 1 (host " in report and "Traceback" not in output
    assert "(its process is stopped); rank 0 waits in 'forward' of step 2" in report
