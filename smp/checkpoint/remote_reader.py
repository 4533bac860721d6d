"""Files of a checkpoint below a URL, read without copying them: in parts, or once through their digest."""

from __future__ import annotations

from smp.checkpoint.object_store import ObjectStore
from smp.checkpoint.safetensors_io import (
    OTHER_DIGEST,
    FileEntry,
    Stored,
    header_bytes,
    header_problem,
    new_digest,
    parse_header,
    shown,
)


class RemoteFiles:
    """Files of one folder, for :class:`smp.checkpoint.reader.CheckpointReader`.

    Args:
        store: where they are.
        folder: of the checkpoint; empty: ``store`` is it.
        sizes: bytes of each.
    """

    def __init__(self, store: ObjectStore, folder: str, sizes: dict[str, int]):
        self._store, self._folder, self._sizes = store, f"{folder}/" if folder else "", sizes

    def header(self, name: str) -> dict[str, Stored]:
        """Return what a file holds."""
        size = self._sizes[name]
        beginning = bytearray(min(8, size))
        self.read(name, memoryview(beginning), 0)
        text = bytearray(header_bytes(beginning, size))
        self.read(name, memoryview(text), 8)
        return parse_header(bytes(text), size)

    def read(self, name: str, into: memoryview, start: int) -> None:
        """Fill ``into`` with a file's bytes from ``start`` on."""
        done = 0
        for part in self._store.pieces(self._folder + name, start, start + len(into)):
            into[done : done + len(part)] = part
            done += len(part)

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def problem_of(self, name: str, entry: FileEntry, expected: dict[str, tuple]) -> str | None:
        """Say what is wrong with the content of a file, reading it once; None if nothing is.

        Args:
            name: of the file.
            entry: what the manifest says of it.
            expected: tensors of its header, as of :func:`smp.checkpoint.manifest.expected_headers`.
        """
        digest, beginning, needed = new_digest(), bytearray(), 8 if name.endswith(".safetensors") else 0
        wrong = None
        for part in self._store.pieces(self._folder + name, 0, entry.size):
            digest.update(part)
            if len(beginning) < needed:
                beginning += part
            if needed == 8 and len(beginning) >= 8:
                try:
                    needed += header_bytes(beginning, entry.size)
                except ValueError as error:
                    wrong, needed = f"cannot be read ({error})", 0
        if shown(digest) != entry.digest:
            return OTHER_DIGEST
        if not needed:
            return wrong
        try:
            return header_problem(parse_header(bytes(beginning[8:needed]), entry.size), expected)
        except ValueError as error:
            return f"cannot be read ({error})"
