"""This rank's shards of DTensors."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

T = TypeVar("T", torch.Tensor, torch.Tensor | None)


def local_tensor(tensor: T) -> T:
    """Return the local tensor of a DTensor, through which gradients flow back; others as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a parameter's gradient, which it has."""
    assert parameter.grad is not None
    return local_tensor(parameter.grad)


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return this rank's shard of a tensor, and the index of its first element in the full tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    local = tensor.to_local()
    if not local.numel():
        return local, (0,) * tensor.ndim
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local, tuple(offsets)
