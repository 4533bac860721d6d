"""Read tensors of a checkpoint, full or in part, from whatever parts they were saved in."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from smp.checkpoint.manifest import Chunk, Manifest
from smp.checkpoint.safetensors_io import Stored, bytes_of, header_of, read_all, reason
from smp.errors import DamagedCheckpointError

# Files that are open at a time: a process may often have 1024, and a large run's checkpoint has more.
MOST_OPEN = 256


class Files(Protocol):
    """The files of a checkpoint, read in parts; raises OSError and ValueError where that fails."""

    def read(self, name: str, into: memoryview, start: int) -> None:
        """Fill ``into`` with a file's bytes from ``start`` on."""

    def close(self) -> None:
        """End reading."""


class LocalFiles:
    """Files of a directory; few are open at a time."""

    def __init__(self, path: Path):
        self._path = path
        self._open: dict[str, int] = {}

    def read(self, name: str, into: memoryview, start: int) -> None:
        """Fill ``into`` with a file's bytes from ``start`` on."""
        read_all(self._descriptor(name), into, start)

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[name] = os.open(self._path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return self._open[name]

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


class CheckpointReader:
    """Reads from a checkpoint whose files have been checked (:func:`smp.checkpoint.manifest.problems_of_files`).

    Args:
        files: None: those of the directory.

    Attributes:
        entries: what is said of each tensor, by name.
    """

    def __init__(self, path: Path | str, manifest: Manifest, files: Files | None = None):
        self._path, self._listed, self.entries = path, manifest.files, manifest.tensors
        self._files = files or LocalFiles(Path(path))
        self._headers: dict[str, dict[str, Stored]] = {}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return a tensor, or the box of it that begins at ``offsets``; on the CPU.

        Raises:
            KeyError: no such tensor.
            DamagedCheckpointError: a file is not what the manifest says, or lacks a part of the box.
        """
        entry = self.entries[name]
        offsets = tuple(offsets) if offsets is not None else (0,) * len(entry.shape)
        sizes = tuple(sizes) if sizes is not None else entry.shape
        out = torch.empty(sizes, dtype=entry.dtype)
        for chunk, begin, here in self.boxes(name, offsets, sizes):
            self.read_box(name, chunk, begin, out[here])
        return out

    def boxes(
        self, name: str, offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[tuple[Chunk, list[int], tuple[slice, ...]]]:
        """Return where a box of a tensor is: chunk, first element in it, and the part of the box that it has.

        Raises:
            DamagedCheckpointError: the chunks lack a part of it.
        """
        found, filled = [], 0
        for chunk in self.entries[name].chunks:
            # The box in which the wanted part and the chunk meet, in coordinates of the whole.
            begin = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            end = [
                min(a + m, b + n)
                for a, m, b, n in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]  # fmt: skip
            if any(b >= e for b, e in zip(begin, end, strict=True)):
                continue
            here = tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, offsets, strict=True))
            found.append((chunk, [b - o for b, o in zip(begin, chunk.offsets, strict=True)], here))
            filled += math.prod(e - b for b, e in zip(begin, end, strict=True))
        if filled != math.prod(sizes):
            raise DamagedCheckpointError(self._path, [f"{name} is incomplete"])
        return found

    def read_box(self, name: str, chunk: Chunk, begin: list[int], target: torch.Tensor) -> None:
        """Fill ``target`` from a chunk, from the element ``begin`` of it on; reads whole rows of the first axis."""
        try:
            stored = self._header(chunk.file).get(name)
            if stored is None or stored.shape != chunk.sizes or stored.dtype != target.dtype:
                raise ValueError(f"it does not contain {name} as the manifest says")
            if not stored.shape:
                self._files.read(chunk.file, bytes_of(target), stored.start)
                return
            row_bytes = stored.nbytes // stored.shape[0]
            start = stored.start + begin[0] * row_bytes
            whole_rows = tuple(target.shape[1:]) == stored.shape[1:]
            if whole_rows and target.is_contiguous():
                self._files.read(chunk.file, bytes_of(target), start)
                return
            rows = torch.empty((target.shape[0], *stored.shape[1:]), dtype=target.dtype)
            self._files.read(chunk.file, bytes_of(rows), start)
            inner = tuple(slice(b, b + n) for b, n in zip(begin[1:], target.shape[1:], strict=True))
            target.copy_(rows[(slice(None), *inner)])
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(self._path, [f"{chunk.file} cannot be read ({reason(error)})"]) from None

    def names(self, file: str) -> list[str]:
        """Return the tensors of a file in their order; raises OSError and ValueError as :class:`Files`."""
        return sorted(self._header(file), key=lambda name: self._header(file)[name].start)

    def _header(self, file: str) -> dict[str, Stored]:
        if file not in self._headers:
            read = functools.partial(self._files.read, file)
            self._headers[file] = header_of(read, self._listed[file].size)
        return self._headers[file]

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
