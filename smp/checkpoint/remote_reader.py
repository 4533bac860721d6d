"""Files of a checkpoint below a URL, read without copying them: in parts, or once through their digest."""

from __future__ import annotations

import concurrent.futures
import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from smp.checkpoint.manifest import Chunk, Manifest
from smp.checkpoint.object_store import ObjectStore
from smp.checkpoint.reader import CheckpointReader
from smp.checkpoint.remote import RemoteCheckpoint
from smp.checkpoint.safetensors_io import (
    OTHER_DIGEST,
    FileEntry,
    header_of,
    header_problem,
    new_digest,
    shown,
)
from smp.errors import DamagedCheckpointError, RunError, UserError

_AHEAD = 4  # requests of a rank that are under way


class RemoteFiles:
    """Files of a checkpoint below a URL, for :class:`smp.checkpoint.reader.CheckpointReader`."""

    def __init__(self, checkpoint: RemoteCheckpoint):
        self._store, self._folder = checkpoint.store, checkpoint.name

    def read(self, name: str, into: memoryview, start: int) -> None:
        """Fill ``into`` with a file's bytes from ``start`` on."""
        done = 0
        for part in self._store.pieces(f"{self._folder}/{name}", start, start + len(into)):
            into[done : done + len(part)] = part
            done += len(part)

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def problem_of(self, name: str, entry: FileEntry, expected: dict[str, tuple]) -> str | None:
        """Say what is wrong with the content of a file, reading it once; None if nothing is.

        Args:
            expected: tensors of its header, as of :func:`smp.checkpoint.manifest.expected_headers`.
        """
        source, problem = OnePass(self._store.pieces(f"{self._folder}/{name}", 0, entry.size), entry), None
        try:
            if name.endswith(".safetensors"):
                problem = header_problem(header_of(functools.partial(source.read, name), entry.size), expected)
        except ValueError as error:
            problem = f"cannot be read ({error})"
        try:
            source.close()
        except ValueError as error:
            return str(error)
        return problem


class OnePass:
    """A file of a checkpoint below a URL, read once from its beginning to its end, and hashed as it comes.

    For :class:`smp.checkpoint.reader.CheckpointReader`, which reads its tensors in their order.
    """

    def __init__(self, parts: Iterator[bytes], entry: FileEntry):
        self._parts, self._entry, self._digest = parts, entry, new_digest()
        self._part, self._position = memoryview(b""), 0

    def read(self, _name: str, into: memoryview, start: int) -> None:
        """Fill ``into`` with the bytes from ``start`` on, which follow what was read before."""
        self._skip(start)
        while into:
            part = self._next(len(into))
            into[: len(part)] = part
            into = into[len(part) :]

    def close(self) -> None:
        """Read what is left.

        Raises:
            ValueError: the file is not as it was written.
        """
        self._skip(self._entry.size)
        if shown(self._digest) != self._entry.digest:
            raise ValueError(OTHER_DIGEST)

    def _next(self, most: int) -> memoryview:
        if not self._part:
            self._part = memoryview(next(self._parts))
            self._digest.update(self._part)
        taken, self._part = self._part[:most], self._part[most:]
        self._position += len(taken)
        return taken

    def _skip(self, to: int) -> None:
        while self._position < to:
            self._next(to - self._position)


def _ahead(store: ObjectStore, name: str, size: int) -> Iterator[bytes]:
    """Yield an object in parts, while the next ones are on their way."""
    pending: deque[Any] = deque()
    with concurrent.futures.ThreadPoolExecutor(_AHEAD) as pool:
        for part in store.ranges(0, size):
            pending.append(pool.submit(store.range, name, *part))
            if len(pending) > _AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def fill_from(
    checkpoint: RemoteCheckpoint, manifest: Manifest, wanted: Mapping[str, tuple[torch.Tensor, Sequence[int]]]
) -> list[str]:
    """Fill tensors, each the box of a saved one that begins at some offsets; a file is fetched at most once.

    Returns:
        Problems: a file that is not as it was written; tensors may have been filled.
    """
    index = CheckpointReader(str(checkpoint), manifest)
    by_file: dict[str, list[tuple[str, Chunk, list[int], torch.Tensor]]] = {}
    for name, (tensor, offsets) in wanted.items():
        for chunk, begin, here in index.boxes(name, offsets, tensor.shape):
            by_file.setdefault(chunk.file, []).append((name, chunk, begin, tensor[here]))
    for file, boxes in by_file.items():
        try:
            entry = manifest.files[file]
            source = OnePass(_ahead(checkpoint.store, f"{checkpoint.name}/{file}", entry.size), entry)
            reader = CheckpointReader(str(checkpoint), manifest, source)
            order = {name: at for at, name in enumerate(reader.names(file))}
            for name, chunk, begin, target in sorted(boxes, key=lambda box: order.get(box[0], -1)):
                box = torch.empty(target.shape, dtype=manifest.tensors[name].dtype)
                reader.read_box(name, chunk, begin, box)
                target.copy_(box)
            source.close()
        except DamagedCheckpointError as error:
            return error.problems
        except ValueError as error:
            return [f"{file} {error}"]
        except RunError as error:  # of the store, before there is anything to lose
            raise UserError(str(error)) from error
    return []
