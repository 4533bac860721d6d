"""A rank that hangs, or is slow, is named; a rank whose launcher is gone ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d

from smp import runtime
from smp.comm import nccl_operations
from smp.errors import PeerError
from smp.faults import watchdog
from smp.faults.members import Activity, Member, Seen, describe_hang, process_state
from smp.faults.propagate import failing_together
from smp.faults.watchdog import TICK_SECONDS, Watchdog
from tests.clock import Clock, SharedClock, wait_until
from tests.faults.jobs import JOB, LONG, at_call, last_step, slowly, watched_by, wrapped
from tests.job import run_job, running_job

MEMBERS = [Member(r, "id", "h", 100 + r) for r in range(4)]


def seen(phase: str, step: int, age: float, beat: int = 1) -> Seen:
    return Seen(Activity(phase, step, 1000.0 - age), beat)


@pytest.mark.smoke
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
    one = Seen(Activity("data", 3, 12.5), 7)
    assert Seen.parse(json.dumps(one).encode()) == one


def test_a_stopped_process_is_seen():
    def becomes(wanted: str) -> None:
        wait_until(lambda: process_state(process.pid) == wanted)

    process = subprocess.Popen(["sleep", "3600"])
    becomes("")  # it waits for the disk, for a moment, while it is loaded
    process.send_signal(signal.SIGSTOP)
    becomes("its process is stopped")
    process.kill()
    process.wait()
    assert process_state(process.pid) == "its process has ended"


# --- the thread that ends the process, by a clock of the test's own

ENDED = "ended the process"


def ticks(watched: Watchdog, monkeypatch, *, each=lambda tick: None, most: int = 1000) -> tuple[float, list]:
    """Run the watching thread's function here: seconds until it ended the process, and with what status."""
    clock, ended, count = Clock(), [], 0

    class Event:
        def wait(self, seconds: float) -> bool:
            nonlocal count
            count += 1
            clock.now += seconds
            each(count)
            return count > most

    def end(status: int) -> None:
        ended.append(status)
        raise SystemExit(ENDED)

    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(os, "_exit", end)
    watched._stopped = Event()
    try:
        watched._watch()
    except SystemExit as error:
        assert str(error) == ENDED
    return clock.now - 1000, ended


class Peers:
    """In the place of the job's members."""

    members = MEMBERS

    def __init__(self, dead: list[Member]):
        self._dead, self._store = dead, dist.HashStore()

    def dead(self) -> list[Member]:
        return self._dead

    def connection(self) -> dist.Store:
        return self._store


def test_a_rank_whose_peer_has_died_ends_within_five_seconds(monkeypatch, capfd):
    watched = Watchdog(0, timeout=0)
    watched.members, watched._connected = Peers([MEMBERS[1]]), True
    seconds, ended = ticks(watched, monkeypatch)
    assert ended == [1] and 3 < seconds < 5
    assert "rank 0: lost rank 1 (pid 101) in 'start': it has ended" in capfd.readouterr().err


def test_a_rank_that_has_noticed_its_peers_death_ends_within_five_seconds(monkeypatch, capfd):
    """Though something holds it up."""
    watched = Watchdog(0, timeout=0)
    watched.members, watched._connected = Peers([MEMBERS[1]]), True
    monkeypatch.setattr(watchdog, "time", Clock())
    with pytest.raises(PeerError, match=r"rank 0: lost rank 1 \(pid 101\)"), failing_together(watched, 0):
        raise RuntimeError("smddp: rank 1 (pid 101) died")
    seconds, ended = ticks(watched, monkeypatch)
    assert ended == [1] and seconds < 5
    assert capfd.readouterr().err == "rank 0: lost rank 1 (pid 101) in 'start': it has ended\n"


def test_a_rank_whose_launcher_has_gone_ends_within_five_seconds(monkeypatch, capfd):
    slept, ended = [], []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(os, "getppid", lambda: 1 if len(slept) > 40 else 4711)
    monkeypatch.setattr(runtime.time, "sleep", slept.append)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(runtime.threading.Thread, "start", lambda thread: thread.run())
    runtime.end_with_launcher(runtime.Launch())
    assert ended == [1] and slept[40] < 5
    assert "rank 0: the launcher (pid 4711) is gone" in capfd.readouterr().err


