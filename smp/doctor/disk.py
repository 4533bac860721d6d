"""Where the run will write: permission, room, speed, locks, links, and one file system for all hosts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from smp.checkpoint.disk_forecast import COPIES
from smp.checkpoint.layout import disk_free
from smp.checkpoint.safetensors_io import reason
from smp.comm.report import readable
from smp.doctor.room import Room

_BLOCK = 4 << 20
_PROBE = 64 << 20
_FULL_PROBE = 1 << 30
_PROBE_SECONDS = 10.0  # after which the speed is known well enough
_WRITING_SHARE = 0.25  # of the check's time that is given to writing, for all directories together
_SLOW = 50 << 20  # bytes per second
_LONG_SECONDS = 600.0  # of one checkpoint
_FEW_FILES = 1000
_IN_MEMORY = ("tmpfs", "ramfs")


def output_directory(room: Room) -> Path | None:
    """Where the run will write, if that is known."""
    given = room.request.settings.get("output_dir")
    if given:
        return Path(given).expanduser().absolute()
    model = room.request.settings.get("model")
    return Path(f"runs/{Path(str(model)).name}").absolute() if model else None


def existing(path: Path) -> Path:
    """The directory itself or, where it is not there yet, the lowest one above it that is."""
    while not path.exists():
        path = path.parent
    return path


def _directories(room: Room) -> list[tuple[str, Path, int]]:
    """(flag, directory, checkpoints kept) of each place that checkpoints go to."""
    output = output_directory(room)
    folders = room.request.settings.get("checkpoint_dir") or []
    kept = list(room.request.settings.get("num_kept_checkpoints") or [2])
    if not folders:
        return [] if output is None else [("output_dir", output, int(kept[0]))]
    places = [] if output is None else [("output_dir", output, 0)]
    for index, folder in enumerate(folders):
        number = kept[index] if index < len(kept) else kept[-1]
        places.append(("checkpoint_dir", Path(folder).expanduser().absolute(), int(number)))
    return places


def check_disk(room: Room) -> None:
    """Write to each directory, and see what fits."""
    places = _directories(room)
    if not places:
        room.ok("no --output_dir was given: nothing was written")
        return
    results = []
    for flag, directory, kept in places:
        seconds = room.request.timeout * _WRITING_SHARE / len(places)
        if (speed := _check_writing(room, flag, directory, seconds=seconds)) is None:
            continue
        results.append({"directory": str(directory), "bytes_per_second": speed, "free_bytes": disk_free(directory)})
        _check_room(room, flag, directory, kept=kept, speed=speed)
    room.measure("disk", results)


def _check_writing(room: Room, flag: str, directory: Path, *, seconds: float) -> float | None:
    """Bytes per second, or None where it cannot be written; at most so many seconds are spent on writing."""
    place = existing(directory)
    if not place.is_dir():
        room.problem(f"--{flag} {directory}: {place} is a file: choose another directory")
        return None
    size = min(_FULL_PROBE if room.request.full else _PROBE, max(_BLOCK, disk_free(place) // 4))
    try:
        with _probe(place) as file:
            speed = write_speed(file, size, seconds=min(seconds, _PROBE_SECONDS * (6 if room.request.full else 1)))
            _check_abilities(room, flag, place, file)
    except OSError as error:
        room.problem(
            f"--{flag} {directory} cannot be written ({reason(error)}; {readable(disk_free(place))} are free): free "
            f"some space or mend its permissions, or choose another directory",
            free_bytes=disk_free(place),
        )
        return None
    slow = speed < _SLOW
    room.say(
        "warning" if slow else "ok",
        f"--{flag} {directory}: written and flushed at {readable(int(speed))}/s, {readable(disk_free(place))} free"
        + (": checkpoints will take long, choose a faster file system" if slow else ""),
        bytes_per_second=speed,
        free_bytes=disk_free(place),
    )
    kind = file_system_of(room, place)
    if kind in _IN_MEMORY:
        room.warn(
            f"--{flag} {directory} is on {kind}, which is memory: checkpoints take it from the training, and are gone "
            f"with the machine; choose a directory on a disk"
        )
    status = os.statvfs(place)
    if status.f_files and status.f_favail < _FEW_FILES:
        room.warn(f"--{flag} {directory} has room for {status.f_favail} more files only (inodes): remove some")
    return speed


@contextlib.contextmanager
def _probe(directory: Path) -> Iterator[BinaryIO]:
    """A file that is gone when this process is, however it ends: it has no name any more."""
    path = directory / f".doctor-{os.getpid()}-{time.time_ns()}"
    with path.open("wb", buffering=0) as file:
        path.unlink()
        yield cast(BinaryIO, file)


def write_speed(file: BinaryIO, size: int, *, seconds: float) -> float:
    """Bytes per second of what is written and flushed to the disk; fewer bytes where time is over.

    Flushed in parts, each twice as large as the one before: a slow disk takes little more than twice the time given.

    Raises:
        OSError: it cannot be written.
    """
    block, part, written = os.urandom(_BLOCK), _BLOCK, 0
    started = time.perf_counter()
    while written < size and time.perf_counter() - started < seconds:
        end = min(size, written + part)
        while written < end:
            written += file.write(block[: end - written]) or 0
        os.fsync(file.fileno())
        part *= 2
    return written / max(time.perf_counter() - started, 1e-9)


def _check_abilities(room: Room, flag: str, place: Path, file: BinaryIO) -> None:
    """Locks, without which a run is refused, and links, by which ``latest`` is named."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        room.problem(
            f"--{flag} {place} is on a file system without flock ({reason(error)}), by which a run keeps others out: "
            f"mount it with locks, or choose another directory"
        )
    link = place / f".doctor-{os.getpid()}-{time.time_ns()}-link"
    try:
        link.symlink_to("nowhere")
        link.unlink()
    except OSError as error:
        room.warn(f"--{flag} {place} takes no symbolic links ({reason(error)}): there will be no `latest`")


