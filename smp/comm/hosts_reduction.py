"""Reduce-scatter among several hosts: sums inside each host, which alone cross to the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from smp.comm import futex
from smp.comm.host import HostCollectives, LoneCollectives, add_up
from smp.comm.reduction import Reduction
from smp.comm.topology import Topology
from smp.comm.wire import Message, Wire

_DEPTH = 2  # pieces that are on their way at once


class ReduceScatter:
    """One operation, on which all ranks have agreed.

    A piece of the parts for one host is summed inside this host, in a round of the arena, and sent there. This host's
    own piece comes last, while the others' sums for it are on their way; it is finished one piece later.

    Args:
        local: this host's collectives.
        wire: to the other hosts.
        topology: of the group.
        chunk: bytes of a slot that may be used, the same on every host.
        parts: this rank's part for each rank: 1-D, contiguous; the sizes may differ, but are the same everywhere.
        out: 1-D, contiguous, as long as this rank's part, which it may be.
        reduction: what to do; it is not finished here.
        workspace: gives memory for so many elements of a dtype, until the operation has ended.
    """

    def __init__(
        self, local: HostCollectives | LoneCollectives, wire: Wire, topology: Topology, *, chunk: int,
        parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction,
        workspace: Callable[[int, torch.dtype], torch.Tensor],
    ):  # fmt: skip
        self._local, self._wire, self._hosts = local, wire, topology.hosts
        self._host, self._place, self._rank = topology.host, topology.local, topology.neighbours[topology.local]
        self._order = (*wire.after, self._host)
        self._parts, self._out, self._reduction = parts, out, reduction
        self._sizes, self._itemsize = [part.numel() for part in parts], out.dtype.itemsize
        share = chunk // len(topology.neighbours) // 64 * 64  # bytes of a slot for one rank
        self._piece = min(share // self._itemsize, max(self._sizes))
        # The others' sums for this rank, and this host's for them and for itself, by (piece modulo depth, host).
        shape = (2, _DEPTH, len(self._hosts), self._piece)
        self._incoming, self._sums = workspace(math.prod(shape), out.dtype).view(shape)
        self._own: dict[int, torch.Tensor] = {}
        self._arriving: dict[int, list[Message]] = {}
        self._leaving: dict[tuple[int, int], Message] = {}

    def run(self, signature: bytes) -> None:
        """Do it."""
        count = -(-max(self._sizes) // self._piece)
        for index in range(_DEPTH):
            self._expect(index)
        self._local.rounds(signature, count * len(self._hosts), self._fill, self._take)
        self._finish(count - 1)
        for message in self._leaving.values():
            message.wait()

    def _length(self, rank: int, index: int) -> int:
        return max(0, min(self._piece, self._sizes[rank] - index * self._piece))

    def _expect(self, index: int) -> None:
        """Begin to receive a piece of the others' sums."""
        if size := self._length(self._rank, index):
            place = self._incoming[index % _DEPTH]
            self._arriving[index] = [self._wire.receive(host, place[host, :size]) for host in self._wire.before]

    def _fill(self, step: int, k: int) -> None:
        """Give the peers a piece of this rank's parts for their places on one host."""
        index, host = step // len(self._hosts), self._order[step % len(self._hosts)]
        if isinstance(self._local, HostCollectives):
            arena = self._local.arena
            for other in arena.others:
                rank = self._hosts[host][other]
                if size := self._length(rank, index):
                    slot = arena.address(self._place, k) + other * self._piece * self._itemsize
                    source = self._parts[rank].data_ptr() + index * self._piece * self._itemsize
                    futex.copy(slot, source, size * self._itemsize)

    def _take(self, step: int, k: int) -> None:
        """Sum the piece for this rank's place on one host, and send it there."""
        index, host = step // len(self._hosts), self._order[step % len(self._hosts)]
        rank = self._hosts[host][self._place]
        if isinstance(self._local, HostCollectives):
            for other in self._local.arena.others:
                self._local.arena.wait(other, k)
        if size := self._length(rank, index):
            key = (index % _DEPTH, host)
            if key in self._leaving:
                self._leaving.pop(key).wait()
            sums = self._sum_here(self._parts[rank][index * self._piece :][:size], k, self._sums[key][:size])
            if host == self._host:
                self._own[index] = sums
            else:
                self._leaving[key] = self._wire.send(host, sums)
        if host == self._host and index:
            self._finish(index - 1)

    def _sum_here(self, own: torch.Tensor, k: int, out: torch.Tensor) -> torch.Tensor:
        """Reduce this host's parts in rank order, this rank's ``own`` and the peers' in their slots; often ``out``."""
        if not isinstance(self._local, HostCollectives):
            return own
        start = self._place * self._piece
        parts = [
            own if r == self._place else self._local.slot(r, k, own.dtype, own.numel(), start)
            for r in range(self._local.size)
        ]
        add_up(parts, out, self._reduction)
        return out

    def _finish(self, index: int) -> None:
        """Reduce the hosts' sums of a piece, in the order of hosts."""
        if size := self._length(self._rank, index):
            for message in self._arriving.pop(index):
                message.wait()
            own, out = self._own.pop(index), self._out[index * self._piece :][:size]
            if own.data_ptr() == out.data_ptr() and self._host > 1:
                own = own.clone()  # the first two sums are added up before it is read
            place = self._incoming[index % _DEPTH]
            sums = [own if host == self._host else place[host, :size] for host in range(len(self._hosts))]
            add_up(sums, out, self._reduction)
            self._expect(index + _DEPTH)
