"""Tensor parallelism as a technique."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from smp.comm.symmetric import neighbours_obstacle
from smp.config import CommConfig, ParallelConfig
from smp.errors import UserError
from smp.memory.shape import FULL, NONE, PRODUCTS, SELECTIVE, ModelShape, Moment, Workload, splits_tokens
from smp.mesh import Mesh
from smp.models.family import tensor_parallel_problems
from smp.parallel.choices import Choice, Situation
from smp.parallel.technique import Sent, Setup, Traffic
from smp.parallel.tensor.group import TPGroup
from smp.parallel.tensor.split import is_split, split_model

Config = ParallelConfig


def overlap_obstacle(degree: int, device_type: str) -> str:
    """Return why collectives cannot overlap their matmuls, or an empty string; collective on GPUs."""
    if device_type == "cpu":
        return "there is no GPU"
    if not dist.is_initialized():  # in a dry run
        return "the ranks ask their GPUs when they run"
    # torch's operators ask the group for its store, which a group that is made in Python does not give.
    return "the backend is smddp" if "smddp" in dist.get_backend_config() else neighbours_obstacle(degree)


def build_tp_group(mesh: Mesh, parallel: ParallelConfig, *, random_seed: int = 0) -> TPGroup:
    """Build this rank's tensor-parallel group; collective.

    Raises:
        UserError: collectives are to overlap their matmuls, and cannot.
    """
    if parallel.tp_overlap is True and (why := overlap_obstacle(mesh.tp.size, mesh.device_type)):
        raise UserError(_refusal(why))
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
    found = tensor_parallel_problems(setup.family, hf_config, degree=mesh.tp.size, shard=mesh.shard.size)
    if setup.settings[Config].tp_overlap:
        if setup.device_type == "cpu":
            found.append(_refusal("there is no GPU"))
        elif setup.settings[CommConfig].distributed_backend == "smddp":
            found.append(_refusal("the backend is smddp"))
    return found


def _refusal(why: str) -> str:
    return (
        f"--tp_overlap 1 needs tensor-parallel ranks of one host, on GPUs that read each other's memory, and backend "
        f"nccl: {why}; leave it out"
    )


def choose(situation: Situation) -> Iterator[Choice]:
    """Overlap collectives with their matmuls where the tensor-parallel ranks' GPUs read each other's memory."""
    parallel, degree = situation.settings[Config], situation.mesh.tp.size
    if degree == 1:
        return
    why = overlap_obstacle(degree, situation.device_type) if parallel.sequence_parallel else "no sequence parallelism"
    if not why and not situation.fits(tp_overlap=True):
        why = "the buffers do not fit"
    yield Choice("tp_overlap", not why, why or "the GPUs of tensor-parallel ranks read each other's memory")


def apply(model: nn.Module, setup: Setup) -> None:
    """Split the model, unless it is split already."""
    if setup.mesh.tp.size > 1 and not is_split(model):
        split_model(model, setup.family, build_tp_group(setup.mesh, setup.settings[Config]))


def cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Count the gathered input of the running layer under sequence parallelism.

    With overlap, also the memory that the GPUs share: two chunks of a hidden state. Savings are in the other
    techniques' costs, which are those of a tensor-parallel rank.
    """
    if not splits_tokens(mesh, work) or work.moment is Moment.UPDATE:
        return {}
    state = work.tokens(mesh) * shape.hidden * work.compute_bytes
    buffers = 2 * state // mesh.tp.size if work.settings[Config].tp_overlap else 0
    return {"activations": state, "communication buffers": buffers}


# A gather and a reduction of attention and of the MLP, forward and backward. Recomputation repeats them, selective
# recomputation the gathers only.
_CROSSINGS = {NONE: 8, PRODUCTS: 10, SELECTIVE: 10, FULL: 12}


def traffic(shape: ModelShape, mesh: Mesh, work: Workload) -> Traffic:
    """Count the collectives of hidden states."""
    state = work.compute_bytes * work.tokens(mesh) * shape.hidden
    times = _CROSSINGS[NONE] / 2
    if not work.forward_only:
        times = work.on_average(_CROSSINGS[NONE], _CROSSINGS[work.recomputation])
    return Traffic([Sent("all_gather", state, "tp", times)])
