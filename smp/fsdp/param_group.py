"""Guarantees of FSDP1 that ``fully_shard`` lacks: unused parameters, dropped gradients, parameters changed since."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from smp.errors import UserError
from smp.local_shards import local_tensor

# Kept on torch's record of a parameter: the parameter and its storage, as they were when last looked at, and the
# gradient that it showed after a backward without reduction.
_NOTED, _SHOWN = "_smp_noted", "_smp_shown"

# On parameters of a unit, as they were, as shards, and as summoned: any other module that holds one shares a tied
# weight. A table of weak references would forbid torch to convert them.
_TAKEN = "_smp_taken"


def mark_taken(parameters: Iterable[nn.Parameter]) -> None:
    """Note that these are parameters of a unit."""
    for parameter in parameters:
        setattr(parameter, _TAKEN, True)


def is_taken(parameter: nn.Parameter | None) -> bool:
    """Return True for a parameter of a unit."""
    return getattr(parameter, _TAKEN, False)


def groups_of(module: Any) -> list[FSDPParamGroup]:
    """Return the parameter groups of a module to which ``fully_shard`` was applied."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    group = state._fsdp_param_group  # of torch 2.11, which makes one or none
    return [] if group is None else [group]


def _groups(module: nn.Module) -> Iterator[FSDPParamGroup]:
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            yield from groups_of(inner)


def _accumulated(fsdp_param: Any) -> torch.Tensor | None:
    if fsdp_param.unsharded_accumulated_grad is not None:
        return fsdp_param.unsharded_accumulated_grad
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    return None if unsharded is None else unsharded.grad


def _post_backward(group: FSDPParamGroup, *unused: Any) -> None:
    """Reduce as torch does, with zeros for parameters that this rank did not use: another may have."""
    if group._orig_dtype is None:  # all was frozen at the first forward
        group._init_mp_dtypes()
    if group.reduce_grads:
        for fsdp_param in group.fsdp_params:
            _hide(fsdp_param)
        _fill_unused(group)
    elif not all(hasattr(fsdp_param, "_unsharded_param") for fsdp_param in group.fsdp_params):
        return  # never gathered, so never used
    FSDPParamGroup.post_backward(group, *unused)
    if not group.reduce_grads:
        _show(group)


def _fill_unused(group: FSDPParamGroup) -> None:
    # torch 2.13's set_reduce_scatter_unused_params gives zeros to units that did not run, too, and no dtype to these.
    gathered: list[Any] = [fsdp_param for fsdp_param in group.fsdp_params if hasattr(fsdp_param, "_unsharded_param")]
    found = [gradient for fsdp_param in gathered if (gradient := _accumulated(fsdp_param)) is not None]
    # Without a gradient here, a unit that backward has come to may have one on another rank.
    if not found and group._training_state.name != "PRE_BACKWARD":
        return
    if any(fsdp_param.unsharded_accumulated_grad is not None for fsdp_param in gathered):
        for fsdp_param in gathered:  # all of one dtype: some were converted when they accumulated
            fsdp_param.accumulate_unsharded_grad_if_needed()
            if fsdp_param.unsharded_accumulated_grad is None:
                fsdp_param.to_accumulated_grad_if_needed()
        found = [gradient for fsdp_param in gathered if (gradient := _accumulated(fsdp_param)) is not None]
    # Structural: torch concatenates the gradients that a rank has. With those of other parameters on another rank, the
    # reduce-scatter would be of other sizes there.
    for fsdp_param in gathered:
        if fsdp_param.sharded_param.requires_grad and _accumulated(fsdp_param) is None:
            unsharded = fsdp_param._unsharded_param.detach()  # read of its shape alone: its memory may be free already
            fsdp_param.unsharded_accumulated_grad = torch.zeros_like(unsharded, dtype=found[0].dtype if found else None)


