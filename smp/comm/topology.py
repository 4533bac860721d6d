"""The ranks of a group by host; those of one host can share memory.

Two processes can when they see each other's ``/proc/<pid>/fd``: one boot, one pid namespace, one user.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from smp.runtime import host_id_override


class Member(NamedTuple):
    """A process of the job: the host it is on (an opaque name) and its pid there."""

    host: str
    pid: int


class Topology(NamedTuple):
    """A group's ranks by host.

    ``hosts`` has the group ranks on each host, hosts in the order of their lowest rank; ``host`` and ``local`` are
    this rank's indices in it.
    """

    members: tuple[Member, ...]
    hosts: tuple[tuple[int, ...], ...]
    host: int
    local: int

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The group ranks on this host, this one among them."""
        return self.hosts[self.host]

    @property
    def even(self) -> bool:
        """True if every host has the same number of the group's ranks."""
        return len({len(ranks) for ranks in self.hosts}) == 1


def this_member() -> Member:
    """Return this process, as its peers need to know it."""
    return Member(host_id_override() or _host_id(), os.getpid())


def _host_id() -> str:
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: nobody can share memory with this process
        return f"alone-{os.uname().nodename}-{os.getpid()}"
    return f"{boot} {namespace} {os.getuid()}"


def gather_members(store: dist.Store, rank: int, size: int, timeout: timedelta) -> tuple[Member, ...]:
    """Learn who every rank of the group is. Every rank must call it.

    Raises:
        torch.distributed.DistBackendError: a rank did not come in time; the message names it.
    """
    own = json.dumps(this_member())
    values = gather(store, "member", own, rank, range(size), timeout, "joined the group")
    return tuple(Member(*json.loads(value)) for value in values)


def gather(
    store: dist.Store, name: str, value: str, rank: int, ranks: Sequence[int], timeout: timedelta, what: str
) -> list[str]:
    """Exchange a short text through the store. Every rank must call it.

    Args:
        store: of the group; keys that begin with ``name`` are used, once.
        name: unique in the store.
        rank: this rank in the group.
        ranks: the job's rank of each, for messages.
        what: what a rank that does not come has not done.

    Returns:
        Every rank's text.

    Raises:
        torch.distributed.DistBackendError: a rank did not come in time; the message names it.
    """
    store.set(f"{name}{rank}", value)
    keys = [f"{name}{r}" for r in range(len(ranks))]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [str(r) for r, key in zip(ranks, keys, strict=True) if not store.check([key])]
        raise dist.DistBackendError(
            f"smddp: rank(s) {', '.join(missing)} of {len(ranks)} have not {what} within the timeout of "
            f"{timeout.total_seconds():g} s: see whether they started, and whether they failed"
        ) from error
    return [text.decode() for text in store.multi_get(keys)]


def arrange(members: Sequence[Member], rank: int) -> Topology:
    """Group the ranks by host."""
    by_host: dict[str, list[int]] = {}
    for r, member in enumerate(members):
        by_host.setdefault(member.host, []).append(r)
    hosts = tuple(tuple(ranks) for ranks in by_host.values())
    host = next(i for i, ranks in enumerate(hosts) if rank in ranks)
    return Topology(tuple(members), hosts, host, hosts[host].index(rank))
