"""Reduce-scatter among several hosts: sums inside each host, which alone cross to the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from smp.comm import futex
from smp.comm.intra_host import HostCollectives, add_up
from smp.comm.reduction import Reduction
from smp.comm.topology import Topology
from smp.comm.wire import Message, Wire

_DEPTH = 2  # messages to one host that are on their way at once


class ReduceScatter:
    """One operation, on which all ranks have agreed.

    A batch of the parts for one host is summed inside this host, in rounds of the arena, and sent there. This host's
    own comes last, while the others' sums for it are on their way; it is finished one batch later.

    Args:
        local: this host's collectives.
        wire: to the other hosts.
        topology: of the group.
        chunk: bytes of a message at most, and of a slot that may be used, the same on every host.
        parts: this rank's part for each rank: 1-D, contiguous; the sizes may differ, but are the same everywhere.
        out: 1-D, contiguous, as long as this rank's part, which it may be.
        reduction: what to do; it is not finished here.
        workspace: gives memory for so many elements of a dtype, until the operation has ended.
    """

    def __init__(
        self, local: HostCollectives, wire: Wire, topology: Topology, *, chunk: int,
        parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction,
        workspace: Callable[[int, torch.dtype], torch.Tensor],
    ):  # fmt: skip
        self._local, self._wire, self._hosts = local, wire, topology.hosts
        self._host, self._place = topology.host, topology.local
        self._parts, self._out, self._reduction = parts, out, reduction
        self._itemsize = out.dtype.itemsize
        share = chunk // len(topology.neighbours) // 64 * 64  # bytes of a slot for one rank
        longest = max(part.numel() for part in parts)
        self._piece = min(share // self._itemsize, longest)  # elements of one round
        rounds = min(chunk // (self._piece * self._itemsize), -(-longest // self._piece))
        self._batch = rounds * self._piece  # elements of one message
        # The others' sums for this rank, and this host's for them and for itself, by (batch modulo depth, host).
        shape = (2, _DEPTH, len(self._hosts), self._batch)
        self._incoming, self._sums = workspace(math.prod(shape), out.dtype).view(shape)
        self._arriving: dict[int, list[Message]] = {}
        self._leaving: dict[tuple[int, int], Message] = {}
        # A piece of a batch for a host: the element it starts at, and where the batch ends.
        self._steps = [
            (index, host, start, min((index + 1) * self._batch, longest))
            for index in range(-(-longest // self._batch))
            for host in (*wire.after, self._host)
            for start in range(index * self._batch, min((index + 1) * self._batch, longest), self._piece)
        ]

    def run(self, signature: bytes) -> None:
        """Do it."""
        for index in range(_DEPTH):
            self._expect(index)
        self._local.rounds(signature, len(self._steps), self._fill, self._take)
        self._finish(self._steps[-1][0])
        for message in self._leaving.values():
            message.wait()

    def _part(self, rank: int, start: int, length: int) -> torch.Tensor:
        """At most so many elements of this rank's part for a rank."""
        return self._parts[rank][start : start + length]

    def _sum(self, index: int, host: int) -> torch.Tensor:
        """This host's sums of a batch for this rank's place on a host: made there, or this rank's own part if alone."""
        part = self._part(self._hosts[host][self._place], index * self._batch, self._batch)
        if self._local.size > 1:
            return self._sums[index % _DEPTH, host, : part.numel()]
        return part

    def _expect(self, index: int) -> None:
        """Begin to receive a batch of the others' sums."""
        if size := self._out[index * self._batch :][: self._batch].numel():
            place = self._incoming[index % _DEPTH]
            self._arriving[index] = [self._wire.receive(host, place[host, :size]) for host in self._wire.before]

    def _fill(self, step: int, k: int) -> None:
        """Give the peers a piece of this rank's parts for their places on one host."""
        _, host, start, _ = self._steps[step]
        arena = self._local.arena
        for other in arena.others:
            part = self._part(self._hosts[host][other], start, self._piece)
            slot = arena.address(self._place, k) + other * self._piece * self._itemsize
            futex.copy(slot, part.data_ptr(), part.numel() * self._itemsize)

    def _take(self, step: int, k: int) -> None:
        """Sum a piece for this rank's place on one host, and send the batch there when it is complete."""
        index, host, start, end = self._steps[step]
        key, offset = (index % _DEPTH, host), start - index * self._batch
        if not offset and key in self._leaving:
            self._leaving.pop(key).wait()
        if self._local.size > 1:
            own = self._part(self._hosts[host][self._place], start, self._piece)
            self._sum_slots(own, k, self._sums[key][offset : offset + own.numel()])
        if start + self._piece < end:
            return
        if host != self._host:
            sums = self._sum(index, host)
            if sums.numel():
                self._leaving[key] = self._wire.send(host, sums)
        elif index:
            self._finish(index - 1)

    def _sum_slots(self, own: torch.Tensor, k: int, out: torch.Tensor) -> None:
        """Reduce this host's parts in rank order: this rank's ``own``, and the peers' in their slots."""
        local = self._local
        for other in local.arena.others:
            local.arena.wait(other, k)
        if own.numel():
            start = self._place * self._piece
            parts = [
                own if r == self._place else local.slot(r, k, own.dtype, own.numel(), start) for r in range(local.size)
            ]
            add_up(parts, out, self._reduction)

    def _finish(self, index: int) -> None:
        """Reduce the hosts' sums of a batch, in the order of hosts."""
        out = self._out[index * self._batch :][: self._batch]
        if not out.numel():
            return
        for message in self._arriving.pop(index):
            message.wait()
        own = self._sum(index, self._host)
        if own.data_ptr() == out.data_ptr() and self._host > 1:
            own = own.clone()  # the first two sums are added up before it is read
        place = self._incoming[index % _DEPTH]
        sums = [own if host == self._host else place[host, : out.numel()] for host in range(len(self._hosts))]
        add_up(sums, out, self._reduction)
        self._expect(index + _DEPTH)
