"""Reports of a run besides its metrics: the start, the settings, the curves, memory and the next commands."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import nn

from smp import __version__ as smp_version
from smp import comm
from smp.checkpoint.directory import LATEST, checkpoint_name
from smp.checkpoint.manifest import Manifest, now, versions
from smp.checkpoint.state import model_entry
from smp.compat.moe import tell_of_sharding
from smp.data.text import TextTokenizer, contradiction
from smp.errors import UserError
from smp.faults.agreement import of_all_ranks
from smp.log import FILE_ONLY, configure_logging, get_logger
from smp.memory.advice import advice_text
from smp.memory.estimate import estimate_memory, memory_table
from smp.memory.profile import MemoryProfile, profile_memory, rank_table
from smp.models.weight_files import generation_dir_of, stops_of
from smp.optim.groups import groups_as_json
from smp.optim.optimizers import described
from smp.plan.devices import peak_flops
from smp.train import history
from smp.train.adapters import log_reach, warn_of_base, warn_of_untrained
from smp.train.arguments import TrainConfig
from smp.train.checked_job import CheckedJob
from smp.train.curves import write_curves
from smp.train.flops import model_flops_per_token
from smp.train.hints import next_commands, shown
from smp.train.job import batch_of_flags, changes_of, sizes
from smp.train.metrics import MetricsLogger, NullMetricsLogger
from smp.train.state import Start, TrainState
from smp.train.writers import Trackers
from smp.units import short

logger = get_logger("train")

# The first update allocates the optimizer's state; from the second step on it is part of the peak.
PROFILED_STEPS = 2


def announce(job: CheckedJob, start: Start, model: nn.Module, changes: list[str]) -> None:
    """Log the model, the layout, the batch, and the changes of a resumed run."""
    total, trained = (sum(p.numel() for p in model.parameters() if p.requires_grad or all_) for all_ in (True, False))
    active = sizes(job)[0].active_parameters
    parts = [
        f"{n} ({short(n)}) are {how}" for n, how in ((active, "active for a token"), (trained, "trained")) if n < total
    ]
    of_them = f", of which {' and '.join(parts)}" if parts else ""
    logger.info("Created model %s with total parameters: %d (%s)%s", job.model.name, total, short(total), of_them)
    logger.info(
        "World size = %d: %s on %s over %s, computing in %s",
        job.launch.world_size, job.mesh, job.device.type, dist.get_backend(), str(job.dtype).removeprefix("torch."),
    )  # fmt: skip
    tell_of_sharding(job.mesh)
    samples, config = job.train_data.samples_per_epoch, job.config
    length = job.model.sequence_length * config.preference.rows_of_sample(config.data.pack)
    epochs = start.max_steps * start.global_batch_size / samples
    logger.info(
        "Global batch: %d samples, %s%d tokens; epoch: %d samples, %s tokens; to step %d%s",
        start.global_batch_size, "at most " if config.data.is_chat and not config.data.keeps_apart else "",
        start.global_batch_size * length, samples, short(samples * length), start.max_steps,
        f" ({epochs:.2f} epochs)" if epochs >= 0.01 else "",
    )  # fmt: skip
    logger.info("Run directory: %s", shown(job.run_dir))
    if job.config.activation.cpu_offload and job.device.type == "cuda":
        logger.info(
            "--cpu_offload 1: the update runs on %d thread(s) of each process (OMP_NUM_THREADS above 1 sets another "
            "number)", torch.get_num_threads(),
        )  # fmt: skip
    for sentence in job.config.without_effect():
        logger.info(sentence)
    if job.launch.rank == 0:
        _warn_of_tokens(job)
        log_reach(job.settings, job.model)
        warn_of_base(job.settings, job.model)
        warn_of_untrained(job.settings, job.model, job.train_data)
    for choice in job.choices:
        logger.info("Chosen: %s", choice)
    if start.checkpoint is not None:
        logger.info(
            "Resumed from %s at step %d, sample %d", start.checkpoint, start.progress.step, start.progress.samples
        )
        flags = batch_of_flags(job.config, job.mesh)
        if job.config.run.global_batch_size is None and flags != start.global_batch_size:
            logger.warning(
                "The global batch stays at the checkpoint's %d samples; --global_batch_size %d would make it what the "
                "flags and the number of processes give.", start.global_batch_size, flags,
            )  # fmt: skip
        for change in changes:
            logger.warning("Changed since the checkpoint: %s", change)
        if start.saved is not None and "data" in start.saved.run and "rows" not in start.saved.run:
            logger.warning(
                "The checkpoint is of an earlier version, and has the names and sizes of the data's files alone: "
                "whether their rows have changed, or are in another order, is not checked."
            )


def _warn_of_tokens(job: CheckedJob) -> None:
    """Warn of a tokenizer that is not the weights' own, and of a model that will not stop where it is taught to."""
    data, model = job.config.data, job.model
    given, own = data.tokenizer_name_or_dir, model.tokenizer_dir
    if model.weights and given and own and (found := contradiction(given, str(own))):
        logger.warning(
            "--tokenizer_name_or_dir contradicts the tokenizer of the pretrained weights (%s), whose embeddings then "
            "stand for other tokens: leave the flag out to take theirs.", found,
        )  # fmt: skip
    if not data.is_chat or data.train_on == "all":  # what follows an answer is trained on, too
        return
    folder = given or str(own)
    stops = stops_of(generation_dir_of(model.generation_dir, Path(folder).expanduser()), model.hf_config)
    if (end := job.train_data.end) is not None and end not in stops:
        logger.warning(
            "What is trained on ends with %r, token %d, and generation with the final model stops at %s: add %d to "
            "eos_token_id in its generation_config.json.", TextTokenizer(folder).text([end]), end, stops or "none", end,
        )  # fmt: skip


