"""Crash loops: a job that is restarted from the same step again and again will not get further, and gives up."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

FILE = "restarts.json"
SAME_STARTS = 3


def is_crash_loop(run_dir: Path, restart: int, step: int) -> bool:
    """Record the step of this start, and tell whether those before it began at the same step; for rank 0 alone.

    Args:
        run_dir: where the note is kept.
        restart: how many times the launcher has started the job again; 0 deletes the note.
        step: updates done by the checkpoint this start resumes from.

    Returns:
        True at the third restart in a row from one step.
    """
    path = run_dir / FILE
    if restart == 0:
        path.unlink(missing_ok=True)
        return False
    steps: list[int] = []
    with contextlib.suppress(OSError, ValueError, TypeError):  # none yet, or cut off by a crash
        steps = [int(value) for value in json.loads(path.read_text(encoding="utf-8"))]
    steps = [*steps, step][-SAME_STARTS:]
    with contextlib.suppress(OSError):  # on a full disk the launcher alone counts restarts
        run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(steps), encoding="utf-8")
    return steps == [step] * SAME_STARTS
