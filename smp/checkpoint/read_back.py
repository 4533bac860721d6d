"""Read a file back from the disk while more of it is written.

Written and read one after the other, a file takes the disk twice as long; so a thread follows the writer, and asks
the system for what has reached the disk already (``sync_file_range`` of Linux; elsewhere the file is read when it is
whole). What it reads is dropped from the page cache before, which would only tell what was meant to be written.
"""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from types import TracebackType

from smp.checkpoint.page_cache import drop_cached, flush, flushes_ranges
from smp.checkpoint.safetensors_io import PIECE, FileEntry, digest_of, new_digest, read_all, shown
from smp.errors import RunError

_PAGE = os.sysconf("SC_PAGE_SIZE")


class ReadBack:
    """Follows the writing of one file; a context that ends with the thread.

    Args:
        path: of the file, which the writer makes within the context.
    """

    def __init__(self, path: Path):
        self._path = path
        self._ends: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._digest = new_digest()
        self._failure: BaseException | None = None
        self._given_up = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ReadBack:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._given_up = error is not None
        self._join()

    def follow(self, end: int) -> None:
        """All before ``end`` has been handed to the system, and its writing begun."""
        if not flushes_ranges() or self._failure is not None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="smp-read-back", daemon=True)
            self._thread.start()
        self._ends.put(end // _PAGE * _PAGE)  # a page that is written in parts is read when it is whole

    def compare(self, written: FileEntry) -> None:
        """Wait for the whole file, which is on the disk by now, and compare it with what was written.

        Raises:
            OSError: it cannot be read.
            RunError: it is not what was written.
        """
        if self._thread is None:
            found = digest_of(self._path, cached=False)
        else:
            self._ends.put(written.size)
            self._join()
            if self._failure is not None:
                raise self._failure
            found = shown(self._digest)
        if found != written.digest:
            raise RunError(f"{self._path} is not on the disk as it was written")

    def _join(self) -> None:
        if self._thread is not None:
            self._ends.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                self._read(descriptor)
            finally:
                os.close(descriptor)
        except BaseException as error:
            self._failure = error

    def _read(self, descriptor: int) -> None:
        # The descriptor is its own: an error of the disk that is told here is told to the writer's fsync, too.
        buffer, done = memoryview(bytearray(PIECE)), 0
        while (end := self._ends.get()) is not None and not self._given_up:
            if end > done:
                flush(descriptor, done, end - done)
                drop_cached(descriptor, done, end - done)
            while done < end:
                part = buffer[: min(PIECE, end - done)]
                read_all(descriptor, part, done)
                self._digest.update(part)
                done += len(part)
