"""A rank that hangs, or is slow, is named; a rank whose launcher is gone ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from smp.faults.members import Member, Place, Seen, describe_hang, process_state
from smp.faults.straggler import STEPS, Stragglers
from smp.faults.watchdog import NOTICE_SECONDS, Watchdog
from tests.faults.jobs import JOB, LONG, last_step, slowly, wrapped
from tests.job import running_job

MEMBERS = [Member(r, "id", "h", 100 + r) for r in range(4)]


def seen(phase: str, step: int, age: float, beat: int = 1) -> Seen:
    return Seen(Place(phase, step, 1000.0 - age), beat)


def test_the_report_names_who_is_silent():
    places = [seen("backward", 41, 62), seen("backward", 41, 61), seen("backward", 41, 63), seen("forward", 41, 60)]
    said = describe_hang(MEMBERS, places, {2}, now=1000.0)
    assert said == (
        "rank 2 (host h, pid 102) last seen in 'backward' of step 41, 63 s ago (its process does not answer); "
        "ranks 0, 1 wait in 'backward' of step 41; rank 3 waits in 'forward' of step 41"
    )
    stopped = describe_hang(MEMBERS, places, {2}, state=lambda m: "its process is stopped", now=1000.0)
    assert "63 s ago (its process is stopped); ranks" in stopped


def test_the_report_names_who_is_behind():
    places = [seen("forward", 41, 61), seen("data", 41, 62), seen("forward", 41, 61), seen("forward", 41, 60)]
    said = describe_hang(MEMBERS, places, set(), now=1000.0)
    assert said == (
        "rank 1 (host h, pid 101) last seen in 'data' of step 41, 62 s ago; ranks 0, 2, 3 wait in 'forward' of step 41"
    )
    same = describe_hang(MEMBERS[:2], [seen("backward", 7, 61)] * 2, set(), now=1000.0)
    assert same == "ranks 0, 1 wait in 'backward' of step 7 for 61 s"
    never = describe_hang(MEMBERS[:2], [seen("start", 0, 61), None], set(), now=1000.0)
    assert never.startswith("rank 1 (host h, pid 101) has not said where it is (its process does not answer); rank 0")


def test_what_is_published_is_read_back():
    one = Seen(Place("data", 3, 12.5), 7, 20, 0.25)
    assert Seen.parse(one.text().encode()) == one


def test_a_stopped_process_is_seen():
    def becomes(wanted: str) -> bool:
        end = time.monotonic() + 10
        while process_state(process.pid) != wanted and time.monotonic() < end:
            time.sleep(0.01)
        return process_state(process.pid) == wanted

    process = subprocess.Popen(["sleep", "60"])
    assert becomes("")  # it waits for the disk, for a moment, while it is loaded
    process.send_signal(signal.SIGSTOP)
    assert becomes("its process is stopped")
    process.kill()
    process.wait()
    assert process_state(process.pid) == "its process has ended"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_stopped_rank_is_named_with_the_stacks_of_one_that_waits(rank, tmp_path):
    words = [*LONG, "--watchdog_timeout", 2, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=3, prepare=slowly) as job:
        job.wait_until(lambda: last_step(tmp_path / "run") >= 2)
        job.signal(signal.SIGSTOP, rank)
        since = time.monotonic()
        waiting = [process for r, process in enumerate(job.processes) if r != rank]
        for process in waiting:
            process.join(40)
        seconds, output = time.monotonic() - since, job.output
        assert [process.exitcode for process in waiting] == [1, 1], output
    assert output.count("error: no progress within --watchdog_timeout 2: ") == 1, output
    report = next(line for line in output.splitlines() if "no progress" in line)
    assert f"rank {rank} (host " in report and f"pid {job.pids[rank]}) last seen in '" in report
    assert "(its process is stopped); " in report and seconds < 30
    assert "Stacks of rank" in output and 'File "' in output and "Traceback" not in output


@pytest.mark.slow
def test_a_rank_that_pauses_for_less_changes_nothing(tmp_path):
    words = [*JOB, "--max_steps", 40, "--watchdog_timeout", 4, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=2, prepare=slowly) as job:
        job.wait_until(lambda: last_step(tmp_path / "run") >= 2)
        job.signal(signal.SIGSTOP, 1)
        time.sleep(1.5)
        job.signal(signal.SIGCONT, 1)
        job.wait(60).succeeded()


@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_for_longer_goes_on(tmp_path):
    words = [*JOB, "--max_steps", 40, "--watchdog_timeout", 3, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=2, prepare=slowly) as job:
        job.wait_until(lambda: last_step(tmp_path / "run") >= 2)
        job.signal(signal.SIGSTOP)
        time.sleep(5)
        job.signal(signal.SIGCONT)
        job.wait(60).succeeded()


def test_a_rank_that_is_stuck_in_its_data_is_named(tmp_path):
    def prepare(rank: int) -> None:
        def hang() -> None:
            if rank == 1 and last_step(tmp_path / "run") >= 1:
                time.sleep(600)

        wrapped("count_valid_tokens", hang)  # before the first exchange of the step

    words = [*LONG, "--watchdog_timeout", 2, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=2, prepare=prepare) as job:
        outcome = job.wait(60)
    assert outcome.statuses == [1, 1], outcome.output
    report = next(line for line in outcome.output.splitlines() if "no progress" in line)
    assert f"rank 1 (host {os.uname().nodename}, pid {job.pids[1]}) last seen in 'data' of step 2" in report
    assert "rank 0 waits in 'forward' of step 2" in report or "rank 0 waits in 'backward' of step 2" in report, report


def test_one_process_that_hangs_is_ended_with_its_stacks(tmp_path):
    def prepare(rank: int) -> None:
        wrapped("forward", lambda: time.sleep(600))

    words = [*LONG, "--watchdog_timeout", 1, "--output_dir", tmp_path / "run"]
    with running_job(*words, prepare=prepare) as job:
        outcome = job.wait(60)
    assert outcome.statuses == [1], outcome.output
    assert "--watchdog_timeout 1: rank 0 has been in 'forward' of step 1 for" in outcome.output
    assert "Stacks of rank 0:" in outcome.output and 'jobs.py", line' in outcome.output


def test_each_batch_of_a_validation_has_the_time_of_a_phase(tmp_path):
    def prepare(rank: int) -> None:
        wrapped("forward", lambda: time.sleep(0.4))

    words = [*JOB, "--max_steps", 1, "--validation_freq", 1, "--validation_batches", 10, "--watchdog_timeout", 2]
    with running_job(*words, "--output_dir", tmp_path / "run", prepare=prepare) as job:
        job.wait(90).succeeded()


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
time.sleep(600)
"""
CHILD = """
import os, time
from smp.runtime import Launch, end_with_launcher
os.environ["TORCHELASTIC_RUN_ID"] = "none"
end_with_launcher(Launch())
print("watches", flush=True)
time.sleep(600)
"""


