"""The manifest: contents of a checkpoint, with size and digest of every file and the location of every tensor.

It is written last. A directory without one is no checkpoint; one whose files are not exactly those it lists is damaged.
Its first entry is a digest of all its bytes that follow, so that no change of it goes unnoticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import json
import math
import operator
import os
import platform
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint.safetensors_io import (
    DTYPE_NAMES,
    DTYPES,
    OTHER_DIGEST,
    FileEntry,
    digest_of,
    header_problem,
    new_digest,
    read_all,
    read_header,
    reason,
    shown,
    strict_json,
)
from smp.errors import DamagedCheckpointError, UserError

SCHEMA = 1
MANIFEST_FILE = "manifest.json"
# A 405B model on 4096 ranks has about 52 million values in 260 MiB; each takes up to a hundred bytes in memory.
MAX_MANIFEST = 384 << 20
MAX_VALUES = 16_000_000
# More for each existing file: every rank adds a part of every tensor.
VALUES_PER_FILE = 16_000
MAX_AXES = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_START = b'{"checksum":"'


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a tensor and the file it lies in, under the tensor's name."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A full tensor, and its shards."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a checkpoint.

    Attributes:
        kind: ``sharded`` (the tensors of all ranks) or ``local`` (those of one rank).
        step: optimizer updates done.
        saved_at: time of the save, UTC, ISO 8601.
        versions: of smp, torch and Python, and what else the writer names.
        world_size: ranks of the run that wrote it.
        degrees: of parallelism, by axis.
        model: ``name`` and ``config``, the Hugging Face configuration.
        run: progress, settings and identity of the data.
    """

    kind: str = "sharded"
    step: int
    world_size: int
    degrees: dict[str, int]
    model: dict[str, Any]
    run: dict[str, Any]
    saved_at: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    schema: int = SCHEMA
    files: dict[str, FileEntry] = dataclasses.field(default_factory=dict)
    tensors: dict[str, TensorEntry] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def now() -> str:
    """Return the time as manifests write it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of torch and Python; the caller adds smp's."""
    return {"torch": torch.__version__, "python": platform.python_version()}


def encode_entries(files: dict[str, FileEntry], tensors: dict[str, TensorEntry]) -> dict[str, Any]:
    """Return files and tensors as JSON has them; a chunk names its file by the number in the list."""
    names = {name: index for index, name in enumerate(files)}
    return {
        "files": [[name, entry.size, entry.digest] for name, entry in files.items()],
        "tensors": {
            name: [
                DTYPE_NAMES[entry.dtype],
                entry.shape,
                [[names[chunk.file], chunk.offsets, chunk.sizes] for chunk in entry.chunks],
            ]
            for name, entry in tensors.items()
        },
    }


