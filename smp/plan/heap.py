"""The heap that a step needs on CPUs: its allocations, in their order, repeated by this machine's own malloc.

A freed tensor's place fits few others, so a heap is larger than the tensors in it. By how much depends on the order of
a step and, by some percent, on where a process's other blocks happen to lie: so the step is repeated several times,
each beside other small blocks. The processes that repeat it hold nothing else and touch no page of a tensor.
"""

from __future__ import annotations

import array
import dataclasses
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path

from smp.comm.buffer_pool import capacity_of, fits
from smp.environment.malloc import as_here
from smp.memory.categories import COMMUNICATION, OPTIMIZER
from smp.plan.blocks import Step
from smp.plan.events import FORWARD, UPDATE

_REPLAY = Path(__file__).with_name("malloc_replay.py")

_SAMPLES = 16
_TURNS = 3  # steps; later ones need no more
_HIGH = 12  # of the sorted samples: the 80th percentile
_MORE = 1.01  # of it: by so much the jobs of benchmarks/plan.py were above
_TOUCHED = 2  # one byte of so many, of what groups share for short messages
_GLOO = 2**23  # bytes of the heaps of its threads


def heap_bytes(step: Step, *, backend: str, ranks: int, shared: int, packed: int) -> tuple[int, int] | None:
    """Return the bytes of a process's heap, and of the memory that it shares, after some of these steps.

    Args:
        step: of the whole model.
        backend: of the collectives; empty for one process. With ``smddp`` communication buffers are not in the heap.
        ranks: of a host that reduce gradients together; 1 where other hosts' ranks do, too.
        shared: bytes that the groups' ranks share for short messages.
        packed: bytes that products keep.

    Returns:
        At least and at most; None where malloc does not tell its bytes, or has not as many.
    """
    pooled = {s for s, category in enumerate(step.categories) if backend == "smddp" and category == COMMUNICATION}
    during = step.changes[step.initial :]
    gathered = {nbytes for place, storage, nbytes in during if place.phase == FORWARD and storage in pooled}
    pool, requests = _Pool(ranks, gathered), array.array("q")
    for storage, nbytes in _requests(step):
        if storage in pooled:
            pool.resize(storage, nbytes)
        else:
            requests.extend((storage, nbytes))
    found = []
    for sample in range(_SAMPLES):
        command = [sys.executable, "-I", "-S", str(_REPLAY), str(sample)]
        done = subprocess.run(command, input=requests.tobytes(), capture_output=True, env=as_here())
        if done.returncode:
            return None
        found.append(int(done.stdout))
    found.sort()
    others = packed + (_GLOO if backend == "gloo" else 0) + pool.touched + shared // _TOUCHED
    return found[0] + others, int(_MORE * found[_HIGH]) + others


def _largest(step: Step) -> int:
    """Return the bytes of the largest parameter."""
    initial = step.changes[: step.initial]
    return max(nbytes for _, storage, nbytes in initial if step.categories[storage] != OPTIMIZER)


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
    """The shared buffers, given out as :class:`smp.comm.buffer_pool.BufferPool` does.

    Args:
        ranks: of the group.
        gathered: bytes of buffers of which a rank touches all; of others, with a part for the gradients of each rank,
            it touches its own part, and of the other parts what it sums.
    """

    def __init__(self, ranks: int, gathered: Container[int]) -> None:
        self._share, self._gathered = (2 * ranks - 1) / ranks**2, gathered
        self._buffers: list[_Buffer] = []  # from the least recently used on

    @property
    def touched(self) -> int:
        """Bytes of all buffers that a rank has touched."""
        return sum(buffer.touched for buffer in self._buffers)

    def resize(self, storage: int, nbytes: int) -> None:
        """Take a storage's buffer back, and give it one of other bytes."""
        for buffer in self._buffers:
            if buffer.owner == storage:
                buffer.owner = None
        if nbytes:
            free = (b for b in self._buffers if b.owner is None and fits(b.capacity, nbytes))
            buffer = next(free, None) or _Buffer(capacity_of(nbytes))
            self._buffers = [*(other for other in self._buffers if other is not buffer), buffer]
            touched = nbytes if nbytes in self._gathered else int(nbytes * self._share)
            buffer.owner, buffer.touched = storage, max(buffer.touched, touched)


@dataclasses.dataclass(eq=False)
class _Buffer:
    capacity: int
    touched: int = 0
    owner: int | None = None
