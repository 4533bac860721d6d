"""Objects below a URL of any file system that fsspec knows, such as S3: list, read, write, copy and delete.

Endpoint and credentials come from the environment and from fsspec's own configuration. Every call has a bounded number
of attempts; the client's own limits bound each (s3fs: 5 s to connect, 15 s without an answer).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from smp.checkpoint.safetensors_io import reason
from smp.data.storage import filesystem_of
from smp.errors import RunError

ATTEMPTS = 4
FIRST_PAUSE = 0.5  # seconds; doubled after each attempt
_RANGE = 16 << 20  # bytes of a download in one request
# Asked again, these have the same answer.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError, TypeError)

_REFUSED = object()


class StoreError(RunError):
    """A store did not do what it was asked, or does not answer."""


def is_url(location: str | os.PathLike[str]) -> bool:
    """Tell a URL from a path of a mounted file system."""
    return "://" in str(location)


def _options(url: str) -> dict[str, Any]:
    """Return what the file system of a URL is opened with; what the user has configured for fsspec goes before."""
    import fsspec

    scheme = url.partition("://")[0]
    if scheme in ("file", "local"):
        return {"auto_mkdir": True}
    if scheme not in ("s3", "s3a"):
        return {}
    mine = {
        "max_concurrency": 4,  # parts of 50 MiB that one upload has in memory
        "config_kwargs": {"retries": {"total_max_attempts": 3, "mode": "standard"}},  # of each part
    }
    return mine | fsspec.config.conf.get("s3", {})


def _ignore(nbytes: int) -> None:
    """Do nothing: the default of ``advance``."""


class ObjectStore:
    """Objects below ``url``; names are relative to it.

    All methods raise :class:`StoreError`, naming URL and cause, when the store has refused or failed every attempt.

    Args:
        url: with its scheme; without credentials.

    Attributes:
        advance: is told the bytes that :meth:`range` has read, maybe by other threads.

    Raises:
        UserError: the scheme is unknown, or its package is not installed.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.advance: Callable[[int], object] = _ignore
        self._fs, root = filesystem_of(self.url, use_listings_cache=False, **_options(url))
        self._root = root.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def at(self, name: str) -> str:
        """Return the URL of an object; of no name: the store's."""
        return f"{self.url}/{name.lstrip('/')}" if name else self.url

    def _call(self, what: str, name: str, action: Callable[[str], Any], *, absent: Any = _REFUSED) -> Any:
        """Return the result of ``action``, called with the path of an object, or ``absent`` if there is none."""
        path = f"{self._root}/{name.lstrip('/')}" if name else self._root
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return action(path)
            except Exception as error:
                # S3's word for an upload in parts whose completion was answered, and the answer lost: begin another.
                lost = "specified upload does not exist" in str(error)
                if attempt < ATTEMPTS and (lost or not isinstance(error, _FINAL)):
                    # Ranks that failed together do not come back together.
                    time.sleep(FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
                    continue
                if isinstance(error, FileNotFoundError) and absent is not _REFUSED:
                    return absent
                raise StoreError(f"{self.at(name)} cannot be {what} ({_why(error)})") from error
        raise AssertionError

    def folders(self) -> list[str]:
        """Return the names that have objects below them, of one level; sorted."""
        found = self._call("listed", "", lambda path: self._fs.ls(path, detail=True), absent=[])
        return sorted(_last(entry["name"]) for entry in found if entry["type"] == "directory")

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each object below a folder, by its name in it; empty if there are none."""

        def listed(path: str) -> dict[str, int]:
            prefix, found = path.lstrip("/") + "/", self._fs.find(path, detail=True)
            return {name.lstrip("/").removeprefix(prefix): int(entry["size"]) for name, entry in found.items()}

        return dict(self._call("listed", folder, listed, absent={}))

    def read(self, name: str) -> bytes | None:
        """Return an object's bytes; None if there is no such object."""
        data = self._call("read", name, self._fs.cat_file, absent=None)
        return None if data is None else bytes(data)

    def write(self, name: str, data: bytes) -> None:
        """Write a small object, in place of one of that name."""
        self._call("written", name, lambda path: self._fs.pipe_file(path, data))

    def upload(self, file: Path, name: str, advance: Callable[[int], object] = _ignore) -> None:
        """Copy a file to the store, a large one in parts.

        Args:
            advance: is told the bytes that are uploaded, also those of an attempt that then fails.
        """
        from fsspec.callbacks import Callback

        class Progress(Callback):
            def relative_update(self, inc: int = 1) -> None:
                advance(inc)

        self._call("written", name, lambda path: self._fs.put_file(str(file), path, callback=Progress()))

    def pieces(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """Return the bytes of an object from ``start`` to ``end``, in parts.

        Raises:
            StoreError: also if it ends before.
        """
        return (self.range(name, *part) for part in self.ranges(start, end))

    @staticmethod
    def ranges(start: int, end: int) -> list[tuple[int, int]]:
        """Cut a range of bytes into those of one request each."""
        return [(begin, min(begin + _RANGE, end)) for begin in range(start, end, _RANGE)]

    def range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from ``start`` to ``end``, by one request; raises as :meth:`pieces`."""
        part = self._call("read", name, lambda path: self._fs.cat_file(path, start=start, end=end), absent=None)
        if part is None:
            raise StoreError(f"{self.at(name)} is no longer there")
        if len(part) != end - start:
            raise StoreError(f"{self.at(name)} ends too early")
        self.advance(len(part))
        return bytes(part)

    def remove(self, name: str) -> None:
        """Delete an object, if it exists."""
        self._call("deleted", name, self._fs.rm_file, absent=None)

    def remove_folder(self, folder: str) -> None:
        """Delete all objects below a folder; safe to retry."""
        self._call("deleted", folder, lambda path: self._fs.rm(path, recursive=True), absent=None)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _why(error: BaseException) -> str:
    """Return the cause in a few words, and what to do where that is known."""
    # The S3 client's errors are sentences, and their types' names look like secrets.
    speaks = isinstance(error, OSError) or "botocore" in type(error).__module__
    text = str(error) if speaks and str(error) else reason(error)
    if isinstance(error, PermissionError) or "redentials" in text:
        return f"{text}; check the credentials, and what they are allowed to do there"
    return text
