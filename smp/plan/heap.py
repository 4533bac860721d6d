"""The heap that a step needs on CPUs: its allocations, in their order, repeated by this machine's own malloc.

A freed tensor's place fits few others, so a heap is larger than the tensors in it. By how much depends on the order of
a step and, by some percent, on where a process's other blocks happen to lie: so the step is repeated several times,
each beside other small blocks. The processes that repeat it hold nothing else and touch no page of a tensor.
"""

from __future__ import annotations

import array
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from smp.comm.buffer_pool import capacity_of, fits
from smp.memory.categories import COMMUNICATION, OPTIMIZER
from smp.plan.blocks import Step
from smp.plan.events import UPDATE

_REPLAY = Path(__file__).with_name("malloc_replay.py")

_SAMPLES = 16
_TURNS = 3  # steps; later ones need no more
_LIBRARIES = (5522080, 2179744, 1786528)  # bytes, at most, in which a thread of MKL packs a product's operands
_HIGH = 13  # of the sorted samples: the 85th percentile
_MORE = 1.02  # of it: by so much the jobs of benchmarks/plan.py were above
_TOUCHED = 2  # one byte of so many, of what groups share for short messages and of an additional buffer
_GLOO = 2**23  # bytes of the heaps of its threads


def heap_bytes(step: Step, *, backend: str, shared: int, threads: int) -> tuple[int, int] | None:
    """Return the bytes of a process's heap, and of the memory that it shares, after some of these steps.

    Args:
        step: of the whole model.
        backend: of the collectives; empty for one process. With ``smddp`` communication buffers are not in the heap.
        shared: bytes that the groups' ranks share for short messages.
        threads: that compute.

    Returns:
        At least and at most; None where malloc does not tell its bytes, or has not as many.
    """
    pooled = {s for s, category in enumerate(step.categories) if backend == "smddp" and category == COMMUNICATION}
    pool, requests, largest = _Pool(), array.array("q"), _largest(step)
    for storage, nbytes in _requests(step):
        if storage in pooled:
            pool.resize(storage, nbytes)
        else:
            requests.extend((storage, nbytes))
    found = []
    for sample in range(_SAMPLES):
        command = [sys.executable, "-I", "-S", str(_REPLAY), str(sample)]
        done = subprocess.run(command, input=requests.tobytes(), capture_output=True)
        if done.returncode:
            return None
        found.append(int(done.stdout))
    found.sort()
    others = (threads - 1) * sum(_packed(largest)) + (_GLOO if backend == "gloo" else 0)
    others += sum(pool.sizes) + shared // _TOUCHED
    # A rank that comes late makes the others take another buffer.
    return found[0] + others, int(_MORE * found[_HIGH]) + others + max(pool.sizes) // _TOUCHED


def _largest(step: Step) -> int:
    """Return the bytes of the largest parameter."""
    initial = step.changes[: step.initial]
    return max(nbytes for _, storage, nbytes in initial if step.categories[storage] != OPTIMIZER)


def _packed(largest: int) -> list[int]:
    """Return the bytes of a thread's packed operands."""
    return [min(nbytes, largest) for nbytes in _LIBRARIES]


def _requests(step: Step) -> Iterator[tuple[int, int]]:
    """Yield storages with the bytes they shall have, as a job asks for them: 0 frees."""
    sizes, other = [0] * len(step.categories), len(step.categories)
    before, during = step.changes[: step.initial], step.changes[step.initial :]
    late = [(storage, nbytes) for _, storage, nbytes in before if step.categories[storage] == OPTIMIZER]
    for _, storage, nbytes in before:
        sizes[storage] = nbytes
        if step.categories[storage] != OPTIMIZER:
            yield storage, nbytes
    yield other, _largest(step)  # a parameter is drawn whole before it is cut
    yield other, 0
    yield from enumerate(_packed(_largest(step)), other + 1)
    for _ in range(_TURNS):
        for place, storage, change in during:
            if place.phase == UPDATE:  # that of the first step makes the state
                yield from late
                late = []
            sizes[storage] += change
            yield storage, sizes[storage]
        for storage in range(step.initial, len(sizes)):  # what the step leaves
            if sizes[storage]:
                sizes[storage] = 0
                yield storage, 0


class _Pool:
    """The shared buffers, given out as :class:`smp.comm.buffer_pool.BufferPool` does where no rank is late."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, int | None]] = []  # bytes and whose, from the least recently used on

    @property
    def sizes(self) -> list[int]:
        """Bytes of each buffer, and a 0."""
        return [0, *(capacity for capacity, _ in self._buffers)]

    def resize(self, storage: int, nbytes: int) -> None:
        """Take a storage's buffer back, and give it one of other bytes."""
        self._buffers = [(capacity, None if owner == storage else owner) for capacity, owner in self._buffers]
        if nbytes:
            found = next((b for b in self._buffers if b[1] is None and fits(b[0], nbytes)), None)
            if found is not None:
                self._buffers.remove(found)
            self._buffers.append((found[0] if found else capacity_of(nbytes), storage))
