"""The job as it will be: planned as its start plans it, and compared with the memory of this host."""

from __future__ import annotations

import dataclasses

from smp.doctor.check import CheckContext
from smp.errors import ConfigError
from smp.memory.estimate import estimate_memory
from smp.memory.limits import available_memory
from smp.plan.cost import checkpoint_bytes
from smp.train.checked_job import check_job
from smp.train.job import batch_of_flags, refuse_too_large, sizes
from smp.units import GIB

PLAN_SHARE = 5.0  # of --timeout: data may have to be converted


def check_plan(ctx: CheckContext) -> None:
    """Plan the job, which opens the data and chooses no checkpoint.

    Raises:
        UserError: whatever the job refuses.
    """
    request, config = ctx.request, ctx.request.config
    if request.problems:
        raise ConfigError(request.problems)
    if not request.has_job:
        ctx.ok("no model, data or --config was given: no job was planned")
        return
    job = check_job(dataclasses.replace(config, run=dataclasses.replace(config.run, dry_run=True)), ctx.launch)
    job.close()
    shape, work = sizes(job)
    needed = sum(estimate_memory(shape, job.mesh, work).values())
    available = available_memory(job.device, ctx.launch.local_world_size)
    data = {
        "parameters": shape.parameters, "trained_parameters": shape.trained(1).parameters,
        "checkpoint_bytes": checkpoint_bytes(shape, work),
        "vocab_size": job.model.hf_config.vocab_size, "needed_bytes": needed, "available_bytes": available,
    }  # fmt: skip
    ctx.measure("model", data)
    pipelines = {"training": job.train_data, "validation": job.validation_data}
    samples = {
        name: f"{pipeline.samples_per_epoch} samples ({pipeline.fingerprint}, {pipeline.digest})"
        for name, pipeline in pipelines.items()
        if pipeline is not None
    }
    ctx.measure("data", samples)
    refuse_too_large(job, available)
    ctx.ok(
        f"{job.model.name}: {shape.parameters:,} parameters; each process needs about {needed / GIB:.1f} GiB, and "
        f"there are {available / GIB:.1f} GiB for each",
        **data,
    )
    batch = config.run.global_batch_size or batch_of_flags(config, job.mesh)
    _check_amount(ctx, job.train_data.samples_per_epoch, batch, job.model.sequence_length)


def _check_amount(ctx: CheckContext, samples: int, batch: int, length: int) -> None:
    """Compare the amount of training data with one step."""
    if ctx.request.config.data.use_synthetic_data:
        ctx.ok("random tokens: no data was read")
    elif samples < batch:
        ctx.warn(
            f"the training data has {samples} sample(s) of at most {length} tokens, less than one step of {batch}: use "
            f"more data or a smaller batch",
            samples=samples,
        )
    else:
        ctx.ok(f"the training data is readable: {samples:,} sample(s) of at most {length} tokens", samples=samples)
