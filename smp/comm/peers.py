"""The processes of a group on this host, and whether they live.

A pidfd becomes readable the moment its process ends, also as a zombie, which ``kill(pid, 0)`` would call alive.
"""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Sequence


class Peers:
    """The ranks of one group on this host.

    Args:
        pids: by local rank.
        ranks: the job's rank of each, to name it.
        local: this process's local rank.
    """

    def __init__(self, pids: Sequence[int], ranks: Sequence[int], local: int):
        self.pids, self.ranks, self.local, self.size = tuple(pids), tuple(ranks), local, len(pids)
        self._descriptors: dict[int, int] = {}  # by local rank; -1: it had ended when it was first asked for

    def label(self, local: int) -> str:
        """Return the name of a peer in messages."""
        return f"rank {self.ranks[local]} (pid {self.pids[local]})"

    def died(self, local: int) -> bool:
        """Return whether this peer's process has ended."""
        if local == self.local:
            return False
        if local not in self._descriptors:
            self._descriptors[local] = self._open(self.pids[local])
        if (descriptor := self._descriptors[local]) < 0:
            return True
        poll = select.poll()  # a separate one: several threads ask, and an object takes one at a time
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def _open(self, pid: int) -> int:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return -1
        weakref.finalize(self, os.close, descriptor)
        return descriptor
