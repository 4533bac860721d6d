"""Connect a group: find out which ranks share a host, then set up shared memory and connections between hosts."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from smp.comm.arena import Arena, Layout
from smp.comm.hosts import HostsCollectives
from smp.comm.intra_host import HostCollectives
from smp.comm.kernel import load
from smp.comm.peers import Peers
from smp.comm.segment import Segment, share
from smp.comm.settings import Settings, read_settings
from smp.comm.topology import Member, Topology, arrange, gather, gather_members
from smp.comm.wire import Wire

# What a group does itself: in one host, or across several.
Collectives = HostCollectives | HostsCollectives


@dataclasses.dataclass
class Connection:
    """A group's means of communication, made at its first collective.

    Attributes:
        store: the group's, with keys that no other group of its name has used.
        collectives: None if the inner backend does everything.
        arena: this host's shared memory, or None.
        wire: to the other hosts, or None.
        why: for the report, if ``collectives`` is None.
    """

    store: dist.Store
    settings: Settings
    topology: Topology
    peers: Peers
    collectives: Collectives | None
    arena: Arena | None
    wire: Wire | None
    why: str

    @property
    def path(self) -> str:
        """The path that the report names."""
        if self.wire is None:
            return "shared memory"
        return "shared memory and network" if self.peers.size > 1 else "network"

    def share(self, name: str, size: int, timeout: float) -> tuple[Segment | None, str]:
        """Make more memory that this host's ranks share: see :func:`smp.comm.segment.share`."""
        key = f"host{self.topology.host}/{name}"
        return share(self.store, key, size, peers=self.peers, timeout=timedelta(seconds=timeout))

    def start(self, operation: str, number: int, nbytes: int, timeout: float) -> None:
        """Note the beginning of a collective where the peers can see it."""
        if self.arena is not None:
            self.arena.start(operation, number, nbytes, timeout)
        if self.wire is not None:
            self.wire.start(operation, number, timeout)

    def end(self) -> None:
        """Note its end."""
        if self.arena is not None:
            self.arena.end()

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one has stopped, and why."""
        if self.arena is not None:
            self.arena.fail(reason)
        if self.wire is not None:
            self.wire.close(reason)


# Keys in the store must not be met again by a group of the same name that is made after this one is destroyed.
_generations: collections.Counter[str] = collections.Counter()
_world: tuple[Member, ...] = ()  # the processes of the default group; its subgroups need not ask again


def join(options: Any) -> Callable[[timedelta], Connection]:
    """Prepare a group's connection, which is made by calling the result once.

    The default group learns here who all the processes are: ``init_process_group`` waits for everyone anyway.
    """
    global _world
    name = str(options.group_id)
    _generations[name] += 1
    store = dist.PrefixStore(f"smddp{_generations[name]}", options.store)
    rank, size, ranks = options.group_rank, options.group_size, list(options.global_ranks_in_group)
    settings = read_settings()
    members: Sequence[Member] = ()
    if not ranks:
        members = _world = gather_members(store, rank, size, options.timeout)
        ranks = list(range(size))
    elif _world and dist.is_initialized() and dist.get_backend(dist.group.WORLD) == "smddp":
        members = [_world[r] for r in ranks]

    def connect(timeout: timedelta) -> Connection:
        topology = arrange(members or gather_members(store, rank, size, timeout), rank)
        return _connect(store, topology, ranks, name, settings, timeout)

    return connect


def _connect(
    store: dist.Store, topology: Topology, ranks: Sequence[int], name: str, settings: Settings, timeout: timedelta
) -> Connection:
    here = topology.neighbours
    peers = Peers([topology.members[r].pid for r in here], [ranks[r] for r in here], topology.local)
    arena = local = wire = None
    if not topology.even:
        why = "the hosts have unequal numbers of the group's ranks"
    else:
        # The first rank's settings hold: the others learn the size from the segment.
        size = Layout.with_scratch(settings.scratch, len(here)).total
        segment, why = share(store, f"host{topology.host}/arena", size, peers=peers, timeout=timeout)
        if segment is not None:
            arena = Arena(segment, peers, name, load() if settings.kernel and peers.size > 1 else None)
            local = HostCollectives(arena)
    collectives: Collectives | None = local
    if len(topology.hosts) > 1 and topology.even:
        chunk, why = _agree(store, topology, ranks, local.chunk if local is not None else 0, why, timeout)
        if local is not None and not why:
            wire = Wire(store, topology, ranks, name, timeout)
            collectives = HostsCollectives(local, wire, topology, ranks=ranks, group=name, chunk=chunk)
    collectives = None if why else collectives
    return Connection(store, settings, topology, peers, collectives=collectives, arena=arena, wire=wire, why=why)


def _agree(
    store: dist.Store, topology: Topology, ranks: Sequence[int], chunk: int, why: str, timeout: timedelta
) -> tuple[int, str]:
    """Agree with all ranks of all hosts: on the bytes of a message, or on why there will be none."""
    own = topology.neighbours[topology.local]
    answers = gather(
        store, "hosts", json.dumps([chunk, why]), own, ranks, timeout, "come to the group's first collective"
    )
    chunks, reasons = zip(*map(json.loads, answers), strict=True)
    problems = [f"on the host of rank {rank}: {reason}" for rank, reason in zip(ranks, reasons, strict=True) if reason]
    return min(chunks), "".join(problems[:1])
