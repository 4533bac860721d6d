"""How a linear layer multiplies: as torch does, or by a product that a technique has put in its place.

Tensor parallelism says which slice of the weight a rank holds and which collective follows; what is computed with the
slice is said here alone, so that low precision, adapters and quantised weights work at any layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

# (layer, input, weight, bias) -> output. Weight and bias are this rank's, the layer is what other settings are read of.
Product = Callable[[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

_PRODUCT = "_smp_product"


def replace_product(module: nn.Linear, product: Product) -> None:
    """Let a layer multiply by ``product``, in place; before or after the layer is split.

    Args:
        module: the layer.
        product: called with the layer, its input ``(..., inputs)``, the weight ``(outputs, inputs)`` and the bias or
            None; returns ``(..., outputs)``, differentiable by autograd. A rank may hold some of the outputs (column
            parallel) or of the inputs (row parallel, without bias).
    """
    setattr(module, _PRODUCT, product)
    if "forward" not in vars(module):  # else it is split, and calls linear() itself
        module.forward = functools.partial(_whole, module)  # type: ignore[method-assign]


def has_product(module: nn.Module) -> bool:
    """Whether the layer multiplies by a product of its own."""
    return hasattr(module, _PRODUCT)


def linear(module: nn.Linear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply as the layer does, with this rank's part of its parameters.

    Args:
        module: the layer.
        x: ``(..., inputs)``.
        weight: ``(outputs, inputs)``.
        bias: ``(outputs,)`` or None.
    """
    product: Product | None = getattr(module, _PRODUCT, None)
    return F.linear(x, weight, bias) if product is None else product(module, x, weight, bias)


def _whole(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(module, x, module.weight, module.bias)
