"""Checkpoints on each rank's local disk: fast to write, of use only where every rank still has its part."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch.distributed as dist

from smp.checkpoint.directory import find_checkpoints, quick_problem
from smp.errors import UserError
from smp.faults.agreement import of_all_ranks
from smp.log import get_logger

logger = get_logger("train")


def local_directory(directory: Path, rank: int, world_size: int) -> Path:
    """Return the directory of a rank's checkpoints."""
    return directory / f"rank{rank:05d}-of-{world_size:05d}"


def own_checkpoint(path: Path, rank: int, world_size: int) -> Path:
    """Return this rank's part of a checkpoint that was named by the directory of all, or by the part of any rank."""
    base = path.parent.parent if path.parent.name.startswith("rank") else path.parent
    return local_directory(base, rank, world_size) / path.name


def refuse_other_kinds(directories: list[Path], world_size: int, *, local: bool) -> None:
    """Refuse a directory with checkpoints that this run would not see.

    Raises:
        UserError: local ones of another number of processes, or of the other kind.
    """
    for directory in directories:
        found = sorted(directory.glob("rank?????-of-?????"))
        if found and not local:
            raise UserError(
                f"{directory} contains local checkpoints ({found[0].name}): continue that run with --checkpoint_type "
                f"local, or choose another --output_dir"
            )
        other = [path for path in found if path.name.partition("-of-")[2] != f"{world_size:05d}"]
        if other:
            count = int(other[0].name.partition("-of-")[2]) if other[0].name[-5:].isdigit() else other[0].name
            raise UserError(
                f"{directory} contains local checkpoints of {count} processes and this run has {world_size}: local "
                f"ones are for the same layout only; start {count} processes, or choose another --output_dir"
            )
        if local and (shared := sorted(directory.glob("*-*steps"))):
            raise UserError(
                f"{directory} contains checkpoints of a run that this one does not continue ({shared[0].name}): resume "
                f"with --checkpoint_type sharded, or choose another --output_dir"
            )


def _nothing_is_lost(directories: list[Path], model_name: str, everyone: list[list[int]]) -> bool:
    """Tell if a fresh start loses nothing: no rank has any, or the run was ended in its first save; collective.

    A rank that has lost its disk has no directory either, and one whose checkpoint is damaged has had it whole.

    Args:
        everyone: the steps of which each rank has a complete checkpoint.
    """
    complete = everyone[dist.get_rank()]
    damaged = any(c.step not in complete for directory in directories for c in find_checkpoints(directory, model_name))
    ranks = of_all_ranks((damaged, any(directory.is_dir() for directory in directories)))
    if any(damaged for damaged, _ in ranks):
        return False
    steps = {step for found in everyone for step in found}
    return not steps or (len(steps) == 1 and all(has_directory for _, has_directory in ranks))


def common_start(directories: list[Path], model_name: str, damaged: Collection[object]) -> Path | None:
    """Return this rank's checkpoint of the newest step that all ranks have; None for a fresh start; collective.

    Args:
        damaged: checkpoints to pass over, besides those whose manifest or names and sizes of files show damage.

    Raises:
        UserError: on every rank; some have checkpoints, and there is no step of which all have a valid one.
    """
    mine: dict[int, Path] = {}
    for checkpoint in (c for directory in directories for c in find_checkpoints(directory, model_name)):
        if checkpoint.path not in damaged and quick_problem(checkpoint.path) is None:
            mine.setdefault(checkpoint.step, checkpoint.path)
    everyone = of_all_ranks(sorted(mine))
    common = set(everyone[0]).intersection(*everyone[1:])
    if common:
        for step in sorted(step for step in mine if step > max(common)):
            logger.warning("Not resuming from step %d: not every rank has a valid checkpoint of it.", step)
        return mine[max(common)]
    if _nothing_is_lost(directories, model_name, everyone):
        return None
    steps = "; ".join(f"rank {rank} {found or 'none'}" for rank, found in enumerate(everyone))
    raise UserError(
        f"no step of which every rank has a valid local checkpoint (steps: {steps}): bring back the missing "
        f"disks or a copy of what is damaged, or start anew in another --output_dir"
    )
