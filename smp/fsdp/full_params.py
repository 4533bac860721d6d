"""``summon_full_params``: unsharded parameters inside a context, written back into the shards at its end."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp.errors import UserError
from smp.fsdp.param_group import mark_taken, refuse_assigned
from smp.fsdp.units import Unit, full_tensor, unit_of, units_below
from smp.parallel.optimizers import local_part, replace_parameters


class Summoned:
    """Unsharded parameters of one unit, set on its modules instead of the shards until :meth:`end`."""

    def __init__(
        self, module: FSDPModule, unit: Unit, *, writeback: bool, rank0_only: bool, offload_to_cpu: bool, grads: bool
    ):
        refuse_assigned(module)
        module.reshard()
        self._unit, self._writeback, self._rank0_only = unit, writeback, rank0_only
        self._holders: dict[DTensor, list[tuple[nn.Module, str]]] = {}
        for inner in unit.modules:
            for name, own in inner.named_parameters(recurse=False, remove_duplicate=False):
                if isinstance(own, DTensor) and own not in unit.ignored_parameters:
                    self._holders.setdefault(own, []).append((inner, name))
        self._full: dict[DTensor, nn.Parameter] = {}
        for parameter in self._holders:
            full = full_tensor(parameter)
            gradient = full_tensor(parameter.grad) if grads and isinstance(parameter.grad, DTensor) else None
            if unit.first_rank or not rank0_only:
                shown = nn.Parameter(full.cpu() if offload_to_cpu else full, requires_grad=parameter.requires_grad)
                shown.grad = None if gradient is None else gradient.to(shown.device)
                self._full[parameter] = shown
        mark_taken(self._full.values())
        for parameter, shown in self._full.items():
            self._set(parameter, shown)
        assert isinstance(module, nn.Module)
        self._handle = module.register_forward_pre_hook(_end_before_forward, prepend=True)
        unit.summoned = self

    def _set(self, parameter: DTensor, tensor: torch.Tensor) -> None:
        for module, name in self._holders[parameter]:
            setattr(module, name, tensor)

    @torch.no_grad()
    def end(self) -> None:
        """Write back and set the shards again; a second call is a no-op."""
        if self._unit.summoned is not self:
            return
        self._unit.summoned = None
        self._handle.remove()
        replaced = [self._restore(*each) for each in self._full.items()]
        self._full.clear()
        replace_parameters(replaced)  # in optimizers that were made inside

    def _restore(self, parameter: DTensor, shown: nn.Parameter) -> tuple[weakref.ref[nn.Parameter], DTensor]:
        if self._writeback:
            parameter.copy_(local_part(shown, parameter))
        self._set(parameter, parameter)
        return weakref.ref(shown), parameter

    def interrupt(self, *, collective: bool) -> None:
        """End it before the context does, for a forward or ``load_state_dict``, which take shards.

        Raises:
            UserError: ranks see different parameters, and would wait for each other, or each keep other values.
        """
        if self._rank0_only and collective:
            raise UserError(
                "FSDP.summon_full_params: with rank0_only the model cannot be called inside, or loaded into, as all "
                "ranks take part: leave rank0_only out and do it on every rank"
            )
        self.end()


def _end_before_forward(module: nn.Module, args: Any) -> None:
    """Set the shards again: a forward gathers and frees by itself."""
    for _, unit in units_below(module):
        if unit.summoned is not None:
            unit.summoned.interrupt(collective=unit.mesh.size(unit.mesh.ndim - 1) > 1)


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show unsharded parameters, in their original dtype, instead of the shards; collective.

    A forward inside ends it for the module that it runs and the units below: they gather by themselves. So does
    ``load_state_dict`` for what it loads. With ``rank0_only`` both are refused.

    Args:
        module: a unit, or a module with units in it.
        recurse: also the units below.
        writeback: keep what was written to the parameters: each rank its shard. Gradients are to be read.
        rank0_only: only the first rank sees them; the others see their shards.
        offload_to_cpu: show them on the CPU.
        with_grads: also unsharded gradients.

    Raises:
        UserError: ``rank0_only`` with ``writeback``, or a unit is summoned already.
    """
    if rank0_only and writeback:
        raise UserError(
            "FSDP.summon_full_params: with rank0_only only one rank could write, so writeback cannot be kept: give "
            "writeback=False"
        )
    plain = unit_of(module) is None
    chosen = [(m, u) for m, u in units_below(module) if recurse or m is module or (plain and u.root)]
    if any(unit.summoned is not None for _, unit in chosen):
        raise UserError("FSDP.summon_full_params: the parameters are unsharded already: leave the inner call out")
    summoned: list[Summoned] = []
    try:
        for inner, unit in chosen:
            only = {"writeback": writeback, "rank0_only": rank0_only}
            summoned.append(Summoned(inner, unit, offload_to_cpu=offload_to_cpu, grads=with_grads, **only))
        yield
    finally:
        for each in summoned:
            each.end()
