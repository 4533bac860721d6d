"""The script that starts a job over ssh, run by a stand-in for ssh, and the launcher that it starts on each host."""

import errno
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from smp.cli import main as smp
from smp.launch import hosts
from smp.launch.hosts import Attempt, Host
from smp.launch.local import main as launch
from tests.clock import HANG_SECONDS, wait_until
from tests.job import LLAMA, read_metrics
from tests.ports import free_port

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """The stand-in's folder; it is found first."""
    folder, own = tmp_path / "ssh", tmp_path / "bin"
    folder.mkdir()
    own.mkdir()
    shutil.copy(ROOT / "tests" / "fakes" / "ssh", own)
    monkeypatch.setenv("FAKE_SSH", str(folder))
    monkeypatch.setenv("PATH", f"{own}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return folder


@pytest.fixture
def script_of(tmp_path):
    """Makes a script of two hosts, one process each."""

    def make(*words, flags=(), hosts="127.0.0.1 slots=1\n127.0.0.2 slots=1 # the other\n"):
        (tmp_path / "hosts").write_text(hosts)
        path = tmp_path / "job.sh"
        own = ["--hosts", str(tmp_path / "hosts"), "--gpus_per_node", "0", "--port", str(free_port())]
        given = ["--workdir", str(ROOT), "--output", str(path), *words, "--", *map(str, flags)]
        assert smp(["launch", "hostfile", *own, *given]) == 0
        return path

    return make


@pytest.fixture
def trial(tmp_path):
    """Writes a script that stands in for the training script; `rank` is there, and `asked`, the signals it got."""

    def write(text):
        path = tmp_path / "trial.py"
        path.write_text(
            "import os, signal, sys, time\n"
            "rank, asked = int(os.environ['RANK']), []\n"
            "for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):\n"
            "    signal.signal(number, lambda number, frame: asked.append(signal.Signals(number).name))\n"
            "def wait(seconds):\n"
            "    end = time.monotonic() + seconds\n"
            "    while not asked and time.monotonic() < end: time.sleep(0.02)\n" + text
        )
        return path

    return write


def wait_for(path, process):
    wait_until(path.exists, alive=lambda: process.poll() is None)


@pytest.mark.slow
def test_two_hosts_train_and_are_asked_to_stop(ssh, script_of, tmp_path):
    run_dir = tmp_path / "run"
    flags = [*LLAMA, "--use_synthetic_data", "1", "--logging_freq", "1", "--output_dir", run_dir]
    script = script_of(flags=[*flags, "--max_steps", "100000"])
    job = subprocess.Popen([script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(run_dir / "metrics.jsonl", job)
        job.send_signal(signal.SIGUSR1)
        text = job.communicate(timeout=HANG_SECONDS)[0]
    finally:
        job.kill()
    assert job.returncode == 75 and "SIGUSR1: all ranks stop" in text, text
    assert "World size = 2: dp_replicate 2 x dp_shard 1" in text
    assert sorted((ssh / "hosts").read_text().split()) == ["127.0.0.1", "127.0.0.2"]
    assert len(read_metrics(run_dir)) > 0 and len(list((run_dir / "checkpoints").glob("*steps"))) == 1


@pytest.mark.slow
def test_a_failure_on_one_host_ends_the_other(ssh, script_of, trial, tmp_path):
    """The one that is left is told by the end of its standard input; it does not go by itself."""
    path = trial(
        f"up, said = {str(tmp_path / 'up')!r}, {str(tmp_path / 'asked')!r}\n"
        "if rank == 0: open(up, 'w')\n"
        "while rank == 1 and not os.path.exists(up): time.sleep(0.02)\n"
        "if rank == 1: sys.exit(7)\n"
        "wait(3600)\nopen(said, 'w').write(str(asked))"
    )
    script = script_of("--script", str(path))
    done = subprocess.run(
        [script], env=os.environ | {"SMP_GRACE_SECONDS": "1"}, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 7, done.stderr
    assert "127.0.0.2 has ended with status 7" in done.stderr and "ending the other hosts" in done.stderr
    # Its processes outlive ssh for as long as their last words take.
    wait_until(lambda: (tmp_path / "asked").exists() and (tmp_path / "asked").read_text())
    assert (tmp_path / "asked").read_text() == "['SIGTERM']"


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_ends_the_job(ssh, script_of, trial):
    (ssh / "refuse-127.0.0.2").touch()
    script = script_of("--script", str(trial("wait(3600)")))
    done = subprocess.run(
        [script], env=os.environ | {"SMP_GRACE_SECONDS": "1"}, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 255 and "Connection refused" in done.stderr


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("USR1", signal.SIGUSR1),
        pytest.param("TERM", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("INT", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_signals_are_handed_on_to_the_processes_of_all_hosts(ssh, script_of, trial, tmp_path, name, number):
    path = trial(
        f"open({str(tmp_path)!r} + f'/up{{rank}}', 'w'); wait(3600)\nsys.exit(75 if asked == ['SIG{name}'] else 1)"
    )
    job = subprocess.Popen([script_of("--script", str(path))])
    try:
        for rank in (0, 1):
            wait_for(tmp_path / f"up{rank}", job)
        job.send_signal(number)
        assert job.wait(timeout=HANG_SECONDS) == 75
    finally:
        job.kill()


@pytest.mark.slow
def test_words_reach_the_other_host_as_they_are(ssh, script_of, trial, tmp_path):
    path = trial(f"open({str(tmp_path)!r} + f'/words{{rank}}', 'w').write(repr(sys.argv[1:]))")
    odd = ["--name", "a  'b' \"$HOME\" `ls` \\ $(id) !x", "--list", "*", "", "é"]
    script = script_of("--script", str(path), flags=odd)
    assert subprocess.run([script], timeout=HANG_SECONDS).returncode == 0
    for rank in (0, 1):
        assert (tmp_path / f"words{rank}").read_text() == repr([*odd, "--resume_from_checkpoint", "latest"])


@pytest.mark.slow
def test_signals_reach_containers_and_the_end_of_the_script_ends_them(ssh, script_of, trial, tmp_path, monkeypatch):
    """A container has standard input only if docker is told to give it one."""
    monkeypatch.setenv("FAKE_DOCKER", str(tmp_path / "docker"))
    (tmp_path / "docker").mkdir()
    shutil.copy(ROOT / "tests" / "fakes" / "docker", tmp_path / "bin")
    path = trial(
        f"out = {str(tmp_path)!r} + f'/{{{{}}}}{{rank}}'\nopen(out.format('up'), 'w'); wait(3600)\n"
        "open(out.format('said'), 'w').write(str(asked))\nsys.exit(75)"
    )
    job = subprocess.Popen([script_of("--script", str(path), "--container", "docker", "--image", "smp:1")])
    try:
        for rank in (0, 1):
            wait_for(tmp_path / f"up{rank}", job)
        time.sleep(0.5)  # for an end of standard input to be seen, if there is one
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=HANG_SECONDS) == 75
    finally:
        job.kill()
    assert [(tmp_path / f"said{rank}").read_text() for rank in (0, 1)] == ["['SIGUSR1']"] * 2
    assert [path.name for path in (tmp_path / "docker").iterdir()] == ["log"]


def test_a_host_that_starts_again_does_not_join_the_attempt_that_it_left():
    """It waits for the next one, which ends only when it says so there."""
    port, left = free_port(), []
    first, one, again, unasked = (Attempt(Host(n, 2, "127.0.0.1", port), lambda: False) for n in (0, 1, 1, 1))
    assert first.join() == port == one.join()
    del one  # it was killed

    def rejoin():
        left.append(again.join())

    waiting = threading.Thread(target=rejoin)
    waiting.start()
    assert "another launcher with --node_rank 1 is part of the job" in unasked._register()
    assert left == []
    first.close()
    second = Attempt(Host(0, 2, "127.0.0.1", port), lambda: False)
    assert second.join() == port
    waiting.join(timeout=HANG_SECONDS)
    assert left == [port]

    waits, store = threading.Event(), second._store

    class Noting:
        def __getattr__(self, name):
            if name == "wait":
                waits.set()
            return getattr(store, name)

    def end():
        second._store = Noting()
        second.leave(0, in_order=True)
        left.append("second")

    ending = threading.Thread(target=end)
    ending.start()
    assert waits.wait(HANG_SECONDS) and left == [port]
    again.leave(0, in_order=True)
    ending.join(timeout=HANG_SECONDS)
    assert left == [port, "second"]


@pytest.mark.parametrize(
    ("own", "others", "status"), [(0, [0, 7], 7), (3, [7, 0], 3), (0, [75, 1], 75), (0, [0, 0], 0)]
)
def test_host_0_returns_a_failure_of_the_others(own, others, status):
    """The job has not ended well where it did so on host 0 alone."""
    port = free_port()
    attempts = [Attempt(Host(number, 3, "127.0.0.1", port), lambda: False) for number in range(3)]
    assert [attempt.join() for attempt in attempts] == [port] * 3
    assert [each.leave(other, in_order=True) for each, other in zip(attempts[1:], others, strict=True)] == others
    assert attempts[0].leave(own, in_order=True) == status


def test_host_0_that_waits_in_vain_keeps_its_status(monkeypatch):
    monkeypatch.setattr(hosts, "ENDING_SECONDS", 0.1)
    first = Attempt(Host(0, 2, "127.0.0.1", free_port()), lambda: False)
    first.join()
    assert first.leave(0, in_order=True) == 0


def test_a_launcher_that_waits_for_host_0_can_be_stopped():
    asked = [False, False, True]
    attempt = Attempt(Host(1, 2, "127.0.0.1", free_port()), lambda: asked.pop(0))
    assert attempt.join() is None and asked == []


@pytest.mark.slow
def test_launchers_of_several_hosts_are_one_job(trial, tmp_path):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    path = trial(
        f"names = {names}\nimport torch.distributed as dist\n"
        "store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)\n"
        "store.set(str(rank), ' '.join(os.environ[n] for n in names))\n"
        "store.set(f'pid{rank}', str(os.getpid()))\n"
        "if rank != 2: sys.exit()\n"
        "pids = [int(store.get(f'pid{other}')) for other in (0, 1)]\n"
        "while any(os.path.exists(f'/proc/{pid}') for pid in pids): wait(0.05)\n"
        "wait(1)\n"  # in which their launcher would end, if it did not wait
        "said = [store.get(str(r)).decode() for r in range(4)]\n"
        f"open({str(tmp_path)!r} + '/all', 'w').write('; '.join(said))\n"
    )
    command = [sys.executable, "-m", "smp.launch.local", "--nproc_per_node", "2", "--nnodes", "2"]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    hosts = [subprocess.Popen([*command, "--node_rank", str(number), str(path)], cwd=ROOT) for number in (0, 1)]
    try:
        # Host 0, whose processes end first, serves the store until those of host 1 have ended.
        assert [host.wait(timeout=HANG_SECONDS) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
    assert (tmp_path / "all").read_text() == "0 4 0 2 0 2; 1 4 1 2 0 2; 2 4 0 2 1 2; 3 4 1 2 1 2"


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_host_that_is_killed_and_starts_again_at_once_resumes(lost, tmp_path):
    """As under Kubernetes: each host's launcher is started again whenever it fails, whatever the other one does."""
    run_dir, stopped = tmp_path / "run", []
    flags = [*LLAMA, "--use_synthetic_data", "1", "--logging_freq", "1", "--max_steps", "60", "--checkpoint_freq", "5"]
    command = [sys.executable, "-m", "smp.launch.local", "--nproc_per_node", "2", "--nnodes", "2"]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    job = ["train_lib.py", *map(str, flags), "--output_dir", str(run_dir), "--resume_from_checkpoint", "latest"]

    def start(number):
        environment = os.environ | {"SMP_HOST_ID": f"host{number}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with open(tmp_path / f"said{number}", "a") as said:
            return subprocess.Popen(
                [*command, "--node_rank", str(number), *job], cwd=ROOT, env=environment, stdout=said,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def keep_running(number):
        while (status := hosts[number].wait()) not in (0, 2) and not stopped:
            statuses[number].append(status)
            hosts[number] = start(number)
        statuses[number].append(status)

    statuses = [[], []]
    hosts = [start(number) for number in (0, 1)]
    keepers = [threading.Thread(target=keep_running, args=(number,)) for number in (0, 1)]
    try:
        for keeper in keepers:
            keeper.start()
        wait_for(run_dir / "checkpoints" / "latest", hosts[lost])
        os.killpg(hosts[lost].pid, signal.SIGKILL)
        for keeper in keepers:
            keeper.join(timeout=HANG_SECONDS)
    finally:
        stopped.append(True)
        for host in hosts:
            host.kill()
    texts = [(tmp_path / f"said{number}").read_text() for number in (0, 1)]
    assert statuses[lost] == [-signal.SIGKILL, 0], texts
    assert statuses[1 - lost] == [1, 0], texts  # one failure: the new launcher did not join the attempt that was dying
    assert "Resumed from" in texts[0] and read_metrics(run_dir)[-1]["step"] == 60


def test_a_port_that_is_taken_is_said(capsys):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["--nnodes", "2", "--node_rank", "0", "--master_addr", "127.0.0.1", "--master_port", str(port), "x.py"]
        with pytest.raises(SystemExit) as caught:
            launch(words)
    assert caught.value.code == 2 and f"port {port} of this host cannot be used" in capsys.readouterr().err


def test_a_host_without_loopback_is_said(capsys, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(SystemExit) as caught:
        launch(["--nproc_per_node", "2", "x.py"])
    assert caught.value.code == 2
    assert "cannot reach 127.0.0.1 (Network is unreachable): bring its loopback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nnodes", "2"], "needs --master_addr and --master_port"),
        (["--nnodes", "2", "--node_rank", "2", "--master_addr", "a", "--master_port", "1"], "must be below --nnodes 2"),
        (["--nnodes", "2", "--master_addr", "a", "--master_port", "1", "--max_restarts", "1"], "for jobs on one host"),
        (["--node_rank", "-1"], "--node_rank must be at least 0"),
        (["--nproc_per_node", "0"], "--nproc_per_node must be at least 1"),
    ],
)
def test_the_launchers_words(words, text, capsys):
    with pytest.raises(SystemExit) as caught:
        launch([*words, "x.py"])
    assert caught.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("", "names no host"),
        ("a slots=2\na slots=2", ":2: a is there twice"),
        ("a slots=2\nme@a slots=2", ":2: a is there twice"),
        ("localhost slots=2\nb slots=2", "localhost is another host for each of the 2 hosts: give the name by which"),
        ("a\nme@localhost", "me@localhost is another host for each"),
        ("a slots=2\nb slots=4", "hosts differ in slots (2, 4)"),
        ("a slots=2\nb", "hosts differ in slots (none, 2)"),
        ("a; rm -rf x", "is no host"),
        ("-oProxyCommand=x slots=1", "is no host"),
        ("a slots=0", "is no host"),
    ],
)
@pytest.mark.smoke
def test_what_is_no_file_of_hosts(hosts, text, tmp_path, capsys):
    (tmp_path / "hosts").write_text(hosts)
    assert smp(["launch", "hostfile", "--hosts", str(tmp_path / "hosts"), "--gpus_per_node", "0"]) == 2
    assert text in capsys.readouterr().err
