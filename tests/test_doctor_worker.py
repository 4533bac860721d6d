"""The doctor's own processes: one that does not die when it is killed is left behind."""

from __future__ import annotations

import os
import signal
import time

from smp.doctor import worker
from smp.doctor.local import examine_here
from smp.doctor.room import Check, Request


def hang(room):
    time.sleep(600)


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
    checks = [Check("disk", hang), Check("after", lambda room: room.ok("went on"))]
    try:
        diagnosis = examine_here(Request(timeout=0.5), 1, checks)
    finally:
        monkeypatch.undo()
        for pid in set(killed):
            os.kill(pid, signal.SIGKILL)
            real(pid, 0)
    said = {finding.check: (finding.status, finding.message) for finding in diagnosis.findings}
    assert said["disk"][0] == "problem" and "did not end within" in said["disk"][1], said
    assert said["after"] == ("ok", "went on")
