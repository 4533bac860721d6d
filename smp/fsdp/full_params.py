"""``summon_full_params``: whole parameters for a while, and what was written to them back into the shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from smp.errors import UserError
from smp.fsdp.between_steps import refuse_assigned
from smp.fsdp.units import Unit, local_box, units_below, whole_tensor


class _Summoned:
    """The whole parameters of one unit, in the places of its shards until :meth:`end`."""

    def __init__(
        self, module: FSDPModule, unit: Unit, *, writeback: bool, show: bool, offload_to_cpu: bool, with_grads: bool
    ):
        refuse_assigned(module)
        module.reshard()
        self._unit, self._writeback, self._ended = unit, writeback, False
        self._places: dict[DTensor, list[tuple[nn.Module, str]]] = {}
        self._whole: dict[DTensor, nn.Parameter] = {}
        for inner in unit.modules:
            for name, held in inner.named_parameters(recurse=False, remove_duplicate=False):
                if isinstance(held, DTensor) and held not in unit.ignored_parameters:
                    self._places.setdefault(held, []).append((inner, name))
        for parameter in self._places:
            whole, gradient = whole_tensor(parameter), None
            if with_grads and isinstance(parameter.grad, DTensor):
                gradient = whole_tensor(parameter.grad)
            if not show:
                continue
            shown = nn.Parameter(whole.cpu() if offload_to_cpu else whole, requires_grad=parameter.requires_grad)
            if gradient is not None:
                shown.grad = gradient.to(shown.device)
            self._whole[parameter] = shown
        for parameter, whole in self._whole.items():
            self._put(parameter, whole)
        unit.summoned = True
        self.handle: RemovableHandle | None = None  # of what ends it before a forward

    def _put(self, parameter: DTensor, tensor: torch.Tensor) -> None:
        for module, name in self._places[parameter]:
            setattr(module, name, tensor)

    @torch.no_grad()
    def end(self) -> None:
        """Write back and show the shards again; a second call does nothing."""
        if self._ended:
            return
        self._ended = True
        self._unit.summoned = False
        if self.handle is not None:
            self.handle.remove()
        for parameter, shown in self._whole.items():
            if self._writeback:
                local = parameter.to_local()
                local.copy_(local_box(parameter)(shown))
            self._put(parameter, parameter)


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

    A forward inside ends it for the module that it runs and the units below: they gather by themselves. So with
    ``rank0_only`` it is refused.

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
    if any(unit.summoned for _, unit in chosen):
        raise UserError("FSDP.summon_full_params: the parameters are whole already: leave the inner call out")
    summoned: list[_Summoned] = []
    try:
        for inner, unit in chosen:
            settings: dict[str, Any] = {"offload_to_cpu": offload_to_cpu, "with_grads": with_grads}
            show = unit.first_rank or not rank0_only
            summoned.append(_Summoned(inner, unit, writeback=writeback, show=show, **settings))
        _end_before_forward(chosen, summoned, rank0_only=rank0_only)
        yield
    finally:
        for each in summoned:
            each.end()


def _end_before_forward(chosen: list[tuple[FSDPModule, Unit]], summoned: list[_Summoned], *, rank0_only: bool) -> None:
    """A forward gathers and frees by itself: the shards of all that it runs have to be in place by then."""
    for (module, _), own in zip(chosen, summoned, strict=True):
        assert isinstance(module, nn.Module)
        inside = set(module.modules())
        below = [(unit, each) for (inner, unit), each in zip(chosen, summoned, strict=True) if inner in inside]
        exchanges = any(unit.mesh.size(unit.mesh.ndim - 1) > 1 for unit, _ in below)

        def end(*unused: Any, below: list[Any] = below, alone: bool = rank0_only and exchanges) -> None:
            if alone:  # the first rank would wait for the others, or take their next exchange for its own
                raise UserError(
                    "FSDP.summon_full_params: with rank0_only the model cannot be called inside, a forward gathers "
                    "over all ranks: leave rank0_only out and call it on every rank"
                )
            for _, each in below:
                each.end()

        own.handle = module.register_forward_pre_hook(end, prepend=True)


def _is_outermost(unit: Any, module: nn.Module) -> bool:
    """Whether no other unit of ``module`` is around a unit."""
    around = [m for m, _ in units_below(module) if m is not unit]
    return not any(unit in set(m.modules()) for m in around if isinstance(m, nn.Module))
