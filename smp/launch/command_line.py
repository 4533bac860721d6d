"""The arguments of a training command: checked as the job checks them, and quoted for shells."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from smp.errors import UserError
from smp.log import redact
from smp.train.arguments import parse_args


@dataclasses.dataclass(frozen=True)
class Checked:
    """The training flags as the job reads them.

    Args:
        given: those that a flag or the ``--config`` file names.
    """

    settings: dict[str, Any]
    given: frozenset[str]

    @property
    def named(self) -> frozenset[str]:
        """Settings that were given a value: every run's own ``config.yaml`` names all, with null for none."""
        return frozenset(name for name in self.given if self.settings.get(name) not in (None, "", []))


def check_arguments(arguments: Sequence[str], directory: Path) -> Checked:
    """Read training flags as the job does.

    Args:
        directory: where the job runs; paths such as that of ``--config`` are relative to it, if it is on this machine.

    Raises:
        ConfigError: with every problem found.
        UserError: they ask for help instead of a job.
    """
    if {"--help", "-h"} & set(arguments):
        raise UserError(
            "the training flags ask for help instead of a job: leave --help out, and read it with `python -m smp.train "
            "--help`"
        )
    with contextlib.chdir(directory if directory.is_dir() else "."):
        config = parse_args(arguments)
    found = Checked(config.flat(), config.given)
    for name in sorted(found.given):  # a --config file can hold what no argument may
        for value in _texts(found.settings.get(name)):
            _require_printable(f"--{name}", value)
    return found


def _texts(value: Any) -> list[str]:
    """Return the strings of a setting: itself, or a list's."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def require_plain(name: str, value: str) -> str:
    """Return a value that may stand in a script.

    Raises:
        UserError: it contains a line break or another control character, or looks like a secret.
    """
    _require_printable(name, value)
    if redact(f"{name} {value}") != f"{name} {value}" or redact(value) != value:
        raise UserError(
            f"{name} looks like a secret, which the script would show to everybody: export it in the job's environment"
        )
    return value


def _require_printable(name: str, value: str) -> None:
    if not value.isprintable():
        raise UserError(
            f"{name} {value!r} contains a line break or control character: scripts cannot carry it, leave it out"
        )


def require_plain_arguments(arguments: Sequence[str]) -> list[str]:
    """Return arguments of a training command that may stand in a script.

    Raises:
        UserError: see :func:`require_plain`.
    """
    flag = "the training flag"
    for argument in arguments:
        require_plain(flag, argument)
        flag = argument if argument.startswith("--") else flag
    return list(arguments)


def require_match(name: str, value: str, pattern: str, allowed: str) -> None:
    """Refuse a value that does not match ``pattern``; ``allowed`` describes the pattern.

    Raises:
        UserError: naming the value and what is allowed.
    """
    if re.fullmatch(pattern, value, re.ASCII) is None:
        raise UserError(f"{name} {value!r} is not allowed: give {allowed}")


_WRITTEN = ("output_dir", "checkpoint_dir", "model_dir", "tensorboard_dir")


def require_kept(found: Checked, workdir: str, roots: Sequence[str], *, advice: str) -> None:
    """Refuse directories that are gone when the job's container is; what goes to a URL is not.

    Args:
        workdir: where relative ones are, in the container.
        roots: directories of the container that outlive it.

    Raises:
        UserError: the job is to write to another one.
    """
    for name in _WRITTEN:
        for given in _texts(found.settings.get(name)):
            if "://" in given and name in ("checkpoint_dir", "model_dir"):
                continue
            path = os.path.normpath(os.path.join(workdir, given))
            if not any(Path(path).is_relative_to(os.path.normpath(root)) for root in roots):
                where = "" if path == given else f", {path} of the container,"
                raise UserError(
                    f"--{name} {given}{where} is on none of its mounts, so that what is written there ends with the "
                    f"container: choose a directory under {' or '.join(roots)}{advice}"
                )


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """Return the value that the last ``FLAG VALUE`` or ``FLAG=VALUE`` gives, or None."""
    found = None
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            found = argument.partition("=")[2]
        elif argument == flag:
            found = arguments[index + 1] if index + 1 < len(arguments) else ""
    return found


def quoted(arguments: Iterable[str]) -> str:
    """Quote arguments for a POSIX shell."""
    return " ".join(shlex.quote(argument) for argument in arguments)


def quoted_lines(arguments: Sequence[str]) -> str:
    """Quote arguments, each flag with its values on one line."""
    lines: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(argument)
    return "\n".join("    " + quoted(line) for line in lines)


def comment(lines: Iterable[str]) -> str:
    """Return lines as a shell or YAML comment, whatever they hold: none ends early, and none shows a secret."""
    shown = ("".join(c if c.isprintable() else " " for c in redact(line)) for line in lines)
    return "\n".join(f"# {line}".rstrip() for line in shown)
