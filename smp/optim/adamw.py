"""AdamW by torch's fused kernel, or by plain operations where that does not take the dtypes.

Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from smp.local_shards import local_gradient, local_tensor
from smp.mesh import Mesh
from smp.models.parameters import ParameterSpec, ParameterTable
from smp.optim.config import OptimConfig, torch_dtype
from smp.optim.entry import StateSpec
from smp.optim.rounding import random_bits, round_stochastically

NAME = "adamw"
# Elements that plain operations update at a time, which bounds what they allocate.
CHUNK = 1 << 24
# Bytes that the plain operations of an update with stochastic rounding move for an element, counted one by one, without
# those of parameter, gradient and state, which any update moves.
PLAIN_MOVED = 272
_TEMPORARY_BYTES = 32  # of an element: eight tensors in fp32 at most
# Torch's kernel for GPUs has had fp32 parameters with bf16 moments since then; that for CPUs has one dtype.
_MIXED_SINCE = "2.13"


def takes(spec: ParameterSpec) -> bool:
    """Return whether it updates such a parameter: any."""
    return True


def settings(config: OptimConfig) -> Mapping[str, Any]:
    """Return the settings of its parameter groups."""
    # One kernel for the whole update; the default loops over tensors on a CPU.
    return {"betas": (config.beta1, config.beta2), "eps": config.adam_eps, "fused": True}


def state(shape: tuple[int, ...], dtype: torch.dtype, config: OptimConfig) -> Mapping[str, StateSpec]:
    """Return the state of a parameter: the updates done, the mean gradient and the mean squared gradient."""
    moment = StateSpec(torch_dtype(config.optimizer_state_dtype) if config.optimizer_state_dtype else dtype, shape)
    return {"step": StateSpec(torch.float32, ()), "exp_avg": moment, "exp_avg_sq": moment}


def working_bytes(table: ParameterTable, mesh: Mesh, config: OptimConfig) -> int:
    """Return the bytes of the temporaries of the plain operations."""
    if config.moments == config.param_dtype and not config.rounds_stochastically:
        return 0
    of_rank = -(-max((spec.size for spec in table), default=0) // mesh.tp.size)
    return _TEMPORARY_BYTES * min(CHUNK, -(-of_rank // mesh.shard.size))


def update(
    parameters: list[nn.Parameter],
    states: list[dict[str, torch.Tensor]],
    group: Mapping[str, Any],
    skip: torch.Tensor | None,
) -> None:
    """Update on local tensors: with DTensors the host would take longer than a GPU."""
    rounding = group.get("rounding")
    # Of one dtype and device all of them.
    moments = states[0]["exp_avg"].dtype
    if rounding is None and _is_fused(local_tensor(parameters[0]), moments):
        _update_fused(parameters, states, group, skip)
        return
    for parameter, each in zip(parameters, states, strict=True):
        _update_plain(parameter, each, group, skip, None if rounding is None else rounding[parameter])


def _is_fused(parameter: torch.Tensor, moments: torch.dtype) -> bool:
    """Return whether torch's kernel takes a parameter with moments of a dtype."""
    if parameter.dtype == moments:
        return True
    mixed = (parameter.dtype, moments) == (torch.float32, torch.bfloat16)
    return mixed and parameter.device.type == "cuda" and torch.__version__ >= _MIXED_SINCE


def _update_fused(
    parameters: list[nn.Parameter],
    states: list[dict[str, torch.Tensor]],
    group: Mapping[str, Any],
    skip: torch.Tensor | None,
) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [local_tensor(parameter) for parameter in parameters],
        [local_gradient(parameter) for parameter in parameters],
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


def _update_plain(
    parameter: nn.Parameter,
    state: Mapping[str, torch.Tensor],
    group: Mapping[str, Any],
    skip: torch.Tensor | None,
    rounding: tuple[int, tuple[int, ...]] | None,
) -> None:
    """Update in fp32 and round: moments to the nearest, the parameter by random bits if it has a key.

    Args:
        rounding: the key, and the index of the shard's first element in the full parameter.
    """
    (beta1, beta2), lr, step = group["betas"], group["lr"], state["step"]
    skipped = None if skip is None else skip.to(step.device)
    step.add_(1 if skipped is None else ~skipped)
    # In fp64: 1 - beta2**step would lose most of fp32's digits.
    rate = lr / (1 - beta1 ** step.double())
    root = (1 - beta2 ** step.double()).sqrt()
    moments = (local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"]))
    for starts, value, gradient, mean, square in _chunks(local_tensor(parameter), local_gradient(parameter), *moments):
        wide = torch.promote_types(value.dtype, torch.float32)
        gradient = gradient.to(wide)
        new_mean = mean.to(wide).lerp(gradient, 1 - beta1)
        new_square = (square.to(wide) * beta2).addcmul_(gradient, gradient, value=1 - beta2)
        new = value.to(wide) * (1 - lr * group["weight_decay"])
        divisor = (new_square.sqrt() / root.to(wide)).add_(group["eps"])
        new.addcdiv_(new_mean * rate.to(wide), divisor, value=-1)
        if rounding is not None:
            key, offsets = rounding
            first = [*map(operator.add, offsets, starts)]
            new = round_stochastically(new, random_bits(key, step, first, value.shape))
        for old, found in ((value, new), (mean, new_mean), (square, new_square)):
            old.copy_(found if skipped is None else torch.where(skipped, old, found.to(old.dtype)))


def _chunks(*tensors: torch.Tensor, dim: int = 0) -> Iterator[tuple[Any, ...]]:
    """Cut tensors of one shape into boxes; yield the index of the first element, and the parts of each.

    They are cut along ``dim``, and along the next one where an index of it has too many: one expert's matrix may.
    """
    shape = tensors[0].shape
    size = max(1, CHUNK // max(1, math.prod(shape[dim + 1 :])))
    for start in range(0, shape[dim], size):
        parts = [each.narrow(dim, start, min(size, shape[dim] - start)) for each in tensors]
        if parts[0].numel() > CHUNK and dim + 1 < len(shape):
            boxes = _chunks(*parts, dim=dim + 1)
        else:
            boxes = iter([((0,) * len(shape), *parts)])
        for starts, *found in boxes:
            yield tuple(at + start * (axis == dim) for axis, at in enumerate(starts)), *found
