"""A new axis is a line of ``smp.axes.AXES``: mesh, log, manifest, the planner's search and its table follow."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

from smp import axes
from smp.compat.init_settings import read_settings
from smp.config import ParallelConfig
from smp.errors import UserError
from smp.mesh import lay_out, resolve_mesh, sharding_choices
from smp.plan.search import Found
from smp.plan.tables import ranking, title_of
from smp.units import GIB
from tests.unit.test_plan_search import found_layouts, plan_of

EP = axes.Axis("ep", "expert_parallel_degree", inside=True, shares=frozenset())


@contextlib.contextmanager
def listed() -> Iterator[None]:
    """The axis is on the list, and its setting, which has been there before it, takes any degree."""
    field = next(field for field in dataclasses.fields(ParallelConfig) if field.name == EP.flag)
    kept, field.metadata = field.metadata, {**field.metadata, "only": ()}
    axes.AXES.insert(1, EP)
    try:
        yield
    finally:
        axes.AXES.remove(EP)
        field.metadata = kept


@pytest.fixture(autouse=True)
def _listed():
    with listed():
        yield


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
