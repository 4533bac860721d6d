"""The ranks of the job as the watchdog sees them: host and process, last published phase, whether it is alive."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from smp.comm.peers import Peers
from smp.comm.topology import gather, this_member

T = TypeVar("T")
ANSWER_SECONDS = 5.0


class Activity(NamedTuple):
    """Phase of a rank, the step it is in (1-based), and since when (seconds since 1970)."""

    phase: str
    step: int
    since: float

    def __str__(self) -> str:
        return f"{self.phase!r}" if not self.step else f"{self.phase!r} of step {self.step}"


class Member(NamedTuple):
    """A rank's process. ``identity`` is alike for processes that see each other's ``/proc``."""

    rank: int
    identity: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


class Seen(NamedTuple):
    """Last state that a rank published, as JSON: its phase, and a heartbeat that grows with every publication."""

    activity: Activity
    beat: int

    @classmethod
    def parse(cls, text: bytes) -> Seen:
        """Read what :func:`json.dumps` wrote."""
        activity, beat = json.loads(text)
        return cls(Activity(*activity), beat)


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of ``call``; None where it fails or takes longer, as the store's host may be gone."""
    found: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def process_state(pid: int) -> str:
    """Describe the state of a process of this host, for a sentence; empty if it runs or sleeps as usual."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "its process has ended"
    return {"T": "its process is stopped", "t": "its process is in a debugger", "Z": "its process has ended"}.get(
        letter, "its process waits for a disk or network file system" if letter == "D" else ""
    )


class Members:
    """All ranks of the job; making it is collective, as each publishes its host and process in the store."""

    def __init__(self, rank: int, size: int, timeout: timedelta):
        self.rank = rank
        self._base = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore("smp/faults", self._base)
        mine = json.dumps([this_member().host, socket.gethostname(), os.getpid()])
        said = gather(self.store, "member", mine, rank, range(size), timeout, "told where they are")
        self.members = [Member(r, *json.loads(text)) for r, text in enumerate(said)]
        self._here = here = self.of_host(rank)
        self._peers: Peers | None = None
        with contextlib.suppress(OSError):  # a system that watches no processes: then nobody is ever seen dead
            peers = Peers([m.pid for m in here], [m.rank for m in here], [m.rank for m in here].index(rank))
            for local in range(len(here)):
                peers.died(local)  # looked up now, before the number can be given to another process
            self._peers = peers

    def dead(self) -> list[Member]:
        """Return the ranks of this host whose process has ended."""
        if self._peers is None:
            return []
        return [member for i, member in enumerate(self._here) if self._peers.died(i)]

    def state(self, member: Member) -> str:
        """Return :func:`process_state` of a rank of this host; empty for any other."""
        return process_state(member.pid) if member in self._here else ""

    def of_host(self, rank: int) -> list[Member]:
        """Return the ranks on the host of ``rank``, itself included."""
        return [member for member in self.members if member.identity == self.members[rank].identity]

    def connection(self) -> Any:
        """Open a store connection for the calling thread: a shared one blocks while another thread waits in it."""
        base = self._base
        if hasattr(base, "clone"):
            base = base.clone()
            base.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        return dist.PrefixStore("smp/faults", base)

    def seen(self) -> list[Seen | None] | None:
        """Return the last state published by each rank; None where the store does not answer."""

        def read() -> list[Seen | None]:
            store, found = self.connection(), []
            for member in self.members:
                key = f"at{member.rank}"
                found.append(Seen.parse(store.get(key)) if store.check([key]) else None)
            return found

        return within(ANSWER_SECONDS, read)


def describe_hang(
    members: Sequence[Member],
    seen: Sequence[Seen | None],
    silent: set[int],
    *,
    state: Callable[[Member], str] = lambda member: "",
    now: float | None = None,
) -> str:
    """Name the ranks that the others wait for, in a sentence.

    Args:
        seen: the last state each has published.
        silent: ranks that have stopped publishing.
        state: describes a rank's process.
        now: seconds since 1970.
    """
    now = time.time() if now is None else now
    activities = {m.rank: s.activity for m, s in zip(members, seen, strict=True) if s is not None}
    alive = {rank: activity for rank, activity in activities.items() if rank not in silent}
    culprits = sorted(silent | ({m.rank for m in members} - activities.keys()))
    if not culprits and alive:
        furthest = max(_progress(activity) for activity in alive.values())
        culprits = sorted(rank for rank, activity in alive.items() if _progress(activity) < furthest)
    parts = []
    for rank in culprits:
        member = members[rank]
        why = state(member) or ("its process does not answer" if rank in silent or rank not in activities else "")
        if rank in activities:
            age = now - activities[rank].since
            said = f"{member} last seen in {activities[rank]}, {age:.0f} s ago"
        else:
            said = f"{member} has not said where it is"
        parts.append(f"{said} ({why})" if why else said)
    by_activity: dict[str, list[int]] = {}
    for rank in sorted(alive.keys() - set(culprits)):
        by_activity.setdefault(str(alive[rank]), []).append(rank)
    for activity, ranks in by_activity.items():
        since = max(now - alive[r].since for r in ranks)
        who = (
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {'wait' if len(ranks) > 1 else 'waits'}"
        )
        parts.append(f"{who} in {activity}" + ("" if culprits else f" for {since:.0f} s"))
    return "; ".join(parts)


PHASES = ("start", "data", "forward", "backward", "optimizer", "validation", "agreement", "checkpoint", "end")


def _progress(activity: Activity) -> tuple[int, int]:
    return activity.step, PHASES.index(activity.phase) if activity.phase in PHASES else len(PHASES)
