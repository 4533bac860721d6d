"""``state_dict()`` and ``load_state_dict()``: full tensors by default, as with FSDP1, or DTensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp import FullStateDictConfig as TorchFullStateDictConfig
from torch.distributed.tensor import DTensor

from smp.errors import UserError
from smp.fsdp.param_group import refuse_assigned
from smp.fsdp.units import Unit, full_tensor, unit_of, units_below
from smp.models.file_names import clean_name
from smp.parallel.optimizers import part_to_load

_KINDS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (TorchFullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclasses.dataclass
class FullStateDictConfig(TorchFullStateDictConfig):
    """SMP v2's ``FullStateDictConfig``.

    Attributes:
        translate_on_save: give the model the names of Hugging Face. It always has them here, so only True.
    """

    translate_on_save: bool = True

    def __post_init__(self) -> None:
        if not self.translate_on_save:
            raise UserError(
                "FullStateDictConfig(translate_on_save=False) is not available, the names are Hugging Face's from the "
                "start: leave it out"
            )


def refuse_sharded_tensor(value: Any, what: str) -> None:
    """Raise UserError for FSDP1's ``ShardedTensor``."""
    if type(value).__name__ == "ShardedTensor":
        raise UserError(
            f"FSDP: {what} is a ShardedTensor, and here shards are DTensors: read the checkpoint by "
            f"torch.distributed.checkpoint.load into model.state_dict() of SHARDED_STATE_DICT, and the optimizer's "
            f"part into torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)"
        )


def _config(name: str, given: Any, kind: type, state_dict_type: StateDictType) -> Any:
    if given is not None and not isinstance(given, kind):
        raise UserError(
            f"FSDP.state_dict_type: {name} is a {type(given).__name__}, and {state_dict_type.name} takes a "
            f"{kind.__name__}: give that, or leave it out"
        )
    return given or kind()


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Choose the type of ``state_dict()`` of all units in ``module``; return the settings before.

    Raises:
        UserError: the type is LOCAL_STATE_DICT, which is FSDP1's own flat storage, or a configuration is another's.
    """
    if not isinstance(state_dict_type, StateDictType):
        raise UserError(
            f"FSDP.state_dict_type: the type is a {type(state_dict_type).__name__}: give a member of torch's "
            f"StateDictType, after the model"
        )
    if state_dict_type not in _KINDS:
        raise UserError(
            f"FSDP.state_dict_type: {state_dict_type.name} is not available, there are no "
            f"flat parameters: use StateDictType.SHARDED_STATE_DICT, which gathers nothing either"
        )
    model_kind, optim_kind = _KINDS[state_dict_type]
    model_config = _config("state_dict_config", state_dict_config, model_kind, state_dict_type)
    optim_config = _config("optim_state_dict_config", optim_state_dict_config, optim_kind, state_dict_type)
    before = get_state_dict_type(module)
    for _, unit in units_below(module):
        unit.state_dicts = StateDictSettings(state_dict_type, model_config, optim_config)
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the type and configurations that the units in ``module`` have.

    Raises:
        UserError: there is no unit, or they differ.
    """
    found = [unit.state_dicts for _, unit in units_below(module)]
    if not found:
        raise UserError(f"FSDP: nothing in the {type(module).__name__} is wrapped: give the model that FSDP returned")
    if any(settings != found[0] for settings in found):
        raise UserError("FSDP: units of the model have different state dict types: set it on the root module")
    return found[0]


@contextlib.contextmanager
def chosen_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Choose the type within a context, as :func:`set_state_dict_type`."""
    before = set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for _, unit in units_below(module):
            unit.state_dicts = before


def register_hooks(module: nn.Module, unit: Unit) -> None:
    """Let a unit's ``state_dict()`` and ``load_state_dict()`` follow the chosen type."""
    module.register_state_dict_pre_hook(_before_saving)
    module.register_state_dict_post_hook(_after_saving)
    for inner in unit.modules:
        inner.register_load_state_dict_pre_hook(functools.partial(_before_loading, unit))


def _before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    assert isinstance(module, FSDPModule)
    refuse_assigned(module)
    module.reshard()  # a forward without a backward leaves parameters gathered


def _after_saving(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    unit = unit_of(module)
    assert unit is not None
    for name, dtype in unit.buffer_dtypes.items():  # saved as before mixed precision
        if prefix + name in state_dict:
            state_dict[prefix + name] = state_dict[prefix + name].to(dtype)
    config = unit.state_dicts.state_dict_config
    full = isinstance(config, TorchFullStateDictConfig)
    keep = unit.first_rank or not getattr(config, "rank0_only", False)
    parameters = {prefix + clean_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}
    copies: dict[Any, Any] = {}  # by parameter: all names of a tied one share a tensor
    for key in [key for key in state_dict if key.startswith(prefix)]:
        value = state_dict[key]
        if isinstance(value, DTensor):  # training goes on with the parameter's own memory
            parameter = parameters.get(key)
            source = parameter if parameter is not None and _shows(value, parameter) else key
            if source not in copies:
                copy = full_tensor(value) if full else value.detach().clone()
                copies[source] = (copy.cpu() if config.offload_to_cpu else copy) if keep else None
            value = copies[source]
        elif config.offload_to_cpu and hasattr(value, "cpu"):
            value = value.cpu()
        state_dict[key] = value
        if not keep:
            del state_dict[key]


def _shows(value: DTensor, parameter: nn.Parameter) -> bool:
    """Return True for a parameter as it is, and not what a state dict hook made of it."""
    return (
        isinstance(parameter, DTensor)
        and value.shape == parameter.shape
        and value.placements == parameter.placements
        and value.to_local().untyped_storage()._cdata == parameter.to_local().untyped_storage()._cdata
    )


def _before_loading(unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Replace every full tensor by this rank's shard."""
    if unit.summoned is not None:
        unit.summoned.interrupt(collective=True)
    cast(FSDPModule, unit.modules[0]).reshard()  # as before saving
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if (key := prefix + name) in state_dict:
            refuse_sharded_tensor(state_dict[key], key)
            state_dict[key] = part_to_load(state_dict[key], parameter)
