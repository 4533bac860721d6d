"""Over which ranks to shard and to replicate: from FSDP's process groups, a device mesh, or ``smp.init``."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from smp.config import AUTO, ParallelConfig
from smp.errors import UserError
from smp.fsdp.options import HYBRID, Options
from smp.log import get_logger
from smp.mesh import Mesh, resolve_mesh, served_device_type
from smp.models.experts import expert_modules
from smp.parallel.units import folded_axis
from smp.process_groups import keep_timeout
from smp.runtime import local_world_size

logger = get_logger(__name__)
_HYBRID_AXES = ("dp_replicate", "dp_shard")

# Meshes made here, by the group they were made from: units that are wrapped one by one share them.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, DeviceMesh]] = weakref.WeakKeyDictionary()

_job: Callable[[], tuple[Mesh, ParallelConfig, int | None] | None] = lambda: None  # noqa: E731


def follow(job: Callable[[], tuple[Mesh, ParallelConfig, int | None] | None]) -> None:
    """Set where the mesh of ``smp.init`` is found; imports go one way, so the package's top calls this.

    Args:
        job: returns the mesh, its settings and the ``random_seed`` that was given; None before ``init``.
    """
    global _job
    _job = job


def default_mesh() -> DeviceMesh | None:
    """Return the mesh of ``smp.init`` that parameters are sharded over, or None before it."""
    job = _job()
    return None if job is None else job[0].fsdp_mesh


def split_axis(module: nn.Module) -> str | None:
    """Return the folded axis of ``smp.init`` along which a module's own parameters are split, or None."""
    return next(filter(None, map(folded_axis, module.parameters(recurse=False))), None)


def mesh_of_split(axis: str, around: DeviceMesh) -> DeviceMesh:
    """Return the mesh to shard over what a folded axis splits, given that of the parameters around it.

    Raises:
        UserError: that is not the mesh of ``smp.init``, which the axis is folded over.
    """
    job = _job()
    assert job is not None
    if around != job[0].fsdp_mesh:
        raise UserError(
            f"FSDP: smp.transform has split parameters over the {axis} ranks of the mesh of smp.init, and FSDP shards "
            f"over another: leave process_group and device_mesh out, and give smp.init the sharding_strategy, or a "
            f"hybrid_shard_degree"
        )
    return job[0].fsdp_mesh_of(axis)


def warn_of_experts(module: nn.Module) -> None:
    """Warn where ``smp.init`` was asked to split experts, and none is split."""
    if (job := _job()) is None or (degree := job[0].degree("ep")) == 1:
        return
    experts = [inner for _, inner in expert_modules(module)]
    if experts and not any(map(split_axis, experts)):
        logger.warning(
            "expert_parallel_degree %d has no effect: FSDP shards and gathers these experts as all parameters; call "
            "smp.transform before it, which splits them",
            degree,
        )


def shared_buffers() -> bool:
    """Return the ``shared_buffers`` of ``smp.init``; True before it."""
    job = _job()
    return job is None or job[1].shared_buffers


def random_seed() -> int | None:
    """Return the ``random_seed`` that ``smp.init`` was given, or None."""
    job = _job()
    return None if job is None else job[2]


def every_axis(mesh: DeviceMesh, options: Options) -> list[dist.ProcessGroup]:
    """Return the groups along the axes of a unit's mesh, and of tensor parallelism where ``smp.init`` laid the mesh."""
    job, groups = _job(), [mesh.get_group(axis) for axis in range(mesh.ndim)]
    own = options.process_group is not None or options.device_mesh is not None
    return groups if job is None or own or job[0].tp.size == 1 else [*groups, job[0].tp.group]


