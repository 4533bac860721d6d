"""The optimizer's state by parameter names, full or sharded: FSDP1's format, both ways.

Not through ``torch.distributed.checkpoint.state_dict``: that gathers in the order of each rank's optimizer, so that
ranks with another order exchange other tensors, steps an optimizer that has no state, returns memory that training
changes, always takes the job's first rank, and keeps what is sharded over another mesh.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from smp.errors import UserError
from smp.fsdp.meshes import require_process_group
from smp.fsdp.state_dicts import get_state_dict_type, refuse_sharded_tensor
from smp.fsdp.units import full_tensor, require_module, units_below
from smp.log import get_logger
from smp.models.file_names import clean_name
from smp.parallel.optimizers import local_part
from smp.parallel.sharding import reshard

_logger = get_logger("smp.fsdp")

State = dict[str, Any]
Group = dict[str, nn.Parameter]  # a parameter group of an optimizer, by the plain model's names


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    require_module(model)
    reshard(model)
    return {parameter: clean_name(name) for name, parameter in model.named_parameters()}


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Group]:
    """Return the optimizer's parameter groups."""
    names = _names(model)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter not in names:
            raise UserError(
                f"FSDP: the optimizer has a parameter of shape {tuple(parameter.shape)} that the model has "
                f"not: make the optimizer after FSDP, from the model's parameters"
            )
    return [{names[p]: p for p in group["params"]} for group in optimizer.param_groups]


def _check_group(group: Any) -> None:
    if group is not None and not isinstance(group, dist.ProcessGroup):  # new_group gives others a number
        raise UserError(
            f"FSDP: group is {group!r}, which is no process group with this rank: give the one that the model "
            f"is sharded over, or leave it out"
        )


def _agree(own: dict[str, State], parameters: dict[str, nn.Parameter]) -> None:
    """Compare what ranks are about to gather; collective.

    Raises:
        UserError: on every rank, as some would gather other tensors than the others.
    """
    meshes = {name: parameter.device_mesh for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
    for mesh in dict.fromkeys(meshes.values()):
        outline = {
            name: ", ".join(sorted(str(entry) for entry, value in values.items() if isinstance(value, DTensor)))
            for name, values in own.items()
            if meshes.get(name) == mesh
        }
        found = [(dist.get_rank(), outline)]
        for axis in range(mesh.ndim):
            parts: list[Any] = [None] * mesh.size(axis)
            dist.all_gather_object(parts, found, group=mesh.get_group(axis))
            found = [each for part in parts for each in part]
        (first, wanted), *others = sorted(found)
        for rank, other in others:
            for name in sorted(wanted.keys() | other.keys()):
                if wanted.get(name) != other.get(name):
                    raise UserError(
                        f"FSDP: the optimizer's state of {name} is {wanted.get(name) or 'nothing'} on rank {first} and "
                        f"{other.get(name) or 'nothing'} on rank {rank}: give the optimizers of all ranks the same "
                        f"parameters, and step them together"
                    )


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: State | None = None,
    group: dist.ProcessGroup | None = None,
) -> State:
    """Return ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}`` of the chosen type.

    Collective where that is FULL_STATE_DICT; with ``rank0_only`` the other ranks get ``{}``.

    Args:
        model: whose parameters the optimizer has.
        optim: made from them after wrapping.
        optim_state_dict: the result of ``optim.state_dict()``; None calls it.
        group: whose first rank ``rank0_only`` means; None: the model's.
    """
    chosen = get_state_dict_type(model)
    config = chosen.optim_state_dict_config
    full = chosen.state_dict_type == StateDictType.FULL_STATE_DICT
    keep = True
    if full and getattr(config, "rank0_only", False):
        _check_group(group)
        keep = next(units_below(model))[1].first_rank if group is None else group.rank() == 0
    groups = _groups(model, optim)
    names = [name for own in groups for name in own]
    state = optim.state_dict() if optim_state_dict is None else optim_state_dict
    # Numbers of the optimizer's parameters; of a named optimizer their names.
    by_name = {names[key] if isinstance(key, int) else clean_name(key): own for key, own in state["state"].items()}
    parameters = {name: parameter for parameter, name in _names(model).items()}
    if unknown := [name for name in by_name if name not in parameters]:
        raise UserError(f"FSDP: the optimizer's state of {unknown[0]} belongs to no parameter of the model")
    if full:
        _agree(by_name, parameters)
    found: State = {}
    # In the model's order, and each parameter's entries sorted: ranks may order both differently, and all have to
    # gather the same tensor together.
    for name in [name for name in parameters if name in by_name]:
        entries = found.setdefault(name, {})
        for entry, value in sorted(by_name[name].items(), key=lambda item: str(item[0])):
            if isinstance(value, torch.Tensor):
                # A copy in any case: the optimizer changes its state in place.
                value = full_tensor(value) if full and isinstance(value, DTensor) else value.detach().clone()
                value = value.cpu() if config.offload_to_cpu else value
            if keep:
                entries[entry] = value
    if not keep:
        return {}
    if "param_groups" not in state:
        return {"state": found}
    pairs = zip(state["param_groups"], groups, strict=True)
    return {"state": found, "param_groups": [{**copy.deepcopy(saved), "params": list(own)} for saved, own in pairs]}


