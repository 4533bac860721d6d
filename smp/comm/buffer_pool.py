"""Buffers that all ranks of a host share, handed out again when every rank has dropped them.

``fully_shard`` asks for a gathered buffer, writes its shard into its slice, and calls the collective. If the buffer is
the same memory for all ranks of a host, the collective is only a barrier, and a host holds one
gathered copy instead of one per rank. The danger is reuse: a rank writes its slice *before* it meets the others, so a
buffer may be given out again only when nobody holds it any more. Therefore

- the first rank of the host decides for all: it alone knows the buffers, and publishes each decision; the others wait
  for it and follow, so the ranks cannot disagree however differently they run;
- a rank's hold ends exactly when the tensor's storage dies (a finalizer on the memory under it, which views and
  parameters keep alive), and is counted in a word per buffer and rank;
- a buffer is given out only when all these counts equal the times it was given out.

A buffer that is still held anywhere is passed over: another is taken, or made. Before one is made, the first rank waits
a little for the others to drop what it has dropped itself: they would meet in the collective all the same, and how
many buffers there are does not hang on which rank is late. What would exceed the limit is private memory, on all ranks
alike, and the collective is the ordinary one.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from smp.comm import futex
from smp.comm.peers import Peers
from smp.comm.segment import Segment

_PAGE = 4096
_DECIDED = 128  # where the count of decisions is; the segment's nonce comes first
_RECORDS, _RECORD = 64, struct.Struct("<qqq")  # decisions kept; of each: buffer, offset, bytes
_BUFFERS = 1024  # at most
_WORD = 0xFFFFFFFF
PRIVATE = -1
_PATIENCE = 0.25  # seconds


class _Buffer(NamedTuple):
    number: int
    offset: int
    capacity: int


def control_bytes(ranks: int) -> int:
    """Return the bytes before the buffers."""
    return -(-(_PAGE + 4 * _BUFFERS * ranks) // _PAGE) * _PAGE


def fits(capacity: int, nbytes: int) -> bool:
    """Tell whether so many bytes may have a buffer of that capacity."""
    return nbytes <= capacity <= 2 * max(nbytes, _PAGE)


def capacity_of(nbytes: int) -> int:
    """Return the capacity of a buffer that is made for so many bytes."""
    return -(-max(nbytes, 1) // _PAGE) * _PAGE


class BufferPool:
    """The shared buffers of one group on one host.

    Every rank must make the same calls in the same order.

    Args:
        segment: ``control_bytes(peers.size)`` and room for the buffers, fresh; pages cost memory once touched.
        poison: overwrite a buffer with NaN bytes when it is given out: what reads stale memory then shows.
    """

    def __init__(self, segment: Segment, peers: Peers, *, poison: bool = False):
        self.segment, self.peers, self._poison = segment, peers, poison
        self._number = 0  # of this rank's latest request
        # Known only to the first rank, from the least to the most recently used.
        self._buffers: list[_Buffer] = []
        self._uses = [0] * _BUFFERS
        self._end = control_bytes(peers.size)

    def lease(self, nbytes: int, timeout: float) -> object | None:
        """Get a buffer, or None for private memory.

        Args:
            timeout: seconds to wait for the first rank's decision.

        Returns:
            A ctypes array over the buffer: this rank holds it as long as the array lives.

        Raises:
            torch.distributed.DistBackendError: the first rank died, did not come in time, or asked for another size.
        """
        self._number += 1
        if self.peers.local == 0:
            self._decide(nbytes)
        else:
            self._await_decision(timeout)
        index, offset, decided = _RECORD.unpack_from(self.segment.view, self._record(self._number))
        if decided != nbytes:
            raise dist.DistBackendError(
                f"smddp: this rank asks for a shared buffer of {nbytes} bytes, {self.peers.label(0)} asked for "
                f"{decided}: do all ranks shard the same modules in the same order?"
            )
        if index == PRIVATE:
            return None
        array = (ctypes.c_char * max(1, nbytes)).from_buffer(self.segment.map, offset)
        weakref.finalize(array, _release, self.segment.words, self._released(index, self.peers.local)).atexit = False
        return array

    # --- the first rank

    def _decide(self, nbytes: int) -> None:
        buffer = self._free(nbytes) or self._freed_soon(nbytes) or self._make(nbytes)
        record = (PRIVATE, 0, nbytes)
        if buffer is not None:
            self._uses[buffer.number] += 1
            self._buffers.remove(buffer)
            self._buffers.append(buffer)
            record = (buffer.number, buffer.offset, nbytes)
            if self._poison:
                ctypes.memset(self.segment.address + buffer.offset, 0xFF, nbytes)
        _RECORD.pack_into(self.segment.view, self._record(self._number), *record)
        self.segment.words[_DECIDED // 4] = self._number & _WORD
        futex.wake(self.segment.address + _DECIDED)

    def _fitting(self, nbytes: int) -> list[_Buffer]:
        return [b for b in self._buffers if fits(b.capacity, nbytes)]

    def _free(self, nbytes: int) -> _Buffer | None:
        everyone = range(self.peers.size)
        return next((b for b in self._fitting(nbytes) if all(self._dropped(b, r) for r in everyone)), None)

    def _freed_soon(self, nbytes: int) -> _Buffer | None:
        """Wait for peers that are late in dropping what this rank has dropped. It cannot last: they need nothing from
        this rank for it, unless they keep it, and then another buffer is made."""
        if not any(self._dropped(b, self.peers.local) for b in self._fitting(nbytes)):
            return None
        end = time.monotonic() + _PATIENCE
        while (buffer := self._free(nbytes)) is None and time.monotonic() < end:
            time.sleep(2e-5)
        return buffer

    def _dropped(self, buffer: _Buffer, rank: int) -> bool:
        return self.segment.words[self._released(buffer.number, rank)] == self._uses[buffer.number] & _WORD

    def _make(self, nbytes: int) -> _Buffer | None:
        capacity = capacity_of(nbytes)
        if len(self._buffers) == _BUFFERS or self._end + capacity > self.segment.size:
            return None
        buffer = _Buffer(len(self._buffers), self._end, capacity)
        self._end += capacity
        self._buffers.append(buffer)
        return buffer

    # --- the others

    def _await_decision(self, timeout: float) -> None:
        word = self.segment.words
        address, deadline = self.segment.address + _DECIDED, 0.0
        for _ in range(50):
            if self._decided(word[_DECIDED // 4]):
                return
        os.sched_yield()
        while not self._decided(seen := word[_DECIDED // 4]):
            futex.wait(address, seen)
            if word[_DECIDED // 4] != seen:
                continue
            deadline = deadline or time.monotonic() + timeout
            late = time.monotonic() > deadline
            if self.peers.died(0) or late:
                what = f"has not asked for a shared buffer within {timeout:g} s" if late else "died"
                raise dist.DistBackendError(f"smddp: {self.peers.label(0)} {what}, which this rank waits for")

    def _decided(self, word: int) -> bool:
        # The counter has 32 bits and goes round.
        return (word - self._number) & _WORD < 1 << 31

    # --- where things are

    def _record(self, number: int) -> int:
        return 2 * _DECIDED + _RECORD.size * (number % _RECORDS)

    def _released(self, index: int, rank: int) -> int:
        """Return the index of the word that counts a rank's releases of a buffer."""
        return (_PAGE + 4 * (index * self.peers.size + rank)) // 4


def _release(words: memoryview, index: int) -> None:
    # The only writer of this word; a finalizer may run in any thread, but holds Python's lock.
    words[index] = (words[index] + 1) & _WORD


def tensor(array: object, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a 1-D tensor over a lease's array."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(array, dtype=dtype, count=numel)  # type: ignore[arg-type] # ctypes arrays are buffers
