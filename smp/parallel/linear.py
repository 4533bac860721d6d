"""The product of a linear layer: torch's, or the one that a technique has put in its place.

Tensor parallelism decides a rank's slice of the weight and the collective that follows; the product with the slice is
computed here alone, so that low precision, adapters and quantised weights work at any layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

# (layer, input, weight, bias) -> output. Weight and bias are this rank's; the layer gives other settings.
Product = Callable[[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

_PRODUCT = "_smp_product"
T = TypeVar("T", torch.Tensor, torch.Tensor | None)


def local_tensor(tensor: T) -> T:
    """Return the local tensor of a DTensor, through which gradients flow back; others as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replace_product(module: nn.Linear, product: Product) -> None:
    """Let a layer compute ``product``, in place; before or after the layer is split.

    Args:
        module: the layer.
        product: called with the layer, its input ``(..., inputs)``, the weight ``(outputs, inputs)`` and the bias or
            None; returns ``(..., outputs)``, differentiable by autograd. A rank may hold some of the outputs (column
            parallel) or of the inputs (row parallel, without bias).
    """
    setattr(module, _PRODUCT, product)
    if "forward" not in vars(module):  # a split layer calls linear() itself
        module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]


def has_product(module: nn.Module) -> bool:
    """Return whether :func:`replace_product` was applied to the layer."""
    return hasattr(module, _PRODUCT)


def linear(module: nn.Linear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute the layer's product with this rank's part of its parameters.

    Args:
        module: the layer.
        x: ``(..., inputs)``.
        weight: ``(outputs, inputs)``.
        bias: ``(outputs,)`` or None.
    """
    product: Product | None = getattr(module, _PRODUCT, None)
    return F.linear(x, weight, bias) if product is None else product(module, x, weight, bias)


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(module, x, module.weight, module.bias)
