"""One run per directory: a lock that the system gives back however its holder ends."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from smp.errors import RankError

LOCK_FILE = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def _try_lock(path: Path) -> int | None:
    """Return the descriptor of the locked file; None while another process holds it."""
    while True:
        # A link would be followed to a file of somebody else's, which is then written over.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # its holder has deleted it in between: what is locked is not what others see


def _holder(path: Path) -> str:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return f"process {said['pid']} on {said['host']}, since {said['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is about to write, or to end
        return "another process"


@contextlib.contextmanager
def _removed_if_empty(directory: Path) -> Iterator[None]:
    """In the end, remove ``directory`` and those it is in, as far as they did not exist before and are empty."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # something is in it
            for path in missing:
                path.rmdir()


@contextlib.contextmanager
def locked(path: Path, directory: Path, otherwise: str, *, required: bool = True) -> Iterator[None]:
    """Hold ``directory`` by a lock on the file ``path``, which is made, and deleted in the end.

    Args:
        path: its directory is made if missing.
        otherwise: what else can be done where another process holds it.
        required: whether to refuse a file system without locks, or else go on.

    Raises:
        RankError: another process does, or the file cannot be locked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _try_lock(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RankError(f"{path} is a link and must be a file: delete it") from None
        if not required and error.errno in _NO_LOCKS:
            path.unlink(missing_ok=True)
            yield
            return
        remedy = "choose another one, on a file system with locks" if error.errno in _NO_LOCKS else otherwise
        raise RankError(f"{path} cannot be locked ({error.strerror}): {remedy}") from None
    if descriptor is None:
        raise RankError(f"{directory} is in use by {_holder(path)}: wait for that run or end it, or {otherwise}")
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    content = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "argv0": sys.argv[0]}
    with contextlib.suppress(OSError):  # held without a name where the disk is full
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(content).encode())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the directory may be gone
            path.unlink()
        os.close(descriptor)


@contextlib.contextmanager
def lock_directories(
    directories: Iterable[Path], *, otherwise: str = "choose another --output_dir and --checkpoint_dir"
) -> Iterator[None]:
    """Hold directories for this run; for rank 0 of a job alone.

    The file ``.lock`` in each says who holds it. One that a killed process has left is taken over. Directories
    that were missing are made, and removed if nothing else has come into them.

    Args:
        otherwise: what else can be done about a directory that is held.

    Raises:
        RankError: another process holds one of them; with its host, pid and start.
    """
    # By any of its names, a directory is held once.
    wanted = sorted({Path(directory).resolve() for directory in directories})
    with contextlib.ExitStack() as stack:
        for directory in wanted:
            stack.enter_context(_removed_if_empty(directory))
            stack.enter_context(locked(directory / LOCK_FILE, directory, otherwise))
        yield
