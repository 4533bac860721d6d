"""Collectives among the ranks of one host, through an arena.

Data goes through the slots in chunks: a rank copies one of its chunks into its slot, and its peers copy it out (or
add it up) while it fills the next one. Addresses and bytes where data is moved, tensors where it is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from smp.comm import futex
from smp.comm.arena import Arena
from smp.comm.reduction import Reduction

# A chunk at most; a slot may be smaller. What a rank writes and its peer reads then stays in the cache between them.
# Measured on two ranks, 1-16 MiB: gathers were 1.2 times as fast as in chunks of 1 MiB, reduce_scatter was slower.
_GATHER_BYTES, _REDUCE_BYTES = 256 * 1024, 512 * 1024
# Up to so many bytes of all ranks, each rank adds up everything itself: half the waiting.
# Three to eight ranks on two cores: at best twice as fast; above, no faster.
_ALONE_BYTES = 2 * 1024 * 1024
# Added up in slices that stay in a core's cache.
_CACHED_BYTES = 256 * 1024


class HostCollectives:
    """The collectives of one group on one host, where it may have one rank only.

    Every method is called by every rank of the arena, with the same ``signature`` unless something is wrong.

    Raises (all methods):
        smp.comm.arena.Mismatch: the signatures differ; nothing has been written, the group continues.
        torch.distributed.DistBackendError: a peer died, failed, or did not come in time.
    """

    def __init__(self, arena: Arena):
        self.arena = arena
        self.rank, self.size = arena.rank, arena.size
        self.chunk = arena.layout.slot_bytes
        # One storage for all dtypes, also where the kernel moves everything: a memory profile counts it once.
        self._bytes = torch.frombuffer(arena.segment.map, dtype=torch.uint8) if arena.size > 1 else None
        self._tensors: dict[torch.dtype, torch.Tensor] = {}

    def slot(self, rank: int, k: int, dtype: torch.dtype, numel: int, start: int = 0) -> torch.Tensor:
        """Return the data of a rank's slot for round k as a 1-D tensor, from element ``start``."""
        full = self._tensors.get(dtype)
        if full is None:
            assert self._bytes is not None
            full = self._tensors[dtype] = self._bytes.view(dtype)
        first = self.arena.offset(rank, k) // dtype.itemsize + start
        return full[first : first + numel]

    def rounds(
        self, signature: bytes, count: int, fill: Callable[[int, int], None], take: Callable[[int, int], None]
    ) -> None:
        """Run rounds in which this rank is one ahead with filling.

        Args:
            count: of rounds, at least 1, the same on every rank.
            fill: called with (index, round): put this rank's part into its slot.
            take: called with (index, round): read what is wanted of the peers' slots, waiting for each.
        """
        arena = self.arena
        k = arena.begin()
        fill(0, k)
        arena.meet(k, signature)
        for index in range(1, count):
            ahead = arena.begin()
            fill(index, ahead)
            arena.post(ahead)
            take(index - 1, k)
            k = ahead
        take(count - 1, k)

    def agree(self, signature: bytes) -> None:
        """See that all ranks do the same: return when every rank has called it."""
        self.arena.meet(self.arena.begin(), signature)

    def all_gather(self, signature: bytes, source: int, sizes: Sequence[int], addresses: Sequence[int]) -> None:
        """Copy every rank's bytes to every rank.

        Args:
            source: address of this rank's bytes.
            sizes: how many bytes each rank gives.
            addresses: address of each rank's bytes in this rank's output; this rank's own may be ``source``.
        """
        if self.size == 1:
            futex.copy(addresses[0], source, sizes[0] if addresses[0] != source else 0)
            return
        arena, chunk, mine = self.arena, min(self.chunk, _GATHER_BYTES), sizes[self.rank]
        count = max(1, -(-max(sizes) // chunk))
        if arena.gather(signature, source, sizes, addresses, chunk, count):
            return

        def fill(index: int, k: int) -> None:
            start = index * chunk
            if start < mine:
                futex.copy(arena.address(self.rank, k), source + start, min(chunk, mine - start))

        def take(index: int, k: int) -> None:
            start = index * chunk
            if start < mine and addresses[self.rank] != source:
                futex.copy(addresses[self.rank] + start, source + start, min(chunk, mine - start))
            for other in arena.others:
                # Waited for even if nothing is left to read of it: nobody may run ahead.
                arena.wait(other, k)
                if start < sizes[other]:
                    futex.copy(addresses[other] + start, arena.address(other, k), min(chunk, sizes[other] - start))

        self.rounds(signature, count, fill, take)

    def gather_shared(self, signature: bytes, address: int, part: int) -> None:
        """Wait until every rank's slice is in the buffer, which is the same memory for all."""
        self.agree(signature)

    def broadcast(self, signature: bytes, address: int, nbytes: int, root: int) -> None:
        """Copy the root's bytes to every rank, at ``address``."""
        sizes = [nbytes if r == root else 0 for r in range(self.size)]
        self.all_gather(signature, address, sizes, [address] * self.size)

    def reduce_scatter(
        self, signature: bytes, parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction
    ) -> None:
        """Reduce every rank's part for this rank.

        Args:
            parts: this rank's part for each rank: 1-D, contiguous; the sizes may differ, but are the same everywhere.
            out: 1-D, contiguous, as long as ``parts[rank]``, which it may be.
            reduction: what to do; it is not finished here.
        """
        if self.size == 1:
            out.copy_(parts[0])
            return
        arena, dtype, itemsize = self.arena, out.dtype, out.dtype.itemsize
        step = self.chunk // self.size // 64 * 64 // itemsize  # elements for one rank in a slot
        sources = [part.data_ptr() for part in parts]
        sizes = [part.numel() for part in parts]
        in_place = out.data_ptr() == sources[self.rank]

        def fill(index: int, k: int) -> None:
            start, slot = index * step, arena.address(self.rank, k)
            for other in arena.others:
                if start < sizes[other]:
                    length = min(step, sizes[other] - start) * itemsize
                    futex.copy(slot + other * step * itemsize, sources[other] + start * itemsize, length)

        def take(index: int, k: int) -> None:
            start = index * step
            length = min(step, sizes[self.rank] - start)
            for other in arena.others:
                arena.wait(other, k)
            if length > 0:
                own = parts[self.rank][start : start + length]
                if in_place and self.rank > 1:
                    own = own.clone()  # the first two parts are added up before it is read
                add_up(
                    [
                        own if r == self.rank else self.slot(r, k, dtype, length, self.rank * step)
                        for r in range(self.size)
                    ],
                    out[start : start + length],
                    reduction,
                )

        self.rounds(signature, max(1, -(-max(sizes) // step)), fill, take)

    def reduce_in_place(
        self, signature: bytes, parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction
    ) -> None:
        """Reduce parts that lie in shared memory.

        Args:
            parts: every rank's part for this rank, 1-D. They stay as they are until every rank has let go of them.
            out: 1-D, private.
            reduction: what to do; it is not finished here.
        """
        self.agree(signature)
        add_up(parts, out, reduction)

    def all_reduce(self, signature: bytes, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduce ``tensor`` (1-D, contiguous) over the ranks, in place; ``reduction`` is not finished here."""
        if self.size == 1:
            return
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if self.size == 2 or nbytes <= min(_ALONE_BYTES // self.size, self.chunk):
            self._all_reduce_alone(signature, tensor, reduction)
            return
        parts = shares(tensor, self.size)
        own = parts[self.rank]
        self.reduce_scatter(signature, parts, own, reduction)
        sizes = [part.numel() * part.dtype.itemsize for part in parts]
        self.all_gather(signature, own.data_ptr(), sizes, [part.data_ptr() for part in parts])

    def _all_reduce_alone(self, signature: bytes, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Every rank adds up everything."""
        arena, dtype, itemsize, numel = self.arena, tensor.dtype, tensor.dtype.itemsize, tensor.numel()
        step, source = min(self.chunk, _REDUCE_BYTES) // itemsize, tensor.data_ptr()

        def fill(index: int, k: int) -> None:
            start = index * step
            length = min(step, numel - start) * itemsize
            futex.copy(arena.address(self.rank, k), source + start * itemsize, length)

        def take(index: int, k: int) -> None:
            start = index * step
            length = min(step, numel - start)
            for other in arena.others:
                arena.wait(other, k)
            if length:
                out = tensor[start : start + length]
                # Of two parts, this rank's own is read in place; of more, the output would cover it too early.
                parts = [
                    out if r == self.rank and self.size == 2 else self.slot(r, k, dtype, length)
                    for r in range(self.size)
                ]
                add_up(parts, out, reduction)

        self.rounds(signature, max(1, -(-numel // step)), fill, take)


def shares(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Split a 1-D tensor into a part for each rank; the last may be shorter, or empty."""
    share = -(-tensor.numel() // ranks)
    share = -(-share // 64) * 64
    return [tensor[share * r : share * (r + 1)] for r in range(ranks)]


def add_up(parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction) -> None:
    """Call ``reduction.combine(parts, out)`` on slices that stay in a core's cache."""
    step = _CACHED_BYTES // out.dtype.itemsize
    if len(parts) == 2 or out.numel() <= step:
        reduction.combine(parts, out)
        return
    for start in range(0, out.numel(), step):
        reduction.combine([part[start : start + step] for part in parts], out[start : start + step])
