"""A launcher that is killed while its processes start; one that is killed in training: see ``test_restart.py``."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.faults.jobs import JOB

ROOT = pathlib.Path(__file__).parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
LOCAL = [sys.executable, "-m", "smp.launch.local", "--nproc_per_node", "2"]

# Says when it is there, and waits for a byte of standard input.
SCRIPT = """
import os, signal, sys, threading, time
import smp
import smp.train.__main__ as train_lib

def wait():
    os.write(1, b"there\\n")
    os.read(0, 1)

def planning(*args):
    os.write(1, repr(sorted(thread.name for thread in threading.enumerate())).encode() + b"\\n")
    wait()
    return check_job(*args)

what, *words = sys.argv[1:]
check_job, train_lib.check_job = train_lib.check_job, planning if what == "planning" else train_lib.check_job
if what.endswith("later"):
    wait()
if what.startswith("library"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    smp.init_process_group("gloo")
    wait()
else:
    status = train_lib.main(words)
    os.write(1, f"status {status}\\n".encode())
    os._exit(status)
"""


def start(launcher: list[str], what: str, folder: pathlib.Path) -> subprocess.Popen[bytes]:
    (folder / "script.py").write_text(SCRIPT)
    words = [*launcher, str(folder / "script.py"), what, *map(str, JOB)]
    words += ["--max_steps", "1", "--output_dir", str(folder / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, bufsize=0)


def wait_for(process: subprocess.Popen[bytes], count: int) -> None:
    """Wait until so many processes have said that they are there."""
    assert process.stdout is not None
    while count:
        line = process.stdout.readline()
        assert line, "they have ended"
        count -= line == b"there\n"


def end(process: subprocess.Popen[bytes], say: bytes = b"") -> str:
    """Say to processes that they may go on, and return what they print until none of them holds the pipe any more."""
    stdin, process.stdin = process.stdin, None  # left open: its end would let them go on
    assert stdin is not None
    with stdin:
        stdin.write(say)
        return process.communicate(timeout=120)[0].decode()  # the start waits for 300 s


@pytest.mark.parametrize(
    ("launcher", "what"), [(TORCHRUN, "planning"), (TORCHRUN, "training, later"), (LOCAL, "library")]
)
def test_processes_end_with_a_launcher_that_is_killed_while_they_start(launcher, what, tmp_path):
    """Where it is killed ``later``, that is before they could watch it."""
    process = start(launcher, what, tmp_path)
    wait_for(process, 2)
    process.kill()
    process.wait()
    out = end(process, b".." if what.endswith("later") else b"")
    assert "is gone: ended" in out and "Traceback" not in out, out


def test_a_process_without_a_launcher_outlives_the_shell_that_started_it(tmp_path):
    process = start(["sh", "-c", 'exec 3<&0; "$@" <&3 &', "sh", sys.executable], "planning", tmp_path)
    process.wait(60)  # the shell
    out = end(process, b".")
    assert out.startswith("['MainThread']\n") and out.endswith("status 0\n"), out
