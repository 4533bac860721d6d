"""The processes of a group on this host, and whether they live.

A pidfd becomes readable the moment its process ends, also as a zombie, which ``kill(pid, 0)`` would call alive.
"""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Sequence


class _Process:
    """A watched process. One descriptor per process, however many groups share it."""

    def __init__(self, pid: int):
        try:
            self.descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.descriptor = -1
            return
        weakref.finalize(self, os.close, self.descriptor)

    def ended(self) -> bool:
        if self.descriptor < 0:
            return True
        poll = select.poll()  # of its own: groups ask in several threads, and an object takes one at a time
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))


_processes: weakref.WeakValueDictionary[int, _Process] = weakref.WeakValueDictionary()


def _watch(pid: int) -> _Process:
    process = _processes.get(pid)
    if process is None:
        process = _processes[pid] = _Process(pid)
    return process


class Peers:
    """The ranks of one group on this host.

    Args:
        pids: by local rank.
        ranks: the job's rank of each, to name it.
        local: this process's place among them.
    """

    def __init__(self, pids: Sequence[int], ranks: Sequence[int], local: int):
        self.pids, self.ranks, self.local, self.size = tuple(pids), tuple(ranks), local, len(pids)
        self._watched: list[_Process | None] = [None] * self.size

    def label(self, local: int) -> str:
        """How messages name a peer."""
        return f"rank {self.ranks[local]} (pid {self.pids[local]})"

    def died(self, local: int) -> bool:
        """Whether this peer's process has ended."""
        if local == self.local:
            return False
        if (process := self._watched[local]) is None:
            process = self._watched[local] = _watch(self.pids[local])
        return process.ended()
