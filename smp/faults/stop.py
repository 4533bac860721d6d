"""Stopping on request: SIGTERM, SIGUSR1, Ctrl-C and hangups become a flag that the loop reads at a step boundary.

The flag is agreed on by all ranks (:mod:`smp.faults.agreement`), so a signal to one of them stops all. It is never
acted on anywhere else: launchers also send SIGTERM to the ranks that outlive a crash, and these can save nothing
together.

Python's own handlers run in the main thread between two lines of Python, which may be long in coming while a collective
waits. So signals are read from a pipe, by a thread: a second signal works whatever the main thread does.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Any

from smp.log import say

STOPPED = 75  # EX_TEMPFAIL: run the same command again
INTERRUPTED = 130  # what shells say of Ctrl-C
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A terminal or a scheduler signals the launcher and its workers alike, and the launcher hands its own signal on.
ONE_REQUEST_SECONDS = 1.0

_active: weakref.WeakSet[StopRequest] = weakref.WeakSet()


class StopRequest:
    """While it is entered, signals are noted instead of ending the process; outside the main thread it does nothing.

    Attributes:
        signal: the number of the first signal, or None.
    """

    def __init__(self, rank: int):
        self.signal: int | None = None
        self._rank, self._since = rank, 0.0
        self._previous: dict[int, Any] = {}
        self._read = self._write = self._previous_pipe = -1
        self._thread: threading.Thread | None = None

    @property
    def raised(self) -> bool:
        """True once this rank was asked to stop."""
        return self.signal is not None

    @property
    def interrupted(self) -> bool:
        """True if that was with Ctrl-C."""
        return self.signal == signal.SIGINT

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # Under nohup, SIGHUP stays ignored.
        deaf = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._previous = {number: signal.signal(number, _noted) for number in SIGNALS if number not in deaf}
        self._thread = threading.Thread(target=self._listen, name="smp-signals", daemon=True)
        self._thread.start()
        _active.add(self)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is None:
            return
        self._restore()
        os.write(self._write, b"\0")  # no signal has this number
        self._thread.join()
        os.close(self._read)
        os.close(self._write)
        self._thread = None

    def _restore(self) -> None:
        _active.discard(self)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_pipe)

    def _listen(self) -> None:
        while number := os.read(self._read, 1)[0]:
            if number in self._previous:
                self._arrived(number)

    def _arrived(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
            if number == signal.SIGINT and self._rank:  # Ctrl-C reaches every rank, and one of them says so
                return
            say(
                f"rank {self._rank}: {name}: all ranks stop at the next step boundary, with a checkpoint; "
                f"a second signal ends this one at once"
            )
        elif now - self._since >= ONE_REQUEST_SECONDS:
            say(f"rank {self._rank}: {name} again: ended without a checkpoint")
            os._exit(128 + number)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python writes a signal to the pipe only where it has a handler."""


def _forget_in_child() -> None:
    """Restore default signal handling in a forked process: its signals must not reach the parent's pipe."""
    for request in list(_active):
        signal.set_wakeup_fd(-1)
        for number in request._previous:
            signal.signal(number, signal.SIG_DFL)
        request._thread = None
        _active.discard(request)


os.register_at_fork(after_in_child=_forget_in_child)
