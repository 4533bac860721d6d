"""Stopping on request: one checkpoint at a step boundary on all ranks, exit 75, and nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from smp.faults import stop
from smp.faults.stop import StopRequest
from smp.runtime import Launch, end_with_launcher
from tests.clock import HANG_SECONDS, SharedClock, wait_until
from tests.faults.jobs import HEARD, JOB, LONG, checkpoints, last_step, slowly, stopped_in_forward, wrapped
from tests.faults.test_lost_ranks import data_workers
from tests.job import assert_same_tensors, losses, run_job, running_job, tensors

DROPOUT = ["--attn_pdrop", 0.2]


def hearing(rank: int) -> None:
    """``prepare``: slow steps, of a rank that hears of hangups also where the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    slowly(rank)


@pytest.mark.parametrize(
    ("number", "ranks", "status"),
    [
        (signal.SIGTERM, [1], 75),
        (signal.SIGINT, [], 130),
        (signal.SIGHUP, [], 75),
        pytest.param(signal.SIGUSR1, [0], 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, [], 75, marks=pytest.mark.slow),
    ],
    ids=["one", "ctrl-c", "hangup", "usr1", "all"],
)
@pytest.mark.smoke
def test_a_signal_stops_all_ranks_at_a_step_boundary_with_one_checkpoint(number, ranks, status, tmp_path):
    run = tmp_path / "run"
    with running_job(*LONG, "--output_dir", run, world_size=2, prepare=hearing) as job:
        job.wait_until(lambda: last_step(run) >= 3)
        job.signal(number, *ranks)
        outcome = job.wait()
    assert outcome.statuses == [status] * 2, outcome.output
    assert checkpoints(run) == [last_step(run)]
    assert outcome.output.count("--resume_from_checkpoint latest") == 1 and "Traceback" not in outcome.output
    # A step may end between two signals, so that all but one of them are seen at its boundary.
    counts = (len(ranks),) if ranks else (1, 2)
    assert any(f"{count} of 2 ranks were asked to stop" in outcome.output for count in counts), outcome.output


def test_a_stopped_run_continues_bit_for_bit(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    job = [*JOB, *DROPOUT, "--max_steps", 12]
    run_job(*job, "--output_dir", whole, world_size=2).succeeded()
    resume = [*job, "--output_dir", parts, "--resume_from_checkpoint", "latest"]
    first = stopped_in_forward(resume, tmp_path, 5)
    assert first.statuses == [75, 75], first.output
    assert last_step(parts) == 5
    run_job(*resume, world_size=2).succeeded()
    assert losses(parts) == losses(whole) and len(losses(whole)) == 12
    assert_same_tensors(tensors(parts, 12), tensors(whole, 12))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "part", ["prepare_model", pytest.param("validate", marks=SLOW), pytest.param("_save_if_due", marks=SLOW)]
)
def test_a_signal_outside_of_steps_waits_for_the_next_boundary(part, tmp_path):
    run, here, go = tmp_path / "run", tmp_path / "here", tmp_path / "go"

    def prepare(rank: int) -> None:
        def wait() -> None:
            here.touch()
            wait_until(go.exists)

        if rank == 1:
            wrapped(part, wait)

    words = ["--validation_freq", 2, "--checkpoint_freq", 2]
    with running_job(*LONG, *words, "--output_dir", run, world_size=2, prepare=prepare) as job:
        job.wait_until(here.exists)
        job.signal(signal.SIGTERM, 1)
        job.wait_until(lambda: HEARD in job.output)
        go.touch()
        outcome = job.wait()
    assert outcome.statuses == [75, 75], outcome.output
    assert last_step(run) <= 2 and checkpoints(run)[-1] == last_step(run)


