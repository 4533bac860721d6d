"""The first line of a job, and Ctrl-C, before torch is imported, which takes seconds."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Sequence

from smp.environment import read_launch, started_by_us
from smp.errors import UserError
from smp.log import say


def announce(version: str, arguments: Sequence[str], *, is_launcher: bool) -> None:
    """Say once a job, on standard error, that it begins: by the launcher of its first host, or else by rank 0.

    Args:
        is_launcher: whether the program is ``smp.launch.local``, which may also start other programs than the job.
    """
    if {"-h", "--help", "--version"}.intersection(arguments):
        return
    if is_launcher:
        begins = "smp.train" in arguments and not re.search(r"--node_rank[= ]0*[1-9]", " ".join(arguments))
    else:
        begins = False
        with contextlib.suppress(UserError):  # raised again by whoever reads it next
            begins = read_launch().rank == 0 and not started_by_us()
    if begins:
        say(f"smp {version}: loading torch")


def leave_on_interrupt() -> None:
    """End the program in a sentence at Ctrl-C, until :func:`raise_on_interrupt`: there is nothing to clean up."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored, as of a shell's background job
        signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """Raise ``KeyboardInterrupt`` at Ctrl-C again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say_interrupted() -> None:
    """Say once a job that Ctrl-C has ended it before training."""
    with contextlib.suppress(UserError):
        if read_launch().rank == 0:
            say("Interrupted before the first step: nothing was saved.")


def _leave(*_: object) -> None:
    say_interrupted()
    os._exit(128 + signal.SIGINT)
