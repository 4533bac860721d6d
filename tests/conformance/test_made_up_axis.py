"""An axis of one line (``tests/unit/test_axes.py``), inside a sharding group or folded over others.

A technique that splits a parameter along the folded one is ``tests/mixture.py``: it is compared with one process.
"""

from __future__ import annotations

import contextlib
import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from smp.checkpoint.manifest import read_manifest
from smp.checkpoint.restore import restore
from smp.checkpoint.state import alike
from smp.config import LossConfig
from smp.fsdp.param_group import groups_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel import experts, parallelize
from smp.parallel.parallelize import apply_techniques
from smp.parallel.sharding import average_gradients, fsdp_modules, placement, reshard, set_gradient_sync
from smp.train.step import forward, train_step
from tests import mixture
from tests.distributed import run_distributed
from tests.flags import SYNTHETIC
from tests.job import LLAMA, losses, run_job
from tests.parity.test_sharding import UNITS, CountCollectives
from tests.reference import (
    CLIP,
    LR,
    Layout,
    build_reference,
    rank_batch,
    reference_trajectory,
    relative,
    setup_of,
)
from tests.resume.test_checkpoint import describe, save, whole
from tests.unit.test_axes import EP, FOLDED, listed

CPU = torch.device("cpu")
TECHNIQUES = [each for each in parallelize.TECHNIQUES if each is not experts]  # whose axis has the same flag
LAYOUTS = [
    Layout("full_shard", tp=2, ep=2, checkpointing=True),
    Layout("full_shard", ep=2, accumulation=2, defer=True, keep=True),
    Layout("hybrid_shard", 2, ep=2, accumulation=2, checkpointing=True),
    Layout("full_shard", cp=2, ep=4),
    Layout("hybrid_shard", 1, tp=4, ep=2),  # what is split is sharded, and nothing else
    Layout("full_shard", ep=2, wrap="size_based_auto_wrap_policy", min_unit=5000),
]


@pytest.fixture
def folded(monkeypatch):
    """Axis and technique are on the lists."""
    monkeypatch.setattr(parallelize, "TECHNIQUES", [mixture, *TECHNIQUES])
    with listed(FOLDED):
        yield


def reference() -> torch.nn.Module:
    model = build_reference("llama_gqa", torch.float64).train()
    mixture.add_mixtures([*model.model.layers])
    generator = torch.Generator().manual_seed(3)
    for block in model.model.layers:
        shape = (mixture.MATRICES, 32, 32)
        block.mixture.weight = torch.nn.Parameter(0.1 * torch.randn(shape, generator=generator, dtype=torch.float64))
    return model


def parallel(layout: Layout):
    """A model under a layout, its setup and its optimizer."""
    model = reference()
    setup = setup_of(model, layout.mesh(), layout.parallel(), layout.activation(), LossConfig(loss_chunk_tokens=7))
    with mock.patch("smp.parallel.sharding.MIN_UNIT_PARAMETERS", layout.min_unit):
        apply_techniques(model, setup)
    return model, setup, build_optimizer(model, OptimConfig(), lr=LR)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _check_training(folder):
    expected = reference_trajectory(reference(), 1)
    updated = reference()
    optimizer = build_optimizer(updated, OptimConfig(), lr=LR)
    for name, parameter in updated.named_parameters():
        parameter.grad = expected.gradients[name]
    optimizer.step()
    for index, layout in enumerate(LAYOUTS):
        model, setup, optimizer = parallel(layout)
        mesh, gradients = setup.mesh, {}
        keep = lambda *_: gradients.update({name: full(p.grad) for name, p in model.named_parameters()})  # noqa: B023, E731
        optimizer.register_step_pre_hook(keep)
        batch = rank_batch(0, mesh.data_rank, mesh.data_size, layout.accumulation)
        result = train_step(model, optimizer, batch, setup=setup, device=CPU, grad_clip=CLIP)
        assert abs(result.loss() - expected.losses[0]) <= 1e-12 * expected.losses[0], layout
        assert abs(float(result.grad_norm) - expected.norms[0]) <= 1e-12 * expected.norms[0], layout
        assert gradients.keys() == expected.gradients.keys()
        for name, gradient in gradients.items():
            assert relative(gradient - expected.gradients[name], expected.gradients[name]) <= 1e-12, (layout, name)
        for name, parameter in model.named_parameters():
            want = updated.get_parameter(name).detach()
            assert relative(full(parameter) - want, want) <= 1e-12, (layout, name)
        assert alike(model) == dist.get_process_group_ranks(mesh.tp.group)
        save(folder / str(index), model, optimizer, describe(model, 2, 4))
        tensors = whole(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(tensors, folder / f"{index}.pt")


def _load(folder, pairs):
    for index, layout in pairs:
        expected, path = torch.load(folder / f"{index}.pt"), folder / str(index) / "m-2steps"
        model, _, optimizer = parallel(layout)
        restore(path, read_manifest(path), model, optimizer, seed="0")
        got = whole(model, optimizer)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], expected[key]) for key in got), (LAYOUTS[index], layout)


