"""Groups of parameters, the state that a checkpoint is read into, and an optimizer that is made up."""

import torch

from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from tests.reference import build_reference


def test_only_matrices_decay():
    for name in ("llama_gqa", "mistral", "gpt_neox"):
        model = build_reference(name, torch.float32)
        optimizer = build_optimizer(model, OptimConfig(weight_decay=0.3, beta1=0.8, beta2=0.9), lr=0.1)
        decayed, rest = optimizer.param_groups
        assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
        assert decayed["betas"] == (0.8, 0.9) and decayed["fused"]
        names = {id(p): n for n, p in model.named_parameters()}
        assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in rest["params"])
        assert not any("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in decayed["params"])
        assert len(decayed["params"]) + len(rest["params"]) == len(names)


def test_allocated_state_is_what_a_first_step_starts_from():
    first, second = (build_reference("llama_tied", torch.float32) for _ in range(2))
    optimizers = [build_optimizer(model, OptimConfig(), lr=0.1) for model in (first, second)]
    for group in optimizers[1].param_groups:
        for parameter in group["params"]:
            optimizers[1].state[parameter] = optimizers[1].initial_state(parameter, group)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        model(torch.arange(8)[None]).logits.sum().backward()
        optimizer.step()
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert optimizers[0].state[mine].keys() == optimizers[1].state[theirs].keys()


def test_adamw_is_torchs_to_the_last_bit():
    first, second = (build_reference("llama_tied", torch.float32) for _ in range(2))
    mine = build_optimizer(first, OptimConfig(), lr=0.1)
    groups = [{"params": [p for p in second.parameters() if (p.dim() < 2) is vector], "weight_decay": decay}
              for vector, decay in ((False, 0.2), (True, 0.0))]  # fmt: skip
    theirs = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True)
    skipped = 2
    for step in range(4):
        for model in (first, second):
            model(torch.arange(8)[None] + step).logits.square().sum().backward()
        mine.step(skip=torch.tensor(step == skipped))
        if step != skipped:
            theirs.step()
        mine.zero_grad(), theirs.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
