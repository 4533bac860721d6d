"""Where the run will write: permission, room, speed, locks and links."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from smp.checkpoint.disk_forecast import COPIES
from smp.checkpoint.layout import disk_free, nearest_existing
from smp.checkpoint.safetensors_io import reason
from smp.comm.report import readable
from smp.doctor.check import CheckContext

_BLOCK = 16 << 20  # flushed at once
_PROBE = 64 << 20
_FULL_PROBE = 1 << 30
_PROBE_SECONDS = 10.0  # after which the speed is known well enough
_WRITING_SHARE = 0.25  # of the check's time that is given to writing, for all directories together
_SLOW = 50 << 20  # bytes per second
_LONG_SECONDS = 600.0  # of one checkpoint
_FEW_FILES = 1000
_IN_MEMORY = ("tmpfs", "ramfs")


def output_directory(ctx: CheckContext) -> Path | None:
    """Where the run will write, if that is known."""
    config = ctx.request.config
    if config.run.output_dir:
        return Path(config.run.output_dir).absolute()
    return Path(f"runs/{Path(config.model.model).name}").absolute() if config.model.model else None


def _directories(ctx: CheckContext) -> list[tuple[str, Path, int]]:
    """(flag, directory, checkpoints kept) of each place that checkpoints go to."""
    output, settings = output_directory(ctx), ctx.request.config.checkpoint
    kept = list(settings.num_kept_checkpoints)
    if not settings.checkpoint_dir:
        return [] if output is None else [("output_dir", output, kept[0])]
    places = [] if output is None else [("output_dir", output, 0)]
    for index, folder in enumerate(settings.checkpoint_dir):
        number = kept[min(index, len(kept) - 1)]
        places.append(("checkpoint_dir", Path(folder).absolute(), number))
    return places


def check_disk(ctx: CheckContext) -> None:
    """Write to each directory, and see what fits."""
    places = _directories(ctx)
    if not places:
        ctx.ok("no --output_dir was given: nothing was written")
        return
    results = []
    for flag, directory, kept in places:
        seconds = ctx.request.timeout * _WRITING_SHARE / len(places)
        if (speed := _check_writing(ctx, flag, directory, seconds=seconds)) is None:
            continue
        results.append({"directory": str(directory), "bytes_per_second": speed, "free_bytes": disk_free(directory)})
        _check_free(ctx, flag, directory, kept=kept, speed=speed)
    ctx.measure("disk", results)


def _check_writing(ctx: CheckContext, flag: str, directory: Path, *, seconds: float) -> float | None:
    """Bytes per second, or None where it cannot be written; at most so many seconds are spent on writing."""
    place = nearest_existing(directory)
    if not place.is_dir():
        ctx.problem(f"--{flag} {directory}: {place} is a file: choose another directory")
        return None
    size = min(_FULL_PROBE if ctx.request.full else _PROBE, max(_BLOCK, disk_free(place) // 4))
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:  # nameless: gone with this process
            speed = write_speed(file, size, seconds=min(seconds, _PROBE_SECONDS * (6 if ctx.request.full else 1)))
            _check_abilities(ctx, flag, place, file)
    except OSError as error:
        ctx.problem(
            f"--{flag} {directory} cannot be written ({reason(error)}; {readable(disk_free(place))} are free): free "
            f"some space or mend its permissions, or choose another directory",
            free_bytes=disk_free(place),
        )
        return None
    slow = speed < _SLOW
    ctx.say(
        "warning" if slow else "ok",
        f"--{flag} {directory}: written and flushed at {readable(int(speed))}/s, {readable(disk_free(place))} free"
        + (": checkpoints will take long, choose a faster file system" if slow else ""),
        bytes_per_second=speed,
        free_bytes=disk_free(place),
    )
    kind = file_system_of(ctx, place)
    if kind in _IN_MEMORY:
        ctx.warn(
            f"--{flag} {directory} is on {kind}, which is memory: checkpoints take it from the training, and are gone "
            f"with the machine; choose a directory on a disk"
        )
    status = os.statvfs(place)
    if status.f_files and status.f_favail < _FEW_FILES:
        ctx.warn(f"--{flag} {directory} has room for {status.f_favail} more files only (inodes): remove some")
    return speed


def write_speed(file: BinaryIO, size: int, *, seconds: float) -> float:
    """Bytes per second of what is written and flushed to the disk; fewer bytes where time is over.

    Raises:
        OSError: it cannot be written.
    """
    block, written = os.urandom(_BLOCK), 0
    started = time.perf_counter()
    while written < size and time.perf_counter() - started < seconds:
        written += file.write(block[: size - written]) or 0
        os.fsync(file.fileno())
    return written / max(time.perf_counter() - started, 1e-9)


def _check_abilities(ctx: CheckContext, flag: str, place: Path, file: BinaryIO) -> None:
    """Locks, without which a run is refused, and links, by which ``latest`` is named."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        ctx.problem(
            f"--{flag} {place} is on a file system without flock ({reason(error)}), by which a run keeps others out: "
            f"mount it with locks, or choose another directory"
        )
    link = place / f".doctor-{os.getpid()}-{time.time_ns()}-link"
    try:
        link.symlink_to("nowhere")
        link.unlink()
    except OSError as error:
        ctx.warn(f"--{flag} {place} takes no symbolic links ({reason(error)}): there will be no `latest`")


def file_system_of(ctx: CheckContext, path: Path) -> str:
    """The kind of file system that holds a path, such as ``ext4``; empty where the system does not tell."""
    best, kind = "", ""
    for line in (ctx.read("proc/self/mounts") or "").splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ")
        if path.resolve().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, words[2]
    return kind


def _check_free(ctx: CheckContext, flag: str, directory: Path, *, kept: int, speed: float) -> None:
    """Compare what checkpoints of the model need with what there is."""
    parameters = ctx.state.get("parameters")
    if parameters is None or not kept:
        return
    one, free = parameters * 4 * COPIES, disk_free(directory)
    data = {"checkpoint_bytes": one, "free_bytes": free, "seconds": one / speed}
    if free < one * (kept + 1):
        ctx.say(
            "problem" if free < one else "warning",
            f"--{flag} {directory} has {readable(free)} free and one checkpoint takes {readable(one)}, {kept} kept "
            f"ones and the one being written {readable(one * (kept + 1))}: free some space, choose another directory, "
            f"or lower --num_kept_checkpoints",
            **data,
        )
        return
    slow = one / speed > _LONG_SECONDS
    ctx.say(
        "warning" if slow else "ok",
        f"a checkpoint takes {readable(one)}, written in about {one / speed:.1f} s by one host"
        + (": use --checkpoint_type async_sharded, or a faster file system" if slow else ""),
        **data,
    )
