"""Copies of the host's tensors to a device."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; the host does not wait, and may change the original only if that is not pinned."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # else the copy would wait for the GPU; what is pinned remains as it is
    return tensor.to(device, non_blocking=True)
