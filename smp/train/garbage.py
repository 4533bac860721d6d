"""Python's garbage collection at steps that all ranks share: one that stops alone keeps the others waiting."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from smp.parallel.choices import Choice, Situation

STEPS = 50


def choose(situation: Situation) -> Iterator[Choice]:
    """Collect rarely; a step makes little garbage."""
    yield Choice("gc_freq", STEPS, "all ranks collect at the same steps, so that none waits for another's")


@contextlib.contextmanager
def collected_together() -> Iterator[None]:
    """Leave garbage to :func:`collect_if_due`; what lives already is never looked at again.

    Source: the garbage collection of torchtitan.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect_if_due(step: int, every: int) -> None:
    """Collect after every so many steps; 0: leave it to Python."""
    if every and step % every == 0:
        gc.collect()