def decode_entries(content: dict[str, Any]) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    """Return the inverse of :func:`encode_entries`; raises ValueError and the like for anything else."""
    files: dict[str, FileEntry] = {}
    for name, size, digest in content["files"]:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == MANIFEST_FILE or name in files:
            raise ValueError(f"{str(name)[:80]!r} is no name of a file, or given twice")
        files[name] = FileEntry(_natural([size])[0], str(digest))
    names = list(files)
    tensors = {
        name: TensorEntry(
            DTYPES[dtype],
            _natural(shape),
            tuple(Chunk(names[_natural([f])[0]], _natural(offsets), _natural(sizes)) for f, offsets, sizes in chunks),
        )
        for name, (dtype, shape, chunks) in content["tensors"].items()
    }
    return files, tensors


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as the bytes of its file."""
    fields = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest)}
    content = fields | encode_entries(manifest.files, manifest.tensors)
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[1:] + b"\n"
    digest = new_digest()
    digest.update(body)
    return _START + shown(digest).encode() + b'",' + body


def size_problem(content: bytes | bytearray, files: int) -> str | None:
    """Say why a manifest of these bytes, with so many files, is more than is read; None if it is not."""
    if len(content) > MAX_MANIFEST:
        return f"has more than {MAX_MANIFEST} bytes"
    most = MAX_VALUES + VALUES_PER_FILE * files
    if content.count(b",") > most:
        return f"lists more than {most} things"
    return None


def _read_file(path: Path) -> tuple[bytearray, int]:
    """Read the file, bounded; return it with the number of files in the directory."""
    file = path / MANIFEST_FILE
    try:
        # Without O_NONBLOCK a pipe would be waited for.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UserError(f"{path} is not a complete checkpoint: it has no {MANIFEST_FILE}") from None
    except OSError as error:
        raise DamagedCheckpointError(path, [f"{MANIFEST_FILE} cannot be opened ({reason(error)})"]) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST:
            raise DamagedCheckpointError(path, [f"{MANIFEST_FILE} is no file of at most {MAX_MANIFEST} bytes"])
        data = bytearray(status.st_size)
        read_all(descriptor, memoryview(data), 0)
        return data, len(os.listdir(path))
    except OSError as error:
        raise DamagedCheckpointError(path, [f"{MANIFEST_FILE} cannot be read ({reason(error)})"]) from None
    finally:
        os.close(descriptor)


def _content(data: bytes | bytearray, path: Path | str, files: int) -> dict[str, Any]:
    """Check the bytes against the digest in them, and return what they say."""
    head, _, body = bytes(data).partition(b'",')
    digest = new_digest()
    digest.update(body)
    if head != _START + shown(digest).encode():
        raise DamagedCheckpointError(path, [f"{MANIFEST_FILE} does not match its own checksum"])
    if problem := size_problem(data, files):
        raise DamagedCheckpointError(path, [f"{MANIFEST_FILE} {problem}"])
    try:
        content = strict_json(b"{" + body)
        if not isinstance(content, dict) or type(content.get("schema")) is not int:
            raise ValueError("it names no schema")
    except ValueError as error:
        raise DamagedCheckpointError(path, [f"{MANIFEST_FILE} cannot be read ({reason(error)})"]) from None
    return content


def checksum_of(data: bytes | bytearray) -> str:
    """Return the digest that a manifest begins with: of all it says, and so of the digests of all files."""
    return bytes(data[:100]).partition(b'",')[0].removeprefix(_START).decode(errors="replace")


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Disable garbage collection: millions of objects are made, none in a cycle, and looking takes half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest and check all that needs no other file.

    Raises:
        UserError: it has none, or one of a newer schema.
        DamagedCheckpointError: malformed; names that leave the directory; tensors with holes or overlaps.
    """
    data, files = _read_file(path)
    return parse_manifest(data, path, files)


@_without_collection()
def parse_manifest(data: bytes | bytearray, path: Path | str, files: int) -> Manifest:
    """Return what the bytes of a manifest say, as :func:`read_manifest`.

    Args:
        path: of the checkpoint, for messages.
        files: how many are next to it, which bounds what is read.
    """
    content = _content(data, path, files)
    if content["schema"] > SCHEMA:
        theirs = content.get("versions")
        writer = theirs.get("smp") if isinstance(theirs, dict) else None
        raise UserError(
            f"checkpoint {path} has schema {content['schema']} and this version of smp reads up to {SCHEMA}: it was "
            f"written by smp {writer if isinstance(writer, str) else 'of a newer version'}, resume with that"
        )
    try:
        return _decode(content)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DamagedCheckpointError(path, [f"{MANIFEST_FILE} is malformed ({reason(error)})"]) from None


def _natural(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(values)
    for value in found:
        if type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"a number is out of range in {found[:8]}")
    return found


def _decode(content: dict[str, Any]) -> Manifest:
    files, tensors = decode_entries(content)
    free = {name: entry.size for name, entry in files.items()}
    for name, entry in tensors.items():
        if problem := coverage_problem(entry) if content["kind"] == "sharded" else _bounds_problem(entry):
            raise ValueError(f"{name[:200]} {problem}")
        for chunk in entry.chunks:
            free[chunk.file] -= math.prod(chunk.sizes) * entry.dtype.itemsize
            if free[chunk.file] < 0:
                raise ValueError(f"{chunk.file} has {files[chunk.file].size} bytes, too few for its tensors")
    step, world_size = _natural([content["step"], content["world_size"]])
    if content["kind"] not in ("sharded", "local"):
        raise ValueError(f"kind {content['kind']!r}")
    for key in ("degrees", "model", "run", "versions"):
        if not isinstance(content[key], dict):
            raise TypeError(f"{key} is no object")
    return Manifest(
        kind=content["kind"], step=step, world_size=world_size, degrees=content["degrees"], model=content["model"],
        run=content["run"], files=files, tensors=tensors, saved_at=str(content["saved_at"]),
        versions=content["versions"], schema=content["schema"],
    )  # fmt: skip


