"""Which rank is slow: seconds of a step without those in which a rank waited for others, compared with the median rank.

Waiting is measured where this project's own collectives run, on CPUs. On other paths it is not known, and nothing is
compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from smp.faults.members import Seen
from smp.log import get_logger

logger = get_logger("train")

STEPS = 20  # a mean over so many steps is published
SILENT_STEPS = 100  # between two warnings of one rank
SMALLEST_SECONDS = 0.01  # per step: below it, what differs is noise


class Stragglers:
    """Measures this rank; on rank 0 also compares all.

    Attributes:
        measured: the step up to which was measured, and the mean seconds of a step; (0, 0.0) before the first.

    Args:
        ratio: of a rank's seconds to the median rank's, above which it is named.
        waited: seconds that this process has waited for others so far; None where that is not known.
    """

    def __init__(self, ratio: float, waited: Callable[[], float] | None):
        self._ratio, self._waited = ratio, waited
        self.measured: tuple[int, float] = (0, 0.0)
        self._start = self._waited_before = self._own = 0.0
        self._count = 0
        self._compared = 0
        self._warned: dict[int, int] = {}

    @property
    def enabled(self) -> bool:
        """Whether anything is measured."""
        return self._ratio > 0 and self._waited is not None

    def begin(self) -> None:
        """A step begins."""
        if self._waited is not None and self._ratio > 0:
            self._start, self._waited_before = time.perf_counter(), self._waited()

    def end(self, step: int) -> None:
        """Step number ``step`` has ended."""
        if self._waited is None or self._ratio <= 0:
            return
        self._own += time.perf_counter() - self._start - (self._waited() - self._waited_before)
        self._count += 1
        if self._count == STEPS:
            self.measured = (step, self._own / STEPS)
            self._own, self._count = 0.0, 0

    def compare(self, store: Any, size: int) -> None:
        """Read what all ranks have published, and warn of those that are slow; called by rank 0's publishing thread.

        Where steps are short, the ranks' latest means are of different steps: each is of so many that they compare.
        """
        keys = [f"at{rank}" for rank in range(size)]
        if not store.check(keys):
            return
        seen = [Seen.parse(text) for text in store.multi_get(keys)]
        step = min(s.steps for s in seen)
        if step <= self._compared:
            return  # somebody has nothing new yet
        self._compared = step
        for sentence in self.slow([s.own for s in seen], step):
            logger.warning("%s", sentence)

    def slow(self, own: list[float], step: int) -> list[str]:
        """A sentence for each rank that is slow and has not been named lately.

        Args:
            own: mean seconds of a step of each rank, without waiting.
            step: at which they were measured.
        """
        # The lower one of two: of two ranks, the slow one would be half of its own measure.
        median = statistics.median_low(own)
        found = []
        for rank, seconds in enumerate(own):
            slow = seconds > self._ratio * median and seconds - median > SMALLEST_SECONDS
            if not slow or step - self._warned.get(rank, -SILENT_STEPS) < SILENT_STEPS:
                continue
            self._warned[rank] = step
            found.append(
                f"Step {step}: rank {rank} computes {seconds / max(median, 1e-9):.1f} times as long as the median rank "
                f"({seconds:.3g} s against {median:.3g} s per step)."
            )
        return found
