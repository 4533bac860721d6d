"""What all ranks must agree on before the first step: where the run starts, and that they do the same job."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from smp.checkpoint.layout import LATEST, set_aside
from smp.checkpoint.local import common_start
from smp.checkpoint.restore import verify_together
from smp.errors import DamagedCheckpointError
from smp.faults.agreement import require_same, together
from smp.log import get_logger
from smp.train.run_plan import RunPlan, make_plan
from smp.train.start import choose_start, refuse_logged

logger = get_logger("train")


def settle_start(plan: RunPlan) -> RunPlan:
    """The plan with a checkpoint that all ranks have found whole, or none; collective, with the directories locked.

    With ``latest``, a damaged checkpoint is passed over for the newest one before it.

    Raises:
        UserError: on every rank; the checkpoint that was named is damaged, or there is none that can be resumed from.
    """
    settings, damaged = plan.config.checkpoint, set[Path]()
    if settings.is_local and settings.resume_from_checkpoint == LATEST:
        chosen = together(lambda: common_start(plan.checkpoint_dirs, plan.model.name))
        if chosen is None:
            together(lambda: refuse_logged(plan.config, plan.run_dir, plan.checkpoint_dirs, fresh=True))
            for directory in plan.checkpoint_dirs:  # of a run that was ended in its first save
                set_aside(directory, plan.model.name, after=0)
        return together(lambda: plan if chosen == plan.resume else _replanned(plan, only=chosen))
    # An earlier process of the run may have saved once more before it gave the lock back.
    plan = together(lambda: plan if _still_newest(plan) else _replanned(plan))
    require_agreement(plan, "the start (checkpoint, step, sample)")
    while plan.saved is not None and plan.resume is not None:
        problems = verify_together(plan.resume, plan.saved, content=settings.verify_checkpoint == "full")
        if not problems:
            break
        if settings.resume_from_checkpoint != LATEST:
            raise DamagedCheckpointError(plan.resume, problems)
        if plan.launch.is_main:
            logger.warning("Passed over: %s", DamagedCheckpointError(plan.resume, problems))
        damaged.add(plan.resume)
        plan = together(functools.partial(_replanned, plan, damaged=damaged))
    return plan


def _still_newest(plan: RunPlan) -> bool:
    """Whether the start would be chosen again."""
    config = plan.config
    wanted = choose_start(config, plan.launch, plan.run_dir, plan.checkpoint_dirs, plan.model.name, [])
    return wanted == plan.resume


def _replanned(plan: RunPlan, *, damaged: Iterable[Path] = (), only: Path | None = None) -> RunPlan:
    """RunPlan anew, without damaged checkpoints, or with a checkpoint that has been chosen."""
    plan.close()
    return make_plan(plan.config, plan.launch, damaged=damaged, only=only)


def require_agreement(plan: RunPlan, *only: str) -> None:
    """Check that all ranks are about to do the same job; collective.

    They decide alone where to start and what the data is, and a host with another or a stale file system would decide
    otherwise: mismatched collectives, or wrong numbers.

    Args:
        only: what to compare; everything if none is given.

    Raises:
        UserError: on every rank, naming the first difference.
    """
    start = (plan.resume.name if plan.resume else None, plan.state.step, plan.state.samples)
    settings = json.dumps(plan.config.flat(), sort_keys=True)
    mine = {
        "the start (checkpoint, step, sample)": start,
        "the global batch": plan.global_batch_size,
        "the last step": plan.max_steps,
        "the training data": plan.train_data.fingerprint,
        "the validation data": plan.validation_data.fingerprint if plan.validation_data else None,
        "the settings": hashlib.sha256(settings.encode()).hexdigest()[:12],
    }
    mine = {what: value for what, value in mine.items() if not only or what in only}
    require_same(mine, "give all hosts the same flags and the same view of --output_dir and the data")
