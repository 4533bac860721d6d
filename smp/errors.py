"""The errors that end a run with a sentence.

``UserError``: bad input, exit status 2. ``RunError``: a failure outside of the program, such as a full disk or a
diverged run, exit status 1. Everything else is a defect and keeps its traceback.
"""

import errno
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def hub_advice(name: str, kind: str = "") -> str:
    """End a sentence about a missing path ``name`` with advice for names of a hub and of the checkout's sample."""
    if name.startswith("data/sample"):
        return "; the sample belongs to a checkout of smp's repository and is not installed with it: start there"
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name, re.ASCII) or Path(name).parent.exists():
        return ""
    return f"; hubs are never asked: download it first, `hf download {name}{kind} --local-dir DIR`, then give DIR"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; of one without, its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException, most: int = 300) -> str:
    """Return an error's type and text on one line, of ``most`` characters at most."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


def a_type(value: object) -> str:
    """Return the name of a value's type with its article, such as ``an int``; ``null`` for None."""
    if value is None:
        return "null"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


class UserError(ValueError):
    """Bad input; the text states the mistake, the value given, the allowed ones and the remedy."""


class RankError(UserError):
    """A user error that only some ranks see: each of them prints it; other user errors are printed once per host."""


class PeerError(UserError):
    """Another rank has ended the job, and prints the reason."""

    def __init__(self, text: str, *, status: int = 2):
        super().__init__(text)
        self.status = status


class ConfigError(UserError):
    """One or more problems of a configuration.

    Args:
        problems: one sentence each.
    """

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = list(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)  # of another process


def was_deleted(path: object) -> bool:
    """Return whether a checkpoint that was found at ``path`` has gone: retention renames it before it deletes it."""
    return isinstance(path, Path) and not os.path.lexists(path)


class DamagedCheckpointError(UserError):
    """A damaged checkpoint.

    Args:
        problems: one sentence each, naming a file or tensor.
    """

    def __init__(self, path: object, problems: list[str]):
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        said = f"is damaged: {shown}; resume from another one"
        if was_deleted(path):
            said = "was deleted while it was read, as its run keeps newer ones: take one of those"
        super().__init__(f"checkpoint {path} {said}")
        self.path, self.problems = path, list(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self.path), self.problems)


class RunError(RuntimeError):
    """The run cannot continue, though its input is right; the text is the full message."""


def limit_reached(error: BaseException) -> str | None:
    """Return a sentence for an error that is due to a limit of this process, on open files or threads; else None."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process has {limit} files open, its limit: raise it, ulimit -n 65536"
    if "can't start new thread" in str(error):
        return "no further thread can be started: raise the limit, ulimit -u or a container's --pids-limit"
    return None


class Problems(list[str]):
    """Problems that several steps raise, to be reported together."""

    def attempt(self, step: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Return the result of ``step``, or None after adding its problems, each once."""
        try:
            return step(*args, **kwargs)
        except UserError as error:
            found = error.problems if isinstance(error, ConfigError) else [str(error)]
            self.extend(text for text in found if text not in self)
        return None
