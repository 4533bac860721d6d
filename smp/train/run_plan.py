"""The job before it is built: everything that can be refused, checked before any allocation or process group."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from smp.activation_offload import require_directory
from smp.checkpoint.local import local_directory, refuse_other_kinds
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.restore import check_architecture
from smp.data.data_pipeline import NO_DATA, BatchShape, DataPipeline, create_data_pipeline
from smp.dry_run import report
from smp.environment.malloc import unused_heap
from smp.errors import ConfigError, UserError
from smp.memory_plan import (
    ModelShape,
    Workload,
    available_memory,
    check_fits,
    estimate_memory,
    model_shape,
    processes_that_fit,
)
from smp.mesh import Degrees, resolve_degrees
from smp.models.model_config import ModelConfig, ResolvedModel, resolve_model
from smp.models.preset import list_presets
from smp.models.registry import build_model
from smp.models.tensor_plan import tensor_parallel_problems
from smp.prepare import compute_dtype
from smp.runtime import Launch, choose_backend, choose_device, own_words
from smp.train.arguments import DEFAULT_MAX_STEPS, TrainConfig, parse_args
from smp.train.start import check_output, choose_start, read_saved
from smp.train_state import TrainState

# Each rank lists a step's samples.
MAX_BATCH = 2**24
_GPU_BYTES = 80 << 30


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """A job that has been checked: what will be built, before anything is."""

    config: TrainConfig
    launch: Launch
    device: torch.device
    dtype: torch.dtype
    degrees: Degrees
    model: ResolvedModel
    run_dir: Path
    checkpoint_dirs: list[Path]  # this rank's, for local checkpoints
    resume: Path | None
    saved: Manifest | None  # the checkpoint's
    state: TrainState
    global_batch_size: int
    max_steps: int
    train_data: DataPipeline
    validation_data: DataPipeline | None

    def close(self) -> None:
        """Close the data."""
        self.train_data.close()
        if self.validation_data is not None:
            self.validation_data.close()


def read_config(argv: Sequence[str] | None, launch: Launch) -> TrainConfig:
    """The settings of a command line; one that names no data is told at once what else is wrong, such as its size.

    Raises:
        ConfigError: with every problem found.
    """
    try:
        return parse_args(argv)
    except ConfigError as error:
        if error.problems != [NO_DATA]:
            raise
    problems = [NO_DATA]
    try:
        plan = make_plan(parse_args([*own_words(argv), "--use_synthetic_data", "1", "--dry_run", "0"]), launch)
        plan.close()
        refuse_too_large(plan)
    except UserError as error:
        problems += error.problems if isinstance(error, ConfigError) else [str(error)]
    raise ConfigError(problems)


def make_plan(
    config: TrainConfig, launch: Launch, *, damaged: Iterable[Path] = (), only: Path | None = None
) -> RunPlan:
    """Check everything that can be checked without allocating a model or starting a process group.

    Args:
        damaged: checkpoints that are not to be resumed from.
        only: the checkpoint to resume from, whatever the settings choose.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[str] = []

    def attempt(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except ConfigError as error:
            problems.extend(error.problems)
        except UserError as error:
            problems.append(str(error))
        return None

    device = attempt(choose_device, launch) or torch.device("cpu")
    attempt(choose_backend, config.comm, device)
    attempt(_check_offload, config, device)
    problems += _needs_of_settings(config, device)
    degrees = attempt(
        resolve_degrees,
        config.parallel,
        world_size=launch.world_size,
        local_world_size=launch.local_world_size,
    )
    model = attempt(resolve_model, config.model)
    if model is None:
        raise ConfigError(problems)
    if degrees is not None:
        problems += tensor_parallel_problems(
            model.family.tensor_plan, model.hf_config, degree=degrees.tp, shard=degrees.dp_shard
        )
    run_dir = Path(config.run.output_dir or f"runs/{model.name}").absolute()
    attempt(check_output, config, run_dir)
    checkpoint_dirs, resume, saved = _start(config, launch, run_dir, model, damaged, only, attempt)
    state = TrainState.from_state_dict(saved.run["progress"]) if saved else TrainState()
    if degrees is None:
        raise ConfigError(problems)
    batch_size = attempt(_global_batch_size, config, degrees, saved)
    dtype = compute_dtype(config.precision, device)
    train_data = validation_data = None
    if batch_size is not None:
        shape = _batch_shape(config, model, degrees, launch, batch_size)
        train_data = attempt(create_data_pipeline, config.data, split="train", batch=shape, start_sample=state.samples)
        if config.data.validation_freq is not None:
            validation_data = attempt(
                create_data_pipeline, config.data, split="validation", batch=_validation_shape(config, shape)
            )
    if problems or train_data is None or batch_size is None:
        raise ConfigError(problems)
    return RunPlan(
        config, launch, device, dtype, degrees, model, run_dir, checkpoint_dirs, resume, saved, state, batch_size,
        _max_steps(config, train_data, batch_size), train_data, validation_data,
    )  # fmt: skip


def _needs_of_settings(config: TrainConfig, device: torch.device) -> list[str]:
    """Problems of settings that need a device, or one another across sections."""
    problems = []
    if config.run.profile_nsys and device.type != "cuda":
        problems.append("--profile_nsys 1 needs a GPU and none is visible: leave it out")
    if config.logging.memory_snapshot and device.type != "cuda":
        problems.append("--memory_snapshot 1 needs a GPU and none is visible: leave it out")
    if config.checkpoint.keep_best and config.data.validation_freq is None:
        problems.append(
            f"--keep_best {config.checkpoint.keep_best} needs the validation loss: give --validation_freq, of which "
            f"--checkpoint_freq is a multiple"
        )
    flash = config.model.attn_implementation == "flash_attention_2"
    if config.data.document_mask and flash and max(config.run.train_batch_size, config.data.val_batch_size) > 1:
        # transformers reads documents from restarting positions here only in batches of one row.
        problems.append(
            "--document_mask 1 with --attn_implementation flash_attention_2 needs --train_batch_size 1 and "
            "--val_batch_size 1: use those, or --attn_implementation sdpa"
        )
    return problems


def _start(
    config: TrainConfig,
    launch: Launch,
    run_dir: Path,
    model: ResolvedModel,
    damaged: Iterable[Path],
    only: Path | None,
    attempt: Callable[..., Any],
) -> tuple[list[Path], Path | None, Manifest | None]:
    """The directories of checkpoints, and the one to resume from with its manifest, if there is one."""
    settings = config.checkpoint
    directories = [Path(folder).absolute() for folder in settings.checkpoint_dir] or [run_dir / "checkpoints"]
    attempt(refuse_other_kinds, directories, launch.world_size, local=settings.is_local)
    if settings.is_local:
        directories = [local_directory(folder, launch.rank, launch.world_size) for folder in directories]
    if config.run.dry_run:
        return directories, None, None
    resume = only or attempt(choose_start, config, launch, run_dir, directories, model.name, list(damaged))
    saved = None if resume is None else attempt(read_saved, resume, settings.is_local, settings.reset_progress)
    if saved is not None:
        attempt(check_architecture, resume, saved.model["config"], model.hf_config)
    return directories, resume, saved


def _check_offload(config: TrainConfig, device: torch.device) -> None:
    """Refuse to offload activations where they would go nowhere.

    Raises:
        UserError: no directory on a CPU, or one that cannot be written.
    """
    if not config.activation.offload_activations:
        return
    if config.activation.offload_dir is not None:
        require_directory(Path(config.activation.offload_dir))
    elif device.type == "cpu":
        raise UserError(
            "--offload_activations 1 on a CPU needs --offload_dir, as activations are in host memory already: give a "
            "directory on a fast local disk, or use --activation_checkpointing 1 alone"
        )


def _global_batch_size(config: TrainConfig, degrees: Degrees, saved: Manifest | None) -> int:
    """Samples per step over all ranks; a resumed run keeps its own unless told otherwise."""
    run = config.run
    size = run.global_batch_size
    if size is None:
        size = (saved and saved.run.get("global_batch_size")) or batch_of_flags(config, degrees)
    if size > MAX_BATCH:
        raise UserError(f"the global batch of {size} samples is too large: use at most {MAX_BATCH} per step")
    if size < degrees.data_size:
        raise UserError(
            f"--global_batch_size {size} is smaller than the {degrees.data_size} data-parallel processes: "
            f"use at least {degrees.data_size}, or fewer processes"
        )
    return size


def batch_of_flags(config: TrainConfig, degrees: Degrees) -> int:
    """Samples per step that follow from the batch of a rank, the data ranks and accumulation."""
    return config.run.train_batch_size * degrees.data_size * config.run.gradient_accumulation_steps


def _batch_shape(
    config: TrainConfig, model: ResolvedModel, degrees: Degrees, launch: Launch, global_batch_size: int
) -> BatchShape:
    return BatchShape(
        sequence_length=model.sequence_length,
        vocab_size=model.hf_config.vocab_size,
        global_batch_size=global_batch_size,
        micro_batch_size=config.run.train_batch_size,
        data_rank=launch.rank // degrees.tp,
        data_size=degrees.data_size,
        seed=config.run.seed,
        pin_memory=torch.cuda.is_available(),
    )


def _validation_shape(config: TrainConfig, shape: BatchShape) -> BatchShape:
    size = config.data.val_batch_size
    return dataclasses.replace(shape, global_batch_size=size * shape.data_size, micro_batch_size=size)


def _max_steps(config: TrainConfig, data: DataPipeline, global_batch_size: int) -> int:
    """The step to stop at: the first of ``--max_steps`` and the end of ``--epochs``."""
    limits = [config.run.max_steps] if config.run.max_steps else []
    if config.run.epochs:
        limits.append(-(-config.run.epochs * data.samples_per_epoch // global_batch_size))
    return min(limits, default=DEFAULT_MAX_STEPS)


def planned_launch(config: TrainConfig, launch: Launch) -> Launch:
    """The processes to plan for: those started, or as many as ``--dry_run_world_size`` says, eight to a host."""
    world = config.run.dry_run_world_size
    return Launch(0, world, 0, min(world, 8)) if world else launch


def sizes(plan: RunPlan) -> tuple[ModelShape, Workload]:
    """What decides the memory of a rank."""
    config, family, activation = plan.config, plan.model.family, plan.config.activation
    with torch.device("meta"):
        model = build_model(plan.model.hf_config, attn_implementation=plan.model.attn_implementation)
    shape = model_shape(
        model, plan.model.hf_config, embedding=family.embedding, blocks=family.blocks, gated_mlp=family.gated_mlp
    )
    return shape, Workload(
        sequence_length=plan.model.sequence_length,
        micro_batch_size=config.run.train_batch_size,
        compute_bytes=plan.dtype.itemsize,
        activation_checkpointing=activation.activation_checkpointing,
        sequence_parallel=config.parallel.sequence_parallel,
        save_gathered=config.parallel.tp_save_gathered,
        loss_chunk=config.loss.loss_chunk_tokens,
        recomputed_every=activation.activation_checkpointing_every,
        selective=activation.activation_checkpointing_mode == "selective",
        offload_horizon=activation.activation_loading_horizon if activation.offload_activations else 0,
        cpu_offload=activation.cpu_offload and plan.device.type != "cpu",
        checkpoint_copy=config.checkpoint.is_async and plan.device.type == "cpu",
        attention_matrix=plan.model.attn_implementation == "eager",
        unused_heap=unused_heap() if plan.device.type == "cpu" else 0.0,
    )


def refuse_too_large(plan: RunPlan) -> None:
    """Refuse a job whose predicted peak is more memory than there is, before allocating.

    Raises:
        UserError: saying what each process needs, what there is, and how many processes would do.
    """
    shape, work = sizes(plan)
    available = available_memory(plan.device, plan.launch.local_world_size)
    needed = estimate_memory(shape, plan.degrees, work)
    advice = "" if sum(needed.values()) <= available else _advice(plan, shape, work, available)
    check_fits(needed, available, model=plan.model.name, processes=plan.launch.world_size, advice=advice)


def _advice(plan: RunPlan, shape: ModelShape, work: Workload, available: int) -> str:
    """What to do about a job that is too large: here, and on a cluster."""
    tp, flat = plan.degrees.tp, plan.config.flat()
    enough = processes_that_fit(shape, work, available, tp=tp)
    parts = [f"use {enough} such processes with full sharding"] if enough else []
    parts.append(f"{'' if parts else 'use '}a smaller model, batch or sequence")
    if preset := _preset_that_fits(plan, available):
        parts.append(f"--model {preset}, which fits here")
    others = ("sharding_strategy", "hybrid_shard_degree", "dry_run", "dry_run_world_size", "output_dir")
    words = ["python", "-m", "smp.train"]
    for name in (name for name in flat if name in plan.config.given and name not in others):
        words += [f"--{name}", *map(_word, flat[name] if isinstance(flat[name], list) else [flat[name]])]
    world = processes_that_fit(shape, work, _GPU_BYTES, tp=tp) or 1024
    words += ["--sharding_strategy", "full_shard", "--dry_run", "1", "--dry_run_world_size", str(world)]
    return f"{', or '.join(parts)}; `{shlex.join(words)}` shows what {world} GPUs of 80 GiB would hold"


def _preset_that_fits(plan: RunPlan, available: int) -> str:
    """The largest one, of the same family if there is one; empty if none fits."""
    best = (False, 0, "")
    for name in list_presets():
        other = dataclasses.replace(plan, model=resolve_model(ModelConfig(model=name)))
        shape, work = sizes(other)
        if sum(estimate_memory(shape, plan.degrees, work).values()) <= available:
            best = max(best, (other.model.family == plan.model.family, shape.parameters, name))
    return best[2]


def _word(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def dry_run(plan: RunPlan) -> None:
    """Print what the job would be."""
    if plan.launch.rank == 0:
        shape, work = sizes(plan)
        planned_here = plan.config.run.dry_run_world_size is None
        text = report(
            plan.model,
            plan.degrees,
            parallel=plan.config.parallel,
            activation=plan.config.activation,
            shape=shape,
            work=work,
            available=available_memory(plan.device, plan.launch.local_world_size) if planned_here else None,
        )
        print(text)
