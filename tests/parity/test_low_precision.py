"""bf16 parameters and bf16 moments: gradients are rounded once, and every layout updates to the same bits."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn

from smp.checkpoint.manifest import read_manifest
from smp.checkpoint.restore import restore
from smp.config import ActivationConfig, LossConfig, ParallelConfig, Settings
from smp.errors import UserError
from smp.local_shards import local_part
from smp.models.model_config import ResolvedModel
from smp.models.registry import family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer, kind_of
from smp.parallel.parallelize import prepare_model
from smp.parallel.sharding import Unit, set_gradient_sync, shard_model
from smp.parallel.technique import Setup
from smp.train.step import train_step
from tests.distributed import run_distributed
from tests.reference import Layout, rank_batch, tiny_config
from tests.resume.test_checkpoint import describe, save, whole

CPU = torch.device("cpu")
SEED = 5
CONFIGS = {
    "parameters": OptimConfig(param_dtype="bf16"),
    "moments": OptimConfig(optimizer_state_dtype="bf16"),
}
TWO = [Layout("full_shard"), Layout("full_shard", tp=2)]
FOUR = [
    Layout("full_shard"), Layout("hybrid_shard", 2), Layout("no_shard"), Layout("full_shard", tp=2),
    Layout("full_shard", tp=4), Layout("full_shard", cp=2),
]  # fmt: skip


def build(config: OptimConfig, layout: Layout):
    """Model, optimizer and setup, as a job builds them."""
    hf_config = tiny_config("llama_tied")
    resolved = ResolvedModel("m", family_of(hf_config), hf_config, 16, None, None, None, "sdpa", True)
    activation = ActivationConfig(activation_checkpointing=False)
    settings = Settings((layout.parallel(), activation, LossConfig(loss_chunk_tokens=7), config))
    mesh = layout.mesh()
    model = prepare_model(
        resolved, mesh=mesh, dtype=torch.bfloat16, device=CPU, seed=SEED, load_weights=False, settings=settings
    )
    optimizer = build_optimizer(model, config, lr=1e-2, seed=SEED)
    return model, optimizer, Setup(resolved.family, mesh, settings, torch.bfloat16)


def give_gradients(model: nn.Module, step: int) -> None:
    """Set gradients that are a function of name, step and position."""
    for name, parameter in model.named_parameters():
        digest = hashlib.blake2b(f"{step}:{name}".encode(), digest_size=6).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        full = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = torch.zeros_like(parameter)
        local, offsets = local_part(parameter.grad)
        local.copy_(full[tuple(slice(o, o + size) for o, size in zip(offsets, local.shape, strict=True))])


def _update(folder, layouts):
    for key, config in CONFIGS.items():
        for layout in layouts:
            model, optimizer, _ = build(config, layout)
            for step in range(3):
                give_gradients(model, step)
                optimizer.step(skip=torch.tensor(False))
            found, file = whole(model, optimizer), folder / f"{key}.pt"
            if not file.exists():
                torch.save(found, file)
                continue
            expected = torch.load(file)
            assert found.keys() == expected.keys()
            different = [name for name in found if not torch.equal(found[name], expected[name])]
            assert not different, (key, layout, different)
            assert {parameter.dtype for parameter in model.parameters()} == {
                torch.bfloat16 if key == "parameters" else torch.float32
            }
            assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


@pytest.mark.parametrize("ranks, layouts", [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.full)])
def test_every_layout_updates_to_the_bits_of_one_process(ranks, layouts, tmp_path, monkeypatch):
    monkeypatch.setattr("smp.optim.adamw.CHUNK", 500)
    run_distributed(_update, tmp_path, [Layout("full_shard")], world_size=1)
    run_distributed(_update, tmp_path, layouts, world_size=ranks)


# In bf16 256 + 1 is 256.
PARTS = (256, 1, 1, 1)
SUM = torch.tensor(259.0).bfloat16()


def _accumulate(rounds_once: bool, defer: bool, strategy: str) -> set[float]:
    """The gradients of a layer, summed over all ranks and micro-batches."""
    layer = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    mesh = Layout(strategy).mesh()
    parallel = ParallelConfig(sharding_strategy=strategy)
    model = nn.Sequential(layer)
    shard_model(
        model, [Unit([layer], True)], mesh=mesh, parallel=parallel, param_dtype=torch.bfloat16, rounds_once=rounds_once
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    own = PARTS[rank * len(PARTS) // size : (rank + 1) * len(PARTS) // size]
    for index, value in enumerate(own):
        set_gradient_sync(model, last=index == len(own) - 1, defer=defer)
        model(torch.full((1, 8), value, dtype=torch.bfloat16)).sum().backward()
    (parameter,) = model.parameters()
    gradient = parameter.grad.full_tensor()
    assert gradient.dtype == torch.bfloat16
    return set(gradient.float().flatten().tolist())


def _check_rounded_once():
    for strategy in ("full_shard", "no_shard"):
        for defer in (False, True):
            assert _accumulate(True, defer, strategy) == {float(SUM)}, (strategy, defer)
    if dist.get_world_size() < len(PARTS):  # else there is one micro-batch, and nothing to round before the sum
        assert _accumulate(False, False, "full_shard") != {float(SUM)}, "a sum of rounded parts is another one"


@pytest.mark.parametrize("backend", ["smddp", "gloo"])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_the_sum_over_micro_batches_and_ranks_is_rounded_once(ranks, backend):
    run_distributed(_check_rounded_once, world_size=ranks, backend=backend)


def _step(folder, layout: Layout):
    model, optimizer, setup = build(CONFIGS["parameters"], layout)
    found: dict[str, torch.Tensor] = {}

    def keep(*_) -> None:
        found.update({name: p.grad.full_tensor() for name, p in model.named_parameters()})

    optimizer.register_step_pre_hook(keep)
    batch = rank_batch(0, setup.mesh.data_rank, setup.mesh.data_size, 4 // setup.mesh.data_size)
    train_step(model, optimizer, batch, setup=setup, device=CPU, grad_clip=0.05)
    file = folder / "gradients.pt"
    if not file.exists():
        torch.save(found, file)
        return
    for name, expected in torch.load(file).items():
        gradient = found[name]
        assert gradient.dtype == expected.dtype == torch.bfloat16
        # Only the order of the sums differs: at most one neighbour, and the clipped value of that.
        torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=1e-8)
        assert (gradient == expected).double().mean() > 0.98, name


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_same_micro_batches_on_more_ranks_have_the_same_gradients(ranks, tmp_path):
    run_distributed(_step, tmp_path, Layout("full_shard"), world_size=1)
    run_distributed(_step, tmp_path, Layout("full_shard"), world_size=ranks)


def _save(folder, key: str, layout: Layout):
    model, optimizer, _ = build(CONFIGS[key], layout)
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    run = {"progress": {"step": 2, "samples": 16, "tokens": 99}, "optimizer": kind_of(CONFIGS[key])}
    save(folder, model, optimizer, dataclasses.replace(describe(model, 2, dist.get_world_size()), run=run))
    give_gradients(model, 2)
    optimizer.step()
    tensors = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(tensors, folder / "next.pt")


def _load(folder, key: str, layouts: list[Layout]):
    path = folder / "m-2steps"
    for layout in layouts:
        model, optimizer, _ = build(CONFIGS[key], layout)
        with pytest.raises(UserError, match="the checkpoint was made with the optimizer --optimizer_state_dtype bf16"):
            restore(path, read_manifest(path), *build(OptimConfig(), layout)[:2], seed="0")
        restore(path, read_manifest(path), model, optimizer, seed="0")
        give_gradients(model, 2)
        optimizer.step()
        found, expected = whole(model, optimizer), torch.load(folder / "next.pt")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found), layout


@pytest.mark.parametrize("key", [pytest.param("moments", marks=pytest.mark.full), "parameters"])
def test_a_checkpoint_goes_on_at_any_other_layout_with_the_same_bits(key, tmp_path):
    run_distributed(_save, tmp_path, key, Layout("full_shard", tp=2), world_size=2)
    run_distributed(_load, tmp_path, key, [Layout("full_shard")], world_size=1)
    run_distributed(_load, tmp_path, key, [Layout("full_shard")], world_size=3)


@pytest.mark.full
def test_a_checkpoint_of_four_ranks_goes_on_at_others(tmp_path):
    for index, layout in enumerate(FOUR):
        folder = tmp_path / str(index)
        folder.mkdir()
        run_distributed(_save, folder, "parameters", layout, world_size=4)
        run_distributed(_load, folder, "parameters", [FOUR[index - 1]], world_size=4)
