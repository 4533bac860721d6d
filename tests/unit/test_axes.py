"""A new axis is a line of ``smp.axes.AXES``: mesh, log, manifest, the planner's search and its table follow."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from smp import axes
from smp.compat.init_settings import read_settings
from smp.config import ParallelConfig
from smp.errors import UserError
from smp.mesh import lay_out, resolve_mesh, sharding_choices
from smp.plan import layouts
from smp.plan.search import Found
from smp.plan.tables import ranking, title_of
from smp.units import GIB
from tests.distributed import run_distributed
from tests.unit.test_plan_search import found_layouts, plan_of

EP = axes.Axis("ep", "expert_parallel_degree", inside=True, shares=frozenset())
FOLDED = axes.Axis("ep", "expert_parallel_degree", over=("dp_shard", "tp"))


@contextlib.contextmanager
def listed(axis: axes.Axis = EP) -> Iterator[None]:
    """The axis is on the list, in place of the one that has its name."""
    kept, degrees = axes.AXES[:], layouts._expert_degrees
    layouts._expert_degrees = lambda _, world: axes.divisors(world)
    axes.AXES[:] = [kept[0], axis, *(each for each in kept[1:] if each.name != axis.name)]
    try:
        yield
    finally:
        axes.AXES[:], layouts._expert_degrees = kept, degrees


@pytest.fixture(autouse=True)
def _listed(request):
    with listed(getattr(request, "param", EP)):
        yield


folded = pytest.mark.parametrize("_listed", [FOLDED], indirect=True)


def test_the_mesh_has_its_ranks():
    parallel = ParallelConfig(hybrid_shard_degree=4, context_parallel_degree=2, expert_parallel_degree=2)
    mesh = resolve_mesh(parallel, world_size=8, local_world_size=8, rank=7)
    assert str(mesh) == "dp_replicate 2 x dp_shard 4 (cp 2, ep 2 inside) x tp 1"
    assert mesh.degrees == {
        "dp_replicate": 2, "dp_shard": 4, "cp": 2, "ep": 2, "tp": 1, "reshard_after_forward": True,
    }  # fmt: skip
    assert mesh.degree("ep") == 2 and mesh.roles["ep"].rank == 1
    assert (mesh.data.size, mesh.loss.size) == (4, 8)  # its ranks read samples of their own
    assert mesh.with_degree("ep", 4) is None and mesh.fully_sharded(data=1) == lay_out(1, 4, cp=2, ep=2)
    assert lay_out(1, 8, cp=2).with_degree("ep", 4) == lay_out(1, 8, cp=2, ep=4)
    assert [other.shard.size for other in sharding_choices(world_size=8, local_world_size=8, cp=2, ep=2)] == [4, 8]
    meshes = [lay_out(2, 4, 2, 2, ep=2, rank=rank) for rank in range(16)]
    for name, sizes in {"ep": 2, "data": 4, "loss": 8}.items():
        assert {each.degree(name) for each in meshes} == {sizes}
        groups = meshes[0]._ranks_of_groups(name)
        assert sorted(rank for group in groups for rank in group) == [*range(16)]
        assert all(meshes[rank].roles[name].rank == place for group in groups for place, rank in enumerate(group))


def test_a_degree_that_does_not_divide_is_refused():
    sentence = r"--expert_parallel_degree 3 does not divide the sharding degree of 4, .*: choose .* from 1, 2, 4$"
    with pytest.raises(UserError, match=sentence):
        parallel = ParallelConfig(hybrid_shard_degree=8, context_parallel_degree=2, expert_parallel_degree=3)
        resolve_mesh(parallel, world_size=8, local_world_size=8)
    assert read_settings({"ep": 2}, {}, {}) == {"expert_parallel_degree": 2}


def test_the_planner_tries_it_and_has_a_column():
    every = found_layouts("--train_batch_size", 1, "--activation_checkpointing", 0, nodes=1)
    legal = {each.mesh.tp.size for each in every}  # as the model's heads allow
    assert {(each.mesh.degree("ep"), each.mesh.tp.size) for each in every} == {
        (ep, tp) for ep in (1, 2, 4, 8) for tp in legal if ep * tp <= 8
    }
    assert len(legal) > 1
    one, two = (next(each for each in every if each.mesh.degree("ep") == ep) for ep in (1, 2))
    assert two.flags["expert_parallel_degree"] == 2 and "expert_parallel_degree" not in one.flags
    assert "(ep 2 inside)" in title_of(two)
    plans = [(layout, plan_of(layout, allocated=GIB, seconds=1.0)) for layout in (two, one)]
    title, row = [*ranking(Found(plans, [], None, 2, 2), 3, 8)][1:3]
    assert title.split()[:4] == ["shard", "tp", "ep", "batch"] and row.split()[3] == "2"
    given = found_layouts("--expert_parallel_degree", 2, nodes=1)
    assert {each.mesh.degree("ep") for each in given} == {2}


# --- Folded over others: the same ranks, seen a second time


@folded
def test_a_folded_axis_is_a_second_view_of_the_ranks():
    parallel = ParallelConfig(hybrid_shard_degree=4, tensor_parallel_degree=2, context_parallel_degree=2)
    plain = resolve_mesh(parallel, world_size=16, local_world_size=16)
    assert str(plain) == "dp_replicate 2 x dp_shard 4 (cp 2 inside) x tp 2" and "ep" not in plain.degrees
    mesh = resolve_mesh(dataclasses.replace(parallel, expert_parallel_degree=4), world_size=16, local_world_size=16)
    assert str(mesh) == f"{plain}, as efsdp 2 x ep 4" and mesh.degrees == {**plain.degrees, "ep": 4}
    assert mesh.world_size == 16 and [mesh.degree(role) for role in ("data", "loss")] == [4, 8]
    meshes = [lay_out(2, 4, 2, 2, ep=4, rank=rank) for rank in range(16)]
    for rank, each in enumerate(meshes):
        place = np.unravel_index(rank, (2, 2, 4))
        assert tuple(each.roles[role].rank for role in ("dp_replicate", "efsdp", "ep")) == place
    for name in ("efsdp", "ep"):
        groups = mesh._ranks_of_groups(name)
        assert sorted(rank for group in groups for rank in group) == [*range(16)]
        assert all(meshes[rank].roles[name].rank == place for group in groups for place, rank in enumerate(group))
    # Its degree divides sharding x tensor parallelism, whichever of the two changes.
    assert mesh.with_degree("ep", 16) is None and mesh.with_degree("ep", 8) == lay_out(2, 4, 2, 2, ep=8)
    assert lay_out(1, 4, ep=4).with_degree("tp", 2) == lay_out(1, 2, 2, ep=4)
    assert lay_out(2, 1, 4, ep=4).with_degree("tp", 2) == lay_out(2, 2, 2, ep=4)
    assert lay_out(1, 4, ep=4).fully_sharded(data=2) == lay_out(1, 4, ep=4)
    assert [each.shard.size for each in sharding_choices(world_size=8, local_world_size=8, tp=2, ep=4)] == [2, 4]


@folded
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"expert_parallel_degree": 3},
            r"degree 3 does not divide the 8 ranks of dp_shard 4 x tp 2: .* of 1, 2, 4, 8$",
        ),
        (
            {"expert_parallel_degree": 16},
            r"16 .* the 8 ranks .*: choose --hybrid_shard_degree from 8, or choose one of",
        ),
        (
            {"expert_parallel_degree": 4, "hybrid_shard_degree": 0, "sharding_strategy": "no_shard"},
            r"--expert_parallel_degree 4 does not divide the 2 ranks of dp_shard 1 x tp 2: choose one of 1, 2$",
        ),
    ],
)
def test_a_degree_that_does_not_divide_what_it_is_folded_over_is_refused(settings, sentence):
    parallel = ParallelConfig(**{"hybrid_shard_degree": 4, "tensor_parallel_degree": 2, **settings})
    with pytest.raises(UserError, match=sentence):
        resolve_mesh(parallel, world_size=16, local_world_size=16)


@folded
def test_the_planner_tries_a_folded_axis_at_every_degree_that_divides():
    every = found_layouts("--train_batch_size", 1, "--activation_checkpointing", 0, nodes=1)
    assert {each.mesh.degree("ep") for each in every} == {1, 2, 4, 8}
    assert all(each.mesh.shard.size * each.mesh.tp.size % each.mesh.degree("ep") == 0 for each in every)
    two = next(each for each in every if each.mesh.degree("ep") == 2 and each.mesh.tp.size == 2)
    assert two.flags["expert_parallel_degree"] == 2 and " x tp 2 (ep 2 folded), batch" in title_of(two)
    # Of those given, tensor parallelism is chosen so that they go together.
    given = found_layouts("--expert_parallel_degree", 4, "--hybrid_shard_degree", 2, nodes=1)
    assert {(each.mesh.shard.size, each.mesh.degree("ep"), each.mesh.tp.size) for each in given} == {
        (2, 4, 2),
        (2, 4, 4),
    }


def _check_views():
    for sizes, ep in (((1, 2, 2), 2), ((1, 4, 1), 2), ((2, 2, 1), 2), ((1, 2, 2), 4)):
        mesh = lay_out(*sizes, ep=ep).join("cpu")
        view, rank = mesh.view("ep"), dist.get_rank()
        efsdp = 4 // sizes[0] // ep
        assert view.mesh_dim_names == ("dp_replicate", "efsdp", "ep")
        assert view.mesh.tolist() == torch.arange(4).view(sizes[0], efsdp, ep).tolist()
        assert mesh.fsdp_mesh_of("ep").mesh_dim_names == ("dp_replicate", "efsdp")[sizes[0] == 1 :]
        by_ranks = {}
        for name in ("dp_replicate", "dp_shard", "tp", "efsdp", "ep"):
            group = mesh.roles[name].group
            ranks = dist.get_process_group_ranks(group)
            assert ranks[mesh.roles[name].rank] == rank
            assert len(ranks) == 1 or by_ranks.setdefault(tuple(ranks), group) is group
            assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 77
            if name in ("efsdp", "ep"):
                assert view.get_group(name) is group


@folded
def test_a_view_is_joined_with_one_group_for_the_same_ranks():
    run_distributed(_check_views, world_size=4, timeout=77)
