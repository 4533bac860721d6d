"""Plan of a job: every check that needs neither memory nor a process group."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint.storage import Storage
from smp.config import ParallelConfig, Section, Settings, flag_text
from smp.data.data_pipeline import BatchShape, DataPipeline, create_data_pipeline
from smp.data.template import given_template
from smp.errors import ConfigError, Problems, UserError
from smp.memory.advice import Change, changes_that_help
from smp.memory.estimate import GIB, peak_bytes, processes_that_fit
from smp.memory.host import check_host_memory, estimate_host_memory
from smp.memory.limits import available_memory
from smp.memory.shape import ModelShape, Workload, workload
from smp.mesh import Mesh, choose_strategy, resolve_mesh
from smp.models.model_config import ResolvedModel, resolve_model
from smp.optim import optimizers
from smp.parallel import parallelize
from smp.parallel.choices import Choice, Situation, choose
from smp.parallel.documents import check_documents
from smp.parallel.parallelize import compute_dtype, find_problems, left_padding_misfit, shape_of
from smp.parallel.technique import Setup
from smp.runtime import Launch, allocator_variable, choose_backend
from smp.train import garbage
from smp.train.adapters import chosen_tokens
from smp.train.arguments import SECTIONS, ArgumentsError, TrainConfig
from smp.train.elsewhere import (
    is_elsewhere,
    missing_data,
    planned_device,
    planned_launch,
    present_data,
    present_model,
    typed_data,
)
from smp.train.output_paths import check_output, storages_of

# Of settings that are auto, in the order in which they are chosen.
CHOOSERS = [*parallelize.CHOOSERS, garbage.choose]

# Each rank lists a step's samples.
MAX_BATCH = 2**24


@dataclasses.dataclass(frozen=True)
class Job:
    """Model, configuration, devices and layout: all that decides the memory of a rank.

    Attributes:
        mesh: laid out.
        choices: for settings that are ``auto``; added to when the group runs.
    """

    config: TrainConfig
    launch: Launch
    device: torch.device
    dtype: torch.dtype
    mesh: Mesh
    model: ResolvedModel
    choices: list[Choice] = dataclasses.field(default_factory=list, kw_only=True)

    @property
    def given(self) -> Settings:
        """Settings of all sections, as given."""
        return Settings(tuple(getattr(self.config, name) for name in SECTIONS))

    @property
    def settings(self) -> Settings:
        """Settings of all sections, with what was chosen for those that are ``auto``."""
        return self.given.changed(**{choice.name: choice.value for choice in self.choices})

    @property
    def setup(self) -> Setup:
        """Setup of the techniques."""
        return Setup(self.model.family, self.mesh, self.settings, self.dtype, self.device.type)


@dataclasses.dataclass(frozen=True)
class CheckedJob(Job):
    """A checked job, with its data open; ``smp.train.start`` chooses its start, in the process group."""

    run_dir: Path
    storages: list[Storage]  # of checkpoints; this rank's, for local ones
    train_data: DataPipeline  # with evaluate_only the validation data, as no other is opened
    validation_data: DataPipeline | None
    chat_template: str | None  # text of --chat_template

    @property
    def checkpoint_dirs(self) -> list[Path]:
        """Directories of checkpoints; for those with a URL, what is written before it is uploaded."""
        return [storage.directory for storage in self.storages]

    def close(self) -> None:
        """Close the data."""
        self.train_data.close()
        if self.validation_data is not None:
            self.validation_data.close()


def check_job(config: TrainConfig, launch: Launch) -> CheckedJob:
    """Check everything that can be checked without allocating a model or starting a process group.

    It opens the data, and so may fill the token cache; nothing else is written, and no checkpoint is read.

    Raises:
        ConfigError: with every problem found.
    """
    missing = missing_data(config)
    config = dataclasses.replace(config, data=typed_data(config))
    problems = Problems(missing)
    job, size, output = _check_settings(config, launch, problems)
    data = None
    if size is not None and not missing:
        data = problems.attempt(_open_data, job, _batch_shape(job, size))
    if data is not None:
        job.choices.extend(problems.attempt(chosen_tokens, job.settings, job.model, data["train_data"]) or [])
    if problems or data is None:
        raise ConfigError(problems)
    return CheckedJob(**vars(job), **output, **data)


def problems_of_rest(error: ArgumentsError, launch: Launch) -> list[str]:
    """Return the problems that the flags have beside those of ``error``; no data is opened.

    Where the model or the machines are not known, what would follow from others is not looked for.
    """
    config, found = error.rest, Problems(missing_data(error.rest))
    model, refused = config.model, {text.split()[0] for text in error.problems}
    known = bool(model.model or model.model_type or model.weights_path or model.shape)
    decisive = ("--model", "--model_type", "--hf_pretrained_model_name_or_dir", "--dry_run_world_size")
    if known and refused.isdisjoint(decisive):
        with contextlib.suppress(ConfigError):  # whose problems are in found
            _check_settings(config, planned_launch(config, launch), found)
    return Section.independent(found, error.problems)


def _check_settings(config: TrainConfig, launch: Launch, problems: Problems) -> tuple[Job, int | None, dict[str, Any]]:
    """Check everything but the data.

    Args:
        problems: those found are added.

    Returns:
        The job, the samples of a step if they can be, and what :class:`CheckedJob` has of where the job writes.

    Raises:
        ConfigError: with all problems, if there is no model or no layout.
    """
    attempt, here = problems.attempt, not is_elsewhere(config)
    device = attempt(planned_device, config, launch) or torch.device("cpu")
    attempt(choose_backend, config.comm, device)
    problems += _needs_of_settings(config, device)
    model = attempt(resolve_model, present_model(config), here=here)
    run_dir = Path(config.run.output_dir or f"runs/{model.name if model else ''}").absolute()
    attempt(check_output, config, run_dir)
    attempt(optimizers.entry_named, config.optim.optimizer)
    if model is None:
        attempt(_lay_out, config, launch)
        raise ConfigError(problems)
    job = make_job(config, launch, device, model, problems)
    misfits = find_problems(model.hf_config, job.setup)
    if not misfits and not config.data.evaluate_only and (table := shape_of(model, job.settings).specs):
        misfits += attempt(optimizers.find_problems, table, job.mesh, config.optim, here=here) or []
    problems += misfits
    if config.data.keeps_apart:
        attempt(check_documents, model.hf_config, model.sequence_length)
    size = attempt(check_global_batch, planned_batch(config, job.mesh), job.mesh)
    # A GPU's memory is asked for when the group runs: that takes some of it.
    if size is not None and not misfits and not config.run.dry_run and device.type == "cpu":
        attempt(refuse_too_large, job, available_memory(device, launch.local_world_size))
    storages = attempt(storages_of, config, launch, run_dir, model.name)
    return job, size, {"run_dir": run_dir, "storages": storages}


def make_job(
    config: TrainConfig, launch: Launch, device: torch.device, model: ResolvedModel, problems: Problems
) -> Job:
    """Find the layout, which nothing of the rest can do without.

    Args:
        problems: of the rest so far; those found here are added.

    Raises:
        ConfigError: with all problems, if there is no layout.
    """
    mesh = problems.attempt(_lay_out, config, launch)
    if config.checkpoint.save_final_model:
        problems.attempt(model.family.file_names.check, "--save_final_model 1", "leave it out")
    if mesh is None:
        raise ConfigError(problems)
    job = Job(config, launch, device, compute_dtype(config.precision, device), mesh, model)
    world = {"world_size": launch.world_size, "local_world_size": launch.local_world_size}
    if (strategy := choose_strategy(config.parallel, **world)) != job.settings[ParallelConfig].sharding_strategy:
        job.choices.append(Choice("sharding_strategy", strategy, "tensor parallelism takes all of a host"))
    return job


def _lay_out(config: TrainConfig, launch: Launch) -> Mesh:
    """Lay out the processes; raises as :func:`resolve_mesh`."""
    return resolve_mesh(
        config.parallel, world_size=launch.world_size, local_world_size=launch.local_world_size, rank=launch.rank
    )


def _open_data(job: Job, shape: BatchShape) -> dict[str, Any]:
    """Open the pipelines of both splits; raises ConfigError with every problem of either."""
    problems, config = Problems(), job.config
    train = validation = None
    if not config.data.evaluate_only:
        train = problems.attempt(create_data_pipeline, present_data(config, "train"), split="train", batch=shape)
    if config.data.evaluate_only or config.data.validation_freq is not None:
        size = config.data.val_batch_size
        rows = dataclasses.replace(shape, global_batch_size=size * shape.data_size, micro_batch_size=size)
        data = present_data(config, "validation")
        validation = problems.attempt(create_data_pipeline, data, split="validation", batch=rows)
    if problems:
        raise ConfigError(problems)
    template = config.data.chat_template if config.data.is_chat else None
    text = given_template(template) if template is not None else None
    return {"train_data": train or validation, "validation_data": validation, "chat_template": text}


def _needs_of_settings(config: TrainConfig, device: torch.device) -> list[str]:
    """Return problems of settings that need a device, or one another across sections."""
    problems = []
    if config.run.profile_nsys and device.type != "cuda":
        problems.append("--profile_nsys 1 needs a GPU and none is visible: leave it out")
    if config.allocator.expandable_segments is True:
        if device.type != "cuda":
            problems.append("--expandable_segments 1 needs a GPU and none is visible: leave it out")
        elif variable := allocator_variable():
            problems.append(f"--expandable_segments 1 and {variable} both set the allocator: leave one out")
    problems += config.preference.misfits(config.data, config.loss, config.model, config.lora)
    known = config.lora.lora_rank or config.lora.adapter_path or config.checkpoint.resume_from_checkpoint
    if config.preference.dpo and config.data.evaluate_only and not known:
        problems.append(
            "--dpo 1 --evaluate_only 1 without adapters needs the reference of a run, which its checkpoints have: set "
            "--resume_from_checkpoint latest, and the run's --output_dir"
        )
    if config.run.plan and config.data.evaluate_only:
        problems.append("--plan 1 plans a training step and --evaluate_only 1 has none: leave one out")
    if config.logging.memory_snapshot and device.type != "cuda":
        problems.append("--memory_snapshot 1 needs a GPU and none is visible: leave it out")
    if config.checkpoint.keep_best and config.data.validation_freq is None:
        problems.append(
            f"--keep_best {config.checkpoint.keep_best} needs the validation loss: give --validation_freq, of which "
            f"--checkpoint_freq is a multiple"
        )
    return problems


def check_global_batch(size: int, mesh: Mesh) -> int:
    """Return ``size``, the samples of a step over all ranks.

    Raises:
        UserError: it is more than a step can list, or fewer than one for each data rank.
    """
    if size > MAX_BATCH:
        raise UserError(f"the global batch of {size} samples is too large: use at most {MAX_BATCH} per step")
    if size < mesh.data.size:
        raise UserError(
            f"--global_batch_size {size} is smaller than the {mesh.data.size} data-parallel processes: "
            f"use at least {mesh.data.size}, or fewer processes"
        )
    return size


def batch_of_flags(config: TrainConfig, mesh: Mesh) -> int:
    """Compute the samples per step from the batch of a rank, the data ranks and accumulation."""
    return config.run.train_batch_size * mesh.data.size * config.run.gradient_accumulation_steps


def planned_batch(config: TrainConfig, mesh: Mesh) -> int:
    """Return the samples per step of a new run, or per batch of an evaluation, over all ranks."""
    if config.data.evaluate_only:
        return config.data.val_batch_size * mesh.data.size
    return config.run.global_batch_size or batch_of_flags(config, mesh)


def _batch_shape(job: Job, global_batch_size: int) -> BatchShape:
    return BatchShape(
        sequence_length=job.model.sequence_length,
        vocab_size=job.model.hf_config.vocab_size,
        global_batch_size=global_batch_size,
        micro_batch_size=job.config.run.train_batch_size,
        data_rank=job.mesh.data.rank,
        data_size=job.mesh.data.size,
        seed=job.config.run.seed,
        pin_memory=torch.cuda.is_available(),
        eos_token_id=job.model.eos_token_id,
        left_padding_misfit=left_padding_misfit(job.setup),
        pairs=job.config.preference.dpo,
        tokenizer_dir=str(job.model.tokenizer_dir) if job.model.tokenizer_dir else None,
    )


def sizes(job: Job) -> tuple[ModelShape, Workload]:
    """Return the sizes that decide the memory of a rank."""
    evaluates = job.config.data.evaluate_only
    work = workload(
        job.model,
        job.setup.settings,
        batch=job.config.data.val_batch_size if evaluates else job.config.run.train_batch_size,
        compute_bytes=job.dtype.itemsize,
        device_type=job.device.type,
        forward_only=evaluates,
        is_async=job.config.checkpoint.is_async,
        accumulation=-(-planned_batch(job.config, job.mesh) // (job.mesh.data.size * job.config.run.train_batch_size)),
    )
    return shape_of(job.model, job.settings), work


def choose_settings(job: Job, available: int, *, batch: int) -> list[Choice]:
    """Choose values for the settings that are ``auto``, as far as planning has not.

    Args:
        available: bytes that each rank may use.
        batch: samples of a step over all ranks.
    """
    shape, work = sizes(job)
    accumulation = -(-batch // (job.mesh.data.size * job.config.run.train_batch_size))

    def fits(**values: Any) -> bool:
        return peak_bytes(shape, job.mesh, work.changed(**values)) <= available

    situation = Situation(job.model.hf_config, job.settings, job.device.type, accumulation, fits, job.mesh)
    return choose(job.settings, situation, CHOOSERS)


def refuse_too_large(job: Job, available: int) -> None:
    """Refuse a job whose predicted peak exceeds the available memory, before allocating.

    Args:
        available: bytes that each rank may use.

    Raises:
        UserError: with the memory that each process needs and has, and the number of processes that would fit.
    """
    shape, work = sizes(job)
    if (needed := peak_bytes(shape, job.mesh, work)) > available:
        raise UserError(
            f"{job.model.name} on {job.launch.world_size} process(es) needs about {needed / GIB:.1f} GiB in each "
            f"process and there are {available / GIB:.1f} GiB for each: {_advice(job, shape, work, needed, available)}"
        )
    if (host := host_memory(job, shape, work)) is not None:
        check_host_memory(host, available_memory(torch.device("cpu"), job.launch.local_world_size))


def host_memory(job: Job, shape: ModelShape, work: Workload) -> dict[str, int] | None:
    """Predict the host memory of a rank on a GPU; None on a CPU, whose prediction has it."""
    if job.device.type == "cpu":
        return None
    config = job.config.checkpoint
    return estimate_host_memory(shape, job.mesh, work, is_async=config.is_async, is_local=config.is_local)


def changes_of(job: Job, shape: ModelShape, work: Workload) -> list[Change]:
    """Return the changes of a training job's flags that save most memory."""
    run = job.config.run
    return changes_that_help(
        shape, job.mesh, work,
        accumulation=None if run.global_batch_size else run.gradient_accumulation_steps,
        legal=lambda mesh: not find_problems(job.model.hf_config, dataclasses.replace(job.setup, mesh=mesh)),
    )  # fmt: skip


