"""Conversion of files to token files, on all cores.

A format reads a file as a sequence of chunks, which is cheap, and turns a chunk into rows, which is not. Worker
processes convert whole files, and the chunks of a file that is too large for one of them; rows are written in the
files' order either way, so that the token files are those that a single process writes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np

from smp.data.progress import Progress
from smp.data.storage import DataFile
from smp.data.token_cache import TokenFile, TokenWriter, cached, look_up, one_at_a_time
from smp.environment.threads import available_cores, use_one_tokenizer_thread
from smp.errors import UserError
from smp.processes import end_worker_with_job, worker_context

WORKER_BYTES = 16 << 20  # of input for each worker process: starting one takes seconds
log = logging.getLogger("smp.data")


class Rows(NamedTuple):
    """Arguments of :meth:`smp.data.token_cache.TokenWriter.add`."""

    ids: np.ndarray
    ends: np.ndarray
    mask: np.ndarray | None = None
    labels: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Format:
    """One kind of file; pickled to worker processes.

    Attributes:
        name: first part of a token file's key.
        key: what the tokens depend on besides the file.
        dtype: number format of the ids.
        content: what a file without any is said to lack.
        chunks: yields a file's chunks, which can be pickled, each with the number of the file's bytes read so far.
        convert: returns the rows of one of a file's chunks.
    """

    name: str
    key: list[Any]
    dtype: str
    content: str
    chunks: Callable[[DataFile], Iterator[tuple[Any, int]]]
    convert: Callable[[DataFile, Any], list[Rows]]


def token_files(files: list[DataFile], form: Format, *, what: str, cache_dir: str | None) -> list[TokenFile]:
    """Open the token files of ``files``, after one of the processes that ask at once has converted what is missing.

    Args:
        files: in the order of the data.
        cache_dir: see :func:`smp.data.token_cache.cached`.

    Raises:
        UserError: a file is unusable; the first one in their order.
    """
    conversion = Conversion(form, cache_dir)
    if conversion.missing(files):
        keys = [conversion.key(file) for file in files]
        with one_at_a_time(cache_dir, keys, what, lambda: len(files) - len(conversion.missing(files))):
            if missing := conversion.missing(files):
                conversion.run(missing, what)
    return [conversion.open(file) for file in files]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Conversion of files of one format into one cache folder; pickled to worker processes."""

    form: Format
    cache_dir: str | None

    def key(self, file: DataFile) -> list[Any]:
        """Return everything that a token file depends on."""
        return [self.form.name, file.url, file.size, file.stamp, *self.form.key]

    def missing(self, files: list[DataFile]) -> list[DataFile]:
        """Return the files without a token file."""
        dtype = self.form.dtype
        return [file for file in files if look_up(self.cache_dir, file.name, self.key(file), dtype=dtype) is None]

    def open(self, file: DataFile, progress: Progress | None = None, workers: Workers | None = None) -> TokenFile:
        """Open a token file, making it first if nobody has: here, or chunk by chunk in ``workers``."""

        def build(writer: TokenWriter) -> None:
            chunks = self.form.chunks(file)
            for rows, position in self._here(file, chunks) if workers is None else workers.converted(file, chunks):
                for each in rows:
                    writer.add(each.ids, each.ends, mask=each.mask, labels=each.labels)
                if progress is not None:
                    progress.add(sum(len(each.ids) for each in rows), inside=position)
            if writer.rows == 0:
                raise UserError(f"{file.url} contains no {self.form.content}: remove it, or write it again")

        return cached(self.cache_dir, file.name, self.key(file), build, dtype=self.form.dtype)

    def _here(self, file: DataFile, chunks: Iterator[tuple[Any, int]]) -> Iterator[tuple[list[Rows], int]]:
        for chunk, position in chunks:
            _refuse_stopped()
            yield self.form.convert(file, chunk), position

    def run(self, files: list[DataFile], what: str) -> None:
        """Convert files with as many processes as there are cores, and work."""
        total = sum(file.size for file in files)
        processes = min(available_cores(), total // WORKER_BYTES)
        with Progress(what, len(files), total) as progress:
            if processes > 1:
                try:
                    return self._in_parallel(files, processes, progress)
                except BrokenProcessPool:
                    log.warning(
                        "%s: a process that converts has ended: killed by hand, or by the system for memory; this one "
                        "continues alone", what,
                    )  # fmt: skip
            for file in files[progress.done_files :]:
                self.open(file, progress)
                progress.end_file(file.size)
        return None

    def _in_parallel(self, files: list[DataFile], processes: int, progress: Progress) -> None:
        """Convert files with worker processes: large ones in chunks, so that none is left to a single worker."""
        large = sum(file.size for file in files) // (2 * processes)
        with Workers(self, processes) as workers:
            tasks = {file.url: workers.submit(_open_here, file) for file in files if file.size <= large}
            for file in files:
                if (task := tasks.get(file.url)) is None:
                    self.open(file, progress, workers)
                else:
                    progress.add(task.result())
                progress.end_file(file.size)


class Workers:
    """Worker processes, which end with the ``with`` block, whatever ends it, and with this process."""

    def __init__(self, conversion: Conversion, processes: int):
        context = worker_context(__name__)
        self._stop, self._ahead = context.Event(), 2 * processes
        begin = functools.partial(_begin, conversion, self._stop)
        self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=begin)
        self.submit = self._pool.submit

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def converted(self, file: DataFile, chunks: Iterator[tuple[Any, int]]) -> Iterator[tuple[list[Rows], int]]:
        """Yield the rows of each chunk in order; errors, too, come in the order of the file."""
        pending: deque[tuple[Any, int]] = deque()
        failed: UserError | None = None
        reading = True
        while reading or pending:
            try:
                chunk, position = next(chunks)
                pending.append((self.submit(_convert_here, file, chunk), position))
            except StopIteration:
                reading = False
            except UserError as error:
                failed, reading = error, False
            while pending and (not reading or len(pending) > self._ahead):
                task, position = pending.popleft()
                yield task.result(), position
        if failed is not None:
            raise failed


_in_worker: Any = None  # of a worker process: its Conversion, and the event that stops it


def _begin(conversion: Conversion, stop: Any) -> None:
    global _in_worker
    end_worker_with_job()
    use_one_tokenizer_thread()
    _in_worker = conversion, stop


def _refuse_stopped() -> None:
    """End a worker's task when the conversion is to stop, so that it removes what it has written."""
    if _in_worker is not None and _in_worker[1].is_set():
        raise UserError("the conversion was stopped")


def _open_here(file: DataFile) -> int:
    _refuse_stopped()
    return len(_in_worker[0].open(file).tokens)


def _convert_here(file: DataFile, chunk: Any) -> list[Rows]:
    _refuse_stopped()
    return _in_worker[0].form.convert(file, chunk)


def joined(parts: list[Rows]) -> list[Rows]:
    """Join consecutive rows that have the same columns."""
    found: list[list[Rows]] = []
    for part in parts:
        same = found and all((a is None) == (b is None) for a, b in zip(found[-1][0], part, strict=True))
        found[-1].append(part) if same else found.append([part])  # type: ignore[func-returns-value]
    return [_join(group) for group in found]


def _join(group: list[Rows]) -> Rows:
    before = np.cumsum([0, *(len(each.ids) for each in group[:-1])])
    ends = np.concatenate([each.ends + start for each, start in zip(group, before.tolist(), strict=True)])
    ids, _, mask, labels = (
        None if column[0] is None else np.concatenate(column) for column in zip(*group, strict=True)
    )
    assert ids is not None
    return Rows(ids, ends, mask, labels)
