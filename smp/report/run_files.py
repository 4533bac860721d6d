"""The files of a run directory, as far as they exist: of a run that goes on, was killed, or was changed by others.

Whatever a file holds, reading it does not raise: lines that cannot be read are counted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smp.checkpoint.directory import BEST, LATEST, quick_problems, step_of
from smp.checkpoint.manifest import Manifest, read_manifest
from smp.errors import DamagedCheckpointError, UserError
from smp.faults import nonfinite
from smp.log import redact, redacted
from smp.train import history
from smp.train.arguments import read_yaml

METRICS, CONFIG, LOG = "metrics.jsonl", "config.yaml", "logs/rank0.log"
MOST_MESSAGES = 100
_MOST_STEPS = 2**53
_MESSAGE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ([WEC]) \[[^\]]*\] (.*)")


@dataclasses.dataclass
class Saved:
    """A checkpoint of the run; without a manifest, where that cannot be read."""

    path: Path
    step: int
    manifest: Manifest | None
    problems: list[str]
    marks: list[str]  # best, latest


@dataclasses.dataclass
class Message:
    """A warning or an error of rank 0's log, as often as it was logged."""

    time: str
    level: str
    text: str
    count: int = 1


@dataclasses.dataclass
class Attempt:
    """A start of the run and its end; without one, the process was killed or still runs."""

    start: dict[str, Any]
    end: dict[str, Any] | None = None


@dataclasses.dataclass
class RunFiles:
    """Contents of a run directory.

    Attributes:
        train: lines of metrics with a loss, by step.
        validation: those with a validation loss.
        written: when the metrics were last written, in seconds since 1970.
        attempts: starts and their ends, oldest first.
        memory: peaks that were measured, by category.
        settings: of the last start, None without a readable ``config.yaml``.
        nonfinite: steps whose update was left out.
        messages: warnings and errors of rank 0's log, each text once, the first and the last ones.
        notes: sentences about what could not be read.
    """

    path: Path
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    written: float | None
    attempts: list[Attempt]
    memory: list[dict[str, Any]]
    settings: dict[str, Any] | None
    checkpoints: list[Saved]
    nonfinite: list[dict[str, Any]]
    messages: list[Message]
    notes: list[str]


def read_run(path: Path) -> RunFiles:
    """Read a run directory.

    Raises:
        UserError: it is none, or has no file of a run.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}: give the directory of a run, its --output_dir")
    if not any((path / name).exists() for name in (METRICS, CONFIG, LOG, history.FILE, "checkpoints")):
        raise UserError(f"{path} contains nothing of a run ({METRICS}, {CONFIG}, ...): give the --output_dir of one")
    notes: list[str] = []
    lines = [line for line in _lines(path / METRICS, notes) if _is_step(line.get("step"))]
    lines.sort(key=lambda line: line["step"])
    events = [*_lines(path / history.FILE, notes)]
    attempts = _attempts(events)
    return RunFiles(
        path=path,
        train=[line for line in lines if "loss" in line],
        validation=[line for line in lines if "val_loss" in line],
        written=_written(path / METRICS),
        attempts=attempts,
        memory=[event for event in events if event.get("event") == "memory"],
        settings=_settings(path / CONFIG, notes),
        checkpoints=_checkpoints(_checkpoint_dirs(path, attempts, notes)),
        nonfinite=[*_lines(path / nonfinite.FILE, notes)],
        messages=_messages(path / LOG, notes),
        notes=notes,
    )


def number(value: Any) -> float | None:
    """Return a number of a file as a float, NaN and infinity included; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        return None
    with contextlib.suppress(OverflowError):
        return float(value)
    return None


def finite(value: Any) -> float | None:
    """Return :func:`number` of it; None also for NaN and infinity."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def table_of(value: Any) -> dict[str, Any]:
    """Return it if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    """Return it if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def _written(path: Path) -> float | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return None


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_STEPS


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; of the last one a crash may have written a part."""
    bad, last = 0, False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                bad += last
                try:
                    content, last = json.loads(line), False
                except (ValueError, RecursionError):
                    last = True
                    continue
                if isinstance(content, dict):
                    yield redacted(content) if path.name != METRICS else content
                else:
                    bad += 1
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror})")
    if bad:
        notes.append(f"{bad} line(s) of {path.name} cannot be read")


def _attempts(events: list[dict[str, Any]]) -> list[Attempt]:
    found: list[Attempt] = []
    for event in events:
        if event.get("event") == "start":
            found.append(Attempt(event))
        elif event.get("event") == "end" and found:
            found[-1].end = event
    return found


def _settings(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        settings = read_yaml(str(path))
    except UserError:
        notes.append(f"{path.name} cannot be read")
        return None
    flat = (str, int, float, bool, type(None))

    def plain(value: Any) -> bool:
        return isinstance(value, flat) or (isinstance(value, list) and all(isinstance(each, flat) for each in value))

    return redacted({name: value if plain(value) else "(not a setting's type)" for name, value in settings.items()})


def _checkpoint_dirs(path: Path, attempts: list[Attempt], notes: list[str]) -> list[Path]:
    """Return the directories that hold checkpoints: as it was started, and as the run lies here now."""
    named = list_of(attempts[-1].start.get("checkpoint_dirs")) if attempts else []
    remote = [str(location) for location in named if "://" in str(location)]
    notes += [
        f"checkpoints in {location} are not listed here: `smp inspect {shlex.quote(str(location))}` does"
        for location in remote
    ]
    locations = [
        path / "checkpoints",
        *(Path(location) for location in named if isinstance(location, str) and location not in remote),
    ]
    # A NUL in a hostile path is a ValueError.
    found = []
    for location in locations:
        with contextlib.suppress(OSError, ValueError):
            if location.is_dir() and location.resolve() not in found:
                found.append(location.resolve())
    return found


def _checkpoints(directories: list[Path]) -> list[Saved]:
    paths = {
        path.resolve(): path
        for directory in directories
        for path in itertools.chain(directory.glob("*steps"), directory.glob("*/*steps"))
        if step_of(path) is not None and path.is_dir() and not path.is_symlink()
    }
    return sorted(map(_saved, paths.values()), key=lambda saved: (saved.step, str(saved.path)))


def _saved(path: Path) -> Saved:
    step = step_of(path) or 0
    marks = []
    for name in (BEST, LATEST):
        with contextlib.suppress(OSError):
            if (path.parent / name).is_symlink() and (path.parent / name).readlink() == Path(path.name):
                marks.append(name)
    try:
        manifest = read_manifest(path)
    except DamagedCheckpointError as error:
        return Saved(path, step, None, error.problems, marks)
    except UserError as error:
        return Saved(path, step, None, [str(error)], marks)
    return Saved(path, step, manifest, quick_problems(path, manifest), marks)


def _messages(path: Path, notes: list[str]) -> list[Message]:
    """Read warnings and errors; one that is repeated with other numbers counts as the same."""
    found: dict[str, Message] = {}
    recent: collections.OrderedDict[str, Message] = collections.OrderedDict()
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                match = _MESSAGE.match(line)
                if match is None:
                    continue
                time, level, text = match.groups()
                key = re.sub(r"\d+", "0", text[:500])
                known = found.get(key) or recent.get(key)
                if known is not None:
                    known.count += 1
                elif len(found) < MOST_MESSAGES:
                    found[key] = Message(time, level, redact(text[:2000]))
                else:
                    recent[key] = Message(time, level, redact(text[:2000]))
                    if len(recent) > MOST_MESSAGES:
                        recent.popitem(last=False)
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror})")
    return [*found.values(), *recent.values()]
