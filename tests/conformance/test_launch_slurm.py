"""The script for sbatch, run by stand-ins for Slurm's commands: two nodes, preempted, requeued, resumed to the end."""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pytest

from smp.cli import main as smp
from smp.launch import slurm as slurm_script
from smp.runtime import START_SECONDS
from tests.clock import HANG_SECONDS, wait_until
from tests.job import LLAMA, losses, read_metrics, run_job

ROOT = pathlib.Path(__file__).parents[2]
FAKES = ROOT / "tests" / "fakes"
STEPS = 300
TRAIN = [*LLAMA, "--use_synthetic_data", "1", "--checkpoint_freq", "1000", "--logging_freq", "1", "--seed", "3"]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The stand-ins' folder; they are found first."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(FAKES), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # which the nodes share here
    monkeypatch.setenv("SMP_MASTER_PORT", str(20_000 + os.getpid() % 9_000))
    return folder


def written(tmp_path, *words, flags=()):
    """The path of a script of two CPU nodes."""
    path = tmp_path / "job.sh"
    own = ["--nodes", "2", "--gpus_per_node", "0", "--processes_per_node", "1", "--workdir", str(ROOT)]
    assert smp(["launch", "slurm", *own, "--output", str(path), *words, "--", *TRAIN, *map(str, flags)]) == 0
    return path


