"""Plan of a job: every check that needs neither memory nor a process group."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint.storage import Storage
from smp.config import ActivationConfig, ParallelConfig, Section
from smp.data.config import DataConfig
from smp.data.data_pipeline import BatchShape, DataPipeline, create_data_pipeline
from smp.data.template import given_template
from smp.errors import ConfigError, Problems
from smp.memory.limits import available_memory
from smp.mesh import Mesh, choose_strategy, resolve_mesh
from smp.models.hf_values import rope_limit
from smp.models.model_config import ResolvedModel, resolve_model
from smp.models.text_part import content_of_whole
from smp.optim import optimizers
from smp.parallel import fp8
from smp.parallel.choices import Choice
from smp.parallel.documents import NOT_COMPILED, calls_for_each, check_documents, mixes_documents
from smp.parallel.parallelize import compute_dtype, find_problems, left_padding_misfit
from smp.runtime import Launch, allocator_variable, choose_backend
from smp.train.adapters import chosen_tokens
from smp.train.arguments import ArgumentsError, TrainConfig
from smp.train.dry_run import (
    is_elsewhere,
    missing_data,
    planned_device,
    planned_launch,
    present_data,
    present_model,
    typed_data,
)
from smp.train.job import Job, accumulation, check_global_batch, planned_batch, refuse_too_large
from smp.train.output_paths import check_output, storages_of


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
    """Return the problems that the flags have besides those of ``error``; no data is opened.

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
    if model is None:
        attempt(_lay_out, config, launch)
        raise ConfigError(problems)
    if (alone := why_one_each(config.data, model)) is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, pack=False))
    job = make_job(config, launch, device, model, problems)
    job.choices.extend([Choice("pack", False, alone)] if alone else [])
    misfits = find_problems(model.hf_config, job.setup)
    if config.data.evaluate_only:
        attempt(optimizers.entry_named, config.optim.optimizer)
    elif not misfits:
        # Inside the attempt, as the table refuses adapters of layers that the model does not have.
        misfits += attempt(lambda: optimizers.find_problems(job.table, job.mesh, config.optim, here=here)) or []
    problems += misfits
    if (steps := accumulation(job)) > 1 and config.experts.method == "aux_loss":
        problems.append(
            f"--moe_load_balancing aux_loss is of the global batch, which {steps} forward passes in a step do not have "
            f"together: use --moe_load_balancing sequence, or 1 forward pass"
        )
    if config.data.keeps_apart:
        attempt(check_documents, model.hf_config, model.sequence_length)
        if calls_for_each(model.hf_config):
            problems += [f"--compile 1: {NOT_COMPILED}: leave it out"] if job.settings[ActivationConfig].compile else []
            job.choices.extend([Choice("compile", False, NOT_COMPILED)] if device.type == "cuda" else [])
    size = attempt(check_global_batch, planned_batch(config, job.mesh), job.mesh)
    # A GPU's memory is asked for when the group runs: that takes some of it.
    if size is not None and not misfits and not config.run.dry_run and device.type == "cpu":
        attempt(refuse_too_large, job, available_memory(device, launch.local_world_size))
    storages = attempt(storages_of, config, launch, run_dir, model.name)
    return job, size, {"run_dir": run_dir, "storages": storages}


def make_job(
    config: TrainConfig, launch: Launch, device: torch.device, model: ResolvedModel, problems: Problems
) -> Job:
    """Find the layout, which all else needs.

    Args:
        problems: of the rest so far; those found here are added.

    Raises:
        ConfigError: with all problems, if there is no layout.
    """
    mesh = problems.attempt(_lay_out, config, launch)
    if config.checkpoint.save_final_model:
        problems.attempt(model.family.file_names.check, "--save_final_model 1", "leave it out")
    if config.checkpoint.export_text_only and (why := _why_no_text_part(config, model)):
        problems.append(f"--export_text_only 1: {why}: leave it out")
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


def _why_no_text_part(config: TrainConfig, model: ResolvedModel) -> str | None:
    """Return why a final model has no text model to be written alone."""
    if (config.lora.lora_rank or config.lora.adapter_path) and not config.lora.save_merged_model:
        return "adapters are written, not a model"
    return None if content_of_whole(model.weights) is not None else "the model is no part of a larger one"


def why_one_each(data: DataConfig, model: ResolvedModel) -> str | None:
    """Return why conversations are one in a sequence where nothing else is said; None: several are, or none is read."""
    found = mixes_documents(model.hf_config, model.sequence_length) if data.is_chat and data.pack is None else None
    return found and f"the model does not keep packed conversations apart: {found[0]}"


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
    problems += [] if is_elsewhere(config) else fp8.lacking(config.fp8, device)
    problems += config.preference.misfits(config.data, config.loss, config.model, config.lora)
    known = config.lora.lora_rank or config.lora.adapter_path or config.checkpoint.resume_from_checkpoint
    if config.preference.dpo and config.data.evaluate_only and not known:
        problems.append(
            "--dpo 1 --evaluate_only 1 without adapters needs the reference of a run, which its checkpoints have: set "
            "--resume_from_checkpoint latest, and the run's --output_dir"
        )
    if config.preference.dpo and (flag := config.experts.adds_loss):
        problems.append(f"{flag} is of tokens and --dpo 1 has a loss of pairs: use --moe_load_balancing bias or none")
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
        fixed_width=(limit := rope_limit(job.model.hf_config)) is not None and job.model.sequence_length > limit[1],
        tokenizer_dir=str(job.model.tokenizer_dir) if job.model.tokenizer_dir else None,
    )
