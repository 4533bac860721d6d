"""The optimizer's state by parameter names, whole or sharded: FSDP1's format, both ways."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from smp.errors import UserError
from smp.fsdp.meshes import require_process_group
from smp.fsdp.state_dicts import clean_name, get_state_dict_type, refuse_sharded_tensor
from smp.fsdp.units import local_part, reshard_below, units_below, whole_tensor

State = dict[str, Any]


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    reshard_below(model)
    return {parameter: clean_name(name) for name, parameter in model.named_parameters()}


def _groups(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, optim_input: Any = None
) -> list[list[tuple[str, nn.Parameter]]]:
    """The optimizer's parameter groups, each parameter with its name; without an optimizer one group of all."""
    if optim_input is not None:
        raise UserError("FSDP: optim_input is not available: give the optimizer itself as optim")
    names = _names(model)
    if optimizer is None:
        return [[(name, parameter) for parameter, name in names.items()]]
    groups = []
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if p not in names]
        if unknown:
            raise UserError(
                f"FSDP: the optimizer holds a parameter of shape {tuple(unknown[0].shape)} that the model has "
                f"not: make the optimizer after FSDP, from the model's parameters"
            )
        groups.append([(names[p], p) for p in group["params"]])
    return groups


def _check_group(group: Any) -> None:
    if group is not None and not isinstance(group, dist.ProcessGroup):  # new_group gives others a number
        raise UserError(
            f"FSDP: group is {group!r}, which is no process group with this rank: give the one that the model "
            f"is sharded over, or leave it out"
        )


def _first_rank(model: nn.Module, group: dist.ProcessGroup | None) -> bool:
    """Whether this is the group's first rank; without one, of those that the model is sharded and replicated over."""
    _check_group(group)
    if group is not None:
        return group.rank() == 0
    for _, unit in units_below(model):
        return unit.first_rank
    raise UserError(f"FSDP: nothing in the {type(model).__name__} is wrapped: give the model that FSDP returned")


def by_name(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: State | None,
    *,
    full: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    optim_input: Any = None,
    group: dist.ProcessGroup | None = None,
) -> State:
    """``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``; collective if ``full``.

    Args:
        model: whose parameters the optimizer holds.
        optimizer: made from them after wrapping.
        state: what ``optimizer.state_dict()`` gave; None calls it.
        full: whole tensors instead of DTensors.
        rank0_only: only for the first rank; ``{}`` for the others.
        offload_to_cpu: tensors on the CPU.
        optim_input: FSDP1's argument of old: refused.
        group: whose first rank ``rank0_only`` means; None: the model's.
    """
    groups = _groups(model, optimizer, optim_input)
    state = optimizer.state_dict() if state is None else state
    names = [name for group in groups for name, _ in group]
    keep = not rank0_only or _first_rank(model, group)
    found: State = {}
    own = {names[key]: values for key, values in state["state"].items()}
    # In the model's order, and the parts of each in one: ranks may have others, and all gather the same together.
    for name in [name for name in _names(model).values() if name in own]:
        converted = {}
        for part, value in sorted(own[name].items(), key=lambda item: str(item[0])):
            if full and isinstance(value, DTensor):
                value = whole_tensor(value)
            elif full and isinstance(value, torch.Tensor):
                value = value.clone()  # the optimizer counts its steps in place
            if offload_to_cpu and isinstance(value, torch.Tensor):
                value = value.cpu()
            if keep:
                converted[part] = value
        found[name] = converted
    if not keep:
        return {}
    if "param_groups" not in state:
        return {"state": found}
    saved_groups = [
        {**saved, "params": [name for name, _ in own]} for saved, own in zip(state["param_groups"], groups, strict=True)
    ]
    return {"state": found, "param_groups": saved_groups}


def to_load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    saved: State | None,
    *,
    from_first_rank: bool = False,
    optim_input: Any = None,
    group: dist.ProcessGroup | None = None,
) -> State:
    """The reverse of :func:`by_name`, for ``optimizer.load_state_dict``.

    Args:
        model: whose parameters the optimizer holds.
        optimizer: None: one that holds all of the model's parameters in one group.
        saved: by names; whole tensors or DTensors.
        from_first_rank: only the group's first rank has ``saved``; collective then.
        optim_input: FSDP1's argument of old: refused.
        group: None: all ranks.

    Raises:
        UserError: names or shapes are not the model's.
    """
    groups = _groups(model, optimizer, optim_input)
    parameters = dict(item for group in groups for item in group)
    if from_first_rank:
        _check_group(group)
        saved = _spread(saved, group or _all_ranks(parameters.values()))
    if not isinstance(saved, dict) or "state" not in saved:
        raise UserError(
            "FSDP: the optimizer's state has no 'state': give what FSDP.optim_state_dict returned, on every rank, or "
            "use a configuration with rank0_only=True"
        )
    state = {}
    numbers = {name: number for number, name in enumerate(parameters)}
    for name, values in saved["state"].items():
        if name not in parameters:
            raise UserError(f"FSDP: the optimizer's state of {name} belongs to no parameter of the optimizer")
        parameter = parameters[name]
        state[numbers[name]] = {
            part: _localized(value, parameter, f"{part} of {name}") for part, value in values.items()
        }
    result: State = {"state": dict(sorted(state.items()))}
    if "param_groups" in saved:
        result["param_groups"] = _numbered(saved["param_groups"], groups)
    return result


