"""Files that are on the disk when a call returns: JSON, and tensors in the safetensors format, hashed as they go.

Plain system calls are used: a disk error shows where it happens, and memory-mapped reads would turn one into a signal.
Format: https://github.com/huggingface/safetensors#format. The headers carry the offsets of sharded tensors as torch's
``HuggingFaceStorageReader`` expects them, so that plain torch can load these files, too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import functools
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from smp.errors import RunError, UserError
from smp.json_input import strict_json

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_OF_EXPORTS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}  # alone
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_NAMES = DTYPE_NAMES | {dtype: name for name, dtype in _OF_EXPORTS.items()}

# What is written or read by one system call: large enough for any disk, small enough to stay in the processor's cache
# until it is hashed, and to answer to signals.
PIECE = 4 << 20
OTHER_DIGEST = "is not as it was written (its digest differs)"
MAX_HEADER = 100_000_000  # safetensors' own bound
_ATTEMPTS = 3
_SYNC_FILE_RANGE_WRITE = 2  # of linux/fs.h


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """Size in bytes and digest of a file, as it was handed to the disk."""

    size: int
    digest: str


class Piece(NamedTuple):
    """Shard of the tensor ``name`` that a rank has and writes, beginning at ``offsets``."""

    name: str
    tensor: torch.Tensor  # contiguous, on the CPU
    offsets: tuple[int, ...]


class Stored(NamedTuple):
    """Location of a tensor in a file: ``start`` counts bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def new_digest() -> Any:
    """Return a new xxh3 digest of 128 bits: finds damage at the speed of memory, and does not stop an attacker."""
    return xxhash.xxh3_128()


def shown(digest: Any) -> str:
    """Return the digest as manifests write it."""
    return f"xxh3_128:{digest.hexdigest()}"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _persistently(operation: Callable[[], int]) -> int:
    """Call ``operation``, and again after an I/O error, which may pass."""
    for failures in range(1, _ATTEMPTS + 1):
        try:
            return operation()
        except OSError as error:
            if error.errno != errno.EIO or failures == _ATTEMPTS:
                raise
            time.sleep(0.1 * failures)
    raise AssertionError


def write_all(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write everything at ``offset``, however little the system takes at once."""
    view = memoryview(data)
    while view:
        count = _persistently(functools.partial(os.pwrite, descriptor, view[:PIECE], offset))
        view, offset = view[count:], offset + count


def read_all(descriptor: int, into: memoryview, offset: int) -> None:
    """Fill ``into`` from ``offset``.

    Raises:
        OSError: the file ends before, or cannot be read.
    """
    while into:
        count = _persistently(functools.partial(os.preadv, descriptor, [into[:PIECE]], offset))
        if not count:
            raise OSError(errno.ENODATA, "the file ends too early")
        into, offset = into[count:], offset + count


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new file and flush it to the disk."""
    descriptor = _create(path)
    try:
        write_all(descriptor, data, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(pieces: list[Piece], metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for piece in pieces:
        entries[piece.name] = {
            "dtype": _HEADER_NAMES[piece.tensor.dtype],
            "shape": list(piece.tensor.shape),
            "data_offsets": [offset, offset + piece.tensor.nbytes],
        }
        offset += piece.tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)  # of Linux
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def _start_flush(descriptor: int, offset: int, count: int) -> None:
    """Have the system begin to write these bytes, where it can: a hint, which neither waits nor fails."""
    if call := _sync_file_range():
        call(descriptor, offset, count, _SYNC_FILE_RANGE_WRITE)


def write_tensors(path: Path, pieces: Iterable[Piece]) -> FileEntry:
    """Write a safetensors file and flush it to the disk; needs no memory besides the tensors'."""
    # Widest items first, so that each tensor is aligned.
    ordered = sorted(pieces, key=lambda piece: -piece.tensor.itemsize)
    sharding = {piece.name: {"saved_offsets": list(piece.offsets)} for piece in ordered}
    header = _header(ordered, {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding), "format": "pt"})
    digest, offset, flushed = new_digest(), len(header), 0
    descriptor = _create(path)
    try:
        write_all(descriptor, header, 0)
        digest.update(header)
        for piece in ordered:
            data = bytes_of(piece.tensor)
            for start in range(0, len(data), PIECE):
                part = data[start : start + PIECE]
                write_all(descriptor, part, offset)
                digest.update(part)
                offset += len(part)
                if offset - flushed >= PIECE:  # the disk works while more is copied and hashed
                    _start_flush(descriptor, flushed, offset - flushed)
                    flushed = offset
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileEntry(offset, shown(digest))


def digest_of(path: Path, *, cached: bool = True) -> str:
    """Read a file and return its digest.

    Args:
        cached: may come from the system's memory; otherwise from the disk, where the system allows that.
    """
    buffer, digest = memoryview(bytearray(PIECE)), new_digest()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if hasattr(os, "posix_fadvise"):
            if not cached:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # twice as fast for what no cache holds
        left, offset = os.fstat(descriptor).st_size, 0
        while left:
            part = buffer[: min(left, PIECE)]
            read_all(descriptor, part, offset)
            digest.update(part)
            left, offset = left - len(part), offset + len(part)
    finally:
        os.close(descriptor)
    return shown(digest)


def read_header(descriptor: int) -> dict[str, Stored]:
    """Return what a safetensors file contains; raises as :func:`header_of`, and OSError."""
    return header_of(functools.partial(read_all, descriptor), os.fstat(descriptor).st_size)


def header_of(read: Callable[[memoryview, int], object], size: int) -> dict[str, Stored]:
    """Return what a safetensors file of ``size`` bytes contains.

    Args:
        read: fills a buffer with the bytes from an offset on.

    Raises:
        ValueError: the header is no such thing, or does not describe exactly the bytes of the file.
    """
    if size < 8:
        raise ValueError("too short for a safetensors file")
    length = bytearray(8)
    read(memoryview(length), 0)
    count = int.from_bytes(length, "little")
    if count > min(MAX_HEADER, size - 8):
        raise ValueError(f"its header claims {count} bytes")
    text = bytearray(count)
    read(memoryview(text), 8)
    return _parse_header(bytes(text), size)


def _parse_header(text: bytes, size: int) -> dict[str, Stored]:
    """Return what the header of a file of ``size`` bytes says; raises as :func:`read_header`."""
    content, end = strict_json(text), 8 + len(text)
    if not isinstance(content, dict):
        raise ValueError("its header is no object")
    content.pop("__metadata__", None)
    found = {name: _stored(name, entry, end) for name, entry in content.items()}
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if stored.start != end:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        end += stored.nbytes
    if end != size:
        raise ValueError(f"it has {size} bytes and its header describes {end}")
    return found


def _stored(name: str, entry: Any, base: int) -> Stored:
    try:
        dtype, shape, (begin, end) = (DTYPES | _OF_EXPORTS)[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"its entry for {name!r} is malformed") from None
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"its entry for {name!r} has a number out of range")
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    if end - begin != count:
        raise ValueError(f"its entry for {name!r} has {end - begin} bytes, its shape needs {count}")
    return Stored(dtype, tuple(shape), base + begin, count)


def header_problem(header: dict[str, Stored], expected: dict[str, tuple[Any, ...]]) -> str | None:
    """Say about which tensor a file's header and the manifest differ; None if they do not."""
    found = {name: (stored.dtype, stored.shape) for name, stored in header.items()}
    if found == expected:
        return None
    name = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))[0]
    return f"and the manifest differ about {name}"


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: BaseException) -> str:
    """Return an error in a few words, for a sentence."""
    if isinstance(error, (UserError, RunError)):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"
