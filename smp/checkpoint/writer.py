"""Write a checkpoint: each rank its files and a list of them, then one rank the manifest, and the rename.

No step needs a collective while data is written, so that a thread can do it. The lists, ``rank<k>.json``, lie in the
temporary directory until the manifest takes their place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from smp.checkpoint.directory import TEMPORARY, publish
from smp.checkpoint.manifest import (
    MANIFEST_FILE,
    Chunk,
    Manifest,
    TensorEntry,
    coverage_problem,
    decode_entries,
    encode,
    encode_entries,
    problems_of_files,
    size_problem,
)
from smp.checkpoint.safetensors_io import (
    FileEntry,
    Piece,
    digest_of,
    strict_json,
    sync,
    write_bytes,
    write_tensors,
)
from smp.errors import RunError

# Of tensors per file: a damaged file is named and read by itself, and many hash in parallel.
FILE_BYTES = 4 << 30
# A network file system may show another host's file late.
VISIBLE_WITHIN = 60.0


def part_name(rank: int) -> str:
    """Return the list of what a rank has written."""
    return f"rank{rank:05d}.json"


def write_part(
    directory: Path,
    pieces: list[Piece],
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    *,
    rank: int,
    check: bool = False,
) -> None:
    """Write this rank's tensors and the list of them.

    Args:
        pieces: on the CPU.
        shapes: of the full tensors, of at least those in ``pieces``.
        check: read the tensors back, from the disk where the system allows that.

    Raises:
        OSError: they cannot be written, or read.
        RunError: what is read is not what was written.
    """
    groups: list[list[Piece]] = [[]]
    filled = 0
    for piece in pieces:
        if groups[-1] and filled + piece.tensor.nbytes > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += piece.tensor.nbytes
    files: dict[str, FileEntry] = {}
    chunks: dict[str, list[Chunk]] = {name: [] for name in shapes}
    for number, group in enumerate(group for group in groups if group):
        name = f"rank{rank:05d}-{number:03d}.safetensors"
        files[name] = write_tensors(directory / name, group)
        if check and digest_of(directory / name, cached=False) != files[name].digest:
            raise RunError(f"{directory / name} is not on the disk as it was written")
        for piece in group:
            chunks[piece.name].append(Chunk(name, piece.offsets, tuple(piece.tensor.shape)))
    tensors = {name: TensorEntry(*shapes[name], tuple(found)) for name, found in chunks.items()}
    listed = directory / part_name(rank)
    unfinished = listed.with_suffix(TEMPORARY)
    write_bytes(unfinished, json.dumps(encode_entries(files, tensors)).encode())
    unfinished.rename(listed)  # another rank that sees it, without a barrier as at exit, can read all of it


def appears(path: Path) -> bool:
    """Tell whether what another host has made is seen here, at once or after a while."""
    end = time.monotonic() + VISIBLE_WITHIN
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def await_parts(directory: Path, ranks: list[int]) -> None:
    """Return when all ranks have written their part, or another one has taken the directory to publish it.

    Raises:
        RunError: nothing more is being written, and one is missing.
    """
    missing = list(ranks)

    def complete() -> bool:
        missing[:] = [rank for rank in missing if not (directory / part_name(rank)).exists()]
        return not missing or not directory.exists()

    if not _while_written(directory, complete):
        raise RunError(f"rank {missing[0]} has not written its part, and nothing was written for {VISIBLE_WITHIN:g} s")


def await_published(claimed: Path) -> None:
    """Return when another rank has published a checkpoint that it has taken.

    Raises:
        RunError: it does not.
    """
    if not _while_written(claimed, lambda: not claimed.exists()):
        raise RunError(f"the rank that was to publish it has not, and nothing was written for {VISIBLE_WITHIN:g} s")


def _while_written(directory: Path, ready: Callable[[], bool]) -> bool:
    """Wait until ``ready``; False if before that the files of ``directory`` have not grown for a while."""
    seen, end = -1, 0.0
    while not ready():
        with contextlib.suppress(OSError):  # it is being renamed
            size = sum(entry.stat().st_size for entry in os.scandir(directory))
            if size != seen:
                seen, end = size, time.monotonic() + VISIBLE_WITHIN
        if time.monotonic() > end:
            return ready()
        time.sleep(0.05)
    return True


def merge_parts(directory: Path, ranks: list[int], manifest: Manifest) -> Manifest:
    """Return the manifest with the files and tensors that the ranks have listed.

    Raises:
        RunError: the tensors are not complete: a defect, found before it is published.
    """
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    for rank in ranks:
        path = directory / part_name(rank)
        appears(path)
        part_files, part_tensors = decode_entries(strict_json(path.read_bytes()))
        files |= part_files
        for name, entry in part_tensors.items():
            before = tensors.get(name, dataclasses.replace(entry, chunks=()))
            if (before.dtype, before.shape) != (entry.dtype, entry.shape):
                raise RunError(f"checkpoint {directory} was not published: ranks disagree on the shape of {name}")
            tensors[name] = dataclasses.replace(entry, chunks=before.chunks + entry.chunks)
    if manifest.kind == "sharded":
        for name, entry in tensors.items():
            if problem := coverage_problem(entry):
                raise RunError(f"checkpoint {directory} was not published: {name} {problem}")
    return dataclasses.replace(manifest, files=dict(sorted(files.items())), tensors=dict(sorted(tensors.items())))


def finish(temporary: Path, final: Path, ranks: list[int], manifest: Manifest) -> None:
    """Turn what the ranks have written into the published checkpoint ``final``; one process does it."""
    complete = merge_parts(temporary, ranks, manifest)
    for rank in ranks:
        (temporary / part_name(rank)).unlink()
    if problems := problems_of_files(temporary, complete, content=False):
        raise RunError(f"checkpoint {final} was not published: {'; '.join(problems[:3])}")
    content = encode(complete)
    if problem := size_problem(content, len(os.listdir(temporary))):
        raise RunError(
            f"checkpoint {final} was not published, as it could not be read: its {MANIFEST_FILE} {problem}; keep "
            f"large things out of what is saved beside the tensors, or save on fewer processes"
        )
    write_bytes(temporary / MANIFEST_FILE, content)
    publish(temporary, final)


def start(temporary: Path) -> None:
    """Make an empty temporary directory, in place of one that an interrupted save has left."""
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    sync(temporary.parent)
