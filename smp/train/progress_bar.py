"""The bar of the steps on a terminal that has a width; elsewhere nothing, and ``TQDM_DISABLE=1`` turns it off."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType

from tqdm import tqdm

from smp.log import is_terminal


class _Bar(tqdm):  # type: ignore[type-arg]
    """tqdm without its thread, which refreshes bars whose steps it has stopped to look at."""

    monitor_interval = 0


class ProgressBar:
    """A bar of the steps, while it is entered; log records appear above it (``smp.log``).

    Args:
        done: steps before this start.
        wanted: False shows nothing, as on all ranks but 0.
    """

    def __init__(self, total: int, done: int, *, wanted: bool = True):
        self._total, self._done, self._wanted = total, done, wanted
        self._bar: _Bar | None = None

    def __enter__(self) -> ProgressBar:
        if self._wanted and is_terminal(sys.stdout):
            self._bar = _Bar(
                desc="Training", total=self._total, initial=self._done, file=sys.stdout, dynamic_ncols=True, miniters=1,
                bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            )  # fmt: skip
        return self

    @property
    def shown(self) -> bool:
        """True while there is a bar to be seen."""
        return self._bar is not None and not self._bar.disable

    def reach(self, step: int) -> None:
        """Move to ``step`` updates done."""
        if self._bar is not None:
            with contextlib.suppress(OSError):  # a terminal that has gone ends no run
                self._bar.update(step - self._bar.n)

    def tell(self, text: str) -> None:
        """Show ``text`` behind the steps, from the next update on."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
            self._bar = None
