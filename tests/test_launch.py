"""The local launcher: torchrun's engine, the job's own exit status and nothing else on the screen."""

import subprocess
import sys

import pytest

SCRIPT = """
import pathlib, sys, time
from os import environ
rank, world, threads = environ["RANK"], environ["WORLD_SIZE"], environ["OMP_NUM_THREADS"]
sys.stdout.write(f"rank {rank} of {world} threads {threads} {sys.argv[1:]}\\n")  # whole, as the ranks share a pipe
printed = pathlib.Path(__file__).with_name("printed")
if rank == "0":
    printed.touch()
while not printed.exists():  # a rank that fails ends the others
    time.sleep(0.01)
sys.exit(int(sys.argv[-1]) if rank == "1" else 0)
"""


@pytest.mark.parametrize("status", [0, 2, 75])
def test_the_jobs_status_is_the_launchers(status, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "smp.launch.local", "--nproc_per_node", "2", str(tmp_path / "script.py"), "--x"]
    done = subprocess.run([*command, str(status)], capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert sorted(line.split(" threads")[0] for line in done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    assert f"['--x', '{status}']" in done.stdout
    assert "Traceback" not in done.stderr and "FAILED" not in done.stderr


def test_no_processes_is_refused():
    command = [sys.executable, "-m", "smp.launch.local", "--nproc_per_node", "0", "x.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "at least 1" in done.stderr