def _numbered(saved: list[State], groups: list[list[tuple[str, nn.Parameter]]]) -> list[State]:
    """The saved groups in the order of the optimizer's, with the numbers of its parameters."""
    left, found, first = list(saved), [], 0
    for own in groups:
        same = [group for group in left if set(group["params"]) == {name for name, _ in own}]
        if len(saved) != len(groups) or not same:
            raise UserError(
                f"FSDP: the optimizer's {len(groups)} parameter groups are not the {len(saved)} saved ones: "
                f"make groups of the same parameters"
            )
        left.remove(same[0])
        found.append({**copy.deepcopy(same[0]), "params": list(range(first, first + len(own)))})
        first += len(own)
    return found


def _localized(value: Any, parameter: nn.Parameter, what: str) -> Any:
    """A saved value as the optimizer keeps it beside its parameter, and may change it."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
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
    """The group of all ranks, whose rank 0 has to be among those that hold the parameters: else its state is another's.

    Raises:
        UserError: it is not.
    """
    meshes = [parameter.device_mesh.mesh for parameter in parameters if isinstance(parameter, DTensor)]
    if meshes and not any(bool((mesh == 0).any()) for mesh in meshes):
        raise UserError(
            f"FSDP: the model is on ranks {meshes[0].flatten().tolist()}, and without a group rank 0's state "
            f"is taken: give group=the process group that the model is sharded over"
        )
    return require_process_group()


def _spread(saved: State | None, group: dist.ProcessGroup) -> State:
    """The state of the group's first rank on all of its ranks, one parameter at a time; collective."""

    def from_first(value: Any) -> Any:
        box = [tree_map_only(torch.Tensor, torch.Tensor.cpu, value)]  # a GPU's tensor would come out on the same GPU
        dist.broadcast_object_list(box, group_src=0, group=group)
        return box[0]

    own = saved if group.rank() == 0 and isinstance(saved, dict) and "state" in saved else None
    outline = from_first(own and {**own, "state": list(own["state"])})
    if outline is None:
        raise UserError("FSDP: the first rank has no optimizer state to spread: read it there before the call")
    return {**outline, "state": {name: from_first(own and own["state"][name]) for name in outline["state"]}}


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: State | None = None,
    group: dist.ProcessGroup | None = None,
) -> State:
    """The optimizer's state by names, of the chosen state dict type; of ``rank0_only``, on the group's first rank."""
    chosen = get_state_dict_type(model)
    config = chosen.optim_state_dict_config
    full = chosen.state_dict_type == StateDictType.FULL_STATE_DICT
    rank0_only = full and getattr(config, "rank0_only", False)
    cpu = config.offload_to_cpu
    return by_name(model, optim, optim_state_dict, full=full, rank0_only=rank0_only, offload_to_cpu=cpu, group=group)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: State,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> State:
    """What ``optim.load_state_dict`` takes; ``load_directly`` calls it. ``rank0_only`` is of the group's first rank."""
    if is_named_optimizer:
        raise UserError("FSDP.optim_state_dict_to_load: named optimizers are not available: use one of torch.optim")
    chosen = get_state_dict_type(model)
    rank0_only = getattr(chosen.optim_state_dict_config, "rank0_only", False)
    result = to_load(model, optim, optim_state_dict, from_first_rank=rank0_only, group=group)
    if load_directly:
        if "param_groups" not in result:
            raise UserError(
                "FSDP.optim_state_dict_to_load: the optimizer's state has no 'param_groups', so load_directly cannot "
                "be kept: add them to what is returned without it, and call optim.load_state_dict"
            )
        optim.load_state_dict(result)
    return result


def rekey_optim_state_dict(
    optim_state_dict: State,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Iterable[Any] | None = None,
    optim: torch.optim.Optimizer | None = None,
) -> State:
    """Names instead of numbers or the reverse, for a model that is not wrapped."""
    if not isinstance(optim_state_key_type, OptimStateKeyType):
        raise UserError(
            f"FSDP.rekey_optim_state_dict: the key type is a {type(optim_state_key_type).__name__}: give "
            f"OptimStateKeyType.PARAM_NAME or OptimStateKeyType.PARAM_ID"
        )
    groups = _groups(model, optim, optim_input)
    names = [name for group in groups for name, _ in group]
    keys = list(optim_state_dict["state"])
    named = all(isinstance(key, str) for key in keys)
    if not named and not all(isinstance(key, int) for key in keys):
        raise UserError(f"FSDP.rekey_optim_state_dict: keys are neither all names nor all numbers: {keys[:4]}")
    if named == (optim_state_key_type == OptimStateKeyType.PARAM_NAME):
        return optim_state_dict
    new: dict[Any, Any] = {name: n for n, name in enumerate(names)} if named else dict(enumerate(names))
    rekeyed = {**optim_state_dict, "state": {new[key]: value for key, value in optim_state_dict["state"].items()}}
    if "param_groups" in rekeyed:
        rekeyed["param_groups"] = copy.deepcopy(rekeyed["param_groups"])
        for group in rekeyed["param_groups"]:
            group["params"] = sorted(new[key] for key in group["params"])
    return rekeyed
