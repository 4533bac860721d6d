"""Checks that die, hang or fail, for the tests of ``smp doctor``: its child processes find them here by name."""

from __future__ import annotations

import os
import signal
import time

import torch.distributed as dist

from smp.doctor.check import Check, CheckContext
from smp.doctor.checks import CHECKS
from tests.clock import HANG_SECONDS, wait_until

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


def hang(ctx: CheckContext) -> None:
    if ctx.launch.rank == 1:
        time.sleep(3600)
    ctx.ok("lives")


def kill_supervisor(ctx: CheckContext) -> None:
    """Kill rank 1's supervisor as soon as the test has seen its report."""
    if ctx.launch.rank == 1:
        folder = os.environ["SMP_TEST_FOLDER"]
        wait_until(lambda: os.path.exists(f"{folder}/published"))
        os.kill(os.getppid(), signal.SIGKILL)
        open(f"{folder}/killed", "w").close()
        time.sleep(3600)  # ended with its parent
    ctx.ok("lives")


def end_job(ctx: CheckContext) -> None:
    """Tell rank 0's supervisor to end, as its launcher does."""
    if ctx.launch.rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(3600)


def die_before_start(ctx: CheckContext) -> None:
    if ctx.launch.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    OF_THE_JOB["start"].function(ctx)


GOOD = (Check("good", fine), *JOB)
KILL = (Check("bad", kill), *GOOD)
HANG = (Check("bad", hang, share=2 / HANG_SECONDS), *GOOD)
LOST = (JOB[0], Check("bad", kill, "job"), Check("more", lambda ctx: dist.barrier(), "job"), *JOB[1:])
LOST_EARLY = (Check("start", die_before_start, "job", 6.0), *JOB[1:])
KILL_SUPERVISOR = (Check("good", fine), Check("bad", kill_supervisor), *JOB)
END_JOB = (Check("good", fine), Check("bad", end_job), *JOB)
ALONE = (Check("good", fine), Check("bad", hang), Check("after", fine))
