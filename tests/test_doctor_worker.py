"""The doctor's own processes: one that does not die when it is killed is left behind."""

from __future__ import annotations

import os
import signal
import time

from smp.doctor import worker
from smp.doctor.local import examine_here
from smp.doctor.room import Check, Request
from tests.clock import HANG_SECONDS


def hang(room):
    time.sleep(3600)


def test_a_process_that_cannot_be_killed_is_told_and_left(monkeypatch):
    """A call to a dead disk or a broken driver ends only when these answer."""
    killed, real = [], os.waitpid

    def kill(pid, number):
        assert number == signal.SIGKILL
        killed.append(pid)

    def wait(pid, options):
        assert options == os.WNOHANG
        return 0, 0

    monkeypatch.setattr(worker.os, "kill", kill)
    monkeypatch.setattr(worker.os, "waitpid", wait)
    monkeypatch.setattr(worker, "_GRACE_SECONDS", 0.1)
    checks = [Check("disk", hang, share=0.1 / HANG_SECONDS), Check("after", lambda room: room.ok("went on"))]
    try:
        diagnosis = examine_here(Request(timeout=HANG_SECONDS), 1, checks)
    finally:
        monkeypatch.undo()
        for pid in set(killed):
            os.kill(pid, signal.SIGKILL)
            real(pid, 0)
    said = {finding.check: (finding.status, finding.message) for finding in diagnosis.findings}
    assert said["disk"][0] == "problem" and "did not end within" in said["disk"][1], said
    assert said["after"] == ("ok", "went on")