def test_a_worker_ends_when_its_launcher_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert parent.stdout.readline() == "watches\n"
    parent.kill()
    parent.wait()
    since = time.monotonic()
    while os.path.exists(f"/proc/{pid}") and process_state(pid) != "its process has ended":
        assert time.monotonic() - since < 5
        time.sleep(0.05)


def test_leaving_has_a_deadline(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    watchdog = Watchdog(0, timeout=0)
    watchdog.leave(75, 0.1)
    watchdog.start()
    end = time.monotonic() + NOTICE_SECONDS + 10
    while not ended and time.monotonic() < end:
        time.sleep(0.05)
    watchdog.stop()
    assert ended[0] == 75


def test_only_a_slow_rank_is_named_and_not_again_for_100_steps():
    stragglers = Stragglers(1.5, lambda: 0.0)
    assert stragglers.slow([0.5, 0.5, 0.52, 0.9], 20) == [
        "Step 20: rank 3 computes 1.8 times as long as the median rank (0.9 s against 0.5 s per step)."
    ]
    assert stragglers.slow([0.5, 0.5, 0.52, 0.9], 100) == []
    assert len(stragglers.slow([0.9, 0.5, 0.5, 0.9], 120)) == 2
    assert Stragglers(1.5, lambda: 0.0).slow([0.5, 0.9], 20)  # of two, too
    assert Stragglers(2.0, lambda: 0.0).slow([0.5, 0.9], 20) == []
    assert Stragglers(1.5, lambda: 0.0).slow([0.001, 0.009], 20) == []  # noise


def test_ranks_are_compared_that_never_publish_the_same_step(caplog):
    """As where twenty steps take less than the time between two publications."""
    store, stragglers = dist.HashStore(), Stragglers(1.5, lambda: 0.0)
    for beat, steps in enumerate([(20, 0), (60, 20), (60, 20), (100, 60)]):
        for rank, (step, own) in enumerate(zip(steps, (0.1, 0.3), strict=True)):
            store.set(f"at{rank}", Seen(Place("forward", step, 0.0), beat, step, own).text())
        stragglers.compare(store, 2)
    assert [record.getMessage()[:24] for record in caplog.records] == ["Step 20: rank 1 computes"]
    assert stragglers._compared == 60


def test_waiting_is_not_computing():
    waited = 0.0
    stragglers = Stragglers(1.5, lambda: waited)
    for step in range(STEPS):
        stragglers.begin()
        time.sleep(0.01)
        waited += 0.008
        stragglers.end(step + 1)
    assert stragglers.measured[0] == STEPS and 0.002 <= stragglers.measured[1] < 0.1
    unknown = Stragglers(1.5, None)
    unknown.begin()
    unknown.end(1)
    assert not unknown.enabled and unknown.measured == (0, 0.0)


def test_a_slow_rank_of_a_job_is_named(tmp_path):
    def prepare(rank: int) -> None:
        wrapped("forward", lambda: time.sleep(0.15 if rank == 1 else 0.02))

    words = [*JOB, "--max_steps", 40, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=2, prepare=prepare) as job:
        outcome = job.wait(90).succeeded()
    named = [line for line in outcome.output.splitlines() if "as long as the median rank" in line]
    assert len(named) == 1 and "Step 20: rank 1 computes" in named[0], outcome.output
