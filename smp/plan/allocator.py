"""torch's caching allocator, as far as the bytes of its segments go.

Source: c10/cuda/CUDACachingAllocator.cpp: requests are rounded to 512 B; up to 1 MiB they come from segments of 2 MiB,
below 10 MiB from segments of 20 MiB, larger ones from separate segments rounded to 2 MiB; best fit within the pool
of the stream; blocks are split and merged; no segment is freed.
"""

from __future__ import annotations

import bisect

from smp.plan.blocks import Step
from smp.units import MIB

_ROUND = 512
_SMALL, _SMALL_SEGMENT = MIB, 2 * MIB
_LARGE, _LARGE_SEGMENT, _LARGE_ROUND = 10 * MIB, 20 * MIB, 2 * MIB


class _Block:
    __slots__ = ("address", "after", "before", "free", "pool", "size")

    def __init__(self, address: int, size: int, pool: _Pool):
        self.address, self.size, self.pool = address, size, pool
        self.free = False
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Pool:
    """Free blocks of one stream and kind, by size and then address."""

    def __init__(self, small: bool):
        self.small = small
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[int, _Block] = {}

    def add(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self.keys, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        block.free = False
        del self.keys[bisect.bisect_left(self.keys, (block.size, block.address))]
        del self.blocks[block.address]

    def best(self, size: int, *, growing: _Block | None = None) -> _Block | None:
        """Return the smallest free block of at least a size; one that can grow counts as the largest of all."""
        at = bisect.bisect_left(self.keys, (size, -1))
        fitting = [self.blocks[address] for _, address in self.keys[at : at + 2]]
        return next((block for block in fitting if block is not growing), fitting[0] if fitting else None)


class Allocator:
    """The segments of one device.

    Args:
        expandable: segments grow, as with ``expandable_segments:True``: one for each pool.

    Attributes:
        reserved: bytes of all segments, which never shrink.
    """

    def __init__(self, *, expandable: bool = False):
        self.expandable, self.reserved = expandable, 0
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._last: dict[int, _Block] = {}  # of an expandable segment, by its pool
        self._next = 0

    def allocate(self, nbytes: int, stream: str) -> _Block:
        """Return a block of at least so many bytes."""
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        small = size <= _SMALL
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = pool.best(size, growing=self._last.get(id(pool)))
        if block is None:
            block = self._segment(size, pool)
        else:
            pool.remove(block)
        rest = block.size - size
        if rest >= _ROUND if small or self.expandable else rest > _SMALL:
            tail = _Block(block.address + size, rest, pool)
            tail.before, tail.after, block.size = block, block.after, size
            if tail.after is not None:
                tail.after.before = tail
            elif self.expandable:
                self._last[id(pool)] = tail
            block.after = tail
            pool.add(tail)
        return block

    def free(self, block: _Block) -> None:
        """Give a block back to its pool, one with its free neighbours."""
        pool = block.pool
        before, after = block.before, block.after
        if before is not None and before.free:
            pool.remove(before)
            before.size, before.after = before.size + block.size, after
            if after is not None:
                after.before = before
            elif self.expandable:
                self._last[id(pool)] = before
            block = before
        if after is not None and after.free:
            pool.remove(after)
            block.size, block.after = block.size + after.size, after.after
            if after.after is not None:
                after.after.before = block
            elif self.expandable:
                self._last[id(pool)] = block
        pool.add(block)

    def _segment(self, size: int, pool: _Pool) -> _Block:
        if self.expandable:
            return self._grown(size, pool)
        segment = (
            _SMALL_SEGMENT
            if pool.small
            else _LARGE_SEGMENT
            if size < _LARGE
            else -(-size // _LARGE_ROUND) * _LARGE_ROUND
        )
        self.reserved += segment
        self._next += segment
        return _Block(self._next - segment, segment, pool)

    def _grown(self, size: int, pool: _Pool) -> _Block:
        """Map pages behind the last block of the pool's segment."""
        page = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT
        last = self._last.get(id(pool))
        have = last.size if last is not None and last.free else 0
        more = -(-(size - have) // page) * page
        self.reserved += more
        if last is None:
            block = _Block(self._next, more, pool)
            self._next += 1 << 50
        elif last.free:
            pool.remove(last)
            last.size += more
            block = last
        else:
            block = _Block(last.address + last.size, more, pool)
            block.before, last.after = last, block
        self._last[id(pool)] = block
        return block


def reserved_bytes(step: Step, *, steps: int = 3, expandable: bool = False) -> int:
    """Return the bytes that the allocator has reserved after some steps.

    What exists before the step is allocated once; the step's changes are repeated.
    """
    allocator = Allocator(expandable=expandable)
    live: dict[int, _Block] = {}
    sizes = [0] * len(step.categories)
    for repetition in range(steps):
        for _, number, delta in step.changes[step.initial if repetition else 0 :]:
            sizes[number] += delta
            before = live.pop(number, None)
            if sizes[number] > 0:  # one that is resized is copied: both exist
                live[number] = allocator.allocate(sizes[number], step.streams[number])
            if before is not None:
                allocator.free(before)
        for number in [n for n in live if n >= step.initial]:  # results that the next step replaces
            allocator.free(live.pop(number))
            sizes[number] = 0
    return allocator.reserved
