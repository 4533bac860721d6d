"""Retention: the newest checkpoints are kept, and those of the lowest validation loss."""

from __future__ import annotations

from pathlib import Path

from smp.checkpoint.layout import BEST, discard, find_checkpoints, point, quick_problem, read_outline
from smp.log import get_logger

logger = get_logger(__name__)


def prune(directory: Path, model_name: str, *, keep: int, keep_best: int = 0) -> None:
    """Delete checkpoints that are neither among the ``keep`` newest nor among the ``keep_best`` best.

    A checkpoint that is damaged, as far as its manifest, names and sizes tell, does not count as kept, so that the last
    good one is never deleted for it. Damaged ones go when they are older than all that are kept.
    """
    found = find_checkpoints(directory, model_name)
    if len(found) <= keep and not keep_best:
        return
    problems = {c.path: quick_problem(c.path) for c in found}
    whole = [c for c in found if problems[c.path] is None]
    kept = whole[-keep:]
    best = _best(whole, keep_best)
    if best:
        point(directory / BEST, best[0].path.name)
    for checkpoint in found:
        if checkpoint in kept or checkpoint in best:
            continue
        if problems[checkpoint.path] is not None and (not kept or checkpoint.step > kept[0].step):
            logger.warning("Keeping %s aside: %s", checkpoint.path.name, problems[checkpoint.path])
            continue
        discard(checkpoint.path)


def _best(whole: list, count: int) -> list:
    """Return the ``count`` checkpoints of the lowest validation loss, best first; the newer of two that are equal."""
    if not count:
        return []
    losses = {c.path: read_outline(c.path).run.get("val_loss") for c in whole}
    rated = [c for c in whole if losses[c.path] is not None]
    return sorted(rated, key=lambda c: (losses[c.path], -c.step))[:count]
