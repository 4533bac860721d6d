"""``curves.png``: drawn at the end of a run, and anew while it runs."""

from __future__ import annotations

import time
from pathlib import Path

from smp.errors import UserError
from smp.log import get_logger
from smp.plots import plot_metrics

logger = get_logger("train")

SECONDS_BETWEEN_DRAWS = 30.0
# A draw (0.3 s, the first with matplotlib's import 1 s) may take this share of the time: training waits for it.
SHARE = 0.005


class Curves:
    """Draws a run's curves now and then.

    Args:
        run_dir: with ``metrics.jsonl``; ``curves.png`` is written to it.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._due = time.monotonic() + SECONDS_BETWEEN_DRAWS

    def redraw(self) -> None:
        """Draw, if the last time is long enough ago; what prevents it is said at the run's end."""
        begun = time.monotonic()
        if begun < self._due:
            return
        write_curves(self._run_dir)
        ended = time.monotonic()
        self._due = ended + max(SECONDS_BETWEEN_DRAWS, (ended - begun) / SHARE)


def write_curves(run_dir: Path) -> str:
    """Write ``curves.png``; returns why there is none, or an empty string."""
    try:
        plot_metrics(run_dir / "metrics.jsonl", run_dir / "curves.png")
    except UserError as error:  # no matplotlib, or a run that has not logged a step yet
        return str(error)
    except OSError as error:  # a full disk ends no run for a picture
        return f"it cannot be written ({error.strerror})"
    except Exception as error:  # of matplotlib, which may be broken, or has no axis for such numbers
        return f"it cannot be drawn ({type(error).__name__}: {error})"
    return ""
