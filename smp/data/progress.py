"""Progress of a long conversion: a bar on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

SECONDS_BETWEEN_LINES = 30.0
log = logging.getLogger("smp.data")


class Progress:
    """Progress of a job of known size.

    Args:
        what: the job, such as "tokenizing train.txt".
        total: its size in bytes.
    """

    def __init__(self, what: str, total: int):
        self.what, self.total = what, total
        self._bar = None
        self._logged = time.monotonic()
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def reach(self, done: int) -> None:
        """Show that ``done`` bytes are processed."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif (now := time.monotonic()) - self._logged >= SECONDS_BETWEEN_LINES:
            self._logged = now
            log.info("%s: %d of %d MB", self.what, done / 1e6, self.total / 1e6)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None:
            log.info("%s: done (%.1f MB)", self.what, self.total / 1e6)
