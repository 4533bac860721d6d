"""Degrees by SMP v2's rules, and the order of ranks in the mesh."""

import pytest
import torch.distributed as dist

from smp.config import ParallelConfig
from smp.errors import ConfigError, UserError
from smp.mesh import build_mesh, resolve_degrees
from tests.distributed import run_distributed


def degrees(strategy="hybrid_shard", degree=0, world=16, local=8):
    parallel = ParallelConfig(sharding_strategy=strategy, hybrid_shard_degree=degree)
    found = resolve_degrees(parallel, world_size=world, local_world_size=local)
    return found.dp_replicate, found.dp_shard, found.reshard_after_forward


@pytest.mark.parametrize(
    ("strategy", "degree", "expected"),
    [
        ("hybrid_shard", 0, (2, 8, True)),
        ("_hybrid_shard_zero2", 0, (2, 8, False)),
        ("full_shard", 0, (1, 16, True)),
        ("shard_grad_op", 0, (1, 16, False)),
        ("no_shard", 0, (16, 1, False)),
        ("hybrid_shard", 1, (16, 1, False)),
        ("no_shard", 1, (16, 1, False)),
        ("hybrid_shard", 4, (4, 4, True)),
        ("full_shard", 4, (4, 4, True)),
        ("_hybrid_shard_zero2", 2, (8, 2, False)),
        ("hybrid_shard", 16, (1, 16, True)),
    ],
)
def test_degree_rules(strategy, degree, expected):
    assert degrees(strategy, degree) == expected


@pytest.mark.parametrize("degree", [3, 5, 32])
def test_degree_that_does_not_divide(degree):
    with pytest.raises(UserError, match=rf"{degree} does not divide the 16 .* 1, 2, 4, 8, 16$"):
        degrees(degree=degree)


@pytest.mark.parametrize(
    ("strategy", "degree"), [("no_shard", 2), ("full_shard", 1), ("shard_grad_op", 1), ("shard_grad_op", 4)]
)
def test_contradicting_strategy(strategy, degree):
    with pytest.raises(ConfigError, match=f"{strategy} contradicts --hybrid_shard_degree {degree}"):
        degrees(strategy, degree)


def _check_order():
    parallel = ParallelConfig(hybrid_shard_degree=2)
    mesh = build_mesh(resolve_degrees(parallel, world_size=4, local_world_size=4), "cpu")
    rank = dist.get_rank()
    assert mesh.data_rank == rank and mesh.data_size == 4
    # Neighbours shard, ranks two apart replicate.
    assert dist.get_process_group_ranks(mesh.device_mesh.get_group("dp_shard")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(mesh.device_mesh.get_group("dp_replicate")) == [rank % 2, rank % 2 + 2]


def test_shard_groups_are_neighbours():
    run_distributed(_check_order, world_size=4)