def _numbered_groups(
    saved: list[State], groups: list[Group], keys: dict[str, Any], optimizer: torch.optim.Optimizer
) -> list[State]:
    """Return the saved groups in the order of the optimizer's, with its keys of the parameters."""
    by_members = {frozenset(group["params"]): group for group in saved}
    members = [frozenset(own) for own in groups]
    if len(saved) == len(groups) and by_members.keys() >= set(members):
        found = [by_members[own] for own in members]
    elif other := sorted(frozenset().union(*members) - frozenset().union(*by_members)):
        raise UserError(
            f"FSDP: the optimizer's {len(groups)} parameter groups are not the {len(saved)} saved ones, whose "
            f"'params' lack {other[0]}: add it to those of one, and it begins without a state"
        )
    else:
        found = _regrouped(saved, groups, optimizer)
    pairs = zip(found, groups, strict=True)
    return [{**copy.deepcopy(group), "params": [keys[name] for name in own]} for group, own in pairs]


def _regrouped(saved: list[State], groups: list[Group], optimizer: torch.optim.Optimizer) -> list[State]:
    """Return the optimizer's own groups with what all of them have in common as it was saved.

    FSDP1 with ``use_orig_params=False`` has whole units in its groups, and so all parameters in one.

    Raises:
        UserError: the saved groups do not say which learning rate a group goes on with.
    """
    filled = [group for group in saved if group["params"]]
    kept, found = set(), [dict(group) for group in optimizer.param_groups]
    for option in [option for group in filled[:1] for option in group if option != "params"]:
        values = [group[option] for group in filled if option in group]
        own = [group[option] for group in found if option in group]
        if all(value == own[0] for value in own) and all(value == values[0] for value in values):
            for group in found:
                group[option] = values[0]
        elif option in ("lr", "initial_lr"):
            raise UserError(
                f"FSDP: the optimizer's {len(groups)} parameter groups are not the {len(saved)} saved ones, and their "
                f"{option} differs: make groups of the same parameters"
            )
        else:
            kept.add(option)
    _logger.info(
        "FSDP: the optimizer's %d parameter groups are not the %d saved ones: states go by the parameters' names%s",
        len(groups), len(saved), f", and {', '.join(sorted(kept))} stays the optimizer's own" if kept else "",
    )  # fmt: skip
    return found