def log_collectives(*, on_console: bool) -> None:
    """Log the ``smddp`` backend's collectives and, where it delegated some to another backend, why.

    Args:
        on_console: in addition to the log file.
    """
    if report := comm.report():
        logger.info("Collectives of this rank:\n%s", report, extra=None if on_console else FILE_ONLY)
    elif on_console:
        logger.info("No table of collectives: only smddp has one, and this job ran over %s.", dist.get_backend())


def describe(job: CheckedJob, start: Start, state: TrainState, val_loss: float | None) -> Manifest:
    """Return the manifest of a checkpoint now, without files and tensors; ``val_loss`` is of this step."""
    return Manifest(
        step=state.step,
        world_size=job.launch.world_size,
        degrees=job.mesh.degrees,
        model=model_entry(job.model.name, job.model.hf_config)
        | ({} if job.chat_template is None else {"chat_template": job.chat_template}),
        run={
            "progress": dataclasses.asdict(state),
            "config": job.config.flat(),
            "data": job.train_data.fingerprint,
            "rows": job.train_data.digest,
            "optimizer": described(job.config.optim),
            "param_groups": groups_as_json(job.config.optim.param_groups) or None,
            "global_batch_size": start.global_batch_size,
            "max_steps": start.max_steps,
            "val_loss": val_loss if val_loss is not None and math.isfinite(val_loss) else None,
        },
        saved_at=now(),
        versions={"smp": smp_version, **versions()},
    )


def begin_files(job: CheckedJob, start: Start) -> MetricsLogger | NullMetricsLogger:
    """Open log files and metrics, and write the configuration where ``--config`` can read it again."""
    launch = job.launch
    configure_logging(
        rank=launch.rank, local_rank=launch.local_rank, world_size=launch.world_size, log_dir=job.run_dir / "logs"
    )
    if not launch.is_main:
        return NullMetricsLogger()
    flops = model_flops_per_token(job.model.hf_config, job.model.sequence_length, job.table)
    notes = [f"model FLOPs: {flops.formula}", *(f"chosen: {choice}" for choice in job.choices)]
    _write_settings(job.config, job.run_dir / "config.yaml", notes)
    device_name = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu"
    continues = job.config.checkpoint.resume_from_checkpoint is not None
    settings = job.config.logging
    run_name = settings.run_name or job.run_dir.name
    return MetricsLogger(
        settings,
        run_dir=job.run_dir,
        flops=flops,
        peak_flops=peak_flops(device_name, job.dtype, tf32=torch.get_float32_matmul_precision() != "highest"),
        world_size=job.launch.world_size,
        max_steps=start.max_steps,
        # "latest" without a checkpoint starts anew, over the metrics of a run that died before its first one.
        resume_from=start.progress if continues else None,
        trackers=Trackers(
            settings.trackers,
            project=settings.project,
            run_name=run_name,
            config=job.config.flat(),
            run_dir=job.run_dir,
        ),
    )


