"""Ranks by role (sharding, replicas, tensor parallelism, data, loss), over torch's device mesh.

Tensor-parallel ranks are neighbours, ``dp_shard`` strides over them and ``dp_replicate`` is outermost, so that the
heaviest communication stays inside a host. Context-parallel ranks are neighbours inside a sharding group, as SMP v2's.
No other module computes ranks from degrees: :class:`Mesh` has the roles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smp.config import AUTO, ParallelConfig, ShardingStrategy
from smp.errors import UserError

AXES = ("dp_replicate", "dp_shard", "tp")


@dataclasses.dataclass(frozen=True)
class Role:
    """A group of ranks.

    Attributes:
        size: number of ranks.
        rank: this rank's index in the group.
    """

    size: int
    rank: int = 0
    _group: dist.ProcessGroup | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the ranks.

        Raises:
            RuntimeError: the mesh is only laid out.
        """
        if self._group is None:
            raise RuntimeError("a mesh that is laid out has no process groups: call join() where a group runs")
        return self._group


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Every role of a rank: laid out, without process groups and for a world of any size, or joined.

    Attributes:
        replicas: ranks with the same shard.
        shard: ranks that parameters are sharded over.
        tp: ranks that a layer is split over.
        cp: ranks that a sequence is split over; they are of one sharding group.
        data: ranks that read different samples.
        loss: ranks over which losses and token counts are summed: those of different samples or parts of a sequence.
        reshard_after_forward: whether gathered parameters are freed between forward and backward.
    """

    replicas: Role
    shard: Role
    tp: Role
    cp: Role
    data: Role
    loss: Role
    reshard_after_forward: bool = True
    _device_mesh: DeviceMesh | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.loss.size * self.tp.size

    @property
    def degrees(self) -> dict[str, int | bool]:
        """Degrees, as in a checkpoint's manifest."""
        return {
            "dp_replicate": self.replicas.size, "dp_shard": self.shard.size, "cp": self.cp.size, "tp": self.tp.size,
            "reshard_after_forward": self.reshard_after_forward,
        }  # fmt: skip

    def __str__(self) -> str:
        inside = f" (cp {self.cp.size} inside)" if self.cp.size > 1 else ""
        return f"dp_replicate {self.replicas.size} x dp_shard {self.shard.size}{inside} x tp {self.tp.size}"

    def join(self, device_type: str) -> Mesh:
        """Create the mesh over the running process group; collective.

        Args:
            device_type: ``cpu`` or ``cuda``.

        Raises:
            UserError: another number of processes runs.
        """
        world = dist.get_world_size()
        shape = (self.replicas.size, self.shard.size, self.tp.size)
        if self.world_size != world:
            raise UserError(f"degrees {shape} multiply to {self.world_size}, but {world} processes run")
        device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
        groups = [device_mesh.get_group(axis) for axis in AXES]
        # Made here, as making a group is collective.
        split = device_mesh["dp_replicate", "dp_shard"]._flatten("data").get_group() if self.tp.size > 1 else None
        here = lay_out(*shape, self.cp.size, rank=dist.get_rank(), reshard_after_forward=self.reshard_after_forward)
        loss = split or dist.group.WORLD
        cp, data = self._context_groups() if self.cp.size > 1 else (None, loss)
        made = [split, cp, data if cp else None]
        keep_timeout([*groups, *(group for group in made if group is not None)], device_type)
        roles = dict(zip(("replicas", "shard", "tp", "cp", "data", "loss"), (*groups, cp, data, loss), strict=True))
        joined = {name: dataclasses.replace(getattr(here, name), _group=group) for name, group in roles.items()}
        return dataclasses.replace(here, _device_mesh=device_mesh, **joined)

    def _context_groups(self) -> tuple[Any, Any]:
        """Create the groups of the ranks of one sequence, and of those that read different ones; collective."""
        ranks = torch.arange(self.world_size).view(-1, self.cp.size, self.tp.size)  # data, cp, tp
        cp, _ = dist.new_subgroups_by_enumeration(ranks.transpose(1, 2).flatten(0, 1).tolist())
        data, _ = dist.new_subgroups_by_enumeration(ranks.permute(1, 2, 0).flatten(0, 1).tolist())
        return cp, data

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's device mesh; the mesh must be joined."""
        if self._device_mesh is None:
            raise RuntimeError("a mesh that is laid out has no device mesh: call join() where a group runs")
        return self._device_mesh

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh for ``fully_shard``: 1-D when nothing is replicated, else (dp_replicate, dp_shard)."""
        return self.device_mesh["dp_shard"] if self.replicas.size == 1 else self.device_mesh["dp_replicate", "dp_shard"]

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The 1-D mesh of this rank's tensor-parallel group."""
        return self.device_mesh["tp"]

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.device_mesh.device_type

    @property
    def data_rank(self) -> int:
        """Index of the data that this rank reads, 0 <= data_rank < data_size."""
        return self.data.rank

    @property
    def data_size(self) -> int:
        """Number of ranks that read different data."""
        return self.data.size

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Ranks over which a script sums losses and token counts; None: all."""
        return None if self.tp.size == 1 else self.loss.group

    def fully_sharded(self, *, data: int | None = None) -> Mesh:
        """Return the layout that shards over all ranks but tensor-parallel ones, of ``data`` data ranks or as many."""
        return lay_out(1, (data or self.data.size) * self.cp.size, self.tp.size, self.cp.size)

    def with_tensor_parallelism(self, tp: int) -> Mesh | None:
        """Return the layout with ``tp`` tensor-parallel ranks, taken from sharding or else from replicas, or None."""
        replicas, shard, times = self.replicas.size, self.shard.size, tp // self.tp.size
        if shard % (times * self.cp.size) == 0:
            shard //= times
        elif replicas % times == 0:
            replicas //= times
        else:
            return None
        return lay_out(replicas, shard, tp, self.cp.size, reshard_after_forward=self.reshard_after_forward)

    def with_context_parallelism(self, cp: int) -> Mesh | None:
        """Return the layout with ``cp`` ranks of a sequence, of the same sharding groups, or None."""
        sizes, reshard = (self.replicas.size, self.shard.size, self.tp.size), self.reshard_after_forward
        return None if self.shard.size % cp else lay_out(*sizes, cp, reshard_after_forward=reshard)


def lay_out(
    replicas: int = 1, shard: int = 1, tp: int = 1, cp: int = 1, *, rank: int = 0, reshard_after_forward: bool = True
) -> Mesh:
    """Lay out the roles of ``rank`` in a world of ``replicas`` x ``shard`` x ``tp`` ranks, without process groups.

    Args:
        cp: ranks of a sequence, which divides ``shard``.
    """
    own = rank // tp
    return Mesh(
        replicas=Role(replicas, own // shard),
        shard=Role(shard, own % shard),
        tp=Role(tp, rank % tp),
        cp=Role(cp, own % cp),
        data=Role(replicas * shard // cp, own // cp),
        loss=Role(replicas * shard, own),
        reshard_after_forward=reshard_after_forward,
    )


def _divisors(number: int, *, of: int = 1) -> list[int]:
    """Return the divisors of ``number`` that ``of`` divides, the smallest first."""
    return [d for d in range(of, number + 1, of) if number % d == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def tensor_parallel_choices(world_size: int, *, cp: int = 1, most_data: int | None = None) -> list[int]:
    """Return the tensor-parallel degrees that divide the world and leave at most ``most_data`` data ranks."""
    degrees = [tp for tp in _divisors(world_size) if world_size // tp % cp == 0]
    return [tp for tp in degrees if most_data is None or world_size // tp // cp <= most_data]


def context_parallel_choices(ranks: int, *, most: int) -> list[int]:
    """Return the degrees, up to ``most``, that divide so many ranks, of a sharding group or of the world."""
    return [cp for cp in _divisors(ranks) if cp <= max(1, most)]


def sharding_choices(
    *, world_size: int, local_world_size: int, tp: int, cp: int = 1, keep_gathered: bool = False
) -> list[Mesh]:
    """Return the layouts whose sharding groups fill hosts or fractions of one, the smallest sharding degree first."""
    ranks, inside = world_size // tp, max(1, local_world_size // tp)
    shards = (d for d in _divisors(ranks, of=cp) if inside % d == 0 or d % inside == 0)
    return [lay_out(ranks // d, d, tp, cp, reshard_after_forward=d > 1 and not keep_gathered) for d in shards]


def choose_strategy(parallel: ParallelConfig, *, world_size: int, local_world_size: int) -> ShardingStrategy:
    """Return the sharding strategy, with a choice for ``auto``: hybrid_shard, as SMP v2.

    Where tensor parallelism takes all of a host, that shards over one rank: every replica would hold the optimizer
    state of its whole part of the model, and no number of hosts would make a larger model fit. Full_shard there.
    """
    tp = parallel.tensor_parallel_degree
    if parallel.sharding_strategy != AUTO:
        return parallel.sharding_strategy
    takes_hosts = 1 < tp < world_size and local_world_size // tp <= 1
    return "full_shard" if takes_hosts and not parallel.hybrid_shard_degree else "hybrid_shard"


def resolve_mesh(parallel: ParallelConfig, *, world_size: int, local_world_size: int, rank: int = 0) -> Mesh:
    """Apply SMP v2's rules for ``hybrid_shard_degree`` 0, 1 and k to the sharding strategy.

    ===== ===================================================================================================
    value meaning
    ===== ===================================================================================================
    0     the strategy decides: full_shard and shard_grad_op shard over the world, hybrid_shard and
          _hybrid_shard_zero2 over the ranks of one host, no_shard not at all; auto: see :func:`choose_strategy`
    1     no sharding
    k     hybrid sharding over k neighbouring ranks; the strategy becomes hybrid_shard unless it is
          _hybrid_shard_zero2
    ===== ===================================================================================================

    Context-parallel ranks are of one sharding group, and counted in ``hybrid_shard_degree``.

    Raises:
        UserError: a degree does not divide the ranks that it is of.
    """
    degree, tp, cp = parallel.hybrid_shard_degree, parallel.tensor_parallel_degree, parallel.context_parallel_degree
    strategy = choose_strategy(parallel, world_size=world_size, local_world_size=local_world_size)
    if world_size % tp:
        raise UserError(
            f"--tensor_parallel_degree {tp} does not divide the {world_size} processes: choose one of "
            f"{_listed(_divisors(world_size))}"
        )
    ranks = world_size // tp
    if degree > 0:
        shard = degree
    elif strategy == "no_shard":
        shard = 1
    elif strategy in ("full_shard", "shard_grad_op"):
        shard = ranks
    else:
        shard = max(1, local_world_size // tp)
    name = f"--hybrid_shard_degree {degree}" if degree else f"sharding over the {shard} processes of a host"
    if ranks % shard:
        raise UserError(
            f"{name} does not divide the {ranks} data-parallel processes: choose --hybrid_shard_degree from "
            f"{_listed(_divisors(ranks))}"
        )
    if shard % cp:
        legal = _divisors(ranks, of=cp)
        choice = f"choose --hybrid_shard_degree from {_listed(legal)}, or " if legal else ""
        if strategy == "no_shard":
            choice = "choose another --sharding_strategy, or "
        raise UserError(
            f"--context_parallel_degree {cp} does not divide the sharding degree of {shard}, in which the ranks of a "
            f"sequence are counted: {choice}choose a context-parallel degree from {_listed(_divisors(shard))}"
        )
    keeps_gathered = strategy in ("shard_grad_op", "_hybrid_shard_zero2") or shard == 1
    return lay_out(ranks // shard, shard, tp, cp, rank=rank, reshard_after_forward=not keeps_gathered)


def served_device_type() -> str:
    """Return the device type of the running process group: ``cuda`` if it has a backend for it, else ``cpu``."""
    backends = dist.get_backend_config().split(",")  # such as cpu:gloo,cuda:nccl, also without an explicit backend
    serves_gpus = "cuda:nccl" in backends or "cuda:smddp" in backends
    return "cuda" if serves_gpus and torch.cuda.is_available() else "cpu"


def keep_timeout(groups: list[dist.ProcessGroup], device_type: str) -> None:
    """Give groups the timeout of the default group: torch creates a mesh's groups with half an hour."""
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device(device_type))
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    if limit is not None:  # the fake backend has none
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(limit, group)
