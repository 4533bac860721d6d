"""The axes of the mesh beside replication and sharding, and which degrees of them fit together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Axis:
    """A degree of parallelism beside replication and sharding.

    Attributes:
        name: in the mesh, logs, tables and manifests.
        flag: the setting of :class:`smp.config.ParallelConfig` with its degree.
        inside: whether its ranks are of one sharding group, and counted in its degree; else the degree multiplies.
        shares: what its ranks have in common: the ``sample``, and the tokens of the ``loss``.
    """

    name: str
    flag: str
    inside: bool
    shares: frozenset[str]


# Those inside a sharding group first, then those that multiply, each the slower the earlier.
AXES = [
    Axis("cp", "context_parallel_degree", inside=True, shares=frozenset({"sample"})),
    Axis("tp", "tensor_parallel_degree", inside=False, shares=frozenset({"sample", "loss"})),
]


def divisors(number: int, *, of: int = 1) -> list[int]:
    """Return the divisors of ``number`` that ``of`` divides, the smallest first."""
    return [d for d in range(of, number + 1, of) if number % d == 0]


def split_degrees(degrees: Mapping[str, int]) -> tuple[int, int]:
    """Return the products of the degrees by name: of the axes that multiply, and of those inside a sharding group."""
    found = [math.prod(degrees.get(axis.name, 1) for axis in AXES if axis.inside is inside) for inside in (False, True)]
    return found[0], found[1]


def fit_together(world_size: int, degrees: Mapping[str, int], *, most_data: int | None = None) -> bool:
    """Return whether degrees, by name, divide the world and leave at most ``most_data`` data ranks."""
    multiplied, counted = split_degrees(degrees)
    shared = math.prod(degrees.get(axis.name, 1) for axis in AXES if "sample" in axis.shares)
    return world_size % (multiplied * counted) == 0 and (most_data is None or world_size // shared <= most_data)
