"""What shows the flags of faults; the register is read by ``test_flags.py``."""

from __future__ import annotations

import math

import pytest

from smp.faults import watchdog
from smp.train import step as one_step
from tests.clock import Clock, wait_until
from tests.flags import SYNTHETIC, check, differs
from tests.job import LLAMA, run_job


@pytest.mark.full
@check("nonfinite", "nonfinite_budget")
def test_nonfinite(tmp_path):
    def diverges(rank):
        inner = one_step.forward
        one_step.forward = lambda *arguments: inner(*arguments) + math.inf

    def end(words):
        run = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        job = [*LLAMA, *SYNTHETIC, "--max_steps", 3, "--output_dir", run, *words]
        outcome = run_job(*job, prepare=diverges)
        return outcome.statuses[0], outcome.output.count("The update was left out")

    assert end([]) == (1, 0)
    skip = ["--nonfinite", "skip"]
    assert end(skip) == (0, 3)
    differs(end, ["--nonfinite_budget", 2], (1, 2), skip)


@check("watchdog_timeout")
def test_watched(tmp_path):
    def ends(rank):
        """The step takes long, as the watchdog sees it."""
        inner, clock = one_step.forward, Clock()

        def forward(*arguments):
            clock.pace, end = 1.0, clock.now + 30
            wait_until(lambda: clock.now > end)
            clock.pace = 0.0
            return inner(*arguments)

        watchdog.time, one_step.forward = clock, forward

    job = [*LLAMA, *SYNTHETIC, "--max_steps", 1]
    run_job(*job, "--output_dir", tmp_path / "a", prepare=ends).succeeded()
    outcome = run_job(*job, "--watchdog_timeout", 1, "--output_dir", tmp_path / "b", prepare=ends)
    assert outcome.statuses == [1] and "no progress within --watchdog_timeout 1" in outcome.output
