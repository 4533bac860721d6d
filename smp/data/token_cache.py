"""Token files: flat arrays of token ids, memory mapped, made once from slower formats.

A token file is a folder::

    tokens.bin   every id of every row, one after the other (uint16 or uint32)
    rows.bin     int64, rows + 1 offsets into tokens.bin
    mask.bin     uint8 for each token, 1 where it is text; absent when every token is
    labels.bin   int32 for each token; absent when labels are the tokens
    meta.json    counts, number format, highest id, label and mask, digest of the rows

It is written under another name, flushed to disk and renamed, so a folder of that name is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash

from smp.data.progress import SECONDS_BETWEEN_LINES
from smp.environment import cache_folder, read_launch
from smp.errors import UserError
from smp.json_input import read_json, read_object

FORMAT = 1
SECONDS_BEFORE_FIRST_LINE = 5.0
TOKEN_DTYPES = ("uint16", "uint32")
IGNORED = -100  # a label that is not in the loss
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)  # of opening a damaged file
T = TypeVar("T")
log = logging.getLogger("smp.data")


@dataclasses.dataclass(frozen=True)
class Columns:
    """Rows of tokens, one after the other.

    Attributes:
        tokens: (n,) ids. offsets: (rows + 1,) int64, where each row begins and the last one ends.
        mask: (n,) 1 where a token is text, or None where all are.
        labels: (n,) integers, or None where they are the tokens.
        digest: of all of them, made in the pass that read them first.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    mask: np.ndarray | None
    labels: np.ndarray | None
    digest: str = dataclasses.field(default="", kw_only=True)


@dataclasses.dataclass(frozen=True)
class TokenFile(Columns):
    """A memory-mapped token file. Pickles as its path, so a worker process maps the same pages.

    Attributes:
        highest: largest id.
        highest_label: largest label in the loss, of labels that are not the tokens.
    """

    folder: Path
    highest: int
    highest_label: int

    @classmethod
    def open(cls, folder: Path) -> TokenFile:
        """Map a folder written by :class:`TokenWriter`.

        Raises:
            ValueError: a part's length differs from ``meta.json``, or the rows do not fit the tokens.
            KeyError, TypeError: ``meta.json`` is malformed.
            OSError: a file is missing.
        """
        meta = read_object(folder / "meta.json")
        dtypes = {"tokens": meta["dtype"], "rows": "int64", "mask": "uint8", "labels": "int32"}
        counts = {name: meta["counts"][name] for name in dtypes if name in meta["counts"]}
        if meta["dtype"] not in TOKEN_DTYPES or counts.keys() != meta["counts"].keys():
            raise ValueError(f"{folder}/meta.json is damaged")
        parts: dict[str, np.ndarray] = {}
        for part, count in counts.items():
            if (folder / f"{part}.bin").stat().st_size != count * np.dtype(dtypes[part]).itemsize:
                raise ValueError(f"{folder / part}.bin is damaged")
            parts[part] = _mapped(folder / f"{part}.bin", np.dtype(dtypes[part]), count)
        tokens, rows, mask, labels = parts["tokens"], parts["rows"], parts.get("mask"), parts.get("labels")
        besides = [len(part) for part in (mask, labels) if part is not None]
        if not len(rows) or rows[0] != 0 or rows[-1] > len(tokens) or besides != [len(tokens)] * len(besides):
            raise ValueError(f"{folder} has rows that are not its tokens")
        # Files of earlier versions lack keys, and are built again.
        highest_label = int(meta["highest_label"]) if labels is not None else 0
        if mask is not None and meta["highest_mask"] > 1:
            raise ValueError(f"{folder} has a mask of other numbers than 0 and 1")
        return cls(
            tokens, rows, mask, labels, folder=folder, highest=int(meta["highest"]), highest_label=highest_label,
            digest=str(meta["digest"]),
        )  # fmt: skip

    def __reduce__(self) -> tuple[Callable[[Path], TokenFile], tuple[Path]]:
        return TokenFile.open, (self.folder,)


