"""A rank that is killed in a step, or at an operation of a save, loses nothing: see ``kill_trials.py``."""

from __future__ import annotations

import collections
import random

import pytest

from benchmarks.kill_trials import Bench, Trial


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("kill"))


def test_the_undisturbed_run_does_every_operation_that_is_killed_at(bench):
    zero, one = bench.labels("sharded", 2)
    assert {"pwrite data", "fsync data", "pwrite list", "fsync manifest", "rename directory", "symlink link",
            "replace link", "unlink list", "rmdir directory", "mkdir directory"} <= set(zero)  # fmt: skip
    assert {"pwrite data", "fsync data", "pwrite list", "fsync list"} <= set(one)
    assert not {"pwrite manifest", "rename directory", "replace link"} & set(one)


# The narrowest moments of publishing, and one in a step.
@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(Trial("sharded", 2, 0, "rename directory", 1, True), marks=pytest.mark.full),
        Trial("sharded", 2, 0, "fsync manifest", 1, False),
        pytest.param(Trial("async_sharded", 2, 1, "pwrite data", 1, True), marks=pytest.mark.full),
        pytest.param(Trial("sharded", 2, 1, "step", 3, False), marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.smoke
def test_moments(trial, bench):
    assert bench.run(trial) == "good"


@pytest.mark.slow
def test_many_at_random(bench):
    draw, done = random.Random(7), collections.Counter()
    for _ in range(40):
        trial = bench.draw(draw, done)
        done[trial.label] += 1
        assert bench.run(trial) in ("good", "missed"), trial