def test_a_phase_has_its_time_and_the_next_one_its_own(monkeypatch, capfd):
    watched = Watchdog(0, timeout=2)
    watched.connect(None)
    watched.enter("forward", 1)

    def each(tick: int) -> None:
        if tick % 8 == 0 and tick <= 80:  # every two seconds, the same phase again
            watched.enter("forward")

    seconds, ended = ticks(watched, monkeypatch, each=each)
    assert ended == [1] and 20 + 2 < seconds <= 20 + 2 + 2 * TICK_SECONDS
    assert "--watchdog_timeout 2: rank 0 has been in 'forward' of step 1 for 2 s" in capfd.readouterr().err


class Recorder:
    """In the place of NCCL's flight recorder: its format of torch 2.13."""

    def __init__(self):
        self.entries = []

    def add(self, group, name, number, state, *sizes, is_p2p=False):
        counts = {"collective_seq_id": 0 if is_p2p else number, "p2p_seq_id": number if is_p2p else 0, "is_p2p": is_p2p}
        sizes = dict(zip(("input_sizes", "output_sizes"), sizes, strict=True))
        self.entries.append(
            {"process_group": group, "profiling_name": f"nccl:{name}", "state": state, **counts, **sizes}
        )

    def __call__(self):
        return json.dumps({"version": "2.10", "entries": self.entries, "pg_status": {}} if self.entries else {})


def test_a_rank_says_what_it_waits_for_over_nccl(monkeypatch, capfd):
    """The host is ahead of the GPU: the collective that hangs is not the last one."""
    recorder, shard, context = Recorder(), ("1", "mesh_dp_shard"), ("2", "mesh_cp")
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", recorder, raising=False)
    assert nccl_operations() == []
    recorder.add(shard, "_all_gather_base", 7, "completed", [[4]], [[8]])
    recorder.add(context, "send 0->1", 3, "completed", [[2, 2]], [[2, 2]], is_p2p=True)
    recorder.add(shard, "_all_gather_base", 8, "started", [[16]], [[32]])
    recorder.add(shard, "_reduce_scatter_base", 9, "scheduled", [[32]], [[16]])
    watched = Watchdog(1, timeout=2, nccl=nccl_operations)
    watched.connect(None)
    assert ticks(watched, monkeypatch)[1] == [1]
    assert [line for line in capfd.readouterr().err.splitlines() if "NCCL" in line] == [
        "rank 1: NCCL group 1 mesh_dp_shard: _all_gather_base #8 ([[16]] to [[32]]), started; enqueued up to #9",
        "rank 1: NCCL group 2 mesh_cp: send 0->1 #3 ([[2, 2]] to [[2, 2]]), completed; enqueued up to #3",
    ]


