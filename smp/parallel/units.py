"""FSDP units: the modules whose parameters ``fully_shard`` gathers together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp.axes import AXES


class Unit(NamedTuple):
    """Modules whose parameters are gathered together."""

    modules: list[nn.Module]
    reshard: bool  # whether the gathered parameters are freed between forward and backward
    in_backward: bool = True  # whether backward reads the parameters at all
    axis: str | None = None  # folded, which splits the parameters: they are sharded over its view of the mesh
    fp32: bool = False  # whether the parameters are used in fp32, whatever the others' dtype is
    inside: tuple[Unit, ...] = ()  # units in the modules

    @property
    def first(self) -> FSDPModule:
        """The module that torch keeps the unit's state at, once it is sharded."""
        return cast(FSDPModule, self.modules[0])


def transformer_units(
    *, embedding: nn.Module, blocks: list[nn.Module], final: list[nn.Module], tied: bool, reshard: bool
) -> list[Unit]:
    """List the units of a transformer, in the order of the forward: embedding, each block, (final norm, head).

    The last unit is used first by backward, so it is not freed in between. The embedding is freed at any strategy, and
    not gathered again, unless it has a norm: the gradient of a look-up needs no weights. A tied head is in one unit
    with the embedding: two units would own and gather the weight twice.
    """
    middle = [Unit([block], reshard) for block in blocks]
    if tied:
        return [*middle, Unit([embedding, *final], reshard=False)]
    looks_up = len(list(embedding.parameters())) == 1
    return [Unit([embedding], reshard=True, in_backward=not looks_up), *middle, Unit(final, reshard=False)]


def size_based_units(parts: Iterable[nn.Module], *, reshard: bool, minimum: int) -> list[Unit]:
    """Apply FSDP1's size-based policy: every smallest subtree with at least ``minimum`` parameters is a unit.

    Containers that are only iterated over, never called, cannot be units. ``parts`` must not contain one of two modules
    that share a weight: a unit with only one of them would untie them.
    """
    units: list[Unit] = []

    def visit(module: nn.Module) -> int:
        free = sum(p.numel() for p in module.parameters(recurse=False)) + sum(visit(c) for c in module.children())
        if free < minimum or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return free
        units.append(Unit([module], reshard))
        return 0

    for part in parts:
        visit(part)
    return units


def folded_axis(parameter: nn.Parameter) -> str | None:
    """Return the folded axis along which a technique has split a parameter: a dimension of its DTensor's mesh."""
    names = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
    return next((axis.name for axis in AXES if axis.over and axis.name in names), None)


def with_inner(model: nn.Module, units: Iterable[Unit], fp32: Iterable[nn.Module]) -> list[Unit]:
    """Return the units, with each module whose parameters a folded axis splits, or of ``fp32``, as a unit inside.

    Raises:
        AssertionError: only some of such a module's parameters are split along the axis.
    """
    split: dict[nn.Module, str | None] = dict.fromkeys(fp32)

    def visit(module: nn.Module) -> None:
        if not any(map(folded_axis, module.parameters(recurse=False))):
            for child in module.children():
                visit(child)
            return
        split[module], *others = {folded_axis(parameter) for parameter in module.parameters()}
        if others:  # they would be sharded over other ranks than those that have them
            raise AssertionError(f"a folded axis splits only some of the parameters of a {type(module).__name__}")

    wide = [*split]
    visit(model)
    found: list[Unit] = []
    for unit in units:
        modules = [each for module in unit.modules for each in module.modules() if each in split]
        inside = tuple(Unit([each], unit.reshard, axis=split.pop(each), fp32=each in wide) for each in modules)
        rest = [module for module in unit.modules if module not in modules]
        found += [unit._replace(modules=rest, inside=inside)] if rest else inside
    return found
