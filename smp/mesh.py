"""From degrees to torch's device mesh: axes ``dp_replicate``, ``dp_shard``, ``tp``.

Tensor-parallel ranks are neighbours, ``dp_shard`` strides over them and ``dp_replicate`` is outermost, so that the
heaviest exchange stays inside a host.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smp.config import ParallelConfig
from smp.errors import UserError

AXES = ("dp_replicate", "dp_shard", "tp")


@dataclasses.dataclass(frozen=True)
class Degrees:
    """How many ranks lie along each mesh axis, and whether parameters are freed between forward and backward."""

    dp_replicate: int
    dp_shard: int
    tp: int = 1
    reshard_after_forward: bool = True

    @property
    def data_size(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def resolve_degrees(parallel: ParallelConfig, *, world_size: int, local_world_size: int) -> Degrees:
    """Apply SMP v2's rules for ``hybrid_shard_degree`` 0, 1 and k to the sharding strategy.

    ===== ===================================================================================================
    value meaning
    ===== ===================================================================================================
    0     the strategy decides: full_shard and shard_grad_op shard over the world, hybrid_shard and
          _hybrid_shard_zero2 over the ranks of one host, no_shard not at all
    1     no sharding
    k     hybrid sharding over k neighbouring ranks; the strategy becomes hybrid_shard unless it is
          _hybrid_shard_zero2
    ===== ===================================================================================================

    Raises:
        UserError: the degree does not divide the world.
    """
    strategy, degree, tp = parallel.sharding_strategy, parallel.hybrid_shard_degree, parallel.tensor_parallel_degree
    if world_size % tp:
        raise UserError(
            f"--tensor_parallel_degree {tp} does not divide the {world_size} processes: choose one of "
            f"{_divisors(world_size)}"
        )
    data_size = world_size // tp
    if degree > 0:
        shard = degree
    elif strategy == "no_shard":
        shard = 1
    elif strategy in ("full_shard", "shard_grad_op"):
        shard = data_size
    else:
        shard = max(1, local_world_size // tp)
    if data_size % shard:
        name = f"--hybrid_shard_degree {degree}" if degree else f"sharding over the {shard} processes of a host"
        raise UserError(
            f"{name} does not divide the {data_size} data-parallel processes: choose --hybrid_shard_degree from "
            f"{_divisors(data_size)}"
        )
    keeps_gathered = strategy in ("shard_grad_op", "_hybrid_shard_zero2") or shard == 1
    return Degrees(data_size // shard, shard, tp, reshard_after_forward=not keeps_gathered)


def served_device_type() -> str:
    """What the process group serves besides the CPU: a group started without a backend names none itself."""
    backends = dist.get_backend_config().split(",")  # such as cpu:gloo,cuda:nccl
    serves_gpus = "cuda:nccl" in backends or "cuda:smddp" in backends
    return "cuda" if serves_gpus and torch.cuda.is_available() else "cpu"


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The job's device mesh and this rank's place in it."""

    device_mesh: DeviceMesh
    degrees: Degrees
    data_group: dist.ProcessGroup | None  # this rank's counterparts that read other data; None: all ranks

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh for ``fully_shard``: 1-D when nothing is replicated, else (dp_replicate, dp_shard)."""
        if self.degrees.dp_replicate == 1:
            return self.device_mesh["dp_shard"]
        return self.device_mesh["dp_replicate", "dp_shard"]

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The 1-D mesh of this rank's tensor-parallel group."""
        return self.device_mesh["tp"]

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank reads, 0 <= data_rank < data_size."""
        replicate, shard = (self.device_mesh.get_local_rank(axis) for axis in ("dp_replicate", "dp_shard"))
        return replicate * self.degrees.dp_shard + shard

    @property
    def data_size(self) -> int:
        """Number of ranks that read different data."""
        return self.degrees.data_size

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.device_mesh.device_type


def build_mesh(degrees: Degrees, device_type: str) -> Mesh:
    """Lay the mesh over the running process group.

    Args:
        degrees: product equal to the world size.
        device_type: ``cpu`` or ``cuda``.
    """
    shape = (degrees.dp_replicate, degrees.dp_shard, degrees.tp)
    world = dist.get_world_size()
    if degrees.data_size * degrees.tp != world:
        raise UserError(f"degrees {shape} multiply to {degrees.data_size * degrees.tp}, but {world} processes run")
    device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    # Made here, where all ranks are: making a group is collective.
    data = device_mesh["dp_replicate", "dp_shard"]._flatten("data").get_group() if degrees.tp > 1 else None
    keep_timeout([*device_mesh.get_all_groups(), *([] if data is None else [data])], device_type)
    return Mesh(device_mesh, degrees, data)


def keep_timeout(groups: list[dist.ProcessGroup], device_type: str) -> None:
    """Give groups the timeout of the default group: torch makes a mesh's with half an hour, whatever was asked for."""
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device(device_type))
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    if limit is not None:  # the fake backend has none
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(limit, group)
