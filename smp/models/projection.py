"""Sizes of the linear layers that transformers builds models of."""

from __future__ import annotations

from torch import nn


def projection_size(module: nn.Module) -> tuple[int, int] | None:
    """Return the inputs and outputs of a linear layer, or None: ``nn.Linear``, or GPT-2's transposed ``Conv1D``."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (module.nx, module.nf) if isinstance(module, Conv1D) else None


def is_transposed(layer: nn.Module) -> bool:
    """Return whether the weight of a linear layer is ``(inputs, outputs)``: transformers' ``Conv1D``."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D)