def test_a_second_signal_ends_at_once_whatever_the_main_thread_does(tmp_path):
    here, heard, clock = tmp_path / "here", tmp_path / "heard", SharedClock(tmp_path / "clock")

    def prepare(rank: int) -> None:
        def hang() -> None:
            here.touch()
            time.sleep(3600)

        arrived = StopRequest._arrived

        def note(self, number: int) -> None:
            arrived(self, number)
            with heard.open("a") as file:
                file.write(".")

        stop.time = clock
        StopRequest._arrived = note
        wrapped("forward", hang)

    def send(job, count: int) -> None:
        job.signal(signal.SIGTERM)
        job.wait_until(lambda: heard.exists() and len(heard.read_text()) == count)

    with running_job(*LONG, "--output_dir", tmp_path / "run", world_size=1, prepare=prepare) as job:
        job.wait_until(here.exists)
        send(job, 1)
        send(job, 2)  # as a launcher hands on what the scheduler has sent to all
        clock.set(stop.ONE_REQUEST_SECONDS - 0.1)
        send(job, 3)
        clock.set(stop.ONE_REQUEST_SECONDS)
        job.signal(signal.SIGTERM)
        outcome = job.wait()
    assert outcome.statuses == [143] and "SIGTERM again: ended without a checkpoint" in outcome.output
    assert checkpoints(tmp_path / "run") == [] and heard.read_text() == "..."


def test_a_request_at_the_last_step_changes_nothing(tmp_path):
    def prepare(rank: int) -> None:
        wrapped("forward", lambda: os.kill(os.getpid(), signal.SIGTERM))

    words = [*JOB, "--max_steps", 1, "--save_final_model", 1, "--output_dir", tmp_path / "run"]
    run_job(*words, world_size=2, prepare=prepare).succeeded()
    assert (tmp_path / "run" / "final" / "config.json").exists() and checkpoints(tmp_path / "run") == [1]


@SLOW
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 75)])
def test_a_terminals_signal_leaves_data_workers_at_work_until_the_checkpoint(number, status, tmp_path):
    """A terminal sends it to every process of the job."""
    run = tmp_path / "run"
    with running_job(*LONG, "--data_num_workers", 1, "--output_dir", run, world_size=2, prepare=hearing) as job:
        job.wait_until(lambda: last_step(run) >= 3)
        workers = [worker for pid in job.pids for worker in data_workers(pid)]
        assert len(workers) >= 2
        for pid in [*workers, *job.pids]:
            os.kill(pid, number)
        outcome = job.wait()
    assert outcome.statuses == [status] * 2 and "Traceback" not in outcome.output, outcome.output
    assert checkpoints(run) == [last_step(run)]


def deaf(end):
    """The exit status of a process whose standard error is a pipe that nobody reads any more."""
    child = os.fork()
    if child == 0:
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 2)
        try:
            end()
            time.sleep(HANG_SECONDS)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_threads_that_end_the_process_do_so_though_nobody_hears_them(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    parents = iter([1 << 30])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))  # it is killed at once
    assert deaf(lambda: end_with_launcher(Launch())) == 1
    monkeypatch.setattr(stop, "ONE_REQUEST_SECONDS", 0.0)

    def asked_twice():
        with StopRequest(0) as request:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: request.raised)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(HANG_SECONDS)

    assert deaf(asked_twice) == 143


@pytest.mark.parametrize("program", [["smp.train"], ["smp.launch.local", "-m", "smp.train"]], ids=["job", "launcher"])
def test_ctrl_c_before_torch_is_there_is_one_sentence(program):
    job = subprocess.Popen([sys.executable, "-m", *program, "--model", "llama_tiny"], stderr=subprocess.PIPE, text=True)
    assert job.stderr.readline().endswith(": loading torch\n")
    job.send_signal(signal.SIGINT)
    assert job.stderr.read() == "Interrupted before the first step: nothing was saved.\n"
    assert job.wait() == 130


def test_handlers_are_given_back(monkeypatch):
    before = [signal.getsignal(number) for number in stop.SIGNALS]
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with StopRequest(0) as request:
        assert not request.raised
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: request.raised)
        assert request.signal == signal.SIGUSR1 and not request.interrupted
    assert [signal.getsignal(number) for number in stop.SIGNALS] == before and ended == []
    assert signal.set_wakeup_fd(-1) == -1


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequest(0):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_forked_process_is_ended_by_a_signal_and_tells_nobody():
    with StopRequest(0) as request:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"!")
            time.sleep(HANG_SECONDS)
            os._exit(0)
        assert os.read(read, 1) == b"!"
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not request.raised
