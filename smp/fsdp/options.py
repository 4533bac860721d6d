"""Check the arguments of FSDP's constructor: one place knows the allowed values of each."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FSDPModule, MixedPrecision, ShardingStrategy

from smp.errors import UserError
from smp.log import get_logger

_logger = get_logger("smp.fsdp")
_told: set[str] = set()

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
# Between forward and backward these keep what they gathered.
KEEPS_GATHERED = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2, ShardingStrategy.NO_SHARD)

_Choice = TypeVar("_Choice", bound=enum.Enum)
ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked arguments of one unit, the constructor's or a policy's for that module.

    They are as in :class:`smp.FullyShardedDataParallel`, but ``cpu_offload`` is a bool and ``device_id`` a device.
    """

    process_group: ProcessGroups | None = None
    device_mesh: DeviceMesh | None = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: bool = False
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    post_param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True


def _choice(name: str, value: Any, kind: type[_Choice]) -> _Choice | None:
    """Return a member of torch's enum, given as such or by name."""
    if value is None or isinstance(value, kind):
        return value
    members = {member.name.lower(): member for member in kind}
    if isinstance(value, str) and value.lower() in members:
        return members[value.lower()]
    allowed = ", ".join(member.name for member in kind)
    raise UserError(
        f"FSDP: {name} is {value!r}: give a member of torch's {kind.__name__} or its name, one of {allowed}"
    )


def _instance(name: str, value: Any, kind: Any, what: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise UserError(f"FSDP: {name} is a {type(value).__name__}: give {what}, or leave it out")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise UserError(f"FSDP: {name} is {value!r}: give True or False")
    return bool(value)


def _process_group(value: Any) -> ProcessGroups | None:
    pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(g, dist.ProcessGroup) for g in value)
    if value is None or pair or isinstance(value, dist.ProcessGroup):
        return value
    raise UserError(
        f"FSDP: process_group is a {type(value).__name__}: give a ProcessGroup, for hybrid sharding the tuple "
        f"(group to shard over, group to replicate over), or leave it out for all ranks"
    )


def _mixed_precision(value: Any) -> MixedPrecision | None:
    mixed = _instance("mixed_precision", value, MixedPrecision, "torch's MixedPrecision")
    if mixed is not None and mixed.keep_low_precision_grads:
        raise UserError(
            "FSDP: MixedPrecision(keep_low_precision_grads=True) is not available, gradients are in the parameters' "
            "dtype when the optimizer reads them: leave it out"
        )
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(mixed, name, None)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UserError(
                f"FSDP: mixed_precision has the {name} {dtype!r}: give a floating-point dtype such as torch.bfloat16, "
                f"or leave it out"
            )
    return mixed


def _cpu_offload(value: Any) -> bool:
    given = _instance("cpu_offload", value, (CPUOffload, bool), "torch's CPUOffload")
    return given.offload_params if isinstance(given, CPUOffload) else bool(given)


def _device(value: Any) -> torch.device | None:
    if value is None:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, str, torch.device)):
        raise UserError(f"FSDP: device_id is a {type(value).__name__}: give a GPU's number or a torch.device")
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(
            f"FSDP: device_id is {value!r}: give a GPU's number from 0, 'cpu' or such as 'cuda:1', or leave it out"
        )
    return device


_FUNCTION = "a function that takes a module"

_READERS: dict[str, Callable[[Any], Any]] = {
    "process_group": _process_group,
    "device_mesh": lambda value: _instance("device_mesh", value, DeviceMesh, "a DeviceMesh"),
    "sharding_strategy": lambda value: _choice("sharding_strategy", value, ShardingStrategy),
    "cpu_offload": _cpu_offload,
    "backward_prefetch": lambda value: _choice("backward_prefetch", value, BackwardPrefetch),
    "mixed_precision": _mixed_precision,
    "param_init_fn": lambda value: _instance("param_init_fn", value, Callable, _FUNCTION),
    "post_param_init_fn": lambda value: _instance("post_param_init_fn", value, Callable, _FUNCTION),
    "device_id": _device,
    "sync_module_states": lambda value: _flag("sync_module_states", value),
    "forward_prefetch": lambda value: _flag("forward_prefetch", value),
    "limit_all_gathers": bool,
}

# Arguments without effect: their defaults, and what holds instead.
_NO_EFFECT = {
    "limit_all_gathers": (True, "the gathers in flight are always bounded"),
    "use_orig_params": (False, "parameters are always the model's own, by their own names"),
}


def read_options(arguments: dict[str, Any]) -> Options:
    """Check a unit's arguments.

    Args:
        arguments: by FSDP's names; what concerns the full model (policy, ignored modules) is not among them.

    Raises:
        UserError: an argument is not known or its value not allowed; the text says what is.
    """
    for name, (default, instead) in _NO_EFFECT.items():
        if arguments.get(name, default) != default and name not in _told:
            _told.add(name)
            _logger.info("FSDP: %s=%s has no effect: %s", name, arguments[name], instead)
    unknown = [name for name in arguments if name not in _READERS and name not in _NO_EFFECT]
    if unknown:
        allowed = ", ".join({**_READERS, **_NO_EFFECT})
        raise UserError(f"FSDP: {unknown[0]} cannot be given for a single module: the policy may return {allowed}")
    return Options(**{name: _READERS[name](value) for name, value in arguments.items() if name in _READERS})


def ignored_states(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the modules and the parameters that are not sharded.

    Args:
        ignored: FSDP's ``ignored_states``: modules or parameters, not both kinds.

    Raises:
        UserError: both arguments are given, or something else than modules or parameters is in them, or a unit is.
    """
    if ignored_modules is not None and ignored is not None:
        raise UserError("FSDP: both ignored_modules and ignored_states are given: give ignored_states alone")
    name = "ignored_modules" if ignored_modules is not None else "ignored_states"
    given = ignored_modules if ignored_modules is not None else ignored if ignored is not None else ()
    try:
        found = list(given)  # type: ignore[arg-type]
    except TypeError:
        raise UserError(f"FSDP: {name} is a {type(given).__name__}: give a list") from None
    parameters = [item for item in found if isinstance(item, nn.Parameter)]
    modules = [item for item in found if isinstance(item, nn.Module)]
    kinds: list[list[Any]] = [modules] if name == "ignored_modules" else [modules, parameters]
    if all(len(kind) != len(found) for kind in kinds):
        allowed = "modules" if name == "ignored_modules" else "either modules or parameters"
        wrong = sorted({type(item).__name__ for item in found})
        raise UserError(f"FSDP: {name} contains {', '.join(wrong)}: give {allowed}")
    if sharded := [item for item in modules if isinstance(item, FSDPModule)]:
        raise UserError(f"FSDP: {name} contains a {type(sharded[0]).__name__}, which FSDP was applied to: leave it out")
    if module in modules:
        raise UserError(f"FSDP: {name} contains the module that is to be sharded itself: leave it out")
    below = {inner for outer in modules for inner in outer.modules() if not isinstance(inner, FSDPModule)}
    return below, {*parameters, *(p for inner in below for p in inner.parameters(recurse=False))}
