"""One process at a time saves into a directory; it alone may clear up what others have left there."""

from __future__ import annotations

import atexit
import contextlib
import os
from pathlib import Path

from smp.checkpoint.files import reason
from smp.checkpoint.layout import clean, interrupted_replacements
from smp.errors import UserError
from smp.faults.lock import lock_directories

# By process: a forked one has the entries of its parent, and not its locks.
_held: dict[tuple[int, Path], set[str]] = {}


def own(directory: Path, model_name: str) -> None:
    """Hold ``directory`` until this process ends, and delete what interrupted saves of ``model_name`` have left there.

    Several writers of one process share it. For rank 0 alone.

    Raises:
        UserError: another process holds it, or it cannot be cleared up.
    """
    key = os.getpid(), directory.resolve()
    if key not in _held:
        lock = contextlib.ExitStack()
        lock.enter_context(lock_directories([directory], otherwise="give Checkpoints another directory"))

        def give_back(holder: int = os.getpid()) -> None:
            if os.getpid() == holder:
                lock.close()

        atexit.register(give_back)
        _held[key] = set()
    if model_name not in _held[key]:
        try:
            clean(directory, model_name)
        except OSError as error:
            raise UserError(
                f"what interrupted saves have left in {directory} cannot be deleted ({reason(error)}): mend that, or "
                f"give Checkpoints another directory"
            ) from None
        _held[key].add(model_name)


def bring_back(directory: Path, model_name: str) -> None:
    """Give checkpoints their names back that a killed process was about to replace; not where one is saving.

    For rank 0 alone, before it looks for the newest. What cannot be brought back is left for the first save.
    """
    with contextlib.suppress(UserError, OSError):
        if interrupted_replacements(directory, model_name):
            with lock_directories([directory]):
                clean(directory, model_name)
