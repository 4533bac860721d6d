"""FSDP1's communication hooks: the user's function reduces the gradients of each unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from smp.errors import UserError
from smp.fsdp.options import HYBRID
from smp.fsdp.units import units_below


class HookedReduceScatter:
    """Calls the hook where ``fully_shard`` reduces; averaging is then the hook's, as in FSDP1.

    Args:
        state: the hook's first argument.
        hook: ``hook(state, gradients, output)``; ``gradients`` 1-D, ``output`` one rank's part of it.
    """

    def __init__(self, state: object, hook: Callable[..., Any]):
        self._state, self._hook = state, hook

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A fresh buffer of the given shape."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, **unused: Any
    ) -> None:
        """Reduce by the hook.

        Args:
            output_tensor: 1-D, this rank's part.
            input_tensor: 1-D, ``group.size()`` times as long.
            group: the sharding group; a hook has its own in its state.
            op: not used.
        """
        self._hook(self._state, input_tensor, output_tensor)


def register_comm_hook(module: nn.Module, state: object, hook: Callable[..., Any]) -> None:
    """Let ``hook`` reduce the gradients of every unit, instead of averaging them.

    Args:
        module: the root.
        state: the hook's first argument.
        hook: with FSDP1's second signature, ``hook(state, gradients, output)``.

    Raises:
        UserError: the module is no root, a unit is replicated, or a hook is registered already.
    """
    units = list(units_below(module))
    if not units or units[0][0] is not module or not units[0][1].root:
        raise UserError("FSDP.register_comm_hook: the module is no root: call it on the outermost FSDP module")
    if not callable(hook):
        raise UserError(f"FSDP.register_comm_hook: hook is a {type(hook).__name__}: give a function")
    for inner, unit in units:
        if unit.strategy in HYBRID or unit.strategy == ShardingStrategy.NO_SHARD:
            raise UserError(
                f"FSDP.register_comm_hook: replicas are reduced without a hook, and a unit has the strategy "
                f"{unit.strategy.name}: use FULL_SHARD or SHARD_GRAD_OP, or torch's DistributedDataParallel"
            )
        if unit.has_comm_hook:
            raise UserError("FSDP.register_comm_hook: a hook is registered already: register one, once")
        unit.has_comm_hook = True
        inner.set_gradient_divide_factor(1.0)
        inner.set_force_sum_reduction_for_comms(True)
        inner.set_custom_reduce_scatter(HookedReduceScatter(state, hook))  # type: ignore[arg-type]