def _bounds_problem(entry: TensorEntry) -> str | None:
    """Say why a chunk is no part of the tensor; None if all are."""
    shape = entry.shape
    if len(shape) > MAX_AXES:
        return f"has {len(shape)} axes"
    for chunk in entry.chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return "has a part of another rank"
        if any(o + n > extent for o, n, extent in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return "has a part that reaches beyond it"
        if not math.prod(chunk.sizes):
            return "has an empty part"
    return None


def coverage_problem(entry: TensorEntry) -> str | None:
    """Say why the chunks are not exactly the tensor, each element once; None if they are."""
    if problem := _bounds_problem(entry):
        return problem
    shape = entry.shape
    if not entry.chunks:
        complete = 0 in shape
    else:
        complete = _fills(entry.chunks, (0,) * len(shape), shape, range(len(shape)))
    return None if complete else "has parts that leave holes or overlap"


def _fills(chunks: Sequence[Chunk], begin: tuple[int, ...], end: tuple[int, ...], axes: Sequence[int]) -> bool:
    """Tell whether the chunks are the box from ``begin`` to ``end``, cut along each of ``axes`` at most once.

    Shards are cut so; the bound on the cuts keeps this linear in the chunks, whatever a file says.
    """
    if len(chunks) == 1:
        offsets, sizes = chunks[0].offsets, chunks[0].sizes
        return offsets == begin and tuple(map(operator.add, offsets, sizes)) == end
    for axis in axes:
        slabs: list[list[Chunk]] = []
        edges, reached = [], -1
        for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[axis]):
            if chunk.offsets[axis] >= reached:
                slabs.append([])
                edges.append(chunk.offsets[axis])
            slabs[-1].append(chunk)
            reached = max(reached, chunk.offsets[axis] + chunk.sizes[axis])
        if len(slabs) > 1 and edges[0] == begin[axis]:
            others = [other for other in axes if other != axis]
            return all(
                _fills(slab, (*begin[:axis], low, *begin[axis + 1 :]), (*end[:axis], high, *end[axis + 1 :]), others)
                for slab, low, high in zip(slabs, edges, [*edges[1:], end[axis]], strict=True)
            )
    return False


def problems_of_files(
    path: Path, manifest: Manifest, *, content: bool, names: Iterable[str] | None = None
) -> list[str]:
    """Return what differs between a checkpoint's directory and its manifest, naming files; empty if nothing does.

    Args:
        content: also read the files: digests, and that their headers describe the tensors of the manifest.
        names: files whose content to read; None: all. Names and sizes are checked of all in any case.
    """
    try:
        present = [(entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(path)]
    except OSError as error:
        return [f"it cannot be listed ({reason(error)})"]
    problems = problems_of_sizes(manifest, {n: s.st_size if stat.S_ISREG(s.st_mode) else None for n, s in present})
    if not content or problems:
        return problems
    expected = expected_headers(manifest)
    read = manifest.files if names is None else names
    found = ((n, _problem_of_content(path / n, manifest.files[n].digest, expected.get(n, {}))) for n in read)
    return [f"{n} {problem}" for n, problem in found if problem]


def problems_of_sizes(manifest: Manifest, sizes: Mapping[str, int | None]) -> list[str]:
    """Compare the names and sizes of a checkpoint's files with its manifest; None is no regular file's."""
    problems = [f"{n} does not belong to it" for n in sorted(sizes.keys() - manifest.files.keys() - {MANIFEST_FILE})]
    for n, entry in manifest.files.items():
        if n not in sizes:
            problems.append(f"{n} is missing")
        elif (size := sizes[n]) != entry.size:
            wrong = "is no regular file" if size is None else f"has {size} bytes instead of {entry.size}"
            problems.append(f"{n} {wrong}")
    return problems


def expected_headers(manifest: Manifest) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Return dtype and shape of each tensor that a file's header should list, by file."""
    expected: dict[str, dict[str, tuple[Any, ...]]] = {}
    for tensor, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            expected.setdefault(chunk.file, {})[tensor] = (entry.dtype, chunk.sizes)
    return expected


def _problem_of_content(file: Path, digest: str, expected: dict[str, tuple[Any, ...]]) -> str | None:
    try:
        if digest_of(file) != digest:
            return OTHER_DIGEST
        if file.suffix == ".safetensors":
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return header_problem(read_header(descriptor), expected)
            finally:
                os.close(descriptor)
    except (OSError, ValueError) as error:
        return f"cannot be read ({reason(error)})"
    return None
