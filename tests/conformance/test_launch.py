"""The local launcher and hangups; its exit status and restarts: see ``tests/faults/test_restart.py``."""

import pathlib
import re
import signal
import subprocess
import sys

import pytest

from tests.clock import HANG_SECONDS, wait_until

WAITS = """
import os, pathlib, signal, sys, time
def put(name, text):  # whole, as it is waited for
    path = pathlib.Path(__file__).with_name(name)
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)
def end(number, frame):
    put("asked", signal.Signals(number).name)
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
put("up", os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
time.sleep(3600)
"""


@pytest.mark.parametrize("hidden", [True, False])
def test_a_hangup_asks_the_processes_to_stop(hidden, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(WAITS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = ["--nproc_per_node", "1", *(["--no_gpus"] if hidden else []), str(tmp_path / "script.py")]
    command = [sys.executable, "-m", "smp.launch.local", *words]
    deaf = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would not hear of hangups
    launcher = subprocess.Popen(command)
    signal.signal(signal.SIGHUP, deaf)
    wait_for(tmp_path / "up")
    launcher.send_signal(signal.SIGHUP)
    assert launcher.wait(timeout=HANG_SECONDS) == 75
    assert (tmp_path / "asked").read_text() == "SIGTERM"
    assert (tmp_path / "up").read_text() == ("" if hidden else "0")


@pytest.mark.slow
def test_a_launcher_under_nohup_does_not_hear_of_hangups(tmp_path):
    (tmp_path / "script.py").write_text(WAITS)
    command = ["nohup", sys.executable, "-m", "smp.launch.local", "--nproc_per_node", "1", str(tmp_path / "script.py")]
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "up")
    status = pathlib.Path(f"/proc/{launcher.pid}/status").read_text()
    ignored = int(re.search(r"^SigIgn:\s*(\w+)", status, re.MULTILINE)[1], 16)
    assert ignored >> (signal.SIGHUP - 1) & 1  # then it is gone when it is sent
    launcher.send_signal(signal.SIGHUP)
    assert launcher.poll() is None and not (tmp_path / "asked").exists()
    launcher.terminate()
    assert launcher.wait(timeout=HANG_SECONDS) == 75


def wait_for(path):
    wait_until(path.exists)
