"""Evaluation: loss and perplexity of a model or a checkpoint on the validation data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from smp.checkpoint.base import begin_digest, digest_together, warn_unless_compared
from smp.checkpoint.directory import LATEST
from smp.checkpoint.local import common_start, refuse_other_kinds
from smp.checkpoint.remote import RemoteCheckpoint
from smp.checkpoint.restore import Damaged, restore_model
from smp.errors import UserError
from smp.faults.agreement import together
from smp.faults.guard import Guard
from smp.log import configure_logging, get_logger
from smp.parallel import lora
from smp.parallel.parallelize import prepare_model
from smp.runtime import process_group
from smp.train.adapters import warn_of_base
from smp.train.checked_job import CheckedJob
from smp.train.job import planned_batch
from smp.train.metrics import json_line, validation_record
from smp.train.on_resume import changes_evaluated, check_fits, with_saved_settings
from smp.train.reference import attach_references, expect_references, give_references
from smp.train.start import (
    locate_wanted,
    named_checkpoint,
    prepare_device,
    read_usable,
    require_agreement,
    search_for,
)
from smp.train.state import Start, TrainState
from smp.train.validation import Validation, validate

logger = get_logger("train")


def evaluate(job: CheckedJob, guard: Guard) -> int:
    """Print the validation loss of the model, or of the checkpoint that is named; returns the exit status.

    A run that goes on in the same directory is not disturbed: its files are neither locked nor changed.
    """
    config, launch = job.config, job.launch
    guard.stop.__exit__()  # there is nothing to save: a signal ends the process at once
    with (
        process_group(config.comm, launch, job.device, cpu_offload=config.activation.cpu_offload),
        guard.connected(),
    ):
        configure_logging(rank=launch.rank, local_rank=launch.local_rank, world_size=launch.world_size, log_dir=None)
        search = search_for(job, functools.partial(_candidate, job, guard.enter))
        start = search.first()
        job = with_saved_settings(job, start)
        prepare_device(job, batch=start.global_batch_size)
        mesh = job.mesh.join(job.device.type)
        model = prepare_model(
            job.model,
            mesh=mesh,
            settings=job.setup.settings,
            dtype=job.dtype,
            device=job.device,
            seed=config.run.seed,
            load_weights=start.checkpoint is None,
        )
        setup = dataclasses.replace(job.setup, mesh=mesh)
        if launch.rank == 0:
            warn_of_base(job.settings, job.model)

        def fill(start: Start) -> None:
            if start.checkpoint is not None and start.saved is not None:
                together(functools.partial(expect_references, job, start, model))
                restore_model(start.checkpoint, start.saved, model)
                together(functools.partial(attach_references, job, start, model))

        start = search.fill(start, fill)
        begin_digest(model)
        if start.checkpoint is not None:
            give_references(job, start, model, setup, enter=guard.enter)
        for change in changes_evaluated(start, job):
            logger.warning("Changed since the checkpoint: %s", change)
        guard.enter("validation")
        result = validate(job, model, setup, enter=guard.enter)
        if not result.tokens:
            raise UserError(f"{config.data.test_dir} contains no token that follows another: nothing to evaluate on")
        digest_together(model)
        warn_unless_compared(model)
        if launch.is_main:
            _report(job, start, result)
        job.close()
        guard.part(0)
    return 0


def _candidate(job: CheckedJob, enter: Callable[[str], None], damaged: Damaged) -> Start:
    """Choose the checkpoint that is named, alike on all ranks, or none; collective.

    Raises:
        UserError: on every rank; it is of another model or kind, or there is none.
    """
    wanted = locate_wanted(job, enter, damaged)

    def choose() -> Path | RemoteCheckpoint | None:
        if wanted == LATEST and job.config.checkpoint.is_local:
            return common_start(job.checkpoint_dirs, job.model.name, damaged)
        return None if wanted is None else named_checkpoint(job, damaged, wanted)

    chosen = together(choose)
    start = together(lambda: _resolve(job, chosen))
    require_agreement(job, start)
    return start


def _resolve(job: CheckedJob, checkpoint: Path | RemoteCheckpoint | None) -> Start:
    """Return the checkpoint with its manifest.

    Raises:
        UserError: there is none though one was asked for, or it is damaged, or of another model or kind.
    """
    settings, saved = job.config.checkpoint, None
    if checkpoint is not None:
        saved = read_usable(checkpoint, local=settings.is_local)
        check_fits(job, checkpoint, saved)
    elif settings.resume_from_checkpoint is not None:
        shared = [each.parent if settings.is_local else each for each in job.checkpoint_dirs]
        refuse_other_kinds(shared, job.launch.world_size, local=settings.is_local)
        urls = [storage.mirror.store for storage in job.storages if storage.mirror is not None]
        looked_in = ", ".join(map(str, [*shared, *urls]))
        raise UserError(
            f"no checkpoint of {job.model.name} in {looked_in}: name the run by --output_dir, a "
            f"checkpoint at a URL by --resume_from_checkpoint, or leave that out to evaluate the model itself"
        )
    return Start(checkpoint, saved, TrainState(), planned_batch(job.config, job.mesh), 0)


def _report(job: CheckedJob, start: Start, result: Validation) -> None:
    """Log the result, and print it as a line of JSON, the last of the output."""
    model, step = job.model.weights or job.model.name, start.saved.step if start.saved else None
    if adapter := job.settings[lora.Config].adapter_path:
        model = f"{model} with {adapter}"
    untrained = start.checkpoint is None and job.model.weights is None
    logger.info(
        "Evaluated %s%s on %d sequences, %d tokens",
        start.checkpoint or model, " with its initial values" if untrained else "", result.samples, result.tokens,
    )  # fmt: skip
    found = validation_record(result.loss, result.metrics)
    logger.info("Validation loss: %s", f"{result.loss:.5f}")
    if "val_ppl" in found:
        logger.info("Validation perplexity: %s", f"{found['val_ppl']:.4f}")
    for name, value in result.metrics.items():
        logger.info("Validation %s: %.4f", name, value)
    record = {"model": str(start.checkpoint or model), "step": step, **found}
    print(json_line({**record, "tokens": result.tokens, "samples": result.samples}), flush=True)
