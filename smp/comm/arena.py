"""Rounds: how the ranks of one host take turns with shared memory.

Every rank owns one counter and four slots of memory. In round k it fills its slot ``k % 4`` (or leaves it), then posts
k in its counter; a peer that has seen the counter at k may read the slot. There is no other signal, because of two
rules:

1. a rank posts round k only when it has read everything it wants of round k - 2 and before;
2. a rank fills the slot for round k only when it has seen every peer's counter at k - 2 or more.

The slot for round k held round k - 4. By 2 every peer has posted k - 2, so by 1 it has done with k - 4: nothing is
overwritten that somebody still reads, and a rank may be one round ahead with filling, which keeps both busy.

Stores become visible in program order on x86-64 (so the data comes before the counter); the segment refuses other
processors. Waiting spins a little, then lets others run, then sleeps in the kernel (futex) in slices of 50 ms, and
after each checks whether the peers live, have failed, or are late. A rank marks when it sleeps, so that posting
needs no system call while nobody sleeps.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from smp.comm import futex
from smp.comm.kernel import ArenaView, Gather, Kernel
from smp.comm.peers import Peers
from smp.comm.segment import NONCE_BYTES, Segment
from smp.environment.threads import available_cores

SLOTS = 4
SIGNATURE_BYTES = 256  # at the start of each slot: what its rank is doing in this round
_LINE = 128  # bytes from one rank's counter to the next: two cache lines, which processors fetch as a pair
_NOTE = 512  # bytes of each rank's note: its last operation, and why it failed
_PAGE = 4096
_WORD = 0xFFFFFFFF
_fence = threading.Lock()  # taking it orders a store before a later load, which x86-64 alone does not
_NOTE_HEAD = struct.Struct("<QddQ32s")  # operation number, started, ended (monotonic seconds), bytes, name
_NOTE_END = struct.Struct("<d")


class LastOperation(NamedTuple):
    """A rank's latest collective in a group.

    ``started`` and ``ended`` are seconds of the host's monotonic clock; ``ended`` is 0 while it runs.
    """

    rank: int
    operation: str
    number: int
    nbytes: int
    started: float
    ended: float

    def __str__(self) -> str:
        if not self.number:
            return "no operation yet"
        now = time.monotonic()
        state = f"finished {now - self.ended:.1f} s ago" if self.ended else f"running for {now - self.started:.1f} s"
        return f"{self.operation} #{self.number} ({self.nbytes} bytes), {state}"


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


class Layout(NamedTuple):
    """Byte offsets in an arena.

    Args:
        size: ranks.
        slot_bytes: data bytes of one slot, a multiple of 4096.
    """

    size: int
    slot_bytes: int

    @staticmethod
    def of(total: int, size: int) -> Layout:
        """Return the layout of an arena of ``total`` bytes for ``size`` ranks."""
        empty = Layout(size, 0)
        return Layout(size, (total - empty.total) // (SLOTS * size))

    @staticmethod
    def with_scratch(scratch: int, size: int) -> Layout:
        """Return the layout with so many bytes of data for each rank, or as few more as any element fits into."""
        return Layout(size, max(scratch // SLOTS, _round_up(64 * size, _PAGE)))

    @property
    def counters(self) -> int:
        """Offset of the counters."""
        return _LINE  # the segment's nonce comes first

    @property
    def notes(self) -> int:
        """Offset of the notes."""
        return self.counters + _LINE * self.size

    @property
    def slots(self) -> int:
        """Offset of the slots."""
        return _round_up(self.notes + _NOTE * self.size, _PAGE)

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next; the signature has a separate page, so that data is page-aligned."""
        return _PAGE + self.slot_bytes

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.slots + self.stride * SLOTS * self.size


