"""Degrees by SMP v2's rules, and the order of ranks in the mesh."""

import pytest
import torch.distributed as dist

from smp.config import ParallelConfig
from smp.errors import ConfigError, UserError
from smp.mesh import build_mesh, resolve_degrees
from tests.distributed import run_distributed


def degrees(strategy="hybrid_shard", degree=0, world=16, local=8, tp=1):
    parallel = ParallelConfig(sharding_strategy=strategy, hybrid_shard_degree=degree, tensor_parallel_degree=tp)
    found = resolve_degrees(parallel, world_size=world, local_world_size=local)
    assert found.tp == tp and found.data_size * tp == world
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


@pytest.mark.parametrize(
    ("strategy", "degree", "tp", "expected"),
    [
        # Two hosts of eight: what the strategy says holds for the ranks that read different data.
        ("hybrid_shard", 0, 2, (2, 4, True)),
        ("_hybrid_shard_zero2", 0, 4, (2, 2, False)),
        ("hybrid_shard", 0, 8, (2, 1, False)),
        ("hybrid_shard", 0, 16, (1, 1, False)),  # a tensor-parallel group of two hosts
        ("full_shard", 0, 2, (1, 8, True)),
        ("shard_grad_op", 0, 4, (1, 4, False)),
        ("no_shard", 0, 4, (4, 1, False)),
        ("hybrid_shard", 1, 2, (8, 1, False)),
        ("hybrid_shard", 4, 2, (2, 4, True)),
        ("full_shard", 2, 4, (2, 2, True)),
        ("hybrid_shard", 8, 2, (1, 8, True)),
    ],
)
def test_degree_rules_under_tensor_parallelism(strategy, degree, tp, expected):
    assert degrees(strategy, degree, tp=tp) == expected


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tp": 3}, r"--tensor_parallel_degree 3 does not divide the 16 processes: choose one of 1, 2, 4, 8, 16$"),
        ({"tp": 32}, r"--tensor_parallel_degree 32 does not divide the 16 processes: choose one of 1, 2, 4, 8, 16$"),
        ({"tp": 4, "degree": 8}, r"--hybrid_shard_degree 8 does not divide the 4 data-parallel .* from 1, 2, 4$"),
        # Six processes to a host.
        ({"tp": 2, "world": 10, "local": 6}, r"sharding over the 3 processes of a host does not divide the 5 .* 1, 5$"),
    ],
)
def test_degrees_that_do_not_divide_under_tensor_parallelism(change, sentence):
    with pytest.raises(UserError, match=sentence):
        degrees(**change)


def _check_tensor_order():
    parallel = ParallelConfig(hybrid_shard_degree=2, tensor_parallel_degree=2)
    mesh = build_mesh(resolve_degrees(parallel, world_size=8, local_world_size=8), "cpu")
    rank = dist.get_rank()
    replica, shard, tp = rank // 4, rank // 2 % 2, rank % 2
    ranks = {
        axis: dist.get_process_group_ranks(mesh.device_mesh.get_group(axis))
        for axis in ("tp", "dp_shard", "dp_replicate")
    }
    assert ranks["tp"] == [rank - tp, rank - tp + 1] == dist.get_process_group_ranks(mesh.tp_mesh.get_group())
    assert ranks["dp_shard"] == [4 * replica + tp, 4 * replica + tp + 2]
    assert ranks["dp_replicate"] == [rank % 4, rank % 4 + 4]
    assert mesh.data_rank == 2 * replica + shard and mesh.data_size == 4
    assert dist.get_process_group_ranks(mesh.data_group) == [tp, tp + 2, tp + 4, tp + 6]
    assert mesh.data_group is mesh.data_group  # made once


def test_tensor_parallel_ranks_are_neighbours():
    run_distributed(_check_tensor_order, world_size=8)


def _check_data_group():
    for tp, ranks in ((1, None), (2, [dist.get_rank() % 2, dist.get_rank() % 2 + 2]), (4, [dist.get_rank()])):
        parallel = ParallelConfig(sharding_strategy="full_shard", tensor_parallel_degree=tp)
        mesh = build_mesh(resolve_degrees(parallel, world_size=4, local_world_size=4), "cpu")
        assert mesh.data_rank == dist.get_rank() // tp
        # None stands for all.
        assert (mesh.data_group and dist.get_process_group_ranks(mesh.data_group)) == ranks


def test_the_group_of_ranks_that_read_other_data():
    run_distributed(_check_data_group, world_size=4)
