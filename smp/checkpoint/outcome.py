"""Outcome of what a rank does with a file system: kept where it is done, and agreed on by all."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from smp.checkpoint.directory import disk_free, no_inodes
from smp.checkpoint.safetensors_io import reason
from smp.errors import RunError
from smp.faults.agreement import of_all_ranks
from smp.units import readable


def agree(failure: BaseException | None, what: str) -> None:
    """Raise on every rank if any has failed; collective.

    Args:
        what: the beginning of the sentence.

    Raises:
        RunError: naming the first rank that failed, and why.
    """
    said = None if failure is None else reason(failure)
    for rank, text in enumerate(of_all_ranks(said)):
        if text is not None:
            raise RunError(f"{what}: rank {rank}: {text}") from failure


def attempt(action: Callable[[], object], needs: tuple[Path, int] | None = None) -> BaseException | None:
    """Run ``action`` and return what it raises.

    Args:
        needs: a directory, and the bytes to be written to it, which are said with what is free if the disk is full.
    """
    try:
        action()
    except Exception as error:
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT) or needs is None:
            return error
        directory, nbytes = needs
        if no_inodes(directory):
            return RunError(f"{reason(error)}: the file system of {directory} has no inodes left (df -i): delete files")
        free = readable(disk_free(directory))
        return RunError(f"{reason(error)}; its part needs {readable(nbytes)} and {directory} has {free} free")
    return None
