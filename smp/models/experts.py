"""Experts of mixtures: which modules have them, and forwards that are followed without their values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_NONE = "smp_no_experts"  # an experts function under which no token is sent to an expert


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has the experts of a layer, each parameter with all of them along its first axis.

    They are found by what transformers' ``use_experts_implementation`` sets, and not by names of classes.
    """
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "has_bias", "down_proj"))


def expert_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules with experts by path, in order."""
    return [(path, module) for path, module in model.named_modules() if is_experts(module)]


def _leave_out(module: nn.Module, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden * 1


@contextlib.contextmanager
def without_experts(model: nn.Module) -> Iterator[None]:
    """Let experts return what they get: which tokens they have depends on values, and their products on the dtype."""
    configs = {id(config): config for _, module in expert_modules(model) if (config := getattr(module, "config", None))}
    if not configs:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NONE, _leave_out)
    former = {key: getattr(config, "_experts_implementation_internal", None) for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation_internal = _NONE
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation_internal = former[key]
