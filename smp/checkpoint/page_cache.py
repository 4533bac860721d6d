"""Control of the page cache: flush a range of a file, drop it, read ahead."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # of linux/fs.h


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def flushes_ranges() -> bool:
    """Tell whether the system can be told to write a part of a file."""
    return _sync_file_range() is not None


def start_flush(descriptor: int, offset: int, count: int) -> None:
    """Have the system begin to write these bytes, where it can: a hint, which neither waits nor fails."""
    if call := _sync_file_range():
        call(descriptor, offset, count, _WRITE)


def flush(descriptor: int, offset: int, count: int) -> None:
    """Wait until the system has written these bytes, or the full file; the file's size may be unknown to the disk yet.

    Raises:
        OSError: it could not.
    """
    call = _sync_file_range()
    if call is not None:
        if not call(descriptor, offset, count, _WAIT_BEFORE | _WRITE | _WAIT_AFTER):
            return
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):  # a sandbox, or a file system, without it
            raise OSError(number, os.strerror(number))
    os.fsync(descriptor)


def drop_cached(descriptor: int, offset: int = 0, count: int = 0) -> None:
    """Have the system forget what it keeps in memory of a file that is on the disk, where it can; 0: all from there."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)


def read_ahead(descriptor: int) -> None:
    """Have the system read ahead of what is asked for, where it can; twice as fast for what no cache holds."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
