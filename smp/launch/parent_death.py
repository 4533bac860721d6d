"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> Callable[[], None] | None:
    """What a child of this process is to run before its program, so that it gets SIGTERM when this one is killed.

    To be called, and the child to be started, from the main thread: the kernel looks at the thread's end. Returns None
    where there is no such thing (not Linux).
    """
    if sys.platform != "linux":
        return None
    # Found before the fork: in the child, other threads' locks are held for ever.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it was killed in between
            os.kill(os.getpid(), signal.SIGTERM)

    return prepare
