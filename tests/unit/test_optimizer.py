"""Weight-decay groups and the state that a checkpoint is read into."""

import torch

from smp.checkpoint.restore import adamw_state
from smp.train.optimizer import OptimConfig, build_optimizer
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
    for parameter in second.parameters():
        optimizers[1].state[parameter] = adamw_state(parameter, on_device=True)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        model(torch.arange(8)[None]).logits.sum().backward()
        optimizer.step()
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert optimizers[0].state[mine].keys() == optimizers[1].state[theirs].keys()
