"""One unit: fill its parameters, broadcast them, apply torch's ``fully_shard``, and add what FSDP1 has beyond it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from smp.errors import UserError
from smp.fsdp.delayed import DelayedParamIniter
from smp.fsdp.materialize import materialize, own_modules, take_from_first_rank
from smp.fsdp.meshes import device_type, every_axis, mesh_of_split, resolve, shared_buffers, split_axis
from smp.fsdp.options import KEEPS_GATHERED, Options
from smp.fsdp.param_group import groups_of, is_taken, keep_promises, mark_taken
from smp.fsdp.policies import is_container
from smp.models.file_names import clean_name
from smp.parallel.activation_checkpoint import hide_from_selection
from smp.parallel.sharding import install_collectives, placement

_ATTRIBUTE = "_smp_unit"


@dataclasses.dataclass(eq=False)
class Unit:
    """State of a wrapped module.

    Attributes:
        strategy: after the rules of ``smp.init``.
        mesh: 1-D, or (replicate, shard); of experts that are split that of the parameters around them.
        modules: itself and the modules below, without other units and ignored modules.
        ignored_parameters: of its constructor and of the units below.
        root: no other unit that can be called is around it.
        syncs: a backward reduces gradients; not inside ``no_sync``.
        buffer_dtypes: of buffers that were cast, by their names in the plain module, their original dtype.
        summoned: its full parameters, inside ``summon_full_params``.
        state_dicts: the type that ``state_dict()`` gives.
    """

    options: Options
    strategy: ShardingStrategy
    mesh: DeviceMesh
    device: torch.device
    modules: list[nn.Module]
    ignored_parameters: set[nn.Parameter]
    root: bool = True
    syncs: bool = True
    buffer_dtypes: dict[str, torch.dtype] = dataclasses.field(default_factory=dict)
    summoned: Any = None
    state_dicts: StateDictSettings = dataclasses.field(
        default_factory=lambda: StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )
    )

    @property
    def first_rank(self) -> bool:
        """True on the first rank of the unit's mesh."""
        return all(self.mesh.get_local_rank(axis) == 0 for axis in range(self.mesh.ndim))


def unit_of(module: nn.Module) -> Unit | None:
    """Return the state of a module, or None if it is no unit."""
    return module.__dict__.get(_ATTRIBUTE)


def require_module(module: nn.Module) -> None:
    """Raise UserError for what is no module, such as the arguments in another order."""
    if not isinstance(module, nn.Module):
        raise UserError(f"FSDP: a {type(module).__name__} is given as the model: give the model that FSDP returned")


def units_below(module: nn.Module) -> Iterator[tuple[FSDPModule, Unit]]:
    """Yield the units in a module tree, outer ones first, ``module`` included."""
    require_module(module)
    for inner in module.modules():
        if (unit := unit_of(inner)) is not None:
            assert isinstance(inner, FSDPModule)
            yield inner, unit