def _write_settings(config: TrainConfig, path: Path, notes: list[str]) -> None:
    """Write the configuration, in place of an earlier start's; a full disk is only a warning."""
    text = "".join(f"# {note}\n" for note in notes) + yaml.safe_dump(config.flat(), sort_keys=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        logger.warning("%s cannot be written (%s).", path, error.strerror)


def arguments_table(config: TrainConfig) -> str:
    """Format every setting as a markdown table, for TensorBoard."""
    return "\n".join(["| setting | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in config.flat().items())])


def log_next_commands(job: CheckedJob, start: Start, step: int, final: Path | None) -> None:
    """Draw the curves, and log the commands a user is likely to want next; ``final`` is the exported model, if any."""
    failure = write_curves(job.run_dir)
    if failure:
        logger.info("No curves.png: %s", failure)
    if step > start.max_steps:
        logger.info(
            "Nothing was trained: the checkpoint is at step %d, the end at step %d. What next:", step, start.max_steps
        )
    else:
        logger.info("Done: step %d of %d. What next:", step, start.max_steps)
    saved = job.checkpoint_dirs[0] / checkpoint_name(job.model.name, step)
    latest = saved.with_name(LATEST)  # which may be a copy of an earlier one
    checkpoint = latest if latest.resolve() == saved.resolve() else saved
    lines = next_commands(
        job.launch,
        run_dir=job.run_dir,
        curves=None if failure else job.run_dir / "curves.png",
        tensorboard=job.config.logging.tensorboard_folders(job.run_dir),
        final=final,
        checkpoint=checkpoint if saved.exists() and not job.config.checkpoint.is_local else None,
        max_steps=2 * step,
        resumes=job.config.checkpoint.resume_from_checkpoint == LATEST,
        is_chat=job.config.data.is_chat,
        has_adapters=bool(job.config.lora.lora_rank or job.config.lora.adapter_path),
    )
    for line in lines:
        logger.info("  %s", line)


@contextlib.contextmanager
def profile_step(
    job: CheckedJob,
    start: Start,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    record: Callable[[str], None],
) -> Iterator[Callable[[str], None]]:
    """Profile the memory of a step, if that is asked for, and log it by category; collective for all ranks.

    Yields:
        The function that the step calls with each phase that has ended; ``record`` where nothing is asked for.
    """
    settings = job.config.logging
    wanted = job.launch.is_main or settings.memory_profiling_all_ranks
    if not settings.enable_memory_profiling or not wanted or step >= start.progress.step + PROFILED_STEPS:
        yield record
        return
    with contextlib.ExitStack() as stack:
        if settings.memory_snapshot and step == start.progress.step + PROFILED_STEPS - 1:
            stack.enter_context(_allocator_history(job.run_dir / f"memory_snapshot_rank{job.launch.rank}.pickle"))
        profile = stack.enter_context(profile_memory(model, optimizer, device=job.device))

        def both(tag: str) -> None:
            profile.mark(tag)  # first: the tracker starts a new peak
            record(tag)

        yield both
    _log_memory(job, profile, step + 1)


def _log_memory(job: CheckedJob, profile: MemoryProfile, step: int) -> None:
    if job.launch.is_main:
        shape, work = sizes(job)
        title = f"Memory by category of rank 0 at the peak of step {step}"
        predicted = estimate_memory(shape, job.mesh, work)
        logger.info("%s", profile.table(title=title, predicted=predicted))
        peak = profile.peak()
        history.append(
            job.run_dir, "memory", step=step, phase=peak.phase, categories=dict(peak.categories),
            allocator=profile.measured, resident=profile.resident or None,
        )  # fmt: skip
        try:
            profile.plot(job.run_dir / "memory_timeline.png")
        except (UserError, OSError) as error:
            logger.info("No memory_timeline.png: %s", error)
    if job.config.logging.memory_profiling_all_ranks:
        peaks = of_all_ranks(profile.peak())
        logger.info("Memory by category of every rank at its peak, in MiB:\n%s", rank_table(peaks))


@contextlib.contextmanager
def _allocator_history(path: Path) -> Iterator[None]:
    """Write CUDA's allocation history, with stacks, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    try:
        yield
    finally:
        try:
            torch.cuda.memory._dump_snapshot(str(path))
            logger.info("Wrote %s: open it at https://pytorch.org/memory_viz", path)
        except OSError as error:
            logger.warning("%s cannot be written (%s).", path, error.strerror)
        torch.cuda.memory._record_memory_history(enabled=None)


def print_out_of_memory(job: CheckedJob, failure: str, tables: list[str]) -> None:
    """Print memory by category, measured or predicted, and the flags that would help most.

    Args:
        failure: the allocator's message.
        tables: measured memory; empty where nothing was measured.
    """
    shape, work = sizes(job)
    predicted = "Predicted memory of each process:\n" + memory_table(estimate_memory(shape, job.mesh, work), None)
    lines = [f"error: rank {job.launch.rank} ran out of memory on {job.device}: {failure}"]
    print("\n".join([*lines, *(tables or [predicted]), advice_text(changes_of(job, shape, work))]), file=sys.stderr)
