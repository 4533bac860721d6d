"""History of a run: ``history.jsonl`` in the run directory, a line for each start, end and measured memory.

Rank 0 writes it, at these moments only. ``smp report`` reads it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from smp import __version__ as smp_version
from smp.checkpoint.manifest import now, versions
from smp.errors import RunError, UserError
from smp.faults.guard import Guard
from smp.faults.stop import INTERRUPTED, STOPPED
from smp.log import get_logger, redacted
from smp.memory.estimate import estimate_memory
from smp.train.arguments import FLAGS
from smp.train.checked_job import CheckedJob
from smp.train.job import sizes
from smp.train.state import Start, TrainState

FILE = "history.jsonl"
MOST_CHARACTERS = 2000

logger = get_logger("train")


def append(run_dir: Path, event: str, **values: Any) -> None:
    """Add a line to the history, with its time and without secrets; a full disk is only a warning.

    Args:
        event: ``start``, ``end`` or ``memory``.
        values: its other keys, of JSON's types.
    """
    line = json.dumps(redacted({"event": event, "time": now(), **values}), allow_nan=False, default=str)
    try:
        with (run_dir / FILE).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        logger.warning("%s cannot be written (%s).", run_dir / FILE, error.strerror)


def last_start(run_dir: Path) -> tuple[dict[str, Any], bool]:
    """Return the settings of the last start, empty without a history, and whether it surely had a checkpoint."""
    settings: dict[str, Any] = {}
    saved = False
    if not (run_dir / FILE).is_file():  # a device might have no end
        return settings, saved
    with contextlib.suppress(OSError), (run_dir / FILE).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a crash may have truncated it
                event = json.loads(line)
                if event["event"] == "start":
                    settings, saved = default_settings() | event["settings"], event["checkpoint"] is not None
                elif event["event"] == "end":  # without an error the last step is saved
                    saved = saved or (event["status"] in (0, STOPPED, INTERRUPTED) and not event["reason"])
    return settings, saved


@contextlib.contextmanager
def recorded(
    job: CheckedJob, start: Start, state: TrainState, guard: Guard, *, changes: list[str]
) -> Iterator[Callable[[int], None]]:
    """Write a start, and the end of what is done inside, on rank 0; nothing elsewhere.

    Args:
        guard: knows the hosts, and the seconds of each phase.
        changes: what differs from the run that wrote the checkpoint.

    Yields:
        Function to call with the exit status, if nothing is raised.
    """
    begun = time.monotonic()

    def end(status: int, reason: str = "") -> None:
        if job.launch.is_main:
            append(
                job.run_dir, "end", status=status, step=state.step, seconds=round(time.monotonic() - begun, 3),
                phase_s=guard.watchdog.spent(), reason=reason,
            )  # fmt: skip

    if job.launch.is_main:
        append(job.run_dir, "start", **_beginning(job, start, guard.hosts, changes))
    try:
        yield end
    except BaseException as error:
        plain = isinstance(error, (RunError, UserError))
        text = str(error) if plain else f"{type(error).__name__}: {error}".removesuffix(": ")
        interrupted = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, UserError) else 1
        end(getattr(error, "status", interrupted), text[:MOST_CHARACTERS])
        raise


def _beginning(job: CheckedJob, start: Start, hosts: list[str], changes: list[str]) -> dict[str, Any]:
    shape, work = sizes(job)
    cuda = job.device.type == "cuda"
    return {
        "step": start.progress.step,
        "checkpoint": None if start.checkpoint is None else str(start.checkpoint),
        "max_steps": start.max_steps,
        "global_batch_size": start.global_batch_size,
        "model": job.model.name,
        "parameters": shape.parameters,
        "sequence_length": job.model.sequence_length,
        "samples_per_epoch": job.train_data.samples_per_epoch,
        "world_size": job.launch.world_size,
        "degrees": job.mesh.degrees,
        "device": torch.cuda.get_device_name(job.device) if cuda else "cpu",
        "dtype": str(job.dtype).removeprefix("torch."),
        "backend": torch.distributed.get_backend(),
        "hosts": {host: hosts.count(host) for host in dict.fromkeys(hosts)},
        "versions": _versions(),
        "commit": _commit(),
        "choices": [str(choice) for choice in job.choices],
        "changes": changes,
        "settings": _given(job),
        "checkpoint_dirs": [
            *map(str, job.checkpoint_dirs),
            *(str(each.mirror.store) for each in job.storages if each.mirror is not None),
        ],
        "predicted_memory": {name: size for name, size in estimate_memory(shape, job.mesh, work).items() if size},
    }


def _given(job: CheckedJob) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    settings, defaults = job.config.flat(), default_settings()
    return {name: value for name, value in settings.items() if value != defaults[name]}


def default_settings() -> dict[str, Any]:
    """Return the default of every setting by name, in types of YAML."""
    fields = {flag.field.name: flag.field.default for flag in FLAGS.values()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _versions() -> dict[str, str]:
    found = {"smp": smp_version, **versions()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["transformers"] = importlib.metadata.version("transformers")
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return {**found, "system": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores"}


def _commit() -> str | None:
    """Return the commit of the checkout that smp runs from, marked where files were changed; None: it is installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, stdin=subprocess.DEVNULL)
        return done.stdout.strip()
    return None
