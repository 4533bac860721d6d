"""Sums of gradients over micro-batches in fp32, for parameters that are narrower: they are rounded once a step.

``fully_shard`` reduces in fp32, and adds what is reduced to gradients of the parameters' dtype. It keeps sums in fp32
only of what is yet to be reduced over replicas, and then every reduced gradient until backward ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


class GradientSum:
    """A unit's hook between the reduction of its gradients and their rounding.

    Attributes:
        last: whether the next backward is the last one of a step.
        partial: the sum of the earlier ones' reduced gradients, if there are any.
        partials: the same of each parameter, where they are reduced by themselves.
    """

    def __init__(self) -> None:
        self.last = True
        self.partial: torch.Tensor | None = None
        self.partials: dict[Any, torch.Tensor] = {}

    def __call__(self, reduced: torch.Tensor) -> None:
        """Keep what is reduced, fp32, and leave zeros; or add what was kept. It runs on the stream of reductions."""
        if self.last:
            if self.partial is not None:
                reduced.add_(self.partial)
            self.partial = None
            return
        self.partial = reduced.clone() if self.partial is None else self.partial.add_(reduced)
        reduced.zero_()

    def add(self, parameter: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of a parameter's gradients in their dtype; None: it is kept, in fp32, for the next one."""
        partial = self.partials.pop(parameter, None)
        if self.last and partial is None:
            return gradient
        total = gradient.to(torch.float32) if partial is None else partial.add_(gradient)
        if self.last:
            return total.to(gradient.dtype)
        self.partials[parameter] = total
        return None


def sum_gradients(module: FSDPModule) -> None:
    """Let a unit of ``fully_shard`` sum its gradients before it rounds them."""
    module.set_all_reduce_hook(GradientSum())


def sum_of(module: Any) -> GradientSum | None:
    """Return the hook of a unit that sums its gradients."""
    hook = getattr(module._get_fsdp_state()._fsdp_param_group, "_all_reduce_hook", None)
    return hook if isinstance(hook, GradientSum) else None


def begin_microbatch(modules: Iterable[FSDPModule], *, last: bool) -> None:
    """Say whether the next backward is a step's last one, and free the zeros that the one before has left."""
    for module in modules:
        if (hook := sum_of(module)) is None:
            continue
        hook.last = last
        if hook.partial is not None:
            for each in module._get_fsdp_state()._fsdp_param_group.fsdp_params:  # type: ignore[union-attr]
                each.sharded_param.grad = None
