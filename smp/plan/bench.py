"""Time calls, with operands that the caches do not hold, in multiples of a fixed product's time just then."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

ROTATED = (64 * 2**20, 512 * 2**20)  # bytes, at least and at most: as much as the last cache
COPIES = 64  # of operands, at most
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
DISTURBED = 5  # times the median
RECENT = 8  # paces that a number is held against, as single ones scatter
WARM = 0.1  # seconds, at most, of calls before those that count


def rotated_bytes() -> int:
    """Return how many bytes no cache holds, as long as all of them are used in turn."""
    sizes = (path.read_text().strip() for path in CACHES.glob("index*/size"))
    last = max((int(size.removesuffix("K")) * 1024 for size in sizes), default=0)
    return min(max(ROTATED[0], last), ROTATED[1])


class Bench:
    """Times calls on a device; every process of the group calls the same at once.

    On CPUs in multiples of a fixed product, as long as it has just taken: what else runs on the host, or beside it on
    the same cores, moves the machine's own speed by as much as a half, for seconds.

    Args:
        budget: seconds for one number.

    Attributes:
        paces: seconds of the product.
    """

    def __init__(self, device: torch.device, budget: float):
        self.device, self.budget, self.rotating = device, budget, rotated_bytes()
        self._operands = self.values(512, 768), self.values(768, 768)
        self._memory: dict[torch.dtype, Tensor] = {}
        self.paces: list[float] = []
        self.tiny = 0.0
        a, b = torch.ones(4, device=device), torch.ones(4, device=device)
        # What any operation costs, whatever it computes: part of the host's microseconds, not of the kernels'.
        self.tiny = self.seconds(lambda: [a + b for _ in range(200)]) / 200

    def now(self) -> float:
        """Return the time when the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def values(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor: on a GPU of random numbers, whose products take more power than those of equal ones."""
        return (torch.randn if self.device.type == "cuda" else torch.ones)(shape, device=self.device, dtype=dtype)

    @staticmethod
    def usual(found: list[float]) -> float:
        """Return the seconds to expect of several that were measured: their mean, as a step is a sum of such calls.

        One that was disturbed counts as ``DISTURBED`` times the median: a pause of a process in a call of microseconds
        is not what each such call takes.
        """
        most = DISTURBED * statistics.median(found)
        return statistics.fmean(min(seconds, most) for seconds in found)

    def pace(self) -> float:
        """Return the seconds of the fixed product just now."""
        x, w = self._operands
        x @ w.t()  # brings them back to the caches
        found = []
        for _ in range(3):
            start = self.now()
            x @ w.t()
            found.append(self.now() - start)
        self.paces.append(statistics.fmean(found))
        return self.paces[-1]

    def at_pace(self, timed: Callable[[], list[float]]) -> float:
        """Return the usual of some seconds; on CPUs in multiples of the fixed product's."""
        if self.device.type == "cuda":
            return self.usual(timed())
        if not self.paces:
            self.pace()
        found = timed()
        self.pace()
        return self.usual(found) / statistics.fmean(self.paces[-RECENT:])

    def timed(self, call: Callable[[], Any]) -> list[float]:
        """Return the seconds of calls, as many as the budget allows."""
        found: list[float] = []
        end = time.perf_counter() + self.budget
        while len(found) < 4 or (time.perf_counter() < end and len(found) < 100):
            start = self.now()
            call()
            found.append(self.now() - start)
        return found

    def seconds(self, call: Callable[[], Any], turns: int = 1) -> float:
        """Return a call's seconds, as :meth:`at_pace` counts them, without what any operation costs: a mean of turns.

        The more of a step a call takes, the more turns it is worth.
        """
        call()
        dist.barrier()
        one = statistics.fmean(self.at_pace(lambda: self.timed(call)) for _ in range(turns))
        return max(one - self.tiny, 0.1 * one)

    def _filling(self, nbytes: int, most: int) -> int:
        """Return how many operands of so many bytes fill what is rotated through."""
        return max(2, min(most, self.rotating // nbytes))

    def copies(
        self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, most: int = COPIES
    ) -> list[tuple[Tensor, ...]]:
        """Return operands of some shapes, and as many more as the caches do not hold: parts of memory that stays."""
        sizes = [math.prod(shape) for shape in shapes]
        count = self._filling(sum(sizes) * dtype.itemsize, most)
        memory = self._memory.get(dtype)
        if memory is None or len(memory) < count * sum(sizes):
            numel = max(count * sum(sizes), self.rotating // dtype.itemsize)
            memory = self._memory[dtype] = self.values(numel, dtype=dtype)
        parts = iter(memory[: count * sum(sizes)].split(sizes * count))
        return [tuple(next(parts).view(shape) for shape in shapes) for _ in range(count)]

    def rotated(self, copies: Sequence[tuple[Tensor, ...]], run: Callable[..., Any], turns: int = 1) -> float:
        """Return the seconds of ``run``, each time on other operands; its results live for one round."""
        start, result, between = self.now(), run(*copies[0]), self.now()
        # With larger results fewer operands fill the caches; what computes for long does not wait for the memory.
        nbytes = sum(t.nbytes for t in tree_leaves([*copies[0], result]) if isinstance(t, Tensor))
        count = min(self._filling(nbytes, len(copies)), max(1, int(WARM / (between - start))))
        del result
        operands = itertools.cycle(copies[:count])
        kept: list[Any] = [None] * count
        slots = itertools.cycle(range(count))

        def call() -> None:
            slot = next(slots)
            kept[slot] = None  # first, so that the result takes its place instead of fresh pages
            kept[slot] = run(*next(operands))

        for _ in range(count):
            call()
        return self.seconds(call, turns)
