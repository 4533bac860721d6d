"""Dry run: a job of any size on meta tensors over torch's fake process group, and what it asks of other machines.

With ``--dry_run_world_size`` it is for other machines: what this one lacks is no problem of theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp.compat.moe import sharding_advice
from smp.config import Settings
from smp.data.config import DataConfig, Split
from smp.data.source import with_type
from smp.delayed_init import build_on_meta
from smp.errors import hub_advice
from smp.log import get_logger
from smp.memory.estimate import estimate_memory, memory_table
from smp.memory.shape import ModelShape, Workload
from smp.mesh import Mesh
from smp.models.model_config import ModelConfig, ResolvedModel
from smp.models.registry import build_model
from smp.parallel.choices import Choice
from smp.parallel.parallelize import apply_techniques
from smp.parallel.technique import Setup
from smp.runtime import Launch, choose_device
from smp.train.arguments import TrainConfig
from smp.units import parameters_text

logger = get_logger("train")

_ATTENTION_OF_GPUS = ("flash_attention_2", "flash_attention_3", "flex_attention", "fused")


def is_elsewhere(config: TrainConfig) -> bool:
    """Tell whether a job on other machines is planned."""
    return config.run.dry_run_world_size is not None


def planned_launch(config: TrainConfig, launch: Launch) -> Launch:
    """Return the processes to plan for: those started, or ``--dry_run_world_size``, eight to a host."""
    world = config.run.dry_run_world_size
    return Launch(0, world, 0, min(world, 8)) if world else launch


def planned_device(config: TrainConfig, launch: Launch) -> torch.device:
    """Return the device of this process, or of rank 0 of other machines: a GPU if one is here or a flag needs one.

    Raises:
        UserError: more processes on this host than GPUs.
    """
    if not is_elsewhere(config):
        return choose_device(launch)
    needs_gpus = (
        config.comm.distributed_backend == "nccl"
        or config.run.profile_nsys
        or config.logging.memory_snapshot
        or config.allocator.expandable_segments is True
        or config.parallel.tp_overlap is True
        or config.model.attn_implementation in _ATTENTION_OF_GPUS
        or (config.activation.offload_activations and config.activation.offload_dir is None)
    )
    on_gpus = config.comm.distributed_backend != "gloo" and (needs_gpus or torch.cuda.is_available())
    return torch.device("cuda", 0) if on_gpus else torch.device("cpu")


def _is_absent(path: str) -> bool:
    """Tell whether a path is one of other machines: no URL, not here, and no hub's name, which nothing resolves."""
    return "://" not in path and not any(glob.iglob(os.path.expanduser(path), recursive=True)) and not hub_advice(path)


def present_model(config: TrainConfig) -> ModelConfig:
    """Return the settings of the model, on other machines without pretrained weights that are not here.

    The sizes of those that are given then stand for the model's own.
    """
    model = config.model
    path = model.weights_path
    if not is_elsewhere(config) or path is None or model.model_type is None or not _is_absent(str(path)):
        return model
    logger.warning(
        "%s is not on this machine: the memory below is of --model_type %s with the sizes that are given, and SMP v2's "
        "defaults for the others", path, model.model_type,
    )  # fmt: skip
    return dataclasses.replace(
        model,
        finetune=False,
        pretrained_model_name=None,
        pretrained_checkpoint_file=None,
        finetune_checkpoint_load_dir=None,
        hf_pretrained_model_name_or_dir=None,
    )


def missing_data(config: TrainConfig) -> list[str]:
    """Name data that is needed and not given; on other machines it may be SageMaker's channel."""
    return [] if is_elsewhere(config) else config.data.missing()


def typed_data(config: TrainConfig) -> DataConfig:
    """Return the settings of the data with what ``--dataset_type auto`` finds, as far as it is on this machine."""
    data = config.data
    path = data.test_dir if data.evaluate_only else data.training_dir
    look = not is_elsewhere(config) or (path is not None and not _is_absent(path))
    return with_type(data, pairs=config.preference.dpo, look=look)


def present_data(config: TrainConfig, split: Split) -> DataConfig:
    """Return the settings of a split's data, on other machines with random tokens for a folder that is not here."""
    if not is_elsewhere(config):
        return config.data
    data = dataclasses.replace(config.data, data_num_workers=0)  # of which a machine has as many as it has cores
    name = "training_dir" if split == "train" else "test_dir"
    path = getattr(data, name)
    if data.use_synthetic_data or (path is not None and not _is_absent(path)):
        return data
    given = path or data.dataset_name
    logger.warning(
        "--%s is not checked: %s", name, "it is not given" if given is None else f"{given} is not on this machine"
    )
    return dataclasses.replace(data, use_synthetic_data=True, document_mask=False)


@contextlib.contextmanager
def sharded_model(resolved: ResolvedModel, mesh: Mesh, settings: Settings, *, rank: int = 0) -> Iterator[nn.Module]:
    """Build the model on the meta device, split and sharded as on ``rank`` of ``mesh``; no group may be running."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world_size)
    try:
        build = functools.partial(build_model, resolved.hf_config, attn_implementation=resolved.attn_implementation)
        model = build_on_meta(build)
        yield apply_techniques(model, Setup(resolved.family, mesh.join("cpu"), settings))
    finally:
        dist.destroy_process_group()


def sharded_parameters(
    resolved: ResolvedModel, mesh: Mesh, settings: Settings
) -> dict[str, tuple[torch.Size, torch.Size]]:
    """Shard the model as on rank 0 of ``mesh``; returns every parameter's global and local shape by name."""
    with sharded_model(resolved, mesh, settings) as model:
        return {
            name: (parameter.shape, parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape)
            for name, parameter in model.named_parameters()
        }


def report(
    resolved: ResolvedModel,
    mesh: Mesh,
    *,
    shape: ModelShape,
    work: Workload,
    available: int | None,
    choices: Sequence[Choice] = (),
    where: str = "",
    host: dict[str, int] | None = None,
) -> str:
    """Format the result of a dry run: the mesh, the memory table of one rank, and what is chosen.

    Args:
        available: bytes that a rank may use; None if it is planned for another machine.
        where: what the memory is predicted for, as ``, on a GPU``.
        host: prediction of the host memory of a rank on a GPU.
    """
    shapes = sharded_parameters(resolved, mesh, work.settings)
    local = sum(local.numel() for _, local in shapes.values())
    size = parameters_text(shape.parameters, shape.active_parameters)
    return "\n".join(
        [
            f"{resolved.name}: {size} in {len(shapes)} tensors; rank 0 stores {local:,}",
            f"mesh: {mesh} = {mesh.world_size} processes",
            *([advice] if (advice := sharding_advice(mesh)) else []),
            "",
            f"predicted peak of each rank{where}:",
            memory_table(estimate_memory(shape, mesh, work), available),
            "",
            *([] if host is None else ["predicted host memory of each rank:", memory_table(host, None), ""]),
            *(["settings that are auto:", *map(str, choices)] if choices else []),
        ]
    )
