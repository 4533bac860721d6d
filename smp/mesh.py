"""Ranks by role (sharding, replicas, tensor parallelism, data, loss), over torch's device mesh.

Tensor-parallel ranks are neighbours, ``dp_shard`` strides over them and ``dp_replicate`` is outermost, so that the
heaviest communication stays inside a host. Context-parallel ranks are neighbours inside a sharding group, as SMP v2's.
No other module computes ranks from degrees: :class:`Mesh` has the roles. It knows of each axis what
:data:`smp.axes.AXES` says.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smp.axes import AXES, Axis, check_folded, check_inside, check_multiplied, divisors, folds, listed, split_degrees
from smp.config import AUTO, ParallelConfig, ShardingStrategy
from smp.errors import UserError
from smp.process_groups import keep_timeout, warm_up

_DATA_PARALLEL = ("dp_replicate", "dp_shard")


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


def _role(name: str, doc: str) -> Any:
    return property(lambda mesh: mesh.roles[name], doc=doc)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Every role of a rank: laid out, without process groups and for a world of any size, or joined.

    Attributes:
        roles: by name: ``dp_replicate``, ``dp_shard``, each of :data:`AXES` and its ``fsdp``, ``data``, ``loss``.
        reshard_after_forward: whether gathered parameters are freed between forward and backward.
    """

    roles: Mapping[str, Role]
    reshard_after_forward: bool = True
    _device_mesh: DeviceMesh | None = dataclasses.field(default=None, compare=False, repr=False)
    _views: Mapping[str, DeviceMesh] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    replicas = _role("dp_replicate", "Ranks with the same shard.")
    shard = _role("dp_shard", "Ranks that parameters are sharded over.")
    tp = _role("tp", "Ranks that a layer is split over.")
    cp = _role("cp", "Ranks that a sequence is split over; they are of one sharding group.")
    data = _role("data", "Ranks that read different samples.")
    loss = _role("loss", "Ranks over which losses and token counts are summed: of other samples, or other tokens.")

    def degree(self, name: str) -> int:
        """Return the number of ranks of a role."""
        return self.roles[name].size

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self._torch_sizes().values())

    @property
    def replica_size(self) -> int:
        """Number of ranks that together have the model's parameters once."""
        return self.world_size // self.replicas.size

    @property
    def degrees(self) -> dict[str, int | bool]:
        """Degrees, as in a checkpoint's manifest."""
        names = (axis.name for axis in AXES if not axis.over or self.degree(axis.name) > 1)
        found = {name: self.degree(name) for name in (*_DATA_PARALLEL, *names)}
        return {**found, "reshard_after_forward": self.reshard_after_forward}

    def __str__(self) -> str:
        inside = ", ".join(f"{a.name} {n}" for a in AXES if a.inside and (n := self.degree(a.name)) > 1)
        words = {name: f"{name} {size}" for name, size in self._torch_sizes().items()}
        words["dp_shard"] += f" ({inside} inside)" if inside else ""
        views = (f", as {a.fsdp} {self.degree(a.fsdp)} x {a.name} {self.degree(a.name)}" for a in self._folded)
        return " x ".join(words.values()) + "".join(views)

    @property
    def _folded(self) -> list[Axis]:
        return [axis for axis in AXES if axis.over and self.degree(axis.name) > 1]

    def _torch_sizes(self) -> dict[str, int]:
        """Return the sizes of torch's device mesh, by name: of the axes those that multiply."""
        names = (*_DATA_PARALLEL, *(axis.name for axis in AXES if axis.multiplies))
        return {name: self.degree(name) for name in names}

    def join(self, device_type: str) -> Mesh:
        """Create the mesh over the running process group; collective.

        Args:
            device_type: ``cpu`` or ``cuda``.

        Raises:
            UserError: another number of processes runs.
        """
        world, sizes = dist.get_world_size(), self._torch_sizes()
        shape = tuple(sizes.values())
        if self.world_size != world:
            raise UserError(f"degrees {shape} multiply to {self.world_size}, but {world} processes run")
        device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=tuple(sizes))
        groups: dict[str, Any] = {name: device_mesh.get_group(name) for name in sizes}
        # Made here, as making a group is collective.
        if self.loss.size == world:
            groups["loss"] = dist.group.WORLD
        elif self.loss.size == self.replicas.size * self.shard.size:
            groups["loss"] = device_mesh[_DATA_PARALLEL]._flatten("data").get_group()
        groups["data"] = groups.get("loss") if self.data.size == self.loss.size else None
        for name in (*(axis.name for axis in AXES if not axis.over and self.degree(axis.name) > 1), "loss", "data"):
            if groups.get(name) is None:
                groups[name], _ = dist.new_subgroups_by_enumeration(self._ranks_of_groups(name))
        views = {axis.name: self._join_view(axis, groups, device_type) for axis in self._folded}
        made = {id(group): group for group in groups.values() if group is not dist.group.WORLD}
        keep_timeout(list(made.values()), device_type)
        if device_type == served_device_type() == "cuda":  # by NCCL, and not by a plan's stand-in
            warm_up(groups[name] for name in groups if name != "data")  # over which nothing on a GPU is reduced
        here = _lay_out(self._sizes() | self._axis_degrees(), rank=dist.get_rank())
        roles = {name: dataclasses.replace(role, _group=groups.get(name)) for name, role in here.items()}
        return dataclasses.replace(self, roles=roles, _device_mesh=device_mesh, _views=views)

    def _join_view(self, axis: Axis, groups: dict[str, Any], device_type: str) -> DeviceMesh:
        """Create the device mesh with a folded axis, whose groups are added to ``groups``; collective."""
        for name in (axis.fsdp, axis.name):
            ranks = sorted(self._ranks_of_groups(name))
            # The same ranks have one group, which saves a communicator.
            same = next((each for each in groups if sorted(self._ranks_of_groups(each)) == ranks), None)
            groups[name] = groups[same] if same else dist.new_subgroups_by_enumeration(ranks)[0]
        sizes = {name: size for name, size in self._sizes().items() if name not in _dimensions(axis.name)}
        sizes |= {name: self.degree(name) for name in (axis.fsdp, axis.name)}
        of_all, names = torch.tensor(self._ranks_of_groups(axis.name)).view(*sizes.values()), tuple(sizes)
        return DeviceMesh.from_group([groups[name] for name in names], device_type, of_all, mesh_dim_names=names)

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of the dimensions of the ranks, the slowest first; of ``dp_shard`` what no axis has."""
        inside = math.prod(self.degree(axis.name) for axis in AXES if axis.inside)
        shard = {"dp_replicate": self.replicas.size, "dp_shard": self.shard.size // inside}
        return shard | {axis.name: self.degree(axis.name) for axis in AXES if not axis.over}

    def _ranks_of_groups(self, name: str) -> list[list[int]]:
        """Return the ranks of every group of a role."""
        sizes, along = self._sizes(), _dimensions(name)
        ranks = torch.arange(self.world_size).view(*sizes.values())
        order = [*(n for n in sizes if n not in along), *along]
        ranks = ranks.permute([list(sizes).index(n) for n in order])
        if (folded := _folded_axis(name)) is not None and name == folded.fsdp:
            ranks = ranks.reshape(-1, self.degree(name), self.degree(folded.name)).mT
        return ranks.reshape(-1, self.degree(name)).tolist()

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's device mesh; the mesh must be joined."""
        if self._device_mesh is None:
            raise RuntimeError("a mesh that is laid out has no device mesh: call join() where a group runs")
        return self._device_mesh

    def view(self, axis: str) -> DeviceMesh:
        """Return the device mesh with a folded axis of a degree above 1: such as (dp_replicate, efsdp, ep)."""
        return self._views[axis]

    def fsdp_mesh_of(self, axis: str | None) -> DeviceMesh:
        """Return the mesh for ``fully_shard`` of what is split along a folded axis; None: of everything else.

        It is 1-D when nothing is replicated, else (dp_replicate, dp_shard), of a folded axis (dp_replicate, efsdp).
        """
        mesh = self.device_mesh if axis is None else self.view(axis)
        shard = "dp_shard" if axis is None else mesh.mesh_dim_names[-2]  # type: ignore[index]
        return mesh[shard] if self.replicas.size == 1 else mesh["dp_replicate", shard]

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh for ``fully_shard`` of what no folded axis splits."""
        return self.fsdp_mesh_of(None)

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
        return None if self.loss.size == self.world_size else self.loss.group

    def fully_sharded(self, *, data: int | None = None) -> Mesh:
        """Return the layout that shards over all ranks of ``data`` data ranks, or of as many as there are."""
        shard = (data or self.data.size) * (self.loss.size // self.data.size)
        degrees = self._axis_degrees()
        _, inside = split_degrees(degrees)
        legal = (n for n in itertools.count(-(-shard // inside) * inside, inside) if folds(n, degrees))
        return lay_out(1, next(legal), **degrees, reshard_after_forward=True)

    def with_degree(self, name: str, degree: int) -> Mesh | None:
        """Return the layout of as many ranks with another degree of an axis, or None.

        The ranks of one that multiplies are taken from sharding, or else from replicas.
        """
        axis, replicas, shard = next(each for each in AXES if each.name == name), self.replicas.size, self.shard.size
        degrees = {**self._axis_degrees(), name: degree}
        _, inside = split_degrees(degrees)
        if axis.multiplies:
            before = self.degree(name)
            if shard * before % (degree * inside) == 0:
                shard = shard * before // degree
            elif replicas * before % degree == 0:
                replicas = replicas * before // degree
            else:
                return None
        if shard % inside or not folds(shard, degrees):
            return None
        return lay_out(replicas, shard, **degrees, reshard_after_forward=self.reshard_after_forward)

    def _axis_degrees(self) -> dict[str, int]:
        return {axis.name: self.degree(axis.name) for axis in AXES}


def _dimensions(name: str) -> list[str]:
    """Return the dimensions of the ranks, of :meth:`Mesh._sizes`, along which those of a role's group differ."""
    if name == "dp_shard":
        return ["dp_shard", *(axis.name for axis in AXES if axis.inside)]
    if name in ("data", "loss"):
        shared = "sample" if name == "data" else "loss"
        return [*_DATA_PARALLEL, *(axis.name for axis in AXES if not axis.over and shared not in axis.shares)]
    if (folded := _folded_axis(name)) is not None:
        return [dimension for role in folded.over for dimension in _dimensions(role)]
    return [name]