def _mapped(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Map a file through torch, as Python's mmap would keep a descriptor for each."""
    if not count:
        return np.empty(0, dtype)
    mapped = torch.from_file(str(path), shared=False, size=count * dtype.itemsize, dtype=torch.uint8).numpy()
    mapped.flags.writeable = False
    return mapped.view(dtype)


class RowsDigest:
    """Digest of rows that come in parts: of each column's bytes, however they are cut."""

    def __init__(self) -> None:
        self._columns: dict[str, Any] = {}

    def add(self, column: str, content: bytes | np.ndarray) -> None:
        """Take the next bytes of a column."""
        data = np.ascontiguousarray(content) if isinstance(content, np.ndarray) else content
        self._columns.setdefault(column, xxhash.xxh3_128()).update(data)

    def hexdigest(self) -> str:
        """Return the digest of what has come so far."""
        return digest_of({name: column.hexdigest() for name, column in sorted(self._columns.items())})


class TokenWriter:
    """Writes a token file row by row, in bounded memory.

    Args:
        folder: an empty folder.
        dtype: one of ``TOKEN_DTYPES``.
    """

    def __init__(self, folder: Path, dtype: str):
        self.folder, self.dtype = folder, dtype
        self._parts = {part: open(folder / f"{part}.bin", "wb") for part in ("tokens", "rows")}  # noqa: SIM115
        self._count, self._rows, self._digest = 0, 0, RowsDigest()
        self._highest = {"highest": 0, "highest_label": 0, "highest_mask": 0}
        self._write("rows", np.zeros(1, np.int64).tobytes())

    def add(
        self,
        ids: np.ndarray,
        ends: Sequence[int] | np.ndarray,
        *,
        mask: np.ndarray | None = None,
        labels: np.ndarray | None = None,
    ) -> None:
        """Append tokens.

        Args:
            ids: (n,) integers that fit ``dtype``.
            ends: ascending positions in ``ids`` after which a row ends; tokens after the last belong to a row that a
                later call ends.
            mask, labels: (n,) or None for "all text" and "the ids".
        """
        for part, values in (("mask", mask), ("labels", labels)):
            if values is not None or part in self._parts:
                self._begin(part)
                self._write(part, _column(part, ids, values))
        self._write("tokens", ids.astype(self.dtype).tobytes())
        self._write("rows", (self._count + np.asarray(ends, np.int64)).tobytes())
        self._count += len(ids)
        self._rows += len(ends)
        for name, values in (("highest", ids), ("highest_label", labels), ("highest_mask", mask)):
            if values is not None:
                self._highest[name] = max(self._highest[name], int(values.max(initial=0)))

    def _write(self, part: str, content: bytes) -> None:
        self._parts[part].write(content)
        self._digest.add(part, content)

    def _begin(self, part: str) -> None:
        """Open the file of a column that most data lacks; when it is new, write its default for all earlier rows."""
        if part not in self._parts:
            self._parts["tokens"].flush()
            self._parts[part] = open(self.folder / f"{part}.bin", "wb")  # noqa: SIM115
            with open(self.folder / "tokens.bin", "rb") as written:
                while block := written.read(1 << 22):
                    self._write(part, _column(part, np.frombuffer(block, self.dtype), None))

    @property
    def rows(self) -> int:
        """Rows ended so far."""
        return self._rows

    def close(self) -> None:
        """Flush every part to disk and write ``meta.json``."""
        counts = dict.fromkeys(self._parts, self._count) | {"rows": self._rows + 1}
        meta = {"dtype": self.dtype, "counts": counts, "digest": self._digest.hexdigest(), **self._highest}
        (self.folder / "meta.json").write_text(json.dumps(meta))
        for handle in self._parts.values():
            handle.flush()
            os.fsync(handle.fileno())
            handle.close()


def _column(part: str, ids: np.ndarray, values: np.ndarray | None) -> bytes:
    if part == "mask":
        return (np.ones(len(ids), np.uint8) if values is None else values.astype(np.uint8)).tobytes()
    return (ids if values is None else values).astype(np.int32).tobytes()


def token_dtype(vocab_size: int) -> str:
    """Return the smallest format that fits every id of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def digest_of(*identity: Any) -> str:
    """Return a short stable hash of what JSON can write."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]


def cached(
    cache_dir: str | None, name: str, key: list[Any], build: Callable[[TokenWriter], None], *, dtype: str
) -> TokenFile:
    """Open the token file of ``key``, building it first if nobody has.

    Args:
        cache_dir: the user's folder, or None for ``~/.cache/smp/tokens``.
        name: readable beginning of the folder's name.
        key: everything the content depends on, as JSON.
        build: writes the rows; a UserError from it reaches the caller and leaves no cache.
        dtype: number format of the ids.

    Raises:
        UserError: the cache folder cannot be written, or ``build`` refuses the input.
    """

    def fill(folder: Path) -> None:
        folder.mkdir()
        writer = TokenWriter(folder, dtype)
        build(writer)
        writer.close()

    return _make_once(cache_dir, name, [dtype, *key], fill, TokenFile.open)


def look_up(cache_dir: str | None, name: str, key: list[Any], *, dtype: str) -> TokenFile | None:
    """Open the token file of ``key`` if it exists and is complete; arguments as for :func:`cached`."""
    with contextlib.suppress(*DAMAGE):
        return TokenFile.open(_place(cache_dir, name, [dtype, *key]))
    return None


def _let_rank_0_convert() -> None:
    """Give local rank 0, whose progress the console shows, a second to take the lock."""
    with contextlib.suppress(UserError):
        if read_launch().local_rank:
            time.sleep(1.0)


@contextlib.contextmanager
def one_at_a_time(cache_dir: str | None, key: list[Any], what: str, done: Callable[[], int]) -> Iterator[None]:
    """Hold the lock of a source, which one process per cache folder has; those that wait log what is done.

    Args:
        cache_dir: see :func:`cached`.
        key: of the source, a list with an entry for each file.
        done: counts the files that are converted.

    Raises:
        UserError: the cache folder cannot be written.
    """
    from filelock import FileLock, Timeout

    root = _root(cache_dir)
    with contextlib.ExitStack() as stack:
        with _writing(root):
            root.mkdir(parents=True, exist_ok=True)
            lock, patience = FileLock(root / f"source-{digest_of(FORMAT, *key)}.lock"), SECONDS_BEFORE_FIRST_LINE
            _let_rank_0_convert()
            while not lock.is_locked:
                try:
                    stack.enter_context(lock.acquire(timeout=patience))
                except Timeout:
                    log.info("%s: another process converts it, this one waits: %d/%d files", what, done(), len(key))
                    patience = SECONDS_BETWEEN_LINES
        yield


def recorded(cache_dir: str | None, name: str, key: list[Any], compute: Callable[[], Any]) -> Any:
    """Return a small result that is slow to compute, kept as JSON in the cache folder.

    Args and errors as for :func:`cached`; ``compute`` returns what JSON can represent, and not None.
    """
    return _make_once(cache_dir, name, key, lambda file: file.write_text(json.dumps(compute())), read_json)


def _make_once(
    cache_dir: str | None, name: str, key: list[Any], make: Callable[[Path], Any], read: Callable[[Path], T]
) -> T:
    """Read the content of ``key``, after one of the processes that ask at once has made it.

    It is made under another name and renamed; leftovers of a killed process are removed, never used.
    """
    from filelock import FileLock

    root, final = _root(cache_dir), _place(cache_dir, name, key)
    partial = final.with_name(f"{final.name}.partial")
    with _writing(root):
        root.mkdir(parents=True, exist_ok=True)
        if (found := _open_complete(final, read)) is not None:  # without the lock: the folder may be read-only
            return found
        with FileLock(root / f"{final.name}.lock"):
            if (found := _open_complete(final, read)) is not None:
                return found
            for leftover in (final, partial):
                shutil.rmtree(leftover, ignore_errors=True)
            try:
                make(partial)
                os.replace(partial, final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            return read(final)


def _root(cache_dir: str | None) -> Path:
    return Path(cache_dir).expanduser() if cache_dir else cache_folder("tokens", "--data_cache_dir")


def _place(cache_dir: str | None, name: str, key: list[Any]) -> Path:
    readable = name[:60].encode(errors="replace").decode()  # torch opens no name that is not UTF-8
    return _root(cache_dir) / f"{readable}-{digest_of(FORMAT, *key)}"


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write the token cache in {root}: {error}; choose another --data_cache_dir") from error


def _open_complete(path: Path, read: Callable[[Path], T]) -> T | None:
    if not path.exists():
        return None
    try:
        return read(path)
    except DAMAGE as error:
        log.warning("token cache %s is damaged (%s); it is built again", path, error)
        return None
