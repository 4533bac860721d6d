"""Small jobs that something happens to."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

import train_lib
from tests.job import LLAMA, read_metrics

JOB = [*LLAMA, "--use_synthetic_data", 1, "--lr_decay_iters", 20, "--sharding_strategy", "full_shard"]
LONG = [*JOB, "--max_steps", 100_000, "--checkpoint_freq", 100_000]


def wrapped(name: str, before: Callable[[], None]) -> None:
    """Call ``before`` each time the job calls its part ``name``; for ``prepare`` of a job."""
    inner = getattr(train_lib, name)

    def call(*args, **kwargs):
        before()
        return inner(*args, **kwargs)

    setattr(train_lib, name, call)


def slowly(rank: int) -> None:
    """``prepare``: steps take 20 ms and more, so that a test sees them pass."""
    wrapped("forward", lambda: time.sleep(0.02))


def last_step(run: pathlib.Path) -> int:
    """The last step in the run's metrics; 0 before the first."""
    try:
        return max((line["step"] for line in read_metrics(run)), default=0)
    except (OSError, ValueError):  # not there, or half written
        return 0


def checkpoints(run: pathlib.Path) -> list[int]:
    """Steps of the run's checkpoints."""
    return sorted(int(p.name.partition("-")[2].removesuffix("steps")) for p in run.glob("checkpoints/*-*steps"))