def submit(script):
    return subprocess.Popen(["sbatch", str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(reached, job, folder):
    wait_until(reached, alive=lambda: job.poll() is None, said=lambda: said(folder))


def said(folder):
    out = folder / "out"
    return out.read_text() if out.exists() else ""


def lines(run_dir):
    return len(read_metrics(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


@pytest.mark.slow
def test_preempted_requeued_and_resumed_to_the_end(slurm, tmp_path):
    run_dir, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    script = written(tmp_path, "--signal_seconds", "60", flags=["--max_steps", STEPS, "--output_dir", run_dir])
    job = submit(script)
    wait_for(lambda: lines(run_dir) > 5, job, slurm)
    os.kill(int((slurm / "pid").read_text()), signal.SIGUSR1)
    assert job.wait(timeout=HANG_SECONDS) == 0, said(slurm)
    text = said(slurm)
    assert "smp: the step has ended with status 75" in text and "smp: the step has ended with status 0" in text, text
    assert "smp: back into the queue, 1 of at most 20 times" in text
    assert "Resumed from" in text and "dp_replicate 2 x dp_shard 1" in text  # two hosts of one process
    assert "'--kill-on-bad-exit'" not in text and "{'nodes': '2', 'ntasks': '2'" in (slurm / "srun.log").read_text()
    run_job(
        *TRAIN, "--max_steps", STEPS, "--output_dir", undisturbed, "--hybrid_shard_degree", 1, world_size=2
    ).succeeded()
    assert losses(run_dir) == losses(undisturbed) and len(losses(run_dir)) == STEPS


@pytest.fixture
def stub(slurm, tmp_path, monkeypatch):
    """A program in the place of python3: it notes its words, and ends with the status due to this start.

    It runs what STUB says, with the number of the start as its argument.
    """
    path = tmp_path / "bin" / "python3"
    path.parent.mkdir()
    path.write_text(
        f'#!/bin/bash\n[ "$1" = -u ] || exec {shlex.quote(sys.executable)} "$@"\n'
        '(IFS="|"; echo "$*" >>"$FAKE_SLURM/words$SLURM_NODEID")\neval "$STUB"\n'
        'statuses=($STATUSES)\nexit "${statuses[${SLURM_RESTART_COUNT:-0}]}"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    def start(script, statuses, does=""):
        """The exit status of sbatch, and the words of each start on node 1."""
        for file in slurm.iterdir():
            file.unlink()
        environment = os.environ | {"STATUSES": statuses, "STUB": does}
        done = subprocess.run(["sbatch", str(script)], env=environment, timeout=HANG_SECONDS)
        return done.returncode, [line.split("|") for line in (slurm / "words1").read_text().splitlines()]

    return start


QUEUED = {
    "75 75 0": (0, 3), "2": (2, 1), "1 0": (0, 2), "1 1 75 1 0": (1, 4), "1 1 1 0": (1, 3), "75 75 75 75 0": (75, 4),
    "130": (130, 1), "127": (127, 1), "137 0": (0, 2),
}  # fmt: skip


def test_what_is_put_back_into_the_queue_and_what_is_not(slurm, stub, tmp_path):
    options = ["--script", "a b.py", "--max_requeues", "3", "--max_failures", "2"]
    script = written(tmp_path, *options, flags=["--name", "a 'b' \"$HOME\" `ls`", "--list", "*", ""])
    for statuses, (status, starts) in QUEUED.items():
        found, words = stub(script, statuses)
        assert (found, len(words)) == (status, starts), (statuses, said(slurm))
        assert list(slurm.glob("*.failures")) == []
        launcher = "-u -m smp.launch.local --nnodes 2 --node_rank 1 --master_addr 127.0.0.1 --master_port".split()
        assert words[-1][: len(launcher)] == launcher and words[-1][11:14] == ["--nproc_per_node", "1", "--no_gpus"]
        last = ["--name", "a 'b' \"$HOME\" `ls`", "--list", "*", "", "--resume_from_checkpoint", "latest"]
        assert words[-1][14:] == ["a b.py", *TRAIN, *last]


def test_a_job_that_slurm_is_ending_is_not_put_back(slurm, stub, tmp_path):
    script = written(tmp_path, "--script", "x.py")
    status, words = stub(script, "75 0", 'echo -n COMPLETING >"$FAKE_SLURM/state"')
    assert (status, len(words)) == (75, 1) and "not put back into the queue: Slurm is ending the job" in said(slurm)


def test_a_signal_before_training_began_is_a_request_like_others(slurm, stub, tmp_path):
    script = written(tmp_path, "--script", "x.py")
    wait = 'until [ -e "$FAKE_SLURM/words1" ]; do sleep 0.02; done'
    does = f'{wait}; [ "$SLURM_NODEID" != 0 ] || kill -USR1 $(cat "$FAKE_SLURM/pid"); exec sleep 60'
    does = f'[ -n "$SLURM_RESTART_COUNT" ] || {{ {does}; }}'
    status, words = stub(script, "1 0", does)
    assert (status, len(words)) == (0, 2) and "status 138" in said(slurm)


def test_the_last_checkpoint_is_waited_for(slurm, stub, tmp_path):
    script = written(tmp_path, "--script", "x.py")
    saves = """trap 'sleep 1; touch "$FAKE_SLURM/saved$SLURM_NODEID"; exit 75' USR1"""
    ready = 'touch "$FAKE_SLURM/ready$SLURM_NODEID"'  # to be asked: without its trap a node would be killed
    wait = f'{ready}; until [ -e "$FAKE_SLURM/ready0" ] && [ -e "$FAKE_SLURM/ready1" ]; do sleep 0.02; done'
    ask = '[ "$SLURM_NODEID" != 0 ] || kill -USR1 $(cat "$FAKE_SLURM/pid")'
    does = f'[ -n "$SLURM_RESTART_COUNT" ] || {{ {saves}; {wait}; {ask}; while :; do sleep 0.1; done; }}'
    done = '[ -z "$SLURM_RESTART_COUNT" ] || ls "$FAKE_SLURM"/saved0 "$FAKE_SLURM"/saved1 || exit 2'
    status, words = stub(script, "1 0", f"{done}\n{does}")
    assert (status, len(words)) == (0, 2) and "status 75" in said(slurm), said(slurm)


def test_a_named_checkpoint_is_where_only_the_first_start_begins(slurm, stub, tmp_path):
    script = written(tmp_path, "--script", "x.py", flags=["--resume_from_checkpoint", "x"])
    status, words = stub(script, "75 0")
    assert status == 0 and [line[len(TRAIN) + 15 :] for line in words] == [
        ["--resume_from_checkpoint", "x"],
        ["--resume_from_checkpoint", "x", "--resume_from_checkpoint", "latest"],
    ]


def test_bad_input_of_one_node_is_not_the_crash_of_those_that_waited_for_it(slurm, stub, tmp_path, monkeypatch):
    """These give up by themselves, before srun kills them."""
    assert int(re.search(r"--wait=(\d+)", written(tmp_path, "--script", "x.py").read_text())[1]) >= START_SECONDS + 60
    (tmp_path / "job.sh").unlink()
    monkeypatch.setattr(slurm_script, "START_SECONDS", 1.0)
    monkeypatch.setattr(slurm_script, "_BEYOND_SECONDS", 3.0)
    script = written(tmp_path, "--script", "x.py")
    status, words = stub(script, "0 0", '[ "$SLURM_NODEID" = 0 ] || exit 2; sleep 1.5; exit 1')
    assert (status, len(words)) == (2, 1) and "it would end so again" in said(slurm), said(slurm)
    script.write_text(script.read_text().replace("--wait=4", "--wait=1"))
    assert stub(script, "0 0", '[ "$SLURM_NODEID" = 0 ] || exit 2; sleep 3')[0] != 2  # as it was


@pytest.mark.smoke
def test_never_back_into_the_queue(slurm, stub, tmp_path):
    script = written(tmp_path, "--script", "x.py", "--max_requeues", "0")
    assert "#SBATCH --no-requeue" in script.read_text()
    status, words = stub(script, "75 0")
    assert (status, len(words)) == (75, 1)


def test_sigterm_asks_for_a_checkpoint_and_kills_nothing(slurm, stub, tmp_path):
    """srun ends its tasks when SIGTERM comes to itself."""
    script = written(tmp_path, "--script", "x.py")
    saves = """trap 'touch "$FAKE_SLURM/saved$SLURM_NODEID"; exit 75' USR1"""
    wait = 'until [ -e "$FAKE_SLURM/words0" ] && [ -e "$FAKE_SLURM/words1" ]; do sleep 0.02; done'
    ask = '[ "$SLURM_NODEID" != 0 ] || kill -TERM $(cat "$FAKE_SLURM/pid")'
    does = f'[ -n "$SLURM_RESTART_COUNT" ] || {{ {saves}; {wait}; {ask}; while :; do sleep 0.1; done; }}'
    status, words = stub(script, "1 0", does)
    assert (status, len(words)) == (0, 2) and "status 75" in said(slurm), said(slurm)
    assert "forcing job termination" not in said(slurm)


def test_a_controller_that_does_not_answer_costs_no_requeue(slurm, stub, tmp_path):
    script = written(tmp_path, "--script", "x.py")
    fails = '[ "$SLURM_NODEID" != 0 ] || printf %s {} >"$FAKE_SLURM/no-controller"'
    script.write_text(script.read_text().replace("for pause in 1 2 4", "for pause in 0.1 0.1 0.1"))
    for failures, (status, starts) in {"xx": (0, 2), "xxxxxx": (0, 2), "xxxxxxxxx": (75, 1)}.items():
        found, words = stub(script, "75 0", fails.format(failures))
        assert (found, len(words)) == (status, starts), said(slurm)
        assert "Slurm is ending the job" not in said(slurm)
        assert ("scontrol requeue failed" in said(slurm)) == (status == 75)
        assert ("does not say the job's state" in said(slurm)) == (len(failures) > 3)


def test_what_slurm_itself_put_back_too_often_does_not_start(slurm, stub, tmp_path, monkeypatch):
    script = written(tmp_path, "--script", "x.py", "--max_requeues", "2")
    slurm_puts_back = 'echo -n PENDING >"$FAKE_SLURM/state"'
    status, words = stub(script, "0 0 0 0 0", slurm_puts_back)
    assert (status, len(words)) == (75, 3) and "in the queue 3 times before (--max_requeues 2)" in said(slurm)


def test_the_submitting_shells_address_is_not_the_jobs(slurm, stub, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("MASTER_PORT", "1")
    script = written(tmp_path, "--script", "x.py")
    place = "--master_addr", "--master_port"
    _, [words] = stub(script, "0")
    assert [words[words.index(name) + 1] for name in place] == ["127.0.0.1", os.environ["SMP_MASTER_PORT"]]
    monkeypatch.setenv("SMP_MASTER_ADDR", "127.0.0.9")
    monkeypatch.delenv("SMP_MASTER_PORT")
    _, [words] = stub(script, "0")
    assert [words[words.index(name) + 1] for name in place] == ["127.0.0.9", "10077"]


@pytest.mark.parametrize("status", [138, 143])
def test_a_process_that_a_request_found_too_early_did_not_fail(slurm, stub, tmp_path, status):
    script = written(tmp_path, "--script", "x.py", "--max_failures", "0")
    wait = 'until [ -e "$FAKE_SLURM/words1" ]; do sleep 0.02; done'
    ask = f"{wait}; [ $SLURM_NODEID != 0 ] || kill -USR1 $(cat $FAKE_SLURM/pid)"
    does = f"[ -n \"$SLURM_RESTART_COUNT\" ] || {{ trap 'exit {status}' USR1; {ask}; while :; do sleep 0.1; done; }}"
    found, words = stub(script, f"{status} 0", does)
    assert (found, len(words)) == (0, 2), said(slurm)
    assert stub(script, f"{status} 0")[0] == status  # unasked, it is a failure


@pytest.fixture
def docker(slurm, tmp_path, monkeypatch):
    """The folder of docker's stand-in."""
    folder = tmp_path / "docker"
    folder.mkdir()
    monkeypatch.setenv("FAKE_DOCKER", str(folder))
    return folder


def container(tmp_path, text):
    """A script of two nodes, whose containers run a program in the place of the launcher."""
    words = ["--container", "docker", "--image", "smp:1", "--script", "x.py", "--max_requeues", "0"]
    script = written(tmp_path, *words)
    trial = tmp_path / "trial.py"
    trial.write_text(f"import os, pathlib, signal, sys, time\nout = pathlib.Path({str(tmp_path)!r})\n{text}")
    launcher = f"{shlex.quote(sys.executable)} -u {trial}"
    script.write_text(script.read_text().replace("python3 -u -m smp.launch.local", launcher))
    return script


def test_a_container_has_what_is_exported(docker, slurm, tmp_path, monkeypatch):
    for name, value in {
        "WANDB_API_KEY": "k e\ny",
        "https_proxy": "p",
        "VIRTUAL_ENV": "x",
        "FI_PROVIDER": "efa",
    }.items():
        monkeypatch.setenv(name, value)
    names = "WANDB_API_KEY https_proxy VIRTUAL_ENV FI_PROVIDER MASTER_ADDR SLURM_JOB_ID HOME".split()
    text = f"(out / os.environ['SLURM_NODEID']).write_text(repr([os.environ.get(name) for name in {names}]))"
    job = submit(container(tmp_path, text))
    assert job.wait(timeout=HANG_SECONDS) == 0, said(slurm)
    expected = ["k e\ny", "p", None, "efa", "127.0.0.1", "77", "/"]
    assert [(tmp_path / node).read_text() for node in "01"] == [repr(expected)] * 2
    assert "k e" not in (docker / "log").read_text()  # which `ps` shows


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


CONTAINER = """
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(out / ('up' + os.environ['SLURM_NODEID'])).write_text(str(os.getpid()))
time.sleep(3600)
"""


@pytest.mark.parametrize("how", ["asked", "killed"])
def test_no_container_outlives_its_job(docker, slurm, tmp_path, how):
    job = submit(container(tmp_path, CONTAINER))
    up = [tmp_path / "up0", tmp_path / "up1"]
    wait_for(lambda: all(path.exists() and path.read_text() for path in up), job, slurm)
    if how == "asked":
        os.kill(int((slurm / "pid").read_text()), signal.SIGUSR1)
    else:  # srun kills the tasks, which cannot do anything then
        batch = (slurm / "pid").read_text()
        [step] = subprocess.check_output(["pgrep", "-P", batch, "-f", "srun"], text=True).split()
        os.kill(int(step), signal.SIGTERM)
    assert job.wait(timeout=HANG_SECONDS) == (75 if how == "asked" else 137), said(slurm)
    wait_until(lambda: not any(is_running(path.read_text()) for path in up))
    assert [path.name for path in docker.iterdir()] == ["log"]


@pytest.mark.slow
def test_srun_starts_the_training_script_itself(slurm, tmp_path):
    command = [
        "srun",
        "--nodes=2",
        "--ntasks=2",
        sys.executable,
        str(ROOT / "train_lib.py"),
        *TRAIN,
        "--max_steps",
        "3",
    ]
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path / "run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "World size = 2: dp_replicate 2 x dp_shard 1" in done.stdout + done.stderr
    assert lines(tmp_path / "run") == 3
