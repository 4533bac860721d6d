"""Time of training steps alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Seconds per training step, without validation and checkpoints."""

    def __init__(self, step: int):
        self._step, self._start = step, time.perf_counter()

    def mean_seconds(self, step: int) -> float:
        """Return the mean over the steps since the last call, and restart."""
        now = time.perf_counter()
        mean = (now - self._start) / (step - self._step)
        self._step, self._start = step, now
        return mean

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the ``with`` block."""
        before = time.perf_counter()
        yield
        self._start += time.perf_counter() - before