def file_system_of(room: Room, path: Path) -> str:
    """The kind of file system that holds a path, such as ``ext4``; empty where the system does not tell."""
    best, kind = "", ""
    for line in (room.read("proc/self/mounts") or "").splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ")
        if path.resolve().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, words[2]
    return kind


def _check_room(room: Room, flag: str, directory: Path, *, kept: int, speed: float) -> None:
    """Compare what checkpoints of the model need with what there is."""
    parameters = room.state.get("parameters")
    if parameters is None or not kept:
        return
    one, free = parameters * 4 * COPIES, disk_free(directory)
    data = {"checkpoint_bytes": one, "free_bytes": free, "seconds": one / speed}
    if free < one:
        room.problem(
            f"--{flag} {directory} has {readable(free)} free and one checkpoint of the model takes {readable(one)}: "
            f"free some space, or choose another directory",
            **data,
        )
    elif free < one * (kept + 1):
        room.warn(
            f"--{flag} {directory} has {readable(free)} free; {kept} kept checkpoint(s) and the one being written take "
            f"{readable(one * (kept + 1))}: free some space, or lower --num_kept_checkpoints",
            **data,
        )
    elif one / speed > _LONG_SECONDS:
        room.warn(
            f"a checkpoint of {readable(one)} takes about {one / speed:.0f} s at {readable(int(speed))}/s: use "
            f"--checkpoint_type async_sharded, or a faster file system",
            **data,
        )
    else:
        room.ok(f"a checkpoint takes {readable(one)}, written in about {one / speed:.1f} s by one host", **data)


# --- seen by all hosts


def leave_mark(directory: Path, name: str) -> Path | None:
    """Leave a file that other hosts look for; where, or None where it cannot be written."""
    path = existing(directory) / name
    try:
        with path.open("wb") as file:
            file.write(name.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return None
    return path


def sees_mark(path: Path, *, seconds: float) -> bool:
    """Whether a file with its own name as content is there, within some time: network file systems show it late."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes NFS look again
            if path.read_bytes() == path.name.encode():
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
