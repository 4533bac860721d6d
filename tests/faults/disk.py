"""Things that happen to a process while it works on the disk: it is killed, the disk is full, an operation fails.

Installed in a rank before the job starts (``prepare`` of :func:`tests.job.run_job`). Only operations on paths below a
given directory count, each with a label such as ``fsync manifest`` or ``rename directory``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import shutil
import signal
from collections.abc import Callable
from typing import Any

# What is patched, and the index of the argument that names the path or the descriptor.
OPERATIONS = {
    "mkdir": 0, "pwrite": 0, "write": 0, "fsync": 0, "rename": 0, "replace": 0, "symlink": 1, "unlink": 0, "rmdir": 0,
}  # fmt: skip


def kind(path: str) -> str:
    """What a path is, in the words of the tally."""
    name = os.path.basename(path.rstrip("/"))
    if name.endswith(".safetensors"):
        return "data"
    if name.startswith("manifest.json"):
        return "manifest"
    if name.startswith(("latest", "best")):
        return "link"
    if name.endswith(" (deleted)"):  # without a name
        return "probe"
    if name.endswith(".json") or re.fullmatch(r"rank\d+\.tmp", name):
        return "list"
    return "directory"


def _path(target: Any, dir_fd: int | None) -> str | None:
    if isinstance(target, int):
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{target}")
        return None
    path = os.fspath(target)
    if dir_fd is not None:  # as shutil.rmtree works
        with contextlib.suppress(OSError):
            return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
    return os.path.abspath(path)


def of_a_save(path: str) -> bool:
    """Whether a path belongs to a checkpoint or an exported model, and not to the directories that hold them."""
    return re.search(r"steps|final|/latest|/best", path) is not None


def watch(
    folder: pathlib.Path,
    event: Callable[[str, str, Callable[[], Any]], Any],
    only: Callable[[str], bool] = lambda path: True,
) -> None:
    """Call ``event(label, path, operation)``, which calls ``operation()``, in place of each one below ``folder``."""
    below = str(folder) + "/"

    def patched(name: str, inner: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = _path(args[OPERATIONS[name]], kwargs.get("dir_fd"))
            if path is None or not (path + "/").startswith(below) or not only(path):
                return inner(*args, **kwargs)
            return event(f"{name} {kind(path)}", path, lambda: inner(*args, **kwargs))

        return call

    for name in OPERATIONS:
        setattr(os, name, patched(name, getattr(os, name)))
    # rmtree asks whether these very functions take a directory's descriptor.
    shutil._use_fd_functions = False  # type: ignore[attr-defined]


def record(folder: pathlib.Path, log: pathlib.Path) -> None:
    """Write the label of every operation of a save to ``log``, a line each."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write = os.write

    def event(label: str, path: str, operation: Callable[[], Any]) -> Any:
        write(descriptor, f"{label}\n".encode())
        return operation()

    watch(folder, event, of_a_save)


def kill_at(folder: pathlib.Path, label: str, number: int, *, after: bool) -> None:
    """End this process by SIGKILL before or after the ``number``-th operation (from 0) of saves with this label."""
    seen = [0]

    def event(found: str, path: str, operation: Callable[[], Any]) -> Any:
        here = found == label and seen[0] == number
        seen[0] += found == label
        if here and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = operation()
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    watch(folder, event, of_a_save)


def fill_after(folder: pathlib.Path, nbytes: int, *, until: pathlib.Path | None = None) -> None:
    """A disk that takes ``nbytes`` more, and is full from then on, or until the file ``until`` exists."""
    left, pwrite, write = [nbytes], os.pwrite, os.write
    below = str(folder) + "/"

    def full(inner: Callable) -> Callable:
        def call(descriptor: int, data: Any, *rest: int) -> int:
            path = _path(descriptor, None)
            if path is None or not path.startswith(below) or (until is not None and until.exists()):
                return inner(descriptor, data, *rest)
            if left[0] <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            count = inner(descriptor, bytes(data[: left[0]]), *rest)  # a short write, as a real disk does
            left[0] -= count
            return count

        return call

    os.pwrite, os.write = full(pwrite), full(write)


def fail(folder: pathlib.Path, label: str, numbers: set[int], code: int = errno.EIO) -> None:
    """Let some operations with this label fail with ``code``."""
    seen = [0]

    def event(found: str, path: str, operation: Callable[[], Any]) -> Any:
        if found != label:
            return operation()
        number, seen[0] = seen[0], seen[0] + 1
        if number in numbers:
            raise OSError(code, os.strerror(code))
        return operation()

    watch(folder, event)
