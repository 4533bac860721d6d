"""A job as its flags describe it: layout, model and settings, and what it needs of memory."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable
from typing import Any

import torch

from smp.config import Settings, flag_text
from smp.errors import UserError
from smp.memory.advice import Change, changes_that_help
from smp.memory.estimate import peak_bytes, processes_that_fit
from smp.memory.host import check_host_memory, estimate_host_memory
from smp.memory.limits import available_memory
from smp.memory.shape import ModelShape, Workload, workload
from smp.mesh import Mesh
from smp.models.model_config import ResolvedModel
from smp.models.parameters import ParameterTable
from smp.parallel import parallelize
from smp.parallel.choices import Choice, Situation, choose
from smp.parallel.parallelize import find_problems, shape_of, table_of
from smp.parallel.technique import Setup
from smp.runtime import Launch
from smp.train import garbage
from smp.train.arguments import SECTIONS, TrainConfig
from smp.units import GIB

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
    def table(self) -> ParameterTable:
        """Table of the model's parameters, with what the techniques add and freeze."""
        return table_of(self.model, self.settings)

    @property
    def setup(self) -> Setup:
        """Setup of the techniques."""
        return Setup(self.model.family, self.mesh, self.settings, self.dtype, self.device.type)


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


def accumulation(job: Job) -> int:
    """Return the forward passes of a step of a new run."""
    return -(-planned_batch(job.config, job.mesh) // (job.mesh.data.size * job.config.run.train_batch_size))


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
        accumulation=accumulation(job),
        rows_of_sample=job.config.preference.rows_of_sample(job.config.data.pack),
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