class Arena:
    """The shared memory of one group on one host, and the rounds in it.

    Not safe for several threads at once: the group runs one operation at a time.

    Args:
        segment: ``Layout(...).total`` bytes, fresh.
        group: name of the group, for messages.
    """

    def __init__(self, segment: Segment, peers: Peers, group: str, kernel: Kernel | None = None):
        assert NONCE_BYTES <= _LINE
        self.segment, self.peers, self.group = segment, peers, group
        self.layout = Layout.of(segment.size, peers.size)
        self.rank, self.size = peers.local, peers.size
        self.others = tuple((self.rank + i) % self.size for i in range(1, self.size))
        self._words = segment.words
        self._view = segment.view
        self._counter = [(self.layout.counters + _LINE * r) // 4 for r in range(self.size)]
        self._counter_address = [segment.address + 4 * c for c in self._counter]
        self._slot_offset = [
            [self.layout.slots + self.layout.stride * (SLOTS * r + s) for s in range(SLOTS)] for r in range(self.size)
        ]
        self._seen = [0] * self.size  # the last round known to be posted by each rank
        self.round = 0  # the last one this rank has begun
        self._asleep = [counter + 1 for counter in self._counter]  # words: whether a rank sleeps
        # With more ranks than cores, looking only burns what a peer needs to go on.
        crowded = self.size > available_cores()
        self._spins, self._yields = (1, 20) if crowded else (20, 100)
        self._kernel = kernel
        self._c = ArenaView(
            segment.address, self.rank, self.size, self.layout.counters, _LINE, self.layout.slots, self.layout.stride,
            SLOTS, _PAGE, SIGNATURE_BYTES, *((1, 20) if crowded else (500, 100)),
        )  # fmt: skip
        self._c_address = ctypes.addressof(self._c)
        self._sizes, self._addresses = (ctypes.c_int64 * self.size)(), (ctypes.c_void_p * self.size)()
        self._gather = Gather(sizes=ctypes.addressof(self._sizes), addresses=ctypes.addressof(self._addresses))
        self._gather_address = ctypes.addressof(self._gather)
        self._own_note = self._note(self.rank)
        self._operation = "nothing"
        self._number = 0
        self._deadline_seconds = 0.0

    # --- rounds

    def offset(self, rank: int, round_: int) -> int:
        """Return the byte offset, in the segment, of the data of a rank's slot for a round."""
        return self._slot_offset[rank][round_ % SLOTS] + _PAGE

    def address(self, rank: int, round_: int) -> int:
        """Return the address of the data of a rank's slot for a round."""
        return self.segment.address + self.offset(rank, round_)

    def begin(self) -> int:
        """Begin the next round; return its number once this rank's slot for it may be filled."""
        self.round = k = self.round + 1
        for other in self.others:
            if self._seen[other] < k - 2:
                self.wait(other, k - 2)
        return k

    def post(self, k: int) -> None:
        """Tell the peers that this rank's slot of round k is filled, or was not needed."""
        words = self._words
        words[self._counter[self.rank]] = k & _WORD
        # A peer marks itself asleep before the kernel compares the counter: one of the two sees the other.
        _fence.acquire()
        _fence.release()
        for other in self.others:
            if words[self._asleep[other]]:
                futex.wake(self._counter_address[self.rank])
                break

    def wait(self, rank: int, k: int) -> None:
        """Wait until ``rank`` has posted round k.

        Raises:
            torch.distributed.DistBackendError: it died, failed or did not come in time.
        """
        words, counter = self._words, self._counter[rank]
        if self._seen[rank] >= k:
            return
        for _ in range(self._spins):
            if self._posted(rank) >= k:
                return
        for _ in range(self._yields):
            os.sched_yield()
            if self._posted(rank) >= k:
                return
        deadline, asleep = 0.0, self._asleep[self.rank]
        while True:
            word = words[counter]
            if self._posted(rank) >= k:
                return
            words[asleep] = 1
            futex.wait(self._counter_address[rank], word)
            words[asleep] = 0
            if words[counter] == word:
                deadline = self._watch(k, deadline)

    def _watch(self, k: int, deadline: float) -> float:
        """Raise if a peer is dead, has failed or is late; return the deadline, set at the first call."""
        now = time.monotonic()
        if not deadline:
            return now + self._deadline_seconds
        doing = f"smddp: {self._operation} #{self._number} of group {self.group}"
        # Any peer that is behind, not only the one waited for: a dead one will not come whatever the order.
        for other in self.others:
            died, failure = self.peers.died(other), self.failure(other)
            if self._posted(other) >= k:
                continue  # it posted before its end
            if failure:  # noted before its end, if it has ended
                raise dist.DistBackendError(f"{doing}: {self.peers.label(other)} has failed: {failure}")
            if died:
                raise dist.DistBackendError(
                    f"{doing}: {self.peers.label(other)} died; its last operation was {self.last_operation(other)}"
                )
        if now > deadline:
            late = [r for r in self.others if self._posted(r) < k]
            who = "; ".join(f"{self.peers.label(r)}: {self.last_operation(r)}" for r in late)
            raise dist.DistBackendError(
                f"{doing}: timed out after {self._deadline_seconds:g} s; not there, with their last operation: {who}"
            )
        return deadline

    def _posted(self, rank: int) -> int:
        # The counter has 32 bits and goes round; what was seen is never ahead of it.
        self._seen[rank] += (self._words[self._counter[rank]] - self._seen[rank]) & _WORD
        return self._seen[rank]

    # --- notes, which the peers read

    def start(self, operation: str, number: int, nbytes: int, timeout: float) -> None:
        """Begin an operation: its name for messages and for the peers, and how long one wait in it may last."""
        self._operation, self._number, self._deadline_seconds = operation, number, timeout
        name = operation.encode()[:31]
        _NOTE_HEAD.pack_into(self._view, self._own_note, number, time.monotonic(), 0.0, nbytes, name)

    def end(self) -> None:
        """Note that the operation of :meth:`start` has ended well."""
        _NOTE_END.pack_into(self._view, self._own_note + 16, time.monotonic())

    def fail(self, reason: str) -> None:
        """Tell the peers that this rank will not post again, and why."""
        text = reason.encode()[: _NOTE - 65]
        at = self._note(self.rank) + 64
        self._view[at : at + len(text) + 1] = text + b"\0"

    def failure(self, rank: int) -> str:
        """Return the reason with which a rank failed; empty if it has not."""
        at = self._note(rank)
        return bytes(self._view[at + 64 : at + _NOTE]).split(b"\0")[0].decode(errors="replace")

    def last_operation(self, rank: int) -> LastOperation:
        """Return a local rank's latest operation, as that rank noted it."""
        at = self._note(rank)
        number, started, ended, nbytes, name = _NOTE_HEAD.unpack_from(self._view, at)
        return LastOperation(self.peers.ranks[rank], name.rstrip(b"\0").decode(), number, nbytes, started, ended)

    def _note(self, rank: int) -> int:
        return self.layout.notes + _NOTE * rank

    # --- agreement

    def sign(self, k: int, signature: bytes) -> None:
        """Write what this rank is doing in round k: exactly ``SIGNATURE_BYTES`` bytes."""
        at = self._slot_offset[self.rank][k % SLOTS]
        self._view[at : at + SIGNATURE_BYTES] = signature

    def signature(self, rank: int, k: int) -> bytes:
        """Return the signature of a rank's round k, which it has posted."""
        at = self._slot_offset[rank][k % SLOTS]
        return bytes(self._view[at : at + SIGNATURE_BYTES])

    def meet(self, k: int, signature: bytes) -> None:
        """Sign and post round k, whose slot is filled, and :meth:`agree`."""
        if self._kernel is None:
            self.sign(k, signature)
            self.post(k)
            self.agree(k, signature)
            return
        status = self._kernel.meet(self._c_address, k & _WORD, signature)
        while status > 0:
            self.wait(status - 1, k)
            status = self._kernel.agree(self._c_address, k & _WORD, signature)
        if status:
            raise Mismatch(self.group, self._describe(k))

    def gather(
        self, signature: bytes, source: int, sizes: Sequence[int], addresses: Sequence[int], chunk: int, count: int
    ) -> bool:
        """Run all rounds of an all_gather or a broadcast in C.

        Args:
            source: address of this rank's bytes.
            sizes: bytes that each rank gives.
            addresses: address for each rank's bytes; this rank's own may be ``source``.
            chunk: bytes of a round at most.
            count: of rounds.

        Returns:
            False, and nothing is done, without the kernel.
        """
        if self._kernel is None:
            return False
        call, first = self._gather, self.round + 1
        call.signature, call.source, call.chunk, call.count = signature, source, chunk, count
        self._sizes[:], self._addresses[:] = list(sizes), list(addresses)
        call.first, call.index, call.filled, call.taken = first & _WORD, 0, 0, 0
        while status := self._kernel.gather(self._c_address, self._gather_address):
            self.round = first + min(call.index, count - 1)
            if status < 0:
                raise Mismatch(self.group, self._describe(first))
            # The round needed is one of the last few; the kernel knows its lower half.
            self.wait(status - 1, self.round - ((self.round - call.needed) & _WORD))
        self.round = first + count - 1
        return True

    def agree(self, k: int, signature: bytes) -> None:
        """Wait for every peer's round k and see that all do the same.

        Raises:
            Mismatch: on every rank alike, after which the next round may begin as usual.
        """
        differs = False
        for other in self.others:
            self.wait(other, k)
            differs |= self.signature(other, k) != signature
        if differs:
            raise Mismatch(self.group, self._describe(k))

    def _describe(self, k: int) -> str:
        calls: dict[str, list[int]] = {}
        for r in range(self.size):
            calls.setdefault(self.signature(r, k).rstrip(b"\0").decode(errors="replace"), []).append(r)
        return "; ".join(
            f"rank(s) {', '.join(str(self.peers.ranks[r]) for r in ranks)}: {what}" for what, ranks in calls.items()
        )


class Mismatch(dist.DistBackendError):
    """The ranks called different operations, or with different shapes, dtypes or roots."""

    def __init__(self, group: str, calls: str):
        super().__init__(group, calls)
        self.group, self.calls = group, calls

    def __str__(self) -> str:
        return f"smddp: the ranks of group {self.group} do not do the same: {self.calls}"


def sign(text: str) -> bytes:
    """Return a signature, padded or cut to its fixed length; after ``" @ "`` it may differ from host to host."""
    encoded = text.encode()
    if len(encoded) > SIGNATURE_BYTES:
        digest = hashlib.sha256(encoded).hexdigest()[:16]
        encoded = encoded[: SIGNATURE_BYTES - 20] + f"... {digest}".encode()
    return encoded.ljust(SIGNATURE_BYTES, b"\0")


def common_part(signature: bytes) -> bytes:
    """Return the part of a signature that is the same on all hosts."""
    return signature.partition(b" @ ")[0].ljust(SIGNATURE_BYTES, b"\0")