def _folded_axis(name: str) -> Axis | None:
    """Return the folded axis in whose view a role is; None: it is none of a view."""
    return next((axis for axis in AXES if axis.over and name in (axis.name, axis.fsdp)), None)


def _lay_out(degrees: Mapping[str, int], rank: int) -> dict[str, Role]:
    """Return the roles of ``rank``, by name; ``degrees`` are of the dimensions, and of the axes that are folded."""
    sizes = {name: size for name, size in degrees.items() if _folded_axis(name) is None}
    coordinates, roles = {}, {}
    for name in reversed([*sizes]):
        rank, coordinates[name] = divmod(rank, sizes[name])
    for role in (*degrees, "data", "loss"):
        size = own = 0
        for index, name in enumerate(_dimensions(role)):
            size, own = (size if index else 1) * sizes[name], own * sizes[name] + coordinates[name]
        if (folded := _folded_axis(role)) is not None:
            roles[folded.fsdp] = Role(size // degrees[role], own // degrees[role])
            size, own = degrees[role], own % degrees[role]
        roles[role] = Role(size, own)
    return roles


def lay_out(
    replicas: int = 1,
    shard: int = 1,
    tp: int = 1,
    cp: int = 1,
    *,
    rank: int = 0,
    reshard_after_forward: bool = True,
    **degrees: int,
) -> Mesh:
    """Lay out the roles of ``rank`` in a world of ``replicas`` x ``shard`` x ``tp`` ranks, without process groups.

    Args:
        cp: ranks of a sequence; those of all axes inside a sharding group divide ``shard``.
        degrees: of other axes, by name.
    """
    given = {"tp": tp, "cp": cp, **degrees}
    inside = math.prod(given.get(axis.name, 1) for axis in AXES if axis.inside)
    sizes = {"dp_replicate": replicas, "dp_shard": shard // inside}
    return Mesh(_lay_out(sizes | {axis.name: given.get(axis.name, 1) for axis in AXES}, rank), reshard_after_forward)


def sharding_choices(
    *, world_size: int, local_world_size: int, keep_gathered: bool = False, **degrees: int
) -> list[Mesh]:
    """Return the layouts whose sharding groups fill hosts or fractions of one, the smallest sharding degree first.

    Args:
        degrees: of the axes, by name.
    """
    multiplied, counted = split_degrees(degrees)
    ranks, inside = world_size // multiplied, max(1, local_world_size // multiplied)
    shards = (d for d in divisors(ranks, of=counted) if (inside % d == 0 or d % inside == 0) and folds(d, degrees))
    return [lay_out(ranks // d, d, **degrees, reshard_after_forward=d > 1 and not keep_gathered) for d in shards]


def degrees_of(parallel: ParallelConfig) -> dict[str, int]:
    """Return the degrees of the axes by name, as the settings ask for them."""
    return {axis.name: getattr(parallel, axis.flag) for axis in AXES}


def choose_strategy(parallel: ParallelConfig, *, world_size: int, local_world_size: int) -> ShardingStrategy:
    """Return the sharding strategy, with a choice for ``auto``: hybrid_shard, as SMP v2.

    Where tensor parallelism takes all of a host, that shards over one rank: every replica would hold the optimizer
    state of its part of the model, unsharded, and no number of hosts would make a larger model fit. Full_shard there.
    """
    if parallel.sharding_strategy != AUTO:
        return parallel.sharding_strategy
    multiplied, _ = split_degrees(degrees_of(parallel))
    takes_hosts = 1 < multiplied < world_size and local_world_size // multiplied <= 1
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

    The ranks of an axis inside a sharding group, such as context-parallel ones, are counted in ``hybrid_shard_degree``.

    Raises:
        UserError: a degree does not divide the ranks that it is of.
    """
    degree, degrees = parallel.hybrid_shard_degree, degrees_of(parallel)
    strategy = choose_strategy(parallel, world_size=world_size, local_world_size=local_world_size)
    ranks = check_multiplied(degrees, world_size)
    if degree > 0:
        shard = degree
    elif strategy == "no_shard":
        shard = 1
    elif strategy in ("full_shard", "shard_grad_op"):
        shard = ranks
    else:
        shard = max(1, local_world_size * ranks // world_size)
    name = f"--hybrid_shard_degree {degree}" if degree else f"sharding over the {shard} processes of a host"
    if ranks % shard:
        raise UserError(
            f"{name} does not divide the {ranks} data-parallel processes: choose --hybrid_shard_degree from "
            f"{listed(divisors(ranks))}"
        )
    for check in (check_inside, check_folded):
        check(degrees, shard, ranks, can_choose=strategy != "no_shard")
    keeps_gathered = strategy in ("shard_grad_op", "_hybrid_shard_zero2") or shard == 1
    return lay_out(ranks // shard, shard, **degrees, rank=rank, reshard_after_forward=not keeps_gathered)


def served_device_type() -> str:
    """Return the device type of the running process group: ``cuda`` if it has a backend for it, else ``cpu``."""
    backends = dist.get_backend_config().split(",")  # such as cpu:gloo,cuda:nccl, also without an explicit backend
    serves_gpus = "cuda:nccl" in backends or "cuda:smddp" in backends
    return "cuda" if serves_gpus and torch.cuda.is_available() else "cpu"
