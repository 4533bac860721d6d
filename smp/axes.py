"""The axes of the mesh beside replication and sharding, and which degrees of them fit together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from smp.errors import UserError


@dataclasses.dataclass(frozen=True)
class Axis:
    """A degree of parallelism beside replication and sharding.

    Attributes:
        name: in the mesh, logs, tables and manifests.
        flag: the setting of :class:`smp.config.ParallelConfig` with its degree.
        inside: whether its ranks are of one sharding group, and counted in its degree.
        shares: what its ranks have in common: the ``sample``, and the tokens of the ``loss``.
        over: roles whose ranks it sees a second time, as ``fsdp`` x itself, the latter of neighbours: it is folded over
            them, such as ``("dp_shard", "tp")``. One that is neither folded nor inside multiplies.

    Source of folding: torchtitan's ``efsdp`` x ``ep`` for ``dp_shard`` x ``cp`` x ``tp``.
    """

    name: str
    flag: str
    inside: bool = False
    shares: frozenset[str] = frozenset()
    over: tuple[str, ...] = ()

    @property
    def multiplies(self) -> bool:
        """Whether its degree is a factor of the number of ranks beside those of sharding and replication."""
        return not self.inside and not self.over

    @property
    def fsdp(self) -> str:
        """Role over whose ranks is sharded what a folded axis splits: ``efsdp`` of ``ep``."""
        return f"{self.name.removesuffix('p')}fsdp"


# Those inside a sharding group first, then those that multiply, each the slower the earlier.
AXES = [
    Axis("cp", "context_parallel_degree", inside=True, shares=frozenset({"sample"})),
    Axis("tp", "tensor_parallel_degree", inside=False, shares=frozenset({"sample", "loss"})),
    Axis("ep", "expert_parallel_degree", over=("dp_shard", "tp")),
]


def divisors(number: int, *, of: int = 1) -> list[int]:
    """Return the divisors of ``number`` that ``of`` divides, the smallest first."""
    return [d for d in range(of, number + 1, of) if number % d == 0]


def split_degrees(degrees: Mapping[str, int]) -> tuple[int, int]:
    """Return the products of the degrees by name: of the axes that multiply, and of those inside a sharding group."""
    multiplied = math.prod(degrees.get(axis.name, 1) for axis in AXES if axis.multiplies)
    return multiplied, math.prod(degrees.get(axis.name, 1) for axis in AXES if axis.inside)


def folds(shard: int, degrees: Mapping[str, int]) -> bool:
    """Return whether the degree of each folded axis divides the ranks that it is folded over."""
    sizes = {**degrees, "dp_shard": shard}
    return all(math.prod(sizes.get(n, 1) for n in a.over) % degrees.get(a.name, 1) == 0 for a in AXES if a.over)


def fit_together(world_size: int, degrees: Mapping[str, int], *, most_data: int | None = None) -> bool:
    """Return whether degrees, by name, divide the world and leave at most ``most_data`` data ranks."""
    multiplied, counted = split_degrees(degrees)
    shared = math.prod(degrees.get(axis.name, 1) for axis in AXES if "sample" in axis.shares)
    fits = world_size % (multiplied * counted) == 0 and folds(world_size // multiplied, degrees)
    return fits and (most_data is None or world_size // shared <= most_data)


def listed(numbers: list[int]) -> str:
    """Return numbers as a refusal lists them."""
    return ", ".join(map(str, numbers))


def check_multiplied(degrees: Mapping[str, int], world_size: int) -> int:
    """Return the ranks of all data-parallel groups.

    Raises:
        UserError: a degree does not divide the ranks.
    """
    ranks = world_size
    for axis in (axis for axis in AXES if axis.multiplies):
        if ranks % (degree := degrees[axis.name]):
            raise UserError(
                f"--{axis.flag} {degree} does not divide the {ranks} processes: choose one of {listed(divisors(ranks))}"
            )
        ranks //= degree
    return ranks


def check_inside(degrees: Mapping[str, int], shard: int, ranks: int, *, can_choose: bool) -> None:
    """Refuse, by a UserError, degrees that do not divide the sharding degree in which their ranks are counted.

    Args:
        degrees: of the axes, by name.
        ranks: among which a sharding degree can be chosen.
        can_choose: whether it can.
    """
    left, taken = shard, 1
    for axis in AXES:
        degree = degrees[axis.name] if axis.inside else 1
        taken *= degree
        if left % degree:
            legal = divisors(ranks, of=taken)
            choice = f"choose --hybrid_shard_degree from {listed(legal)}, or " if legal else ""
            if not can_choose:
                choice = "choose another --sharding_strategy, or "
            kind = axis.flag.removesuffix("_degree").replace("_", "-")
            raise UserError(
                f"--{axis.flag} {degree} does not divide the sharding degree of {left}, in which its ranks are "
                f"counted: {choice}choose a {kind} degree from {listed(divisors(left))}"
            )
        left //= degree


def check_folded(degrees: Mapping[str, int], shard: int, ranks: int, *, can_choose: bool) -> None:
    """Refuse, by a UserError, degrees that do not divide the ranks they are folded over; as :func:`check_inside`."""
    sizes, (_, inside) = {**degrees, "dp_shard": shard}, split_degrees(degrees)
    for axis in (axis for axis in AXES if axis.over):
        size, degree = math.prod(sizes[name] for name in axis.over), degrees[axis.name]
        if size % degree:
            legal = [d for d in divisors(ranks, of=inside) if folds(d, degrees)] if can_choose else []
            choice = f"choose --hybrid_shard_degree from {listed(legal)}, or " if legal else ""
            shown = " x ".join(f"{name} {sizes[name]}" for name in axis.over)
            raise UserError(
                f"--{axis.flag} {degree} does not divide the {size} ranks of {shown}: {choice}choose one of "
                f"{listed(divisors(size))}"
            )
