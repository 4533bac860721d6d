"""``summon_full_params``: whole parameters for a while, and what was written to them back into the shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp.errors import UserError
from smp.fsdp.param_group import refuse_assigned
from smp.fsdp.units import Unit, local_part, units_below, whole_tensor


class Summoned:
    """The whole parameters of one unit, in the places of its shards until :meth:`end`."""

    def __init__(self, module: FSDPModule, unit: Unit, *, writeback: bool, rank0_only: bool, **shown: bool):
        refuse_assigned(module)
        module.reshard()
        self._unit, self._writeback, self._rank0_only = unit, writeback, rank0_only
        self._places: dict[DTensor, list[tuple[nn.Module, str]]] = {}
        self._whole: dict[DTensor, nn.Parameter] = {}
        for inner in unit.modules:
            for name, held in inner.named_parameters(recurse=False, remove_duplicate=False):
                if isinstance(held, DTensor) and held not in unit.ignored_parameters:
                    self._places.setdefault(held, []).append((inner, name))
        for parameter in self._places:
            self._gather(parameter, **shown)
        for parameter, whole in self._whole.items():
            self._put(parameter, whole)
        assert isinstance(module, nn.Module)
        self._handle = module.register_forward_pre_hook(_end_before_forward, prepend=True)
        unit.summoned = self

    def _gather(self, parameter: DTensor, *, show: bool, offload_to_cpu: bool, with_grads: bool) -> None:
        whole, gradient = whole_tensor(parameter), None
        if with_grads and isinstance(parameter.grad, DTensor):
            gradient = whole_tensor(parameter.grad)
        if show:
            shown = nn.Parameter(whole.cpu() if offload_to_cpu else whole, requires_grad=parameter.requires_grad)
            if gradient is not None:
                shown.grad = gradient.to(shown.device)
            self._whole[parameter] = shown

    def _put(self, parameter: DTensor, tensor: torch.Tensor) -> None:
        for module, name in self._places[parameter]:
            setattr(module, name, tensor)

    @torch.no_grad()
    def end(self) -> None:
        """Write back and show the shards again; a second call does nothing."""
        if self._unit.summoned is not self:
            return
        self._unit.summoned = None
        self._handle.remove()
        for parameter, shown in self._whole.items():
            if self._writeback:
                parameter.copy_(local_part(shown, parameter))
            self._put(parameter, parameter)

    def interrupt(self, *, exchanges: bool) -> None:
        """End it inside the context, where shards have to be in place.

        Raises:
            UserError: ranks see different parameters, and would wait for each other, or each keep its own.
        """
        if self._rank0_only and exchanges:
            raise UserError(
                "FSDP.summon_full_params: with rank0_only the model cannot be called inside, or loaded into, as all "
                "ranks take part: leave rank0_only out and do it on every rank"
            )
        self.end()


def _end_before_forward(module: nn.Module, args: Any) -> None:
    """A forward gathers and frees by itself."""
    for _, unit in units_below(module):
        if unit.summoned is not None:
            unit.summoned.interrupt(exchanges=unit.mesh.size(unit.mesh.ndim - 1) > 1)


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show whole parameters, in their own dtype, in the places of the shards; collective.

    A forward inside ends it for the module that it runs and the units below: they gather by themselves. So does
    ``load_state_dict`` for what it loads. With ``rank0_only`` both are refused.

    Args:
        module: a unit, or a module with units in it.
        recurse: also the units below.
        writeback: keep what was written to the parameters: each rank the part that it holds. Gradients are to be read.
        rank0_only: only the first rank sees them; the others see their shards.
        offload_to_cpu: show them on the CPU.
        with_grads: also whole gradients.

    Raises:
        UserError: ``rank0_only`` with ``writeback``, or a unit is summoned already.
    """
    if rank0_only and writeback:
        raise UserError(
            "FSDP.summon_full_params: with rank0_only only one rank could write, so writeback cannot be kept: give "
            "writeback=False"
        )
    chosen = [(m, u) for m, u in units_below(module) if recurse or m is module or _is_outermost(m, module)]
    if any(unit.summoned is not None for _, unit in chosen):
        raise UserError("FSDP.summon_full_params: the parameters are whole already: leave the inner call out")
    summoned: list[Summoned] = []
    try:
        for inner, unit in chosen:
            show = unit.first_rank or not rank0_only
            settings = {"show": show, "offload_to_cpu": offload_to_cpu, "with_grads": with_grads}
            summoned.append(Summoned(inner, unit, writeback=writeback, rank0_only=rank0_only, **settings))
        yield
    finally:
        for each in summoned:
            each.end()


def _is_outermost(unit: Any, module: nn.Module) -> bool:
    """Whether no other unit of ``module`` is around a unit."""
    around = [m for m, _ in units_below(module) if m is not unit]
    return not any(unit in set(m.modules()) for m in around if isinstance(m, nn.Module))
