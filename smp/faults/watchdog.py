"""Watch this rank from a thread: has it hung, has a rank of this host died?

The main thread records its phase with :meth:`Watchdog.enter`. Two threads read that. One publishes it to the store, for
the other ranks; a process that is stopped publishes nothing, and so is found. The other one waits for nothing but time,
and ends the process where the main thread cannot: it hangs in a collective that nobody will complete, or has not
noticed that a peer has died.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from smp.faults.members import Activity, Member, Members, Seen, describe_hang, within
from smp.log import say

TICK_SECONDS = 0.25
PUBLISH_SECONDS = 2.0
NOTICE_SECONDS = 3.0  # how long the main thread has to notice by itself that a peer has died
NCCL_SECONDS = 30.0  # how long NCCL's recorder may take for the report
LENIENT = {"start": 6.0, "checkpoint": 6.0}  # loading weights and writing large files take what they take


class Watchdog:
    """Heartbeat and timeout of this rank; see the module.

    Args:
        timeout: seconds in one phase after which the run ends; 0: no limit.
        operations: the latest collective of every rank, by group, for the report.
        nccl: those of this rank over NCCL, in sentences.
    """

    def __init__(
        self, rank: int, *, timeout: float, operations: Callable[[], dict[str, Any]] = dict,
        nccl: Callable[[], list[str]] = list,
    ):  # fmt: skip
        self.activity = Activity("start", 0, time.time())
        self.members: Members | None = None
        self._rank, self._timeout, self._operations, self._nccl = rank, timeout, operations, nccl
        self._period = min(PUBLISH_SECONDS, timeout / 5) if timeout else PUBLISH_SECONDS
        self._connected = False
        self._entered, self._spent = time.monotonic(), collections.defaultdict[str, float](float)
        self._stopped = threading.Event()
        self._leaving: tuple[float, int, str] | None = None  # deadline (monotonic), status, text
        self._threads = [threading.Thread(target=self._watch, name="smp-watchdog", daemon=True)]

    # --- the main thread's side

    def start(self) -> None:
        """Begin to watch this process."""
        self._threads[0].start()

    def connect(self, members: Members | None) -> None:
        """Start the timeout of each phase, the watch for dead ranks, and the publication of this rank's phase.

        Args:
            members: all ranks; None for a job of one.
        """
        self.members, self._connected = members, True
        self.enter(self.activity.phase, self.activity.step)  # what came before had other limits
        if members is None:
            return
        self._threads.append(threading.Thread(target=self._publish, name="smp-publish", daemon=True))
        self._threads[-1].start()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Record the phase of the main thread; the same step as before if none is given."""
        self._count()
        self.activity = Activity(phase, self.activity.step if step is None else step, time.time())

    def _count(self) -> None:
        moment = time.monotonic()
        self._spent[self.activity.phase] += moment - self._entered
        self._entered = moment

    def spent(self) -> dict[str, float]:
        """Return the main thread's seconds in each phase since the last call."""
        self._count()
        spent, self._spent = self._spent, collections.defaultdict(float)
        return {phase: round(seconds, 6) for phase, seconds in spent.items()}

    def leave(self, status: int, seconds: float, text: str = "") -> None:
        """Stop watching the other ranks, and end this process if it has not ended in time.

        Args:
            status: exit status.
            seconds: after which the process is ended, whatever still holds it.
            text: printed then.
        """
        self._leaving = (time.monotonic() + seconds, status, text)

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=2 * TICK_SECONDS)

    def dead(self, seconds: float) -> list[Member]:
        """Wait up to ``seconds`` for a rank of this host to die; return those that have."""
        end = time.monotonic() + seconds
        while True:
            dead = self.members.dead() if self.members is not None else []
            if dead or time.monotonic() >= end:
                return dead
            time.sleep(0.02)

    def lost(self, dead: list[Member]) -> str:
        """Describe the loss of ranks of this host."""
        who = " and ".join(f"rank {m.rank} (pid {m.pid})" for m in dead)
        return f"rank {self._rank}: lost {who} in {self.activity}: {'it has' if len(dead) == 1 else 'they have'} ended"

    # --- the thread that ends what cannot end itself

    def _watch(self) -> None:
        activity, age, last = self.activity, 0.0, time.monotonic()
        dead_since: float | None = None
        while not self._stopped.wait(TICK_SECONDS):
            now = time.monotonic()
            # What passed while this very process was stopped is nobody's fault.
            passed, last = min(now - last, 2.0), now
            if self._leaving is not None:
                deadline, status, text = self._leaving
                if now > deadline:
                    say(text or f"rank {self._rank}: ended, as it did not come to its end by itself")
                    os._exit(status)
                continue
            if not self._connected:
                continue
            age = age + passed if self.activity is activity else 0.0
            activity = self.activity
            if dead := self.dead(0.0):
                dead_since = dead_since or now
                if now - dead_since > NOTICE_SECONDS:
                    say(self.lost(dead))
                    os._exit(1)
            if self._timeout and age > self._timeout * LENIENT.get(activity.phase, 1.0):
                try:
                    self._report(activity, age)
                    self._print_nccl()
                finally:
                    os._exit(1)

    def _report(self, activity: Activity, age: float) -> None:
        """Print which ranks hang, once for the whole job, and the stacks of this process."""
        if self.members is None:
            self._print_report(f"rank {self._rank} has been in {activity} for {age:.0f} s")
            return
        members = self.members
        first = within(5.0, lambda: members.connection().compare_set("report", "", str(self._rank)))
        if first is not None and first != str(self._rank).encode():
            within(30.0, lambda: members.connection().wait(["reported"]))
            say(f"rank {self._rank}: ended in {activity} after {age:.0f} s; rank {first.decode()} has said who hangs")
            return
        before = members.seen()
        self._stopped.wait(2.5 * self._period)
        after = members.seen()
        if before is None or after is None:
            states = "; ".join(f"{m}: {state}" for m in members.members if (state := members.state(m)))
            who = f"rank {self._rank} has been in {activity} for {age:.0f} s, and the job's store does not answer"
            text = f"{who}; {states}" if states else who
        else:
            silent = {
                m.rank
                for m, old, new in zip(members.members, before, after, strict=True)
                if m.rank != self._rank and (new is None or (old is not None and old.beat == new.beat))
            }
            text = describe_hang(members.members, after, silent, state=members.state)
        self._print_report(text)
        within(2.0, lambda: members.connection().set("reported", "1"))

    def _print_report(self, text: str) -> None:
        say(f"error: no progress within --watchdog_timeout {self._timeout:g}: {text}")
        for group, operations in self._operations().items():
            for operation in operations:
                say(f"  group {group}, rank {operation.rank}: {operation}")
        say(f"Stacks of rank {self._rank}:")
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            faulthandler.dump_traceback(2)

    def _print_nccl(self) -> None:
        """Print what this rank waits for over NCCL: its recorder, unlike that of smddp, knows of no other rank."""
        faulthandler.dump_traceback_later(NCCL_SECONDS, exit=True, file=2)  # ends the process also if CUDA blocks it
        try:
            for line in self._nccl():
                say(f"rank {self._rank}: {line}")
        finally:
            faulthandler.cancel_dump_traceback_later()

    # --- the thread that tells the others

    def _publish(self) -> None:
        assert self.members is not None
        beat = 0
        with contextlib.suppress(RuntimeError):  # the store is gone: so is who serves it, which others notice
            store = self.members.connection()
            while not self._stopped.is_set() and self._leaving is None:
                beat += 1
                store.set(f"at{self._rank}", json.dumps(Seen(self.activity, beat)))
                self._stopped.wait(self._period)