def shards_of_gathered(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Map parameters that a forward without a backward left gathered to their shards, which the optimizer knows.

    Within forward and backward the result is empty: there, a module's parameters are those computed with.
    """
    found: dict[nn.Parameter, nn.Parameter] = {}
    for inner in module.modules():
        if not isinstance(inner, FSDPModule):
            continue
        state = inner._get_fsdp_state()
        if state._training_state.name != "IDLE" or state._state_ctx.iter_forward_root is not None:
            return {}
        for group in groups_of(inner):
            if group.is_unsharded:
                found.update(
                    (fsdp_param._unsharded_param, fsdp_param.sharded_param) for fsdp_param in group.fsdp_params
                )
    return found


def shard_unit(
    module: nn.Module,
    options: Options,
    *,
    ignored_modules: set[nn.Module],
    ignored_parameters: set[nn.Parameter],
) -> Unit:
    """Shard one unit in place; what is below it and sharded already stays as it is.

    Args:
        module: real, on the meta device, or both.
        ignored_parameters: left alone; grows by those of the units below.

    Raises:
        UserError: the module is sharded already, cannot be materialised, or its parameters do not go together.
    """
    if isinstance(module, FSDPModule):
        raise UserError(f"FSDP: the {type(module).__name__} is sharded already: apply FSDP to it once")
    kind = device_type(module, options)
    mesh, strategy = resolve(options, kind)
    axis = split_axis(module)
    over = mesh if axis is None else mesh_of_split(axis, mesh)
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    below, container = list(units_below(module)), is_container(module)
    if ran := [inner for inner, _ in below if not container and inner._get_fsdp_state()._is_root]:
        raise UserError(
            f"FSDP: the {type(ran[0]).__name__} in the {type(module).__name__} has run as the outermost FSDP module "
            f"already: wrap the module around it before its first forward"
        )
    ignored_parameters = ignored_parameters.union(*(unit.ignored_parameters for _, unit in below))
    modules = own_modules(module, ignored_modules)
    initer = getattr(options.param_init_fn, "__self__", None)
    # With sync_module_states some ranks may have none, and its values are replaced by the first rank's.
    if isinstance(initer, DelayedParamIniter) and not options.sync_module_states:
        initer.share_seed(every_axis(mesh, options), device)
    materialize(modules, options, device, ignored_parameters)
    if options.sync_module_states:
        take_from_first_rank(modules, over, device, ignored_parameters)
    own = {
        parameter: f"{name} of a {type(inner).__name__}"
        for inner in modules
        for name, parameter in inner.named_parameters(recurse=False)
        if parameter not in ignored_parameters
    }
    _check_parameters(own)
    mark_taken(own)
    for parameter in own:
        if not parameter.is_contiguous():  # shards are row-major; convolutions may have another order
            parameter.data = parameter.data.contiguous()
    unit = Unit(options, strategy, mesh, device, modules, ignored_parameters)
    _cast_buffers(module, unit)
    _fully_shard(module, unit, over)
    for _, inside in () if container else below:
        inside.root = False
    module.__dict__[_ATTRIBUTE] = unit
    for each, state in units_below(module):
        _set_input_cast(each, state)
    return unit


def _check_parameters(own: dict[nn.Parameter, str]) -> None:
    dtypes: dict[torch.dtype, str] = {}
    for parameter, where in own.items():
        if is_taken(parameter):
            raise UserError(
                f"FSDP: {where} is tied to a parameter of a module that is sharded already, and both would train "
                f"apart: wrap the module that contains both"
            )
        if parameter.numel() == 0:
            raise UserError(
                f"FSDP: {where} has the shape {tuple(parameter.shape)}, so there is nothing to shard: leave it out "
                f"of the model, or give it in ignored_states"
            )
        if parameter.ndim == 0:
            raise UserError(f"FSDP: {where} is a scalar, which cannot be sharded: give it the shape (1,)")
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, where)
    if len(dtypes) > 1:
        found = ", ".join(f"{where} is {dtype}" for dtype, where in dtypes.items())
        raise UserError(
            f"FSDP: a unit's trainable parameters must have one dtype: {found}: convert the model, or wrap them apart"
        )


def _cast_buffers(module: nn.Module, unit: Unit) -> None:
    mixed = unit.options.mixed_precision
    if mixed is None or mixed.buffer_dtype is None:
        return
    own = set(unit.modules)
    for path, inner in module.named_modules():
        for name, buffer in inner.named_buffers(recurse=False) if inner in own else ():
            if buffer.is_floating_point() and buffer.dtype != mixed.buffer_dtype:
                unit.buffer_dtypes[clean_name(f"{path}.{name}" if path else name)] = buffer.dtype
                buffer.data = buffer.to(mixed.buffer_dtype)


def _fully_shard(module: nn.Module, unit: Unit, mesh: DeviceMesh) -> None:
    options = unit.options
    mixed = options.mixed_precision
    policy = MixedPrecisionPolicy() if mixed is None else MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype)
    if is_container(module):  # torch refuses a class without a forward; the caller replaces the class again
        module.__class__ = type(type(module).__name__, (type(module),), {"forward": lambda self: None})
    # Pinned memory is a GPU's.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if options.cpu_offload else OffloadPolicy()
    fully_shard(
        module,
        mesh=mesh,
        # None: freed after forward, but for the root, whose backward is next.
        reshard_after_forward=False if unit.strategy in KEEPS_GATHERED else None,
        shard_placement_fn=placement_over(mesh, unit.mesh),
        mp_policy=policy,
        offload_policy=offload,
        ignored_params=unit.ignored_parameters,
    )
    assert isinstance(module, FSDPModule)
    use_collectives(module, mesh, of_tokens=unit.mesh, shared_buffers=shared_buffers())
    keep_promises(module)
    if options.backward_prefetch != BackwardPrefetch.BACKWARD_PRE:
        # An explicit list replaces the default; a unit that is gathered already is left alone: no prefetch.
        module.set_modules_to_backward_prefetch([module])


def placement_over(mesh: DeviceMesh, of_tokens: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Return the ``shard_placement_fn`` for ``mesh``: that of tokens, or one for what a folded axis splits."""
    return functools.partial(placement, ranks=1 if mesh == of_tokens else mesh.size(mesh.ndim - 1))


def use_collectives(
    module: FSDPModule, mesh: DeviceMesh, *, of_tokens: DeviceMesh | None = None, shared_buffers: bool = True
) -> None:
    """Average gradients on any backend, by smp's collectives where they are better than torch's.

    Args:
        module: ``fully_shard`` was applied to it, over ``mesh``.
        mesh: 1-D, or (replicate, shard).
        of_tokens: over whose ranks to average, which have other tokens; None: ``mesh``.
        shared_buffers: see :func:`smp.parallel.sharding.install_collectives`.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    if mesh.device_type == "cpu" or any(dist.get_backend(group) == "smddp" for group in groups):
        # gloo does not average: add, then divide. The quotient is the same.
        module.set_force_sum_reduction_for_comms(True)
    if of_tokens not in (None, mesh):
        # Backward has summed the gradients of the tokens that were sent here. As :func:`average_gradients` divides.
        ranks = of_tokens.size()
        module.set_force_sum_reduction_for_comms(True)
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
        module.set_all_reduce_hook(lambda gradients: gradients.div_(ranks))  # type: ignore[arg-type]
        hide_from_selection(module)
    if len(groups_of(module)) == 1:
        install_collectives(module, groups[-1], mesh.device_type, shared_buffers=shared_buffers)


def _set_input_cast(module: FSDPModule, unit: Unit) -> None:
    """Set whether a unit casts its inputs; the outermost does, so once more after a unit around it is made."""
    state, mixed = module._get_fsdp_state(), unit.options.mixed_precision
    casts = mixed is not None and (mixed.cast_forward_inputs or (unit.root and mixed.cast_root_forward_inputs))
    state._mp_policy = dataclasses.replace(state._mp_policy, cast_forward_inputs=casts)


def prefetch_in_forward(root: nn.Module) -> None:
    """Let every unit gather the one that follows it in the model, before it computes itself."""
    order = [inner for inner, unit in units_below(root) if unit.options.forward_prefetch]
    for inner, following in itertools.pairwise(order):
        inner.set_modules_to_forward_prefetch([following])


def full_tensor(sharded: DTensor) -> torch.Tensor:
    """Gather a sharded tensor into new memory, on the device of its mesh; collective."""
    with torch.no_grad():
        # Shards in host memory are gathered on the device that the backend serves.
        sharded = sharded.to(sharded.device_mesh.device_type)  # type: ignore[assignment]
        full = sharded.full_tensor().detach()
        shared = full.untyped_storage().data_ptr() == sharded.to_local().untyped_storage().data_ptr()
        return full.clone() if shared else full