@torch.no_grad()
def _show(group: FSDPParamGroup) -> None:
    """Give shards a gradient while unsharded ones accumulate, which no optimizer sees: ``zero_grad`` changes it."""
    for fsdp_param in group.fsdp_params:
        parameter = fsdp_param.sharded_param
        if hasattr(fsdp_param, _SHOWN) or _accumulated(fsdp_param) is None:
            continue
        shown = parameter.grad
        if shown is None:
            # Negative zeros add nothing, and ``zero_grad(set_to_none=False)`` makes them positive.
            shown = parameter.grad = torch.full_like(parameter, -0.0)
        elif not bool(local_tensor(shown).any()):
            continue  # it looks the same when it is cleared
        setattr(fsdp_param, _SHOWN, shown)


def _hide(fsdp_param: Any) -> None:
    shown = vars(fsdp_param).pop(_SHOWN, None)
    if shown is not None and fsdp_param.sharded_param.grad is shown and not bool(local_tensor(shown).any()):
        fsdp_param.sharded_param.grad = None


def _drop(fsdp_param: Any) -> None:
    fsdp_param.unsharded_accumulated_grad = None
    if hasattr(fsdp_param, "_unsharded_param"):
        fsdp_param._unsharded_param.grad = None
    _hide(fsdp_param)


def drop_accumulated(module: nn.Module) -> None:
    """Drop the gradients that the units in a module have accumulated without reduction."""
    for group in _groups(module):
        for fsdp_param in group.fsdp_params:
            _drop(fsdp_param)


def _cleared(fsdp_param: Any) -> bool | None:
    """Return whether the gradient that a parameter showed was cleared; None where this rank has no element of it."""
    shown = getattr(fsdp_param, _SHOWN)
    local = local_tensor(shown)
    if fsdp_param.sharded_param.grad is not shown:
        return True
    if local.numel() == 0:
        return None
    # The first element tells of negative zeros: they are cleared together.
    return not bool(local.any()) and not bool(local.flatten()[0].signbit())


def _all_cleared(found: Iterable[bool | None]) -> bool:
    known = {each for each in found if each is not None}
    return known == {True}


@torch.no_grad()
def _drop_cleared(module: nn.Module) -> None:
    """Drop the accumulated gradients of parameters whose shown gradient was cleared."""
    units = [
        {fsdp_param: _cleared(fsdp_param) for fsdp_param in group.fsdp_params if hasattr(fsdp_param, _SHOWN)}
        for group in _groups(module)
    ]
    everywhere = _all_cleared(cleared for unit in units for cleared in unit.values())
    for unit in units:
        # A parameter of which this rank has no element follows the unit's others, or all others.
        others = everywhere or _all_cleared(unit.values())
        for fsdp_param, cleared in unit.items():
            if cleared or (cleared is None and others):
                _drop(fsdp_param)


def accumulates(module: nn.Module) -> bool:
    """Return True if a unit in a module has gradients that are neither reduced nor cleared."""
    _drop_cleared(module)
    return any(_accumulated(fsdp_param) is not None for group in _groups(module) for fsdp_param in group.fsdp_params)


def note_converted(module: Any) -> None:
    """Note a unit's parameters, as they are now, as unassigned, and compute in their present dtype."""
    for group in groups_of(module):
        mark_taken(fsdp_param.sharded_param for fsdp_param in group.fsdp_params)
        for fsdp_param in group.fsdp_params:
            setattr(fsdp_param, _NOTED, (fsdp_param.sharded_param, fsdp_param.sharded_param.untyped_storage()))
        if not hasattr(group, "_orig_dtype"):
            continue  # the first forward will
        before = group._orig_dtype
        group._init_mp_dtypes()
        for fsdp_param in group.fsdp_params if group._orig_dtype != before else ():
            fsdp_param.all_gather_outputs = []
            fsdp_param.unsharded_accumulated_grad = None
            if hasattr(fsdp_param, "_unsharded_param"):
                del fsdp_param._unsharded_param


