"""Time in tests: clocks that a test owns, and how long it waits for what comes in the end."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

# Only what hangs takes longer, however busy the machine is: never a bound of what is tested.
HANG_SECONDS = 600.0


class Clock:
    """Takes the place of the module ``time`` in a module under test.

    Attributes:
        now: what it shows, in seconds; only the test moves it.
        pace: seconds that it goes on at each reading.
    """

    def __init__(self, pace: float = 0.0):
        self.now, self.pace = 1000.0, pace

    def monotonic(self) -> float:
        self.now += self.pace
        return self.now

    perf_counter = time = monotonic

    def sleep(self, seconds: float) -> None:
        """Let others run: who sleeps between two looks at this clock looks again until the test has moved it."""
        time.sleep(min(seconds, 0.01))


class SharedClock(Clock):
    """One that processes share by a file: it stands still until the test sets it, or lets it run."""

    def __init__(self, file: pathlib.Path, pace: float = 1.0):
        super().__init__(pace)
        self._file = file

    def monotonic(self) -> float:
        said = self._file.read_text() if self._file.exists() else ""
        if said == "run":
            self.now += self.pace
        elif said:
            self.now = max(self.now, 1000.0 + float(said))
        return self.now

    perf_counter = monotonic
    time = staticmethod(time.time)  # dates go on

    def set(self, seconds: float) -> None:
        """Show so many seconds more than in the beginning."""
        self._put(str(seconds))

    def run(self) -> None:
        """Go on by ``pace`` at each reading, from now on."""
        self._put("run")

    def _put(self, text: str) -> None:
        part = self._file.with_suffix(".part")  # whole, as others read it
        part.write_text(text)
        part.rename(self._file)


def wait_until(
    reached: Callable[[], object],
    *,
    alive: Callable[[], object] = lambda: True,
    said: Callable[[], object] = lambda: "",
) -> None:
    """Wait for what comes in the end.

    Args:
        reached: whether it is there.
        alive: whether it can still come.
        said: for the message of a failure.
    """
    end = time.monotonic() + HANG_SECONDS
    while not reached():
        possible = alive() or reached()  # in this order: it may have come with the end of what lived
        assert possible and time.monotonic() < end, said()
        time.sleep(0.01)
