"""Muon: torch's to the last bit, the plan's bytes of it, and what is refused."""

import pytest
import torch
from torch import nn

from smp.mesh import lay_out
from smp.models.parameters import parameter_table
from smp.models.registry import family_of
from smp.optim import muon
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer, gathered_bytes, product_flops, state_bytes, working_bytes
from tests.reference import build_reference


def split_by_hand(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Torch's Muon for the matrices of blocks, and its AdamW for the others."""
    named, blocks = dict(model.named_parameters()), family_of(model.config).blocks
    matrices = {name: p for name, p in named.items() if name.startswith(blocks) and p.dim() == 2}
    others = [p for name, p in named.items() if name not in matrices]
    groups = [{"params": [p for p in others if (p.dim() < 2) is vector], "weight_decay": decay}
              for vector, decay in ((False, 0.2), (True, 0.0))]  # fmt: skip
    return [
        torch.optim.Muon(matrices.values(), lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True),
    ]


@pytest.mark.parametrize("name", ["llama_tied", "gpt_neox"])
def test_muon_in_bf16_is_torchs_to_the_last_bit(name):
    first, second = (build_reference(name, torch.float32) for _ in range(2))
    mine = build_optimizer(first, OptimConfig(optimizer="muon", muon_dtype="bf16"), lr=0.1)
    theirs = split_by_hand(second)
    for step in range(4):
        for model in (first, second):
            model(torch.arange(8)[None] + step).logits.square().sum().backward()
        if skipped := step == 2:
            for parameter in first.parameters():
                parameter.grad.view(-1)[:2] = torch.tensor([float("nan"), float("inf")])
        mine.step(skip=torch.tensor(skipped))
        for optimizer in [] if skipped else theirs:
            optimizer.step()
        first.zero_grad(), second.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_transposed_weight_has_the_transposed_update():
    from transformers.pytorch_utils import Conv1D

    linear, transposed = nn.Linear(4, 9, bias=False), Conv1D(9, 4)
    with torch.no_grad():
        transposed.weight.copy_(linear.weight.T)
    gradient = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    for layer, grad in ((linear, gradient), (transposed, gradient.T.contiguous())):
        layer.weight.grad = grad
        build_optimizer(layer, OptimConfig(optimizer="muon", muon_adjust_lr="original"), lr=0.1).step()
    torch.testing.assert_close(transposed.weight.T, linear.weight)
    assert muon.lr_ratio((9, 4), "original") == 1.5 == muon.lr_ratio((4, 9), "original", transposed=True)
    assert muon.lr_ratio((4, 9), "original") == 1


def test_muon_in_a_plan():
    model = build_reference("llama_tied", torch.float32)
    table, mesh = parameter_table(model, family_of(model.config)), lay_out(1, 2, tp=2)
    adamw, fp32, bf16 = OptimConfig(), OptimConfig(optimizer="muon"), OptimConfig(optimizer="muon", muon_dtype="bf16")
    matrices, others = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32), 96 * 32 + 7 * 32
    assert state_bytes(table, adamw) == 8
    assert state_bytes(table, fp32) == (4 * matrices + 8 * others) / (matrices + others)
    # A rank sends its quarter of the momentum, and gets as much of the updates.
    assert gathered_bytes(table, mesh, fp32) == {"dp_shard": 2 * matrices, "tp": 2 * matrices}
    assert gathered_bytes(table, mesh, bf16) == {"dp_shard": matrices, "tp": matrices}
    assert working_bytes(table, mesh, adamw) == 0 and gathered_bytes(table, mesh, adamw) == {}
    # One process has one matrix at a time: as it is, after a step, and two products of its rows.
    assert working_bytes(table, lay_out(), fp32) == 4 * (2 * 48 * 32 + 2 * 32 * 32)
    # All fit in one round, in which a rank has a quarter, as they are and as they have arrived or are sent.
    assert 0 <= working_bytes(table, mesh, fp32) / (4 * 2 * matrices / 4) - 1 < 0.1
    of_one = {(k, n): 5 * (2 * k * k * n + 2 * k**3 + 2 * k * k * n) for k, n in ((32, 32), (16, 32), (32, 48))}
    every = 3 * (2 * of_one[32, 32] + 2 * of_one[16, 32] + 3 * of_one[32, 48])
    assert product_flops(table, lay_out(), fp32) == {4: every} and product_flops(table, lay_out(), bf16) == {2: every}
    assert 0 <= product_flops(table, mesh, fp32)[4] / (every / 4) - 1 < 0.2