def test_it_trains_like_one_process_and_any_layout_loads_at_any_other(folded, tmp_path):
    run_distributed(_check_training, tmp_path, world_size=4)
    run_distributed(_load, tmp_path, [*enumerate([*LAYOUTS[1:], LAYOUTS[0]])], world_size=4)
    run_distributed(_load, tmp_path, [(index, Layout("no_shard")) for index in range(len(LAYOUTS))], world_size=1)


def _check_units():
    model, setup, _ = parallel(Layout("full_shard", ep=2, checkpointing=True))
    mesh, groups = setup.mesh, {group for module in fsdp_modules(model) for group in groups_of(module)}
    batch = rank_batch(0, mesh.data_rank, mesh.data_size, 1).microbatches[0]
    set_gradient_sync(model, last=False, defer=False)
    assert len(groups) == 3 + UNITS and not any(group.all_reduce_grads for group in groups)
    set_gradient_sync(model, last=False, defer=True)
    assert not any(group.reduce_grads for group in groups)
    set_gradient_sync(model, last=True, defer=True)
    # Forward gathers all; backward, which computes again, each block and what is inside once more.
    with CountCollectives() as counter:
        forward(model, batch, CPU).backward()
    assert {kind: counter.counts[kind] for kind in ("all_gather", "reduce_scatter")} == {
        "all_gather": (3 + UNITS) + 2 * 3, "reduce_scatter": 3 + UNITS,
    }  # fmt: skip
    assert all(group.is_sharded for group in groups)
    ahead = model.model.layers[0]._get_fsdp_state()._states_to_forward_prefetch
    assert ahead == [each._get_fsdp_state() for each in (model.model.layers[0].mixture, model.model.layers[1])]
    summed = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
    model.zero_grad()
    average_gradients(model, mesh)
    forward(model, batch, CPU).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter.grad), summed[name] / 4), name
    with torch.no_grad():
        forward(model, batch, CPU)
    reshard(model)
    assert all(group.is_sharded for group in groups)
    for shape, axis in (((4, 32), None), ((6, 32), Shard(1)), ((6, 33), None)):
        split = distribute_tensor(torch.zeros(shape), mesh.view("ep")["ep"], [Shard(0)])
        assert placement(split, ranks=2) == axis
    model = reference()
    model.model.layers[2].mixture.scale = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(AssertionError, match="splits only some of the parameters of a Mixture"):
        apply_techniques(model, setup)


def test_what_acts_on_all_units_acts_on_those_of_its_view(folded):
    run_distributed(_check_units, world_size=4)


def job(folder, axis, *words: object, world_size: int, techniques=TECHNIQUES) -> str:
    """What a job with the axis prints."""
    kept = contextlib.ExitStack()  # else what was entered would be left when it is collected

    def prepare(rank: int) -> None:
        kept.enter_context(mock.patch.object(parallelize, "TECHNIQUES", techniques))
        kept.enter_context(listed(axis))

    argv = [*LLAMA, *SYNTHETIC, "--global_batch_size", 4, *words, "--output_dir", folder]
    return run_job(*argv, world_size=world_size, prepare=prepare).succeeded().output


def degrees_of(folder) -> dict[str, int]:
    (manifest,) = folder.glob("checkpoints/*-1steps/manifest.json")
    return json.loads(manifest.read_text())["degrees"]


def test_its_log_and_its_manifest_have_it(tmp_path):
    words = ("--max_steps", 1, "--sharding_strategy", "full_shard", f"--{EP.flag}", 2)
    assert "dp_replicate 1 x dp_shard 2 (ep 2 inside) x tp 1" in job(tmp_path, EP, *words, world_size=2)
    assert degrees_of(tmp_path)["ep"] == 2


def test_a_job_with_a_folded_one_begins_and_resumes_as_one_process(tmp_path):
    def run(folder: str, *words: object, world_size: int) -> str:
        argv = ("--checkpoint_freq", 1, *words)
        return job(tmp_path / folder, FOLDED, *argv, world_size=world_size, techniques=[mixture, *TECHNIQUES])

    split = ("--tensor_parallel_degree", 2, "--sharding_strategy", "full_shard", f"--{FOLDED.flag}", 2)
    run("one", "--max_steps", 2, world_size=1)
    said = run("folded", *split, "--max_steps", 1, world_size=4)
    assert "dp_replicate 1 x dp_shard 2 x tp 2, as efsdp 2 x ep 2" in said
    assert degrees_of(tmp_path / "folded")["ep"] == 2 and "ep" not in degrees_of(tmp_path / "one")
    run("folded", f"--{FOLDED.flag}", 2, "--max_steps", 2, "--resume_from_checkpoint", "latest", world_size=2)
    torch.testing.assert_close(losses(tmp_path / "folded"), losses(tmp_path / "one"), rtol=1e-5, atol=0)
