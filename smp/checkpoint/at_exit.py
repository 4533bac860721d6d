"""What a script has not waited for when it ends: the checkpoint under way is published, and uploads end.

Without a collective: ranks may end at different lines, by an error, or after ``destroy_process_group``. The lists in
the temporary directory tell which ranks have written their part.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 # its hook, after which no pool takes work, is then called after this one
import os
import sys
import threading
from typing import Protocol

from smp.checkpoint.background import PendingWrite
from smp.checkpoint.directory import CLAIMED, TEMPORARY, set_aside
from smp.checkpoint.mirror import Rule
from smp.checkpoint.outcome import attempt
from smp.checkpoint.retention import prune
from smp.checkpoint.safetensors_io import reason
from smp.checkpoint.storage import Storage
from smp.checkpoint.writer import await_parts, await_published, finish
from smp.log import say


class Saving(Protocol):
    """What is read here of a :class:`smp.checkpoint.checkpointer.Checkpointer`."""

    name: str
    storage: Storage
    writing: PendingWrite | None

    def rule(self, step: int) -> Rule:
        """Return the retention for a checkpoint of ``step``."""


# By the process that saves: a forked one has the entries of its parent, and not its threads.
_unfinished: dict[Saving, int] = {}


def finish_at_exit(checkpointer: Saving) -> None:
    """Finish what ``checkpointer`` has begun when the interpreter exits, unless :func:`finished` is called before."""
    _unfinished[checkpointer] = os.getpid()


def finished(checkpointer: Saving) -> None:
    """Forget it: all that it has begun has ended."""
    _unfinished.pop(checkpointer, None)


def _finish_all() -> None:
    for checkpointer, process in _unfinished.items():
        if process != os.getpid():
            continue
        if checkpointer.writing is not None:
            _finish(checkpointer, checkpointer.writing)
        if checkpointer.storage.mirror is not None:
            checkpointer.storage.mirror.finish_alone()


def _finish(checkpointer: Saving, write: PendingWrite) -> None:
    """Publish a checkpoint, from the first rank that comes here; the others wait, as launchers end all with one."""
    storage, mirror, rule = checkpointer.storage, checkpointer.storage.mirror, checkpointer.rule(write.manifest.step)
    final = write.temporary.with_name(write.temporary.name.removesuffix(TEMPORARY))
    claimed = final.with_name(final.name + CLAIMED)
    ranks = list(range(write.manifest.world_size))

    def publish() -> None:
        if write.failure is not None:
            raise write.failure
        if mirror is not None and final.name in mirror.needed:  # its files are about to be replaced
            mirror.finish_alone()
        await_parts(write.temporary, ranks)
        try:
            write.temporary.rename(claimed)
        except FileNotFoundError:  # another rank's
            await_published(claimed)
            return
        set_aside(storage.directory, checkpointer.name, after=rule.after)
        finish(claimed, final, ranks, write.manifest)
        spared = mirror.needed if mirror is not None else set()
        prune(storage.directory, checkpointer.name, keep=rule.keep, keep_best=rule.keep_best, spared=spared)

    write.wait()
    if (failure := attempt(publish)) is not None:
        say(f"rank {write.rank}: checkpoint {final} was not published as the script ended: {reason(failure)}")
    elif mirror is not None and final.exists():
        if hasattr(sys, "last_type"):  # the others may wait for this rank, and would not upload their files
            say(f"rank {write.rank}: checkpoint {final} was not uploaded, as the script failed")
        else:
            mirror.offer_alone(final, rule)


threading._register_atexit(_finish_all)  # type: ignore[attr-defined] # atexit's own hooks come after the pools' end
