"""Muon's update at every layout is that of one process, and so is what it sends."""

from __future__ import annotations

import copy
import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from smp.local_shards import local_part
from smp.models.registry import family_of
from smp.optim import muon
from smp.optim.config import OptimConfig
from smp.optim.optimizers import MixedOptimizer, build_optimizer
from smp.parallel.parallelize import apply_techniques
from tests.distributed import run_distributed
from tests.parity.test_sharding import CountCollectives
from tests.reference import CLIP, LR, Layout, build_reference, mean_loss, relative, setup_of, train_parallel

STEPS = 3
MUON = OptimConfig(optimizer="muon")
ROUNDS = {"llama": 9, "gpt_neox": 4}  # of two ranks, each of as many matrices as the largest one has elements
LAYOUTS = {
    1: [Layout("full_shard")],
    2: [Layout("full_shard"), Layout("no_shard", tp=2), Layout("full_shard", cp=2)],
    3: [Layout("full_shard")],  # shards of unequal sizes
    4: [
        Layout("full_shard", tp=2),
        Layout("hybrid_shard", 2),
        Layout("full_shard", cp=2),
        Layout("full_shard", tp=4),  # two ranks have the same key and value heads
        Layout("hybrid_shard", 2, tp=2),
    ],
}


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz as it is written down, of the matrix as it is."""
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def trained_by_hand(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """The parameters before each step and after the last, of a plain model: AdamW for what is outside of blocks."""
    model, blocks = copy.deepcopy(model).train(), family_of(model.config).blocks
    matrices = {name: p for name, p in model.named_parameters() if name.startswith(blocks) and p.dim() == 2}
    others = [p for name, p in model.named_parameters() if name not in matrices]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.2},
            {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.95),
    )
    momenta = {name: torch.zeros_like(p) for name, p in matrices.items()}
    found = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    for step in range(STEPS):
        model.zero_grad()
        mean_loss(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        with torch.no_grad():
            for name, p in matrices.items():
                momenta[name] = 0.95 * momenta[name] + 0.05 * p.grad
                change = orthogonal(0.95 * momenta[name] + 0.05 * p.grad) * 0.2 * max(p.shape) ** 0.5
                p.mul_(1 - LR * 0.2).sub_(LR * change)
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; collective."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def _check_training(cases, layouts):
    for reference, expected in cases:
        for layout in layouts:
            seen: list[nn.Module] = []
            for step, _ in enumerate(train_parallel(reference, layout, STEPS, optim=MUON, seen=seen)):
                for name, parameter in seen[0].named_parameters():
                    before, after = (expected[index][name] for index in (step, step + 1))
                    error = relative(full(parameter) - after, after - before)
                    assert error <= 1e-9, (layout, step, name, error)


@pytest.mark.parametrize("world_size", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 4))])
def test_training_updates_as_one_process(world_size):
    references = [build_reference(name, torch.float64) for name in ("llama_gqa", "gpt_neox_tied")]
    cases = [(reference, trained_by_hand(reference)) for reference in references]
    run_distributed(_check_training, cases, LAYOUTS[world_size], world_size=world_size)


def gradient(name: str, like: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def stepped(model: nn.Module, optim: OptimConfig) -> tuple[MixedOptimizer, dict[str, torch.Tensor]]:
    """Update by given gradients, skipping a step in between; returns the matrices and their momenta."""
    optimizer = build_optimizer(model, optim, lr=LR)
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            local, offsets = local_part(parameter.detach())
            box = tuple(slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True))
            own = gradient(name, parameter, step)[box].contiguous()
            if step == 1 and (not dist.is_initialized() or dist.get_rank() == 0):
                own.fill_(math.nan)
            parameter.grad = like_parameter(own, parameter)
        optimizer.step(skip=torch.tensor(step == 1))
    found = {}
    for name, parameter in model.named_parameters():
        if (momentum := optimizer.state[parameter].get("momentum_buffer")) is not None:
            found |= {name: full(parameter), f"{name}.momentum_buffer": full(momentum)}
    return optimizer, found


def like_parameter(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def _check_bits(cases, layouts, counts):
    for (reference, optim, expected), layout in itertools.product(cases, layouts):
        for limit in (muon.ROUND_BYTES, 0):  # all matrices in one round; one a rank and round
            with mock.patch.object(muon, "ROUND_BYTES", limit):
                muon._schedule.cache_clear()
                model = copy.deepcopy(reference)
                apply_techniques(model, setup_of(model, layout.mesh(), layout.parallel(), layout.activation()))
                optimizer, found = stepped(model, optim)
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], each) for name, each in expected.items()), (layout, optim, limit)
                with CountCollectives() as counter:
                    optimizer.step()
            if counts:
                rounds = 1 if limit else ROUNDS[reference.config.model_type]
                assert counter.counts == {"alltoall_base_": 2 * rounds}, (layout, counter.counts)


@pytest.mark.parametrize(
    ("world_size", "backend"), [(2, "smddp"), *(pytest.param(n, "gloo", marks=pytest.mark.full) for n in (2, 3, 4))]
)
def test_equal_gradients_have_equal_updates_in_two_collectives_a_round(world_size, backend):
    cases = []
    for name, optim in (("llama_gqa", MUON), ("gpt_neox", OptimConfig(optimizer="muon", muon_dtype="bf16"))):
        reference = build_reference(name, torch.float32)
        cases.append((reference, optim, stepped(copy.deepcopy(reference), optim)[1]))
    layouts = [layout for layout in LAYOUTS[world_size] if layout.cp == 1]  # which shards as without cp
    run_distributed(_check_bits, cases, layouts, world_size == 2, world_size=world_size, backend=backend)


def _check_experts():
    mesh, group = init_device_mesh("cpu", (2, 2)), {**muon.settings(MUON), "lr": LR, "weight_decay": 0.2}
    placements = [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(2), Shard(1)), (Shard(1), Shard(1))]
    for axes, sharding in zip((0, 1, 2, 2), placements, strict=True):  # experts sharded one by one are not gathered
        found = []
        for sharded in (False, True):
            parameter, gradient = (gradient_of_experts(index) for index in (0, 1))
            if sharded:
                parameter, gradient = (distribute_tensor(each, mesh, sharding) for each in (parameter, gradient))
            parameter = nn.Parameter(parameter)
            parameter.grad = gradient
            with CountCollectives() as counter, torch.no_grad():
                muon.update([parameter], [{"momentum_buffer": torch.zeros_like(parameter)}], group, None)
            assert counter.counts == ({"alltoall_base_": 2 * axes} if sharded and axes else {})
            found.append(full(parameter))
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
        for expert, change in zip(gradient_of_experts(1), found[0] - 0.998 * gradient_of_experts(0), strict=True):
            torch.testing.assert_close(-change, LR * 0.2 * 7**0.5 * orthogonal(expert), rtol=1e-9, atol=1e-9)


def gradient_of_experts(seed: int) -> torch.Tensor:
    return torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_experts_are_matrices_each():
    run_distributed(_check_experts, world_size=4)
