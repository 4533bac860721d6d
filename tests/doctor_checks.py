"""Checks that die, hang or fail, for the tests of ``smp doctor``: its child processes find them here by name."""

from __future__ import annotations

import os
import pathlib
import signal
import time

import torch.distributed as dist

from smp.doctor.check import Check, CheckContext
from smp.doctor.checks import CHECKS
from tests.clock import wait_until

OF_THE_JOB = {check.name: check for check in CHECKS if check.scope == "job"}
JOB = tuple(OF_THE_JOB[name] for name in ("start", "run directory", "end"))


def fine(ctx: CheckContext) -> None:
    ctx.ok(f"rank {ctx.launch.rank} was here")
    ctx.measure("here", True)


def kill(ctx: CheckContext) -> None:
    if ctx.launch.rank == 1:
        ctx.warn("about to die")
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.ok("lives")


def end_job(ctx: CheckContext) -> None:
    """End rank 1, and tell rank 0 to end, as its launcher then does."""
    last = pathlib.Path(os.environ["SMP_TEST_FOLDER"], "last")
    if ctx.launch.rank == 1:
        last.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(last.exists)  # rank 0 serves the store
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3600)


def die_before_start(ctx: CheckContext) -> None:
    if ctx.launch.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    OF_THE_JOB["start"].function(ctx)


GOOD = (Check("good", fine), *JOB)
KILL = (Check("bad", kill), *GOOD)
LOST = (JOB[0], Check("bad", kill, "job"), Check("more", lambda ctx: dist.barrier(), "job"), *JOB[1:])
LOST_EARLY = (Check("start", die_before_start, "job", 6.0), *JOB[1:])
END_JOB = (Check("good", fine), Check("bad", end_job), *JOB)