def refuse_assigned(module: Any) -> None:
    """Raise UserError if a parameter of this unit, or its ``.data``, was assigned.

    That replaces a module's attribute, or the storage of the DTensor, and not the local tensor that is computed with:
    the value would be lost.
    """
    for group in groups_of(module):
        for fsdp_param in group.fsdp_params:
            _refuse_replaced(fsdp_param, started=module._get_fsdp_state()._is_root is not None)
            parameter, storage = getattr(fsdp_param, _NOTED, (None, None))
            now = fsdp_param.sharded_param.untyped_storage()
            if parameter is not fsdp_param.sharded_param:  # ``load_state_dict(assign=True)`` has replaced it
                setattr(fsdp_param, _NOTED, (fsdp_param.sharded_param, now))
            # The noted storage is kept, so no other one has its address.
            elif storage is not None and now._cdata != storage._cdata:
                raise UserError(
                    f"FSDP: .data of {_where(fsdp_param)} was assigned, which has no effect on a sharded "
                    f"parameter: write param.data.copy_(value), with backups as param.data.clone(), or assign inside "
                    f"FSDP.summon_full_params"
                )


def _where(fsdp_param: Any) -> str:
    info = fsdp_param._module_info
    return fsdp_param._param_fqn or f"{info.param_name} of a {type(info.module).__name__}"


def _refuse_replaced(fsdp_param: Any, *, started: bool) -> None:
    now = fsdp_param._module_info.module._parameters.get(fsdp_param._module_info.param_name)
    if now is fsdp_param.sharded_param or now is getattr(fsdp_param, "_unsharded_param", None) or is_taken(now):
        return
    # The first forward takes one over that is sharded in the same way.
    if started or not isinstance(now, DTensor) or now.shape != fsdp_param.sharded_param.shape:
        raise UserError(
            f"FSDP: {_where(fsdp_param)} was replaced, which has no effect on a sharded parameter of the shape "
            f"{tuple(fsdp_param.sharded_param.shape)}: write into it inside FSDP.summon_full_params, or by "
            f"load_state_dict()"
        )


def _outermost_of_forward(module: Any) -> bool:
    state = module._get_fsdp_state()
    return state._state_ctx.iter_forward_root is None and state._training_state.name == "IDLE"


def _before_forward(module: nn.Module, args: Any) -> None:
    if not _outermost_of_forward(module):
        return
    _drop_cleared(module)
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            refuse_assigned(inner)
    for group in _groups(module):
        # In a group of one rank, gathering anew takes the parameters as they are now, without a collective.
        alone = getattr(group.mesh_info, "shard_mesh_size", 1) == 1
        if alone and group.is_unsharded and group.reshard_after_backward:
            group.reshard()


def _after_forward(module: nn.Module, args: Any, output: Any) -> None:
    """Free gathered parameters that no backward will free: they may change before the next forward."""
    if not _outermost_of_forward(module):
        return
    for group in _groups(module):
        if group._training_state.name != "IDLE":
            continue
        prefetched = group._all_gather_result is not None  # and then not called
        if prefetched:
            group.wait_for_unshard()
        if group.is_unsharded and (prefetched or not torch.is_grad_enabled()):
            group.reshard()


def keep_promises(module: Any) -> None:
    """Install the hooks of one unit; ``fully_shard`` was applied to it."""
    note_converted(module)
    for group in groups_of(module):
        # Torch calls it on the group: from autograd's graph, and after backward for units that this did not come to.
        group.post_backward = functools.partial(_post_backward, group)  # type: ignore[method-assign]
    # Around torch's own hooks: an assigned parameter is refused before the gathered one replaces it, and parameters are
    # freed after torch has decided whether it does. Not in torch.compile's graphs, like those.
    module.register_forward_pre_hook(torch.compiler.disable(_before_forward), prepend=True)
    module.register_forward_hook(torch.compiler.disable(_after_forward))
