"""The directories that the run will write to: permission, free space, time, locks and links."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

from smp.checkpoint.directory import disk_free, nearest_existing
from smp.checkpoint.disk_forecast import forecast
from smp.checkpoint.object_store import is_url
from smp.checkpoint.safetensors_io import reason
from smp.doctor.check import CheckContext
from smp.errors import UserError
from smp.units import readable

_PROBE = 32 << 20  # bytes of a checkpoint where no model is known
_IN_MEMORY = ("tmpfs", "ramfs")


def output_directory(ctx: CheckContext) -> Path | None:
    """Return where the run will write, if that is known."""
    config = ctx.request.config
    if config.run.output_dir:
        return Path(config.run.output_dir).absolute()
    return Path(f"runs/{Path(config.model.model).name}").absolute() if config.model.model else None


def _directories(ctx: CheckContext) -> list[tuple[str, Path, int]]:
    """Return (flag, directory, checkpoints kept) of each directory that checkpoints go to."""
    output, settings = output_directory(ctx), ctx.request.config.checkpoint
    kept = list(settings.num_kept_checkpoints)
    if not settings.checkpoint_dir:
        return [] if output is None else [("output_dir", output, kept[0])]
    directories = [] if output is None else [("output_dir", output, 0)]
    for index, folder in enumerate(settings.checkpoint_dir):
        number = kept[min(index, len(kept) - 1)]
        if not is_url(folder):
            directories.append(("checkpoint_dir", Path(folder).absolute(), number))
        elif output is not None:  # written to it before it is uploaded
            directories.append(("output_dir", output, number))
    return directories


def check_disk(ctx: CheckContext) -> None:
    """Write to each directory as the job's start does, and compare its free space with the checkpoints kept."""
    directories = _directories(ctx)
    if not directories:
        ctx.ok("no --output_dir was given: nothing was written")
    model = ctx.report.measurements.get("model")
    checkpoint = None if model is None else model["checkpoint_bytes"]
    for flag, directory, kept in directories:
        existing = nearest_existing(directory)
        if not existing.is_dir():
            ctx.problem(f"--{flag} {directory}: {existing} is a file: choose another directory")
            continue
        try:
            said = forecast(directory, checkpoint if checkpoint and kept else _PROBE)
        except UserError as error:
            ctx.problem(str(error))
            continue
        _check_abilities(ctx, flag, existing)
        free = disk_free(directory)
        if checkpoint and kept and free < checkpoint * (kept + 1):
            ctx.warn(
                f"--{flag} {directory} has {readable(free)} free and one checkpoint takes {readable(checkpoint)}, "
                f"{kept} kept ones and the one being written {readable(checkpoint * (kept + 1))}: free some space, "
                f"choose another directory, or lower --num_kept_checkpoints",
                checkpoint_bytes=checkpoint,
                free_bytes=free,
            )
        else:
            what = "a checkpoint of " if checkpoint and kept else ""
            ctx.ok(f"--{flag} {directory}: {what}{said}", checkpoint_bytes=checkpoint, free_bytes=free)
        if (kind := file_system_of(ctx, existing)) in _IN_MEMORY:
            ctx.warn(
                f"--{flag} {directory} is on {kind}, which is memory: checkpoints take it from the training, and are "
                f"gone with the machine; choose a directory on a disk"
            )


def _check_abilities(ctx: CheckContext, flag: str, directory: Path) -> None:
    """Try locks, without which a run is refused, and links, by which ``latest`` is named."""
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            ctx.problem(
                f"--{flag} {directory} is on a file system without flock ({reason(error)}), by which a run keeps "
                f"others out: mount it with locks, or choose another directory"
            )
    link = directory / f".doctor-{os.getpid()}-{time.time_ns()}-link"
    try:
        link.symlink_to("nowhere")
        link.unlink()
    except OSError as error:
        ctx.warn(f"--{flag} {directory} takes no symbolic links ({reason(error)}): there will be no `latest`")


def file_system_of(ctx: CheckContext, path: Path) -> str:
    """Return the kind of file system that holds a path, such as ``ext4``; empty where the system does not tell."""
    best, kind = "", ""
    for line in (ctx.read("proc/self/mounts") or "").splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ")
        if path.resolve().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, words[2]
    return kind