def device_type(module: nn.Module, options: Options) -> str:
    """Return ``cpu`` or ``cuda``: as given, else of the parameters, else as the process group serves.

    Raises:
        UserError: ``device_id`` is not the device that this process computes on.
    """
    given = options.device_id
    if options.device_mesh is not None:
        found = options.device_mesh.device_type
    elif given is not None:
        found = given.type
    else:
        own = {p.device.type for p in module.parameters()} - {"cpu", "meta"}
        found = own.pop() if own else served_device_type()
    if given is None:
        return found
    if given.type != found:
        raise UserError(f"FSDP: device_id {given} is no {found} device, which device_mesh is of: leave it out")
    if found == "cuda" and not torch.cuda.is_available():
        raise UserError(f"FSDP: device_id {given} is a GPU, and there is none: leave it out to shard on the CPU")
    if found == "cuda" and given.index not in (None, torch.cuda.current_device()):
        raise UserError(
            f"FSDP: device_id is {given} while this process computes on cuda:{torch.cuda.current_device()}: call "
            f"torch.cuda.set_device({given.index}) before init_process_group"
        )
    return found


def _cached(group: dist.ProcessGroup, key: tuple, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    made = _made.setdefault(group, {})
    if key not in made:
        made[key] = make()
    return made[key]


def require_process_group() -> dist.ProcessGroup:
    """Return the group of all ranks.

    Raises:
        UserError: there is none.
    """
    if not dist.is_initialized():
        raise UserError("FSDP needs a process group: call torch.distributed.init_process_group(...) before it")
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def resolve(options: Options, device: str) -> tuple[DeviceMesh, ShardingStrategy]:
    """Return the mesh of a unit, 1-D or (replicate, shard), and its strategy; making a mesh is collective.

    Raises:
        UserError: group, mesh and strategy do not go together; the text says what does.
    """
    world = require_process_group()
    group, mesh, job = options.process_group, options.device_mesh, _job()
    strategy = options.sharding_strategy or ShardingStrategy.FULL_SHARD
    if group is not None and mesh is not None:
        raise UserError("FSDP: both process_group and device_mesh are given: give one of them")
    if mesh is not None:
        return _from_mesh(mesh, strategy), strategy
    if group is None and job is not None and job[0].device_type == device:
        return _from_job(*job[:2], strategy)
    if isinstance(group, tuple):
        if strategy not in HYBRID:
            raise UserError(
                f"FSDP: process_group is a pair of groups, which is for hybrid sharding, and sharding_strategy is "
                f"{strategy.name}: give one group, or HYBRID_SHARD"
            )
        return _cached(group[0], (group[1].group_name, device), lambda: _from_pair(*group, device)), strategy
    if strategy in HYBRID:
        if group is not None and group is not world:
            raise UserError(
                f"FSDP: sharding_strategy {strategy.name} with one process_group says not where to shard and where to "
                f"replicate: give the tuple (group to shard over, group to replicate over), or a 2-D device_mesh"
            )
        if world.size() % (local := local_world_size()):
            raise UserError(
                f"FSDP: sharding_strategy {strategy.name} shards over the {local} processes of a host, "
                f"which do not divide the {world.size()} processes: give a 2-D device_mesh"
            )
        return _of_all_ranks(_lay_out(strategy), device), strategy
    return _from_group(group or world, strategy, device), strategy


def _lay_out(strategy: ShardingStrategy, tp: int = 1) -> Mesh:
    """Lay out all ranks as a strategy has them when nothing else is given."""
    script = ParallelConfig(sharding_strategy=strategy.name.lower(), tensor_parallel_degree=tp)  # type: ignore[arg-type]
    return resolve_mesh(script, world_size=dist.get_world_size(), local_world_size=local_world_size())


def _of_all_ranks(laid_out: Mesh, device: str) -> DeviceMesh:
    key = (laid_out.replicas.size, laid_out.shard.size, device)
    return _cached(require_process_group(), key, lambda: laid_out.join(device).fsdp_mesh)


def _from_group(group: dist.ProcessGroup, strategy: ShardingStrategy, device: str) -> DeviceMesh:
    if strategy == ShardingStrategy.NO_SHARD:
        return _cached(group, ("replicas", device), lambda: _replicas(group, device))
    return _cached(group, ("shard", device), lambda: DeviceMesh.from_group(group, device, mesh_dim_names=("dp_shard",)))


def _replicas(group: dist.ProcessGroup, device: str) -> DeviceMesh:
    """Make a mesh (ranks of the group, 1): every rank has the full parameters."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(alone, dist.ProcessGroup)
    keep_timeout([alone], device)
    layout = torch.tensor(dist.get_process_group_ranks(group)).view(-1, 1)
    return DeviceMesh.from_group([group, alone], device, layout, mesh_dim_names=_HYBRID_AXES)


def _from_pair(shard: dist.ProcessGroup, replicate: dist.ProcessGroup, device: str) -> DeviceMesh:
    """Make a mesh over the two groups of hybrid sharding; ranks tell their replicas whom they shard with."""
    own = torch.tensor(dist.get_process_group_ranks(shard), device=device)
    rows = [torch.empty_like(own) for _ in range(replicate.size())]
    dist.all_gather(rows, own, group=replicate)
    layout = torch.stack(rows).cpu()
    return DeviceMesh.from_group([replicate, shard], device, layout, mesh_dim_names=_HYBRID_AXES)


def _from_mesh(mesh: DeviceMesh, strategy: ShardingStrategy) -> DeviceMesh:
    wanted = 2 if strategy in HYBRID else 1
    if mesh.ndim == wanted == 1 and strategy == ShardingStrategy.NO_SHARD:
        return _from_group(mesh.get_group(), strategy, mesh.device_type)
    if mesh.ndim != wanted:
        axes = "(replicate, shard)" if wanted == 2 else "the axis to shard over, such as mesh['dp_shard']"
        raise UserError(
            f"FSDP: device_mesh has {mesh.ndim} dimensions, and sharding_strategy {strategy.name} takes {wanted}: "
            f"give {axes}, or another strategy"
        )
    if wanted == 2 and not mesh.mesh_dim_names:  # fully_shard knows axes by their names
        replicate, shard = mesh.get_all_groups()
        return _cached(
            shard,
            ("named", replicate.group_name, mesh.device_type),
            lambda: DeviceMesh.from_group([replicate, shard], mesh.device_type, mesh.mesh, mesh_dim_names=_HYBRID_AXES),
        )
    return mesh


def _from_job(mesh: Mesh, parallel: ParallelConfig, strategy: ShardingStrategy) -> tuple[DeviceMesh, ShardingStrategy]:
    """Apply SMP v2's rules: a degree overrides the script's strategy, 0 leaves it alone."""
    degree = parallel.hybrid_shard_degree
    if degree == 1:
        return mesh.fsdp_mesh, ShardingStrategy.NO_SHARD
    if degree > 1:
        zero2 = strategy == ShardingStrategy._HYBRID_SHARD_ZERO2
        return mesh.fsdp_mesh, strategy if zero2 else ShardingStrategy.HYBRID_SHARD
    wanted = _lay_out(strategy, mesh.tp.size)
    if parallel.sharding_strategy == AUTO and strategy in HYBRID:
        return mesh.fsdp_mesh, strategy  # inside a host, or over hosts that tensor parallelism takes
    if (wanted.replicas.size, wanted.shard.size) == (mesh.replicas.size, mesh.shard.size):
        return mesh.fsdp_mesh, strategy
    if mesh.tp.size == 1:
        return _of_all_ranks(wanted, mesh.device_type), strategy
    if wanted.replicas.size == 1:
        return mesh.device_mesh[_HYBRID_AXES]._flatten("data"), strategy
    raise UserError(
        f"FSDP: sharding_strategy {strategy.name} needs another mesh than smp.init laid for tensor parallelism: give "
        f"smp.init the same sharding_strategy, or a hybrid_shard_degree"
    )
