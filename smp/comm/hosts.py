"""Collectives among several hosts: shared memory inside each, and between them only what must cross.

Each rank talks to its counterparts, the ranks with its local rank on the other hosts, so a host sends as many streams
as it has ranks, and no byte twice. What arrives goes on to the host's other ranks through the arena while the next
chunk is on its way.

Every operation begins with a meeting: when all ranks of a host do the same, each tells its counterparts what that is.
So every rank knows what all hosts do before anything is written, and up to 64 KiB of data come along. Nobody can leave
a meeting before everybody has begun the operation, which makes it a barrier.

Sums are made in rank order inside each host, then over the hosts in the order of their lowest ranks: the same bits on
every rank and in every run, whatever the size.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from smp.comm import futex
from smp.comm.arena import Mismatch, common_part
from smp.comm.intra_host import HostCollectives, add_up, shares
from smp.comm.reduction import Reduction
from smp.comm.topology import Topology
from smp.comm.wire import PAYLOAD, Message, Wire, memory

# Up to so many bytes, each rank of a host carries all of a broadcast or sum: that spares a round of the arena.
_CARRIED_BYTES = 4096


class _Batch(NamedTuple):
    """A batch of a reduce-scatter whose messages are on their way: the sums of all hosts for this rank."""

    sums: list[torch.Tensor]
    messages: list[Message]
    out: torch.Tensor

    def finish(self, reduction: Reduction) -> None:
        """Wait for the messages and add up the sums, in the order of hosts."""
        for message in self.messages:
            message.wait()
        if self.out.numel():
            add_up(self.sums, self.out, reduction)


class HostsCollectives:
    """The collectives of one group with the same number of ranks on every host. Sizes and addresses are by group rank.

    Args:
        local: those among this host's ranks.
        ranks: the job's rank of each of the group's ranks, for messages.
        group: name of the group, for messages.
        chunk: bytes of one message at most, the same on every host; no more than a slot of the arena.

    Raises (all methods):
        smp.comm.arena.Mismatch: the signatures differ; nothing has been written, the group continues.
        torch.distributed.DistBackendError: a rank died, failed, or did not come in time.
    """

    def __init__(
        self, local: HostCollectives, wire: Wire, topology: Topology, *,
        ranks: Sequence[int], group: str, chunk: int,
    ):  # fmt: skip
        self.local, self.wire, self.hosts = local, wire, topology.hosts
        self.host, self.local_rank, self.mates = topology.host, topology.local, topology.neighbours
        self.rank = self.mates[self.local_rank]
        self._arena, self._others = local.arena, local.arena.others
        self._ranks, self._group, self._slot = ranks, group, chunk
        # Where nothing is handed on, nothing is gained by cutting what is moved.
        self._chunk = chunk if self._others else 2**30
        self._scratch = ctypes.create_string_buffer(_CARRIED_BYTES)
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def _meet(self, signature: bytes, locally: Callable[[], None]) -> None:
        """See that all ranks of all hosts do the same.

        Args:
            locally: this host's part, which compares its ranks' signatures and fills the payloads.
        """
        objection, local = "", None
        try:
            locally()
        except Mismatch as error:
            objection, local = error.calls, error
        calls = self.wire.meet(common_part(signature), objection)
        if objection or any(what != calls[self.host] for what in calls):
            messages = [
                other or f"rank(s) {', '.join(str(self._ranks[r]) for r in ranks)}: {what.decode(errors='replace')}"
                for ranks, (what, other) in zip(self.hosts, calls, strict=True)
            ]
            raise Mismatch(self._group, "; ".join(messages)) from local

    def agree(self, signature: bytes) -> None:
        """See that all ranks do the same: return when every rank has called it."""
        self._meet(signature, lambda: self.local.agree(signature))

    def _put(self, k: int, source: int, nbytes: int) -> None:
        """Copy into this rank's slot for round k, if there is anybody to read it."""
        if self._others:
            futex.copy(self._arena.address(self.local_rank, k), source, nbytes)

    def _get(self, other: int, k: int, address: int, nbytes: int) -> None:
        """Wait for a local rank's round k, and copy from its slot if ``nbytes`` is positive."""
        self._arena.wait(other, k)
        if nbytes > 0:
            futex.copy(address, self._arena.address(other, k), nbytes)

    # --- all_gather

    def all_gather(self, signature: bytes, source: int, sizes: Sequence[int], addresses: Sequence[int]) -> None:
        """Copy every rank's bytes to every rank: see :meth:`HostCollectives.all_gather`."""
        if max(sizes) <= PAYLOAD:
            self._gather_packed(signature, source, sizes, addresses)
            self._hand_on(signature, source, sizes, addresses, {})
        else:
            self.agree(signature)
            self._all_gather(signature, source, sizes, addresses)

    def _gather_packed(self, signature: bytes, source: int, sizes: Sequence[int], addresses: Sequence[int]) -> None:
        """Gather this rank's bytes and its counterparts' with the meeting."""

        def locally() -> None:
            self.local.agree(signature)
            self.wire.pack_for_all(source, sizes[self.rank])

        self._meet(signature, locally)
        for host in self.wire.before:
            r = self.hosts[host][self.local_rank]
            futex.copy(addresses[r], self.wire.incoming(host), sizes[r])

    def _send_and_receive(
        self, source: int, sizes: Sequence[int], addresses: Sequence[int]
    ) -> tuple[list[Message], dict[tuple[int, int], Message]]:
        """Begin to send this rank's bytes to its counterparts, and to receive theirs into the output.

        Returns:
            What leaves, and what arrives by (host, byte it starts at).
        """
        ends = [sizes[ranks[self.local_rank]] for ranks in self.hosts]
        leaving, arriving = [], {}
        for start in range(0, max(ends), self._chunk):
            for host in self.wire.before:
                if (size := min(self._chunk, ends[host] - start)) > 0:
                    address = addresses[self.hosts[host][self.local_rank]] + start
                    arriving[host, start] = self.wire.receive(host, memory(address, size))
            if (size := min(self._chunk, ends[self.host] - start)) > 0:
                leaving += [self.wire.send(host, memory(source + start, size)) for host in self.wire.after]
        return leaving, arriving

    def _all_gather(self, signature: bytes, source: int, sizes: Sequence[int], addresses: Sequence[int]) -> None:
        """Gather when all ranks have agreed."""
        leaving, arriving = self._send_and_receive(source, sizes, addresses)
        self._hand_on(signature, source, sizes, addresses, arriving)
        for message in leaving:
            message.wait()

    def _hand_on(
        self, signature: bytes, source: int, sizes: Sequence[int], addresses: Sequence[int],
        arriving: dict[tuple[int, int], Message],
    ) -> None:  # fmt: skip
        """Share this rank's bytes and those of its counterparts inside the host.

        This host's go first, while those that are still ``arriving`` (see :meth:`_send_and_receive`) are on their way.
        """
        longest = [max(sizes[r] for r in ranks) for ranks in self.hosts]
        steps = [(self.host, start) for start in range(0, longest[self.host], self._chunk)]
        for start in range(0, max(longest), self._chunk):
            steps += [(host, start) for host in self.wire.before if start < longest[host]]

        def fill(index: int, k: int) -> None:
            host, start = steps[index]
            r = self.hosts[host][self.local_rank]
            if (size := min(self._chunk, sizes[r] - start)) > 0:
                if (host, start) in arriving:
                    arriving.pop((host, start)).wait()
                self._put(k, (source if host == self.host else addresses[r]) + start, size)

        def take(index: int, k: int) -> None:
            host, start = steps[index]
            size = min(self._chunk, sizes[self.rank] - start)
            if host == self.host and size > 0 and addresses[self.rank] != source:
                futex.copy(addresses[self.rank] + start, source + start, size)
            for other in self._others:
                r = self.hosts[host][other]
                self._get(other, k, addresses[r] + start, min(self._chunk, sizes[r] - start))

        if steps:
            self.local.rounds(signature, len(steps), fill, take)

    def gather_shared(self, signature: bytes, address: int, part: int) -> None:
        """Complete a gathered buffer that this host's ranks share, whose pages every rank of the host sees.

        On the other hosts :meth:`all_gather` may be called instead: the messages are the same.

        Args:
            signature: of the operation; what is different on other hosts comes after ``" @ "``.
            address: of the buffer in this process; each rank's ``part`` bytes of it are filled.
            part: bytes of each rank.
        """
        sizes = [part] * len(self._ranks)
        addresses = [address + r * part for r in range(len(sizes))]
        own = addresses[self.rank]
        if part <= PAYLOAD:
            self._gather_packed(signature, own, sizes, addresses)
        else:
            self.agree(signature)
            leaving, arriving = self._send_and_receive(own, sizes, addresses)
            for message in (*leaving, *arriving.values()):
                message.wait()
        self.local.agree(signature)

    # --- broadcast

    def broadcast(self, signature: bytes, address: int, nbytes: int, root: int) -> None:
        """Copy the root's bytes to every rank, at ``address``."""
        host = next(h for h, ranks in enumerate(self.hosts) if root in ranks)
        local_root = self.hosts[host].index(root)
        if nbytes > _CARRIED_BYTES:
            self.agree(signature)
            self._broadcast(signature, address, nbytes, host, local_root)
            return
        scratch = ctypes.addressof(self._scratch)

        def locally() -> None:
            if host != self.host:
                self.local.agree(signature)
                return
            if self.rank == root:
                futex.copy(scratch, address, nbytes)
            self.local.broadcast(signature, scratch, nbytes, local_root)
            self.wire.pack_for_all(scratch, nbytes)

        self._meet(signature, locally)
        if self.rank != root:
            futex.copy(address, scratch if host == self.host else self.wire.incoming(host), nbytes)

    def _broadcast(self, signature: bytes, address: int, nbytes: int, host: int, local_root: int) -> None:
        """Broadcast inside the root's host, each of whose ranks sends a share that the other hosts then gather."""
        share = -(-nbytes // (64 * len(self.mates))) * 64
        sizes, addresses = [0] * len(self._ranks), [address] * len(self._ranks)
        for local, rank in enumerate(self.hosts[host]):
            start = min(local * share, nbytes)
            sizes[rank], addresses[rank] = min(share, nbytes - start), address + start
        if host != self.host:
            self._all_gather(signature, address, sizes, addresses)
            return
        self.local.broadcast(signature, address, nbytes, local_root)
        leaving, _ = self._send_and_receive(addresses[self.rank], sizes, addresses)
        for message in leaving:
            message.wait()

    # --- reductions

    def reduce_scatter(
        self, signature: bytes, parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction
    ) -> None:
        """Reduce every rank's part for this rank: see :meth:`HostCollectives.reduce_scatter`."""
        if max(part.numel() for part in parts) * out.dtype.itemsize > PAYLOAD:
            self.agree(signature)
            self._reduce_scatter(signature, parts, out, reduction)
            return
        # Each local rank makes this host's sums for its counterparts and itself.
        by_local_rank = [torch.cat([parts[ranks[i]] for ranks in self.hosts]) for i in range(len(self.mates))]
        sums = torch.empty_like(by_local_rank[self.local_rank])
        by_host = sums.split([parts[ranks[self.local_rank]].numel() for ranks in self.hosts])

        def locally() -> None:
            self.local.reduce_scatter(signature, by_local_rank, sums, reduction)
            for host in self.wire.after:
                self.wire.pack(host, by_host[host].data_ptr(), by_host[host].numel() * out.dtype.itemsize)

        self._meet(signature, locally)
        self._combine_payloads(by_host[self.host], out, reduction)

    def _reduce_scatter(
        self, signature: bytes, parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction
    ) -> None:
        """Reduce batch by batch: sum inside this host, send the other hosts their sums, and add theirs one batch later.

        The other hosts' sums of a batch are on their way while this host sums the next one.
        """
        longest = max(part.numel() for part in parts)
        batch = min(self._slot // out.dtype.itemsize, longest)  # elements of one message
        shape = (2, 2, len(self.hosts), batch)  # two batches at once; of each what is received and what is sent
        workspace = self._workspace_of(math.prod(shape), out.dtype).view(shape)
        pending: _Batch | None = None
        for index, start in enumerate(range(0, longest, batch)):
            begun = self._begin_batch(
                signature, [part[start : start + batch] for part in parts], out[start : start + batch],
                workspace[index % 2], reduction,
            )  # fmt: skip
            if pending is not None:
                pending.finish(reduction)
            pending = begun
        assert pending is not None
        pending.finish(reduction)

    def _begin_batch(
        self, signature: bytes, parts: Sequence[torch.Tensor], out: torch.Tensor, buffers: torch.Tensor,
        reduction: Reduction,
    ) -> _Batch:  # fmt: skip
        """Begin to receive the other hosts' sums for this rank, and to send them this host's sums.

        Args:
            parts: this rank's part of the batch for each rank.
            out: where the result of the batch goes.
            buffers: to receive into, and for this host's sums: (2, hosts, elements of a batch).
        """
        received, summed = buffers[0, :, : out.numel()], buffers[1]
        messages = [self.wire.receive(host, received[host]) for host in self.wire.before] if out.numel() else []
        sums = list(received)
        for host in (*self.wire.after, self.host):
            total = parts[self.hosts[host][self.local_rank]]
            if self._others:
                total = summed[host, : total.numel()]
                self.local.reduce_scatter(signature, [parts[rank] for rank in self.hosts[host]], total, reduction)
            if host == self.host:
                # In place, the first two sums are added up before this one is read.
                sums[host] = total.clone() if total.data_ptr() == out.data_ptr() and self.host > 1 else total
            elif total.numel():
                messages.append(self.wire.send(host, total))
        return _Batch(sums, messages, out)

    def _combine_payloads(self, own: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
        """Reduce what came with the meeting and this host's ``own``, in the order of hosts."""
        nbytes = own.numel() * own.dtype.itemsize
        if nbytes:
            parts = [
                own if host == self.host else memory(self.wire.incoming(host), nbytes).view(own.dtype)
                for host in range(len(self.hosts))
            ]
            reduction.combine(parts, out)

    def all_reduce(self, signature: bytes, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduce ``tensor`` (1-D, contiguous) over the ranks, in place; ``reduction`` is not finished here."""
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if nbytes > _CARRIED_BYTES:
            parts = shares(tensor, len(self._ranks))
            own = parts[self.rank]
            self.reduce_scatter(signature, parts, own, reduction)
            sizes = [part.numel() * part.dtype.itemsize for part in parts]
            self._all_gather(signature, own.data_ptr(), sizes, [part.data_ptr() for part in parts])
            return
        sums = tensor.clone()

        def locally() -> None:
            self.local.all_reduce(signature, sums, reduction)
            self.wire.pack_for_all(sums.data_ptr(), nbytes)

        self._meet(signature, locally)
        self._combine_payloads(sums, tensor, reduction)

    def _workspace_of(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory to work in, kept for the next time: fresh pages cost as much as what is done with them."""
        nbytes = numel * dtype.itemsize
        if self._workspace.numel() < nbytes:
            self._workspace = torch.empty(nbytes, dtype=torch.uint8)
        return self._workspace[:nbytes].view(dtype)
