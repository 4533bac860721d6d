"""Launchers that start a job again, and jobs that do not come together in the first place."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from smp import runtime
from smp.errors import RankError, UserError
from smp.faults.members import process_state
from smp.faults.restart import is_crash_loop
from smp.launch import local
from smp.launch.local import LocalJob
from smp.runtime import Launch
from tests.clock import HANG_SECONDS, wait_until
from tests.faults.jobs import JOB, LONG, checkpoints, last_step
from tests.faults.test_lost_ranks import children
from tests.job import run_job
from tests.ports import free_port

ROOT = pathlib.Path(__file__).parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

SCRIPT = """
import os, pathlib, signal, sys, time
from os import environ
rank, attempt, port = environ["RANK"], int(environ["TORCHELASTIC_RESTART_COUNT"]), int(environ["MASTER_PORT"])
sys.stdout.write(f"rank {rank} attempt {attempt}\\n")
with open("/proc/net/tcp") as table:
    listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
assert [address for address in listening if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
here = pathlib.Path(__file__).parent
(here / f"up{attempt}-{rank}").touch()
while not (here / f"up{attempt}-{1 - int(rank)}").exists():  # a rank that ends, ends the other
    time.sleep(0.01)
what = sys.argv[1:][min(attempt, len(sys.argv) - 2)]
if what == "wait":
    def stop(number, frame):
        sys.stdout.write("stops\\n")
        sys.stdout.flush()
        while not (here / "go").exists():
            time.sleep(0.01)
        sys.exit(75)
    signal.signal(signal.SIGUSR1, stop)
    sys.stdout.write("waits\\n")
    sys.stdout.flush()
    time.sleep(3600)
if rank == "1" and what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "killed":
    time.sleep(3600)
sys.exit(int(what))
"""


def launch(tmp_path, *words: object, restarts: int = 0) -> subprocess.Popen[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "smp.launch.local", "--nproc_per_node", "2", "--max_restarts", str(restarts)]
    words = (tmp_path / "script.py", *words)
    return subprocess.Popen([*command, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("attempts", "restarts", "status", "started"),
    [
        (["killed", 0], 2, 0, 2),
        pytest.param([75], 1, 75, 1, marks=pytest.mark.full),
        pytest.param(["killed"], 1, 137, 2, marks=pytest.mark.slow),
        pytest.param([2], 1, 2, 1, marks=pytest.mark.slow),
        pytest.param([1, 2], 3, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_the_local_launcher_restarts_what_crashed(attempts, restarts, status, started, tmp_path):
    process = launch(tmp_path, *attempts, restarts=restarts)
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == status, err
    expected = [f"rank {rank} attempt {attempt}" for attempt in range(started) for rank in range(2)]
    assert sorted(out.splitlines()) == sorted(expected) and err.count("launcher: ") == started - 1, (out, err)
    assert "Traceback" not in err and "FAILED" not in err, err


def test_the_local_launcher_hands_a_request_to_stop_on_and_waits(tmp_path):
    process = launch(tmp_path, "wait", restarts=1)
    assert process.stdout is not None

    def said_by_both(word: str) -> None:
        count = 0
        while count < 2:
            line = process.stdout.readline()
            assert line, "it has ended"
            count += line == f"{word}\n"

    said_by_both("waits")
    process.send_signal(signal.SIGUSR1)
    said_by_both("stops")
    assert process.poll() is None
    (tmp_path / "go").touch()
    assert process.wait(HANG_SECONDS) == 75


def test_a_launcher_that_nobody_reads_restarts_all_the_same(tmp_path):
    with open("/dev/full", "w") as full:
        (tmp_path / "script.py").write_text(SCRIPT)
        words = ["--nproc_per_node", "2", "--max_restarts", "2", str(tmp_path / "script.py"), "1"]
        command = [sys.executable, "-m", "smp.launch.local", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 1 and done.stdout.count("attempt") == 6, done


class Stuck:
    """A process that is in a call to a broken disk: it does not die when it is killed."""

    pid, returncode, kills = 4711, None, 0

    def poll(self):
        return None

    def kill(self):
        self.kills += 1


@pytest.mark.parametrize("failed", [True, False])
def test_a_process_that_cannot_be_killed_is_named_and_left(failed, monkeypatch, capfd):
    monkeypatch.setattr(local, "KILLED_SECONDS", 0.1)
    monkeypatch.setattr(local, "SURVIVORS_SECONDS", 0.0)
    job = LocalJob([sys.executable, "-c", "import sys; sys.exit(3)"], 1, max_restarts=5)
    stuck = Stuck()
    ended = subprocess.Popen([sys.executable, "-c", f"import sys; sys.exit({3 if failed else 0})"])
    job._running = [ended, stuck]
    if not failed:
        job._abandoned = 0.0  # nobody controls it any more
    assert job._wait() == (3 if failed else 137) and stuck.kills
    assert "launcher: pid 4711 killed and not gone" in capfd.readouterr().err
    job._attempt = lambda attempt: 3
    assert job.run() == 3  # and nothing is started beside it


# --- real jobs


def started(launcher: list[str], run: pathlib.Path, log: pathlib.Path, *words: object) -> subprocess.Popen:
    """The job under a launcher, with a checkpoint every two steps."""
    job = [*LONG, "--output_dir", run, "--checkpoint_freq", 2, "--resume_from_checkpoint", "latest", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("a") as file:
        return subprocess.Popen(
            [*launcher, "train_lib.py", *map(str, job)], cwd=ROOT, env=environment, stdout=file, stderr=file
        )


def workers(launcher: subprocess.Popen) -> dict[int, int]:
    """Pid by rank."""
    found = {}
    for pid in children(launcher.pid):
        words: list[bytes] = []
        with contextlib.suppress(OSError):  # it has just ended
            words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
        if ranks:
            found[ranks[0]] = pid
    return found


def wait_under(launcher: subprocess.Popen, log: pathlib.Path, reached) -> None:
    wait_until(reached, alive=lambda: launcher.poll() is None, said=log.read_text)


def recovers(launcher_words: list[str], tmp_path: pathlib.Path) -> tuple[subprocess.Popen, pathlib.Path]:
    """Kill a rank; the job resumes at the first restart."""
    run, log = tmp_path / "run", tmp_path / "log"
    launcher = started(launcher_words, run, log)
    wait_under(launcher, log, lambda: last_step(run) >= 5)
    before = workers(launcher)
    os.kill(before[1], signal.SIGKILL)
    killed_at = last_step(run)
    wait_under(launcher, log, lambda: workers(launcher).keys() == before.keys() and workers(launcher) != before)
    wait_under(launcher, log, lambda: "Resumed from" in log.read_text() and last_step(run) > killed_at + 2)
    assert "Gloo connectFullMesh failed" not in log.read_text()
    return launcher, run


def end(launcher: subprocess.Popen, run: pathlib.Path) -> int:
    """Ask the launcher to stop: its status."""
    launcher.send_signal(signal.SIGTERM)
    status = launcher.wait(HANG_SECONDS)
    assert checkpoints(run)[-1] == last_step(run)
    return status


@pytest.mark.slow
def test_torchrun_recovers_from_a_killed_rank(tmp_path):
    launcher, run = recovers([*TORCHRUN, "--standalone", "--nproc_per_node", "2", "--max_restarts", "1"], tmp_path)
    try:
        assert end(launcher, run) == 1  # whatever its workers say
    finally:
        launcher.kill()
    assert "with a checkpoint: run again with --resume_from_checkpoint latest" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_the_local_launcher_recovers_a_job(tmp_path):
    local = [sys.executable, "-m", "smp.launch.local", "--nproc_per_node", "2", "--max_restarts", "1"]
    launcher, run = recovers(local, tmp_path)
    try:
        assert end(launcher, run) == 75
    finally:
        launcher.kill()


@pytest.mark.slow
def test_torchrun_with_a_static_rendezvous_recovers(tmp_path):
    static = [
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(free_port()),
        "--nproc_per_node",
        "2",
        "--max_restarts",
        "1",
    ]
    launcher, run = recovers([*TORCHRUN, *static], tmp_path)
    try:
        end(launcher, run)
    finally:
        launcher.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "heard"), [("torchrun", True), ("local", True), ("torchrun", False), ("local", False)]
)
def test_a_killed_launcher_leaves_no_workers_and_the_next_run_goes_on(launcher, heard, tmp_path):
    """Also where nobody reads what they say: standard error is a pipe that was closed."""
    run, log = tmp_path / "run", tmp_path / "log"
    words = [*TORCHRUN, "--standalone"] if launcher == "torchrun" else [sys.executable, "-m", "smp.launch.local"]
    if not heard:
        deaf = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 2); os.execv(sys.argv[1], sys.argv[1:])"
        words = [sys.executable, "-c", deaf, *words]
    process = started([*words, "--nproc_per_node", "2"], run, log)
    wait_under(process, log, lambda: last_step(run) >= 5)
    pids = workers(process)
    process.kill()
    process.wait()
    gone = "its process has ended"
    wait_until(lambda: all(process_state(pid) == gone for pid in pids.values()), said=log.read_text)
    job = [*JOB, "--output_dir", run, "--resume_from_checkpoint", "latest", "--max_steps", last_step(run) + 2]
    run_job(*job, world_size=2).succeeded()


# --- crash loops


def test_the_third_restart_from_one_step_is_the_last(tmp_path):
    assert [is_crash_loop(tmp_path, restart, 8) for restart in (0, 1, 2, 3, 4)] == [False, False, False, True, True]
    assert not is_crash_loop(tmp_path, 5, 10)  # it got further
    assert [is_crash_loop(tmp_path, restart, 10) for restart in (6, 7)] == [False, True]
    assert not is_crash_loop(tmp_path, 0, 10) and not (tmp_path / "restarts.json").exists()
    (tmp_path / "restarts.json").write_text("[1, ")
    assert not is_crash_loop(tmp_path, 1, 10)


def test_a_crash_loop_is_ended_on_all_ranks(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "restarts.json").write_text("[0, 0]")  # by the two before

    def prepare(rank: int) -> None:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "3"

    outcome = run_job(*JOB, "--output_dir", run, "--max_steps", 2, world_size=2, prepare=prepare)
    assert outcome.statuses == [1, 1] and "Traceback" not in outcome.output, outcome.output
    assert outcome.output.count("error: this restart begins at step 0, as the 2 before it did") == 1
    run_job(*JOB, "--output_dir", run, "--max_steps", 2, world_size=2).succeeded()  # started anew by hand
    assert not (run / "restarts.json").exists()


# --- jobs that do not come together


def test_a_process_that_was_not_started_is_named(tmp_path):
    def prepare(rank: int) -> None:
        if rank == 1:
            os._exit(0)
        wait = runtime._await_everyone

        def when_two_are_there(store, *arguments) -> None:
            store.set(f"started{rank}", "1")
            wait_until(lambda: store.check(["started0", "started2"]))
            wait(store, *arguments)

        runtime._await_everyone = when_two_are_there

    words = [*JOB, "--distributed_timeout", 2, "--max_steps", 1, "--output_dir", tmp_path / "run"]
    outcome = run_job(*words, world_size=3, prepare=prepare)
    assert outcome.statuses == [2, 0, 2], outcome.output
    assert "error: rank(s) 1 of 3 have not come to 127.0.0.1:" in outcome.output and "Traceback" not in outcome.output
    assert "start as many processes as WORLD_SIZE says (3)" in outcome.output


SECONDS = datetime.timedelta(seconds=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_store_that_cannot_be_reached_is_named(host, monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(RankError, match=rf"^rank 1 does not reach the job's store at {host}:{port} within 1 s") as e:
        runtime.open_store(Launch(1, 2, 1, 2), SECONDS)
    assert "\n" not in str(e.value)


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(RankError, match=rf"rank 0 cannot serve the job's store at 127.0.0.1:{port} \(.*in use"):
            runtime.open_store(Launch(0, 2, 0, 2), SECONDS)


@pytest.mark.parametrize(("host", "port"), [(None, "29500"), ("127.0.0.1", None), ("127.0.0.1", "99999")])
def test_an_environment_without_an_address_is_refused(host, port, monkeypatch):
    for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="do not say where rank 0 is: start with torchrun, or set both"):
        runtime.open_store(Launch(0, 2, 0, 2), SECONDS)
