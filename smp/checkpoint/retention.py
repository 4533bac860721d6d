"""Retention: the newest checkpoints are kept, and those of the lowest validation loss; on a disk and on a store."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from pathlib import Path

from smp.checkpoint.directory import BEST, discard, find_checkpoints, point, quick_problem, read_outline
from smp.errors import UserError
from smp.log import get_logger

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Rated:
    """What retention asks of a checkpoint: its problem, None if it is valid, and its validation loss."""

    name: str
    step: int
    problem: str | None
    val_loss: float | None


def best_of(found: list[Rated], count: int) -> list[Rated]:
    """Return the ``count`` valid ones of the lowest validation loss, best first; the newer of two that are equal."""
    rated = [(c.val_loss, -c.step, c) for c in found if c.problem is None and c.val_loss is not None]
    return [c for *_, c in sorted(rated, key=lambda entry: entry[:2])[:count]]


def doomed_of(found: list[Rated], *, keep: int, keep_best: int) -> list[Rated]:
    """Return the checkpoints that are neither among the ``keep`` newest nor among the ``keep_best`` best.

    A damaged one does not count as kept, so that the last good one is never deleted for it. Damaged ones go when they
    are older than all that are kept.

    Args:
        found: oldest first.
    """
    complete = [c for c in found if c.problem is None]
    kept = complete[-keep:]
    doomed = []
    for checkpoint in found:
        if checkpoint in kept or checkpoint in best_of(found, keep_best):
            continue
        if checkpoint.problem is not None and (not kept or checkpoint.step > kept[0].step):
            logger.warning("Keeping %s aside: %s", checkpoint.name, checkpoint.problem)
            continue
        doomed.append(checkpoint)
    return doomed


def prune(
    directory: Path, model_name: str, *, keep: int, keep_best: int = 0, spared: Collection[str] = frozenset()
) -> None:
    """Delete the checkpoints of a directory that :func:`doomed_of` names, as far as manifests, names and sizes tell.

    Args:
        spared: names of those that stay for now, too.
    """
    present = find_checkpoints(directory, model_name)
    if len(present) <= keep and not keep_best:
        return
    found = [Rated(c.path.name, c.step, quick_problem(c.path), _val_loss(c.path)) for c in present]
    if best := best_of(found, keep_best):
        point(directory / BEST, best[0].name)
    for checkpoint in doomed_of(found, keep=keep, keep_best=keep_best):
        if checkpoint.name not in spared:
            discard(directory / checkpoint.name)


def _val_loss(path: Path) -> float | None:
    with contextlib.suppress(UserError):  # of what is damaged
        return read_outline(path).run.get("val_loss")
    return None
