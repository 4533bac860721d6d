"""Progress of a conversion: one line per source, rewritten in place on a terminal, else logged now and then."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from smp.log import is_terminal
from smp.units import digits

SECONDS_BETWEEN_LINES = 30.0
log = logging.getLogger("smp.data")


class Progress:
    """Progress through the files of a source.

    Args:
        what: the source, such as "training data".
        total: their bytes, as stored.
    """

    def __init__(self, what: str, files: int, total: int):
        self.what, self.files, self.total = what, files, total
        self.done_files = self._done_bytes = self._tokens = 0
        self._began = self._logged = time.monotonic()
        self._bar = None
        if is_terminal(sys.stderr):
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, leave=False)

    def __enter__(self) -> Progress:
        return self

    def add(self, tokens: int, *, inside: int = 0) -> None:
        """Count tokens; ``inside`` is the number of bytes read of the file in work."""
        self._tokens += tokens
        self._show(min(self._done_bytes + inside, self.total))

    def end_file(self, size: int) -> None:
        """Count a file of ``size`` bytes."""
        self.done_files += 1
        self._done_bytes += size
        self._show(self._done_bytes)

    def _show(self, done: int) -> None:
        now = time.monotonic()
        seconds = max(now - self._began, 1e-9)
        if self._bar is not None:
            rate = f"{digits(self.done_files / seconds, 1)} files/s"
            counts = f"{self.done_files}/{self.files} files, {rate}, {self._tokens:,} tokens"
            self._bar.set_postfix_str(counts, refresh=False)
            self._bar.update(done - self._bar.n)
        elif now - self._logged >= SECONDS_BETWEEN_LINES:
            self._logged = now
            left = seconds * (self.total - done) / max(done, 1)
            log.info("%s, %.0f s left", self._line(done, seconds), left)

    def _line(self, done: int, seconds: float) -> str:
        return (
            f"{self.what}: {self.done_files}/{self.files} files, {digits(done / 1e6, 1)} of "
            f"{digits(self.total / 1e6, 1)} MB in {digits(seconds, 1)} s "
            f"({digits(self.done_files / seconds, 1)} files/s, {digits(done / 1e6 / seconds, 1)} MB/s), "
            f"{self._tokens:,} tokens"
        )

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        if kind is None:
            log.info("%s", self._line(self._done_bytes, max(time.monotonic() - self._began, 1e-9)))
