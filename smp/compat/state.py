"""SMP v2's ``state``: this rank's groups, degrees and ranks in the job, by the same names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smp.errors import UserError
from smp.mesh import Mesh
from smp.parallel.tensor.group import TPGroup


class Ranker:
    """Which ranks have replicas of the same shard."""

    def __init__(self, mesh: Mesh):
        self._ranks = mesh.device_mesh.mesh  # (dp_replicate, dp_shard, tp)

    def get_rep_rank(self, rank: int) -> int:
        """Return the replica, 0 <= replica < dp_replicate, that a global rank belongs to."""
        return int((self._ranks == rank).nonzero()[0, 0])

    def get_rep_groups(self) -> list[list[int]]:
        """Return, for each position in a replica, the global ranks at that position."""
        return self._ranks.flatten(1).T.tolist()


class RandomTracker:
    """Random numbers in regions where tensor-parallel ranks have different data.

    Args:
        tp: the group, or None without tensor parallelism.
    """

    def __init__(self, tp: TPGroup | None):
        self._tp = tp

    def fork(self, device: torch.device | None = None) -> contextlib.AbstractContextManager[None]:
        """Draw random numbers of this rank alone inside; see :meth:`smp.parallel.tensor.group.TPGroup.fork_random`."""
        if self._tp is None:
            return contextlib.nullcontext()
        return self._tp.fork_random(torch.device(device or self._tp.device))


def _degree(name: str, of_mesh: Callable[[Mesh], int], doc: str) -> property:
    """Return a degree that can be set before ``init``, which takes it, and be read before it, as in SMP v2."""

    def read(state: State) -> int:
        return of_mesh(state._mesh) if state.initialized else state.given.get(name, 1)

    def write(state: State, value: int) -> None:
        if not state.initialized:
            state.given[name] = value
        elif value != read(state):
            raise UserError(f"smp.state.{name} is {read(state)} since smp.init: give {value} to that, or before it")

    return property(read, write, doc=doc)


def _of_mesh(read: Callable[[Mesh], Any], doc: str, before: Any = None) -> property:
    """Return a field of the mesh; before ``init``, ``before`` or, where there is none, a refusal."""

    def value(state: State) -> Any:
        return before if before is not None and not state.initialized else read(state._mesh)

    return property(value, doc=doc)


class NoMeshError(UserError, AttributeError):
    """A field of the mesh before ``init``: to ``hasattr`` there is none."""


class State:
    """The public fields of SMP v2's ``torch.sagemaker.state``; before :func:`smp.init` degrees are 1 or what was set.

    Args:
        current: gives the mesh, the tensor-parallel group, and whether activations are offloaded; raises before
            ``init``.
        forget: undoes ``init``.

    Attributes:
        given: degrees that were set before ``init``.
    """

    def __init__(self, current: Callable[[], tuple[Mesh, TPGroup | None, bool]], forget: Callable[[], None]):
        self._current, self._forget = current, forget
        self.given: dict[str, int] = {}

    def __repr__(self) -> str:
        if not self.initialized:
            return "State(smp.init has not been called)"
        kinds = ("hybrid_shard", "tensor_parallel", "context_parallel", "expert_parallel")
        degrees = [f"{kind}_degree" for kind in kinds]
        names = ("rank", "world_size", *degrees, "sm_activation_offloading")
        return f"State({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    @property
    def initialized(self) -> bool:
        """Whether ``init`` has been called."""
        try:
            self._current()
        except UserError:
            return False
        return True

    def reset(self) -> None:
        """Undo ``init``, for another one over another process group."""
        self.given.clear()
        self._forget()

    @property
    def _now(self) -> tuple[Mesh, TPGroup | None, bool]:
        try:
            return self._current()
        except UserError as error:
            raise NoMeshError(str(error)) from None

    @property
    def _mesh(self) -> Mesh:
        return self._now[0]

    rank = _of_mesh(lambda mesh: dist.get_rank(), "This process's global rank.")
    world_size = _of_mesh(lambda mesh: dist.get_world_size(), "Number of processes.")
    world_process_group = _of_mesh(lambda mesh: dist.group.WORLD, "The group of all processes.")

    hybrid_shard_degree = _of_mesh(lambda mesh: mesh.shard.size, "Ranks of a sharding group.")
    tensor_parallel_degree = _degree(
        "tensor_parallel_degree", lambda mesh: mesh.tp.size, "Ranks of a tensor-parallel group."
    )
    context_parallel_degree = _degree("context_parallel_degree", lambda mesh: mesh.cp.size, "Ranks of a sequence.")
    expert_parallel_degree = _degree(
        "expert_parallel_degree", lambda mesh: mesh.degree("ep"), "Ranks that split the experts of a layer."
    )
    tp_size, cp_size, ep_size = tensor_parallel_degree, context_parallel_degree, expert_parallel_degree

    tp_rank = _of_mesh(lambda mesh: mesh.tp.rank, "This process's rank in its tensor-parallel group.", 0)
    tp_process_group = _of_mesh(lambda mesh: mesh.tp.group, "Its tensor-parallel group.")
    cp_rank = _of_mesh(lambda mesh: mesh.cp.rank, "This process's rank among those of its sequence.", 0)
    cp_process_group = _of_mesh(
        lambda mesh: mesh.cp.group if mesh.cp.size > 1 else None, "The ranks of its sequence; None: it is not split."
    )
    ep_rank = _of_mesh(lambda mesh: mesh.roles["ep"].rank, "This process's rank among those that split experts.", 0)
    rep_rank_process_group = _of_mesh(
        lambda mesh: mesh.replicas.group, "The ranks that have replicas of this one's shard."
    )
    ranker = _of_mesh(Ranker, "Which ranks have replicas of the same shard.")

    @property
    def sm_activation_offloading(self) -> bool:
        """The value that ``init`` was given; :func:`smp.offload_wrapper` offloads."""
        return self._now[2]

    def get_rng_state_tracker(self) -> RandomTracker:
        """Return random numbers in regions where tensor-parallel ranks have different data."""
        return RandomTracker(self._current()[1])
