"""Tensor parallelism as a technique."""

from __future__ import annotations

from typing import Any

from torch import nn

from smp.config import ParallelConfig
from smp.memory.shape import ModelShape, Workload, splits_tokens
from smp.mesh import Mesh
from smp.models.tensor_plan import tensor_parallel_problems
from smp.parallel.technique import Setup
from smp.parallel.tensor.group import TPGroup
from smp.parallel.tensor.split import is_split, split_model

Config = ParallelConfig


def build_tp_group(mesh: Mesh, parallel: ParallelConfig, *, random_seed: int = 0) -> TPGroup:
    """Build this rank's tensor-parallel group."""
    return TPGroup(
        mesh.tp_mesh,
        sequence_parallel=parallel.sequence_parallel,
        save_gathered=parallel.tp_save_gathered,
        overlap=parallel.tp_overlap is True,
        random_seed=random_seed,
    )


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Return the reasons why the model cannot be split over so many tensor-parallel and sharding ranks."""
    mesh = setup.mesh
    return tensor_parallel_problems(setup.family.tensor_plan, hf_config, degree=mesh.tp.size, shard=mesh.shard.size)


def apply(model: nn.Module, setup: Setup) -> None:
    """Split the model, unless it is split already."""
    if setup.mesh.tp.size > 1 and not is_split(model):
        split_model(model, setup.family, build_tp_group(setup.mesh, setup.settings[Config]))


def cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Count the gathered input of the running layer under sequence parallelism.

    Savings are in the other techniques' costs, which are those of a tensor-parallel rank.
    """
    return {"activations": work.tokens * shape.hidden * work.compute_bytes if splits_tokens(mesh, work) else 0}
