"""AdamW by torch's fused kernel.

Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from smp.models.parameters import ParameterSpec
from smp.optim.config import OptimConfig
from smp.optim.entry import StateSpec, local_tensor

NAME = "adamw"


def takes(spec: ParameterSpec) -> bool:
    """Return whether it updates such a parameter: any."""
    return True


def settings(config: OptimConfig) -> Mapping[str, Any]:
    """Return the settings of its parameter groups."""
    # One kernel for the whole update; the default loops over tensors on a CPU.
    return {"betas": (config.beta1, config.beta2), "eps": config.adam_eps, "fused": True}


def state(shape: tuple[int, ...], dtype: torch.dtype, config: OptimConfig) -> Mapping[str, StateSpec]:
    """Return the state of a parameter: the updates done, the mean gradient and the mean squared gradient."""
    moment = StateSpec(dtype, shape)
    return {"step": StateSpec(torch.float32, ()), "exp_avg": moment, "exp_avg_sq": moment}


def update(
    parameters: list[nn.Parameter],
    states: list[dict[str, torch.Tensor]],
    group: Mapping[str, Any],
    skip: torch.Tensor | None,
) -> None:
    """Update by the kernel, on local tensors: with DTensors the host would take longer than a GPU."""
    beta1, beta2 = group["betas"]
    adamw(
        [local_tensor(parameter) for parameter in parameters],
        [local_tensor(parameter.grad) for parameter in parameters],
        [local_tensor(each["exp_avg"]) for each in states],
        [local_tensor(each["exp_avg_sq"]) for each in states],
        [],
        [each["step"] for each in states],
        fused=True,
        # The kernel reads it on the device: the host does not wait to know.
        found_inf=None if skip is None else skip.to(parameters[0].device, torch.float32),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