def test_the_seconds_of_each_phase_are_counted_once(monkeypatch):
    monkeypatch.setattr(watchdog, "time", clock := Clock())
    watched = Watchdog(0, timeout=0)
    for phase, seconds in (("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("forward", 8.0)):
        watched.enter(phase, 1)
        clock.now += seconds
    assert watched.spent() == {"start": 0.0, "data": 1.0, "forward": 10.0, "backward": 4.0}
    clock.now += 0.5
    watched.enter("optimizer")
    assert watched.spent() == {"forward": 0.5, "optimizer": 0.0}


def test_what_passes_while_the_process_is_stopped_counts_for_two_seconds(monkeypatch):
    def each(tick: int) -> None:
        if tick == 3:
            watchdog.time.now += 3600

    watched = Watchdog(0, timeout=3)
    watched.connect(None)
    watched.enter("forward", 1)
    assert ticks(watched, monkeypatch, each=each, most=5) == (3600 + 6 * TICK_SECONDS, [])
    assert ticks(watched, monkeypatch, each=each, most=6)[1] == [1]


def test_leaving_has_a_deadline(monkeypatch):
    watched = Watchdog(0, timeout=0)
    monkeypatch.setattr(watchdog, "time", Clock())
    watched.leave(75, 1.0)
    seconds, ended = ticks(watched, monkeypatch)
    assert ended == [75] and 1 < seconds <= 1 + TICK_SECONDS


# --- jobs


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_stopped_rank_is_named_with_the_stacks_of_one_that_waits(rank, tmp_path):
    clock = SharedClock(tmp_path / "clock")

    def prepare(own: int) -> None:
        slowly(own)
        watched_by(clock, silent=rank)

    words = [*LONG, "--watchdog_timeout", 2, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=3, prepare=prepare) as job:
        job.wait_until(lambda: last_step(tmp_path / "run") >= 2)
        job.signal(signal.SIGSTOP, rank)
        clock.run()
        waiting = [process for r, process in enumerate(job.processes) if r != rank]
        wait_until(lambda: not any(process.is_alive() for process in waiting), said=lambda: job.output)
        output = job.output
        assert [process.exitcode for process in waiting] == [1, 1], output
    assert output.count("error: no progress within --watchdog_timeout 2: ") == 1, output
    report = next(line for line in output.splitlines() if "no progress" in line)
    assert f"rank {rank} (host " in report and f"pid {job.pids[rank]}) last seen in '" in report
    assert "(its process is stopped); " in report
    assert "Stacks of rank" in output and 'File "' in output and "Traceback" not in output


def held_at_step(step: int, rank: int, folder, clock: SharedClock):
    """``prepare``: the rank waits in the forward of a step for a file ``go``, and has made a file ``here``."""

    def prepare(own: int) -> None:
        def hold() -> None:
            (folder / "here").touch()
            wait_until((folder / "go").exists)

        if own == rank:
            wrapped("forward", at_call(step, hold))
        watched_by(clock)

    return prepare


@pytest.mark.slow
def test_a_rank_that_pauses_for_less_changes_nothing(tmp_path):
    clock = SharedClock(tmp_path / "clock")
    words = [*JOB, "--max_steps", 5, "--watchdog_timeout", 4, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=2, prepare=held_at_step(3, 1, tmp_path, clock)) as job:
        job.wait_until((tmp_path / "here").exists)
        job.signal(signal.SIGSTOP, 1)
        clock.set(1.5)
        job.signal(signal.SIGCONT, 1)
        (tmp_path / "go").touch()
        job.wait().succeeded()


@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_for_longer_goes_on(tmp_path):
    clock = SharedClock(tmp_path / "clock")
    words = [*JOB, "--max_steps", 5, "--watchdog_timeout", 3, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=2, prepare=held_at_step(3, 1, tmp_path, clock)) as job:
        job.wait_until((tmp_path / "here").exists)
        job.signal(signal.SIGSTOP)
        clock.set(3600)
        job.signal(signal.SIGCONT)
        (tmp_path / "go").touch()
        job.wait().succeeded()


def test_a_rank_that_is_stuck_in_its_data_is_named(tmp_path):
    clock, waits = SharedClock(tmp_path / "clock"), tmp_path / "waits"

    def prepare(rank: int) -> None:
        def hang() -> None:
            wait_until(waits.exists)
            clock.run()
            wait_until(lambda: False)

        if rank == 1:
            wrapped("valid_tokens", at_call(2, hang))  # before the first exchange of the step
        else:
            wrapped("forward", at_call(2, waits.touch))
        watched_by(clock)

    words = [*LONG, "--watchdog_timeout", 2, "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=2, prepare=prepare) as job:
        outcome = job.wait()
    assert outcome.statuses == [1, 1], outcome.output
    report = next(line for line in outcome.output.splitlines() if "no progress" in line)
    assert f"rank 1 (host {os.uname().nodename}, pid {job.pids[1]}) last seen in 'data' of step 2" in report
    assert "rank 0 waits in 'forward' of step 2" in report or "rank 0 waits in 'backward' of step 2" in report, report


def test_one_process_that_hangs_is_ended_with_its_stacks(tmp_path):
    clock = SharedClock(tmp_path / "clock")

    def prepare(rank: int) -> None:
        def hang() -> None:
            clock.run()
            wait_until(lambda: False)

        wrapped("forward", hang)
        watched_by(clock)

    words = [*LONG, "--watchdog_timeout", 1, "--output_dir", tmp_path / "run"]
    with running_job(*words, prepare=prepare) as job:
        outcome = job.wait()
    assert outcome.statuses == [1], outcome.output
    assert "--watchdog_timeout 1: rank 0 has been in 'forward' of step 1 for" in outcome.output
    assert "Stacks of rank 0:" in outcome.output and 'jobs.py", line' in outcome.output


def test_each_batch_of_a_validation_has_the_time_of_a_phase(tmp_path):
    """It enters its phase anew, which is what begins the time."""
    seen = tmp_path / "seen"

    def prepare(rank: int) -> None:
        enter, entered = Watchdog.enter, []

        def note(self, phase, step=None):
            enter(self, phase, step)
            entered.append(phase)

        def look() -> None:
            with seen.open("a") as file:
                file.write(f"{entered[-1]} {len(entered)}\n")

        Watchdog.enter = note
        wrapped("forward", look)

    words = [*JOB, "--max_steps", 1, "--validation_freq", 1, "--validation_batches", 10]
    run_job(*words, "--output_dir", tmp_path / "run", prepare=prepare).succeeded()
    forwards = [line.split() for line in seen.read_text().splitlines()]
    assert [phase for phase, _ in forwards] == ["validation"] * 10 + ["forward"] + ["validation"] * 10
    assert len({count for _, count in forwards}) == 21
