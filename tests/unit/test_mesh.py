"""Degrees by SMP v2's rules, and the order of ranks in the mesh."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from smp import mesh as mesh_module
from smp import process_groups
from smp.axes import fit_together
from smp.config import ParallelConfig
from smp.errors import ConfigError, UserError
from smp.mesh import lay_out, resolve_mesh, sharding_choices
from tests.distributed import run_distributed


def degrees(strategy="hybrid_shard", degree=0, world=16, local=8, tp=1, cp=1):
    parallel = ParallelConfig(
        sharding_strategy=strategy, hybrid_shard_degree=degree, tensor_parallel_degree=tp, context_parallel_degree=cp
    )
    found = resolve_mesh(parallel, world_size=world, local_world_size=local)
    assert (found.tp.size, found.cp.size, found.world_size) == (tp, cp, world)
    assert found.data.size * cp == found.loss.size == world // tp
    return found.replicas.size, found.shard.size, found.reshard_after_forward


@pytest.mark.parametrize(
    ("strategy", "degree", "tp", "expected"),
    [
        ("hybrid_shard", 0, 1, (2, 8, True)),
        ("_hybrid_shard_zero2", 0, 1, (2, 8, False)),
        ("full_shard", 0, 1, (1, 16, True)),
        ("shard_grad_op", 0, 1, (1, 16, False)),
        ("no_shard", 0, 1, (16, 1, False)),
        ("hybrid_shard", 1, 1, (16, 1, False)),
        ("no_shard", 1, 1, (16, 1, False)),
        ("hybrid_shard", 4, 1, (4, 4, True)),
        ("full_shard", 4, 1, (4, 4, True)),
        ("_hybrid_shard_zero2", 2, 1, (8, 2, False)),
        ("hybrid_shard", 16, 1, (1, 16, True)),
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
def test_degree_rules(strategy, degree, tp, expected):
    assert degrees(strategy, degree, tp=tp) == expected


@pytest.mark.parametrize(
    ("strategy", "degree"), [("no_shard", 2), ("full_shard", 1), ("shard_grad_op", 1), ("shard_grad_op", 4)]
)
def test_contradicting_strategy(strategy, degree):
    with pytest.raises(ConfigError, match=f"{strategy} contradicts --hybrid_shard_degree {degree}.*choose"):
        degrees(strategy, degree)


def test_other_layouts_of_a_mesh():
    mesh = lay_out(2, 4, 2, reshard_after_forward=True)
    assert mesh.fully_sharded() == lay_out(1, 8, 2) and mesh.fully_sharded(data=16) == lay_out(1, 16, 2)
    assert mesh.with_degree("tp", 4) == lay_out(2, 2, 4)
    assert lay_out(2, 1, 2).with_degree("tp", 4) == lay_out(1, 1, 4)
    assert lay_out(1, 1, 2).with_degree("tp", 4) is None
    shards = sharding_choices(world_size=24, local_world_size=8, tp=2)
    assert [(other.replicas.size, other.shard.size) for other in shards] == [(12, 1), (6, 2), (3, 4), (1, 12)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tp": 8}, (1, 2, True)),  # hybrid_shard would shard over one rank
        ({"tp": 8, "world": 64}, (1, 8, True)),
        ({"tp": 8, "world": 1024}, (1, 128, True)),
        ({"tp": 16}, (1, 1, False)),
        ({"tp": 16, "world": 32}, (1, 2, True)),  # a tensor-parallel group of two hosts
        ({"tp": 8, "degree": 1}, (2, 1, False)),
        ({"tp": 8, "degree": 4, "world": 64}, (2, 4, True)),
        ({"tp": 4}, (2, 2, True)),
        ({"tp": 2}, (2, 4, True)),
        ({}, (2, 8, True)),
        ({"local": 1}, (16, 1, False)),
    ],
)
def test_strategy_that_is_not_given(change, expected):
    assert degrees("auto", **change) == expected


# --- Context parallelism


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # As without it: the ranks of a sequence are counted in the sharding degree.
        ({"cp": 2}, (2, 8, True)),
        ({"cp": 8}, (2, 8, True)),
        ({"cp": 2, "tp": 2}, (2, 4, True)),
        ({"cp": 4, "tp": 2, "degree": 4}, (2, 4, True)),
        ({"cp": 2, "degree": 2}, (8, 2, True)),
        ({"cp": 16, "strategy": "full_shard"}, (1, 16, True)),
        ({"cp": 2, "strategy": "shard_grad_op"}, (1, 16, False)),
        ({"cp": 2, "strategy": "_hybrid_shard_zero2"}, (2, 8, False)),
        ({"cp": 3, "world": 12, "local": 6}, (2, 6, True)),
        ({"cp": 2, "strategy": "auto", "tp": 8}, (1, 2, True)),
    ],
)
def test_degree_rules_under_context_parallelism(change, expected):
    assert degrees(**change) == expected


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"degree": 3}, r"--hybrid_shard_degree 3 does not divide the 16 .* 1, 2, 4, 8, 16$"),
        ({"degree": 32}, r"--hybrid_shard_degree 32 does not divide the 16 .* 1, 2, 4, 8, 16$"),
        ({"tp": 3}, r"--tensor_parallel_degree 3 does not divide the 16 processes: choose one of 1, 2, 4, 8, 16$"),
        ({"tp": 32}, r"--tensor_parallel_degree 32 does not divide the 16 processes: choose one of 1, 2, 4, 8, 16$"),
        ({"tp": 4, "degree": 8}, r"--hybrid_shard_degree 8 does not divide the 4 data-parallel .* from 1, 2, 4$"),
        # Six processes to a host.
        ({"tp": 2, "world": 10, "local": 6}, r"sharding over the 3 processes of a host does not divide the 5 .* 1, 5$"),
        (
            {"cp": 3},
            r"--context_parallel_degree 3 does not divide the sharding degree of 8, .*: choose a .* 1, 2, 4, 8$",
        ),
        (
            {"cp": 16},  # of one host
            r"degree 16 .* degree of 8, .*: choose --hybrid_shard_degree from 16, or choose a .* from 1, 2, 4, 8$",
        ),
        (
            {"cp": 4, "degree": 2},
            r"degree 4 does not divide .* of 2, .*: choose --hybrid_shard_degree from 4, 8, 16, or .* from 1, 2$",
        ),
        ({"cp": 2, "degree": 1}, r"divide .* of 1, .*: choose --hybrid_shard_degree from 2, 4, 8, 16, or .* from 1$"),
        ({"cp": 2, "strategy": "no_shard"}, r"divide .* of 1, .*: choose another --sharding_strategy, or .* from 1$"),
        ({"cp": 2, "tp": 16}, r"--context_parallel_degree 2 does not divide .* counted: choose a context.* from 1$"),
    ],
)
def test_degrees_that_do_not_divide(change, sentence):
    with pytest.raises(UserError, match=sentence):
        degrees(**change)


# Of a rank's place (replica, sharding group, sequence, layer): what differs inside a role's group.
ROLES = {"replicas": {0}, "shard": {1, 2}, "cp": {2}, "tp": {3}, "data": {0, 1}, "loss": {0, 1, 2}}


def roles_of(mesh):
    return {name: (role.size, role.rank) for name in ROLES if (role := getattr(mesh, name))}


def test_a_mesh_that_is_laid_out_knows_every_role_and_has_no_groups():
    parallel = ParallelConfig(hybrid_shard_degree=4, tensor_parallel_degree=2, context_parallel_degree=2)
    mesh = resolve_mesh(parallel, world_size=16, local_world_size=16, rank=11)
    # Rank 11: replica 1; in it the second of four that shard, the second half of a sequence; the second of tp.
    assert roles_of(mesh) == {
        "replicas": (2, 1), "shard": (4, 1), "tp": (2, 1), "cp": (2, 1), "data": (4, 2), "loss": (8, 5),
    }  # fmt: skip
    for owner, name in (*((getattr(mesh, role), "group") for role in ROLES), (mesh, "device_mesh"), (mesh, "tp_mesh")):
        with pytest.raises(RuntimeError, match="laid out"):
            getattr(owner, name)
    assert mesh.degrees == {"dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 2, "reshard_after_forward": True}
    assert str(mesh) == "dp_replicate 2 x dp_shard 4 (cp 2 inside) x tp 2"
    assert str(lay_out(2, 4, 2)) == "dp_replicate 2 x dp_shard 4 x tp 2"


def test_every_layout_without_processes_agrees_with_its_degrees():
    """For each rank: the same data on all ranks of a sequence, and other samples or tokens on all of a loss."""
    for replicas, shard, tp, cp in ((2, 4, 2, 2), (1, 8, 1, 4), (3, 2, 1, 2), (1, 4, 2, 4)):
        meshes = [lay_out(replicas, shard, tp, cp, rank=rank) for rank in range(replicas * shard * tp)]
        assert {mesh.world_size for mesh in meshes} == {len(meshes)}
        seen = {(mesh.data.rank, mesh.cp.rank, mesh.tp.rank) for mesh in meshes}
        assert len(seen) == len(meshes)
        assert {(mesh.replicas.rank, mesh.shard.rank, mesh.tp.rank) for mesh in meshes} == {
            (r, s, t) for r in range(replicas) for s in range(shard) for t in range(tp)
        }
        for mesh in meshes:
            assert mesh.loss.rank == mesh.data.rank * cp + mesh.cp.rank == mesh.replicas.rank * shard + mesh.shard.rank
            assert mesh.shard.rank % cp == mesh.cp.rank  # neighbours inside a sharding group


def test_other_layouts_keep_the_ranks_of_a_sequence():
    mesh = lay_out(2, 4, 2, 2)
    assert mesh.fully_sharded() == lay_out(1, 8, 2, 2) and mesh.fully_sharded(data=8) == lay_out(1, 16, 2, 2)
    assert mesh.with_degree("tp", 4) == lay_out(2, 2, 4, 2)
    assert mesh.with_degree("tp", 8) is None  # one rank would be left for two parts of a sequence
    assert lay_out(4, 2, 1, 2).with_degree("tp", 4) == lay_out(1, 2, 4, 2)
    shards = sharding_choices(world_size=24, local_world_size=8, tp=2, cp=4)
    assert [(other.replicas.size, other.shard.size) for other in shards] == [(3, 4), (1, 12)]
    assert {other.cp.size for other in shards} == {4}
    found = {
        most: [tp for tp in range(1, 17) if fit_together(16, {"cp": 4, "tp": tp}, most_data=most)] for most in (None, 2)
    }
    assert found == {None: [1, 2, 4], 2: [2, 4]}


def _check_groups():
    rank = dist.get_rank()
    for sizes in ((8, 1, 1, 1), (4, 2, 1, 1), (2, 2, 1, 2), (2, 1, 1, 4), (2, 2, 2, 1), (2, 1, 2, 2)):
        replicas, shard, cp, tp = sizes
        parallel = ParallelConfig(hybrid_shard_degree=shard * cp, tensor_parallel_degree=tp, context_parallel_degree=cp)
        laid_out = resolve_mesh(parallel, world_size=8, local_world_size=8, rank=rank)
        mesh = laid_out.join("cpu")
        assert roles_of(mesh) == roles_of(laid_out)
        places = [np.unravel_index(each, sizes) for each in range(8)]
        for name, varies in ROLES.items():
            role, same = getattr(mesh, name), [dimension for dimension in range(4) if dimension not in varies]
            if role.size == 1 and name == "cp":
                continue
            ranks = [r for r in range(8) if all(places[r][each] == places[rank][each] for each in same)]
            assert dist.get_process_group_ranks(role.group) == ranks and ranks[role.rank] == rank, (sizes, name)
            assert role.group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 77
            total = torch.tensor(rank)
            dist.all_reduce(total, group=role.group)
            assert total == sum(ranks)
        # None stands for all.
        assert mesh.data_group is (None if mesh.loss.size == 8 else mesh.loss.group)
        assert (mesh.data_rank, mesh.data_size) == (rank // (cp * tp), replicas * shard)
        assert mesh.tp_mesh.get_group() == mesh.tp.group
        assert mesh.device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
    with pytest.raises(UserError, match="multiply to 4, but 8 processes run"):
        lay_out(2, 1, 2).join("cpu")


def test_roles_of_a_mesh_that_is_joined_have_their_groups():
    """Neighbours split a layer, and then a sequence; those that shard are next, replicas furthest apart."""
    run_distributed(_check_groups, world_size=8, timeout=77)


@pytest.mark.parametrize("rank", [0, 9])
def test_nccl_connects_the_groups_on_gpus_in_one_order(rank, monkeypatch):
    connected = []
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
    monkeypatch.setattr(mesh_module, "served_device_type", lambda: "cuda")
    # Not torch.zeros itself, in whose place torch.device would then keep this one.
    on_cpu = SimpleNamespace(zeros=lambda *size, device: torch.zeros(*size), device=torch.device)
    monkeypatch.setattr(process_groups, "torch", on_cpu)
    monkeypatch.setattr(dist, "all_reduce", lambda one, group: connected.append(group))
    try:
        lay_out(2, 4, 2, 2).join("cpu")
        assert connected == []
        mesh = lay_out(2, 4, 2, 2).join("cuda")
        sizes = [16, 2, 4, 2, 8, 2]  # of the data group, of 4, no tensor on a GPU is reduced
        roles = [mesh.replicas, mesh.shard, mesh.tp, mesh.loss, mesh.cp]
        assert connected == [dist.group.WORLD, *(role.group for role in roles)]
        assert [group.size() for group in connected] == sizes and mesh.data.size == 4
        connected.clear()
        lay_out(1, 16).join("cuda")  # groups of all ranks are one, and those of one rank connect nothing
        assert connected == [dist.group.WORLD]
    finally:
        dist.destroy_process_group()