def _shard(value: Any, parameter: nn.Parameter, what: str) -> Any:
    """Return a saved value as the optimizer keeps it beside its parameter, in memory of its own.

    Collective for a DTensor that is laid out otherwise than the parameter.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        laid = (value.device_mesh, value.placements)
        if isinstance(parameter, DTensor) and laid == (parameter.device_mesh, parameter.placements):
            return value.clone()
        value = full_tensor(value)
    if not value.size():
        return value.clone()
    refuse_sharded_tensor(value, what)
    if value.size() != parameter.shape:
        raise UserError(
            f"FSDP: {what} has the shape {tuple(value.size())}, the parameter {tuple(parameter.shape)}: load "
            f"the state of the same model and optimizer"
        )
    return local_part(value, parameter) if isinstance(parameter, DTensor) else value.clone()


def _all_ranks(parameters: Iterable[nn.Parameter]) -> dist.ProcessGroup:
    """Return the group of all ranks, whose rank 0 has to be among those that hold the parameters.

    Raises:
        UserError: it is not, so its state would be another model's.
    """
    meshes = [parameter.device_mesh.mesh for parameter in parameters if isinstance(parameter, DTensor)]
    if meshes and not any(bool((mesh == 0).any()) for mesh in meshes):
        raise UserError(
            f"FSDP: the model is on ranks {meshes[0].flatten().tolist()}, and without a group rank 0's state "
            f"is taken: give group=the process group that the model is sharded over"
        )
    return require_process_group()


def _broadcast(saved: State | None, group: dist.ProcessGroup) -> State:
    """Return the state of the group's first rank on all of its ranks, sent one parameter at a time; collective."""

    def from_first(value: Any) -> Any:
        box = [tree_map_only(torch.Tensor, torch.Tensor.cpu, value)]  # a GPU's tensor would come out on the same GPU
        dist.broadcast_object_list(box, group_src=0, group=group)
        return box[0]

    own = saved if group.rank() == 0 and isinstance(saved, dict) and "state" in saved else None
    outline = from_first(own and {**own, "state": list(own["state"])})
    if outline is None:
        raise UserError("FSDP: the first rank has no optimizer state to spread: read it there before the call")
    return {**outline, "state": {name: from_first(own and own["state"][name]) for name in outline["state"]}}


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: State | None,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> State:
    """Return a state by names as ``optim.load_state_dict`` takes it.

    Args:
        model: whose parameters the optimizer has.
        optim_state_dict: by names; full tensors or DTensors.
        is_named_optimizer: the optimizer's own keys are names, and not numbers.
        load_directly: call ``optim.load_state_dict``.
        group: whose first rank's state is taken, with ``rank0_only`` of the chosen type, collective then; None: all
            ranks.

    Raises:
        UserError: names or shapes are not the model's.
    """
    groups = _groups(model, optim)
    parameters = {name: parameter for own in groups for name, parameter in own.items()}
    saved = optim_state_dict
    if getattr(get_state_dict_type(model).optim_state_dict_config, "rank0_only", False):
        _check_group(group)
        saved = _broadcast(saved, group or _all_ranks(parameters.values()))
    if not isinstance(saved, dict) or "state" not in saved:
        raise UserError(
            "FSDP: the optimizer's state has no 'state': give what FSDP.optim_state_dict returned, on every rank, or "
            "use a configuration with rank0_only=True"
        )
    if unknown := [name for name in saved["state"] if name not in parameters]:
        raise UserError(f"FSDP: the optimizer's state of {unknown[0]} belongs to no parameter of the optimizer")
    keys: dict[str, Any] = {name: name if is_named_optimizer else number for number, name in enumerate(parameters)}
    result: State = {"state": {}}
    for name in sorted(saved["state"]):  # in one order on all ranks: what is sharded otherwise is gathered
        entries = sorted(saved["state"][name].items(), key=lambda item: str(item[0]))
        own = {entry: _shard(value, parameters[name], f"{entry} of {name}") for entry, value in entries}
        result["state"][keys[name]] = own
    if "param_groups" in saved:
        result["param_groups"] = _numbered_groups(saved["param_groups"], groups, keys, optim)
    if load_directly:
        if "param_groups" not in result:
            raise UserError(
                "FSDP.optim_state_dict_to_load: the optimizer's state has no 'param_groups', so load_directly cannot "
                "be kept: add them to what is returned without it, and call optim.load_state_dict"
            )
        optim.load_state_dict(result)
    return result