def _advice(job: Job, shape: ModelShape, work: Workload, needed: int, available: int) -> str:
    """Advise on a job that is too large: here, and on GPUs."""
    enough = processes_that_fit(shape, job.mesh, work, available)
    parts = [f"{enough} such processes with full sharding"] if enough else []
    if job.config.data.evaluate_only:
        return f"use {', or '.join([*parts, 'a smaller model, batch or sequence'])}"
    parts = [change.flags for change in changes_of(job, shape, work) if needed - change.saving <= available] + parts
    command = plan_command(job, without=("sharding_strategy", "hybrid_shard_degree"))
    return f"use {', or '.join([*parts, 'a smaller model'])}; `{command}` shows how many GPUs suffice, and how"


def given_words(job: Job, *, without: Iterable[str] = ()) -> list[str]:
    """Return the flags that were given, but for where the job writes and those ``without``."""
    left_out = {"plan", "output_dir", "resume_from_checkpoint", "dry_run", "dry_run_world_size", *without}
    settings, argv = job.config.flat(), list[str]()
    for name in sorted(job.config.given - left_out):
        values = settings[name] if isinstance(settings[name], list) else [settings[name]]
        if values and values != [None]:
            argv += [f"--{name}", *map(flag_text, values)]
    return argv


def plan_command(job: Job, *options: str, without: Iterable[str] = ()) -> str:
    """Return the command that plans a job on GPUs."""
    return shlex.join(["smp", "plan", *options, *given_words(job, without=without)])
