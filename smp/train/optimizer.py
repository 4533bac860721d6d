"""AdamW with weight decay on matrices only."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from smp.config import Section, setting
from smp.parallel.linear import local_tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """The optimizer's settings; the learning rate has a section of its own."""

    weight_decay: float = setting(
        0.2, "Decoupled weight decay of matrices; norms and biases have none.", minimum=0, maximum=1000
    )
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient.", minimum=0, maximum=0.999999)
    beta2: float = setting(0.95, "AdamW's decay of the mean squared gradient.", minimum=0, maximum=0.999999)
    adam_eps: float = setting(1e-8, "AdamW's epsilon.", above=0, maximum=1)
    grad_clip: float = setting(1.0, "Bound of the global gradient norm; 0: no clipping.", minimum=0)


class AdamW(torch.optim.AdamW):
    """torch's AdamW, whose update runs on local tensors: the host would take longer with DTensors than a GPU."""

    def _init_group(self, group: dict, *lists: list[torch.Tensor]) -> bool:  # type: ignore[override]
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_tensor, tensors)
        return has_complex


def step_unless(optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> None:
    """Update the parameters, or change nothing where ``skip`` is true, without asking the device which.

    Args:
        optimizer: a fused AdamW, which reads ``found_inf``.
        skip: 0-d, bool.
    """
    device = optimizer.param_groups[0]["params"][0].device  # of --cpu_offload's parameters: the CPU
    optimizer.found_inf = skip.to(device, torch.float32)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def build_optimizer(model: nn.Module, config: OptimConfig, *, lr: float) -> torch.optim.AdamW:
    """Build AdamW over a sharded model; its state is sharded like the parameters.

    Norm weights and biases are the one-dimensional parameters of these models; they get no weight decay (the
    originals matched norm classes by name and missed some).

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        # One kernel for the whole update; the default loops over tensors on a CPU.
        fused=True,
    )
