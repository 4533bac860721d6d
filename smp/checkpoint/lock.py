"""Lock of a directory for one writing process, which alone may delete what interrupted saves have left."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import weakref
from pathlib import Path

from smp.checkpoint.directory import clean, interrupted_replacements
from smp.checkpoint.safetensors_io import reason
from smp.errors import UserError
from smp.faults.lock import lock_directories

# By process: a forked one has the entries of its parent, and not its locks.
# Of each directory: who has saved last under a name, and at which step.
_held: dict[tuple[int, Path], dict[str, tuple[weakref.ref[object], int]]] = {}


def _hold(directory: Path) -> dict[str, tuple[weakref.ref[object], int]]:
    """Lock ``directory`` until this process ends, and return who has saved in it.

    Raises:
        UserError: another process has it.
    """
    key = os.getpid(), directory.resolve()
    if key not in _held:
        lock = contextlib.ExitStack()
        lock.enter_context(lock_directories([directory], otherwise="give Checkpointer another directory"))

        def give_back(holder: int = os.getpid()) -> None:
            if os.getpid() == holder:
                lock.close()

        atexit.register(give_back)
        _held[key] = {}
    return _held[key]


def own(directory: Path, model_name: str, writer: object, step: int) -> None:
    """Hold ``directory`` until this process ends, and delete what interrupted saves of ``model_name`` have left in it.

    Several writers of one process share it, each with another name. For rank 0 alone, before each save.

    Raises:
        UserError: another process has it, it cannot be cleared up, or another writer of this process has just saved
            the same step under the same name, which would be lost.
    """
    owners = _hold(directory)
    if model_name not in owners:
        try:
            clean(directory, model_name)
        except OSError as error:
            raise UserError(
                f"what interrupted saves have left in {directory} cannot be deleted ({reason(error)}): mend that, or "
                f"give Checkpointer another directory"
            ) from None
    else:
        _refuse_to_replace(*owners[model_name], directory, model_name, writer, step)
    owners[model_name] = weakref.ref(writer), step


def _refuse_to_replace(
    last: weakref.ref[object], last_step: int, directory: Path, model_name: str, writer: object, step: int
) -> None:
    if last_step != step or last() in (None, writer):
        return
    gc.collect()  # one that nobody uses any more, such as an earlier run's of a notebook, may be part of a cycle
    if last() is not None:
        raise UserError(
            f"step {step} of {model_name!r} has just been saved in {directory} by another Checkpointer of this "
            f"process: give each a name of its own, such as name='generator'"
        )


def bring_back(directory: Path, model_name: str) -> None:
    """Give checkpoints their names back that a killed process was about to replace; not where one is saving.

    For rank 0 alone, before it looks for the newest. What cannot be brought back is left for the first save.
    """
    with contextlib.suppress(UserError, OSError):
        if interrupted_replacements(directory, model_name):
            with lock_directories([directory]):
                clean(directory, model_name)
