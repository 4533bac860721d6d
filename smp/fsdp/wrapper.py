"""``FullyShardedDataParallel``: FSDP1's constructor and methods over torch's ``fully_shard``, in place.

The module itself is returned, with its own class mixed with this one: ``isinstance`` is true, names and keys are the
plain model's, and ``model.config`` or ``model.generate`` work. Gradients are averaged over ranks, as FSDP1's are.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from smp.errors import UserError
from smp.fsdp import attributes, full_params, optimizer_states, param_group, state_dicts
from smp.fsdp.materialize import own_modules
from smp.fsdp.meshes import require_process_group, split_axis, warn_of_experts
from smp.fsdp.options import Options, ProcessGroups, ignored_states, read_options
from smp.fsdp.policies import choose_units, is_container
from smp.fsdp.units import (
    Unit,
    prefetch_in_forward,
    shard_unit,
    shards_of_gathered,
    unit_of,
    units_below,
)
from smp.parallel.activation_checkpoint import leave_out_cache
from smp.parallel.documents import keep_apart_in_script
from smp.parallel.grad_norm import clip_grad_norm_ as _clip_grad_norm
from smp.parallel.optimizers import following_optimizers
from smp.parallel.refusals import refuse_ddp
from smp.parallel.script_hooks import refuse_added

# Names of the constructor that a single unit does not have.
_OF_THE_MODEL = ("cls", "module", "auto_wrap_policy", "ignored_modules", "ignored_states")

_mixed: dict[tuple[type, type], type] = {}


def _wrapped_class(wrapper: type, original: type) -> type:
    """Return a class that is both; calling it makes the original, as a slice of a sharded ``nn.Sequential`` does."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return original(*args, **kwargs)

    if (wrapper, original) not in _mixed:
        _mixed[wrapper, original] = type(f"FSDP{original.__name__}", (wrapper, original), {"__new__": __new__})
    return _mixed[wrapper, original]


def _shard(
    wrapper: type, module: nn.Module, arguments: dict[str, Any], policy: Any, ignored: tuple[Any, Any]
) -> nn.Module:
    """Shard the units that the policy names, inner ones first, then the module itself."""
    if not isinstance(module, nn.Module):
        raise UserError(f"FSDP: module is a {type(module).__name__}: give a torch.nn.Module")
    require_process_group()
    options = read_options(arguments)
    if unit_of(module) is not None and policy is None:
        return module  # nothing is left to shard
    ignored_modules, ignored_parameters = ignored_states(module, *ignored)
    leave: dict[str, Any] = {"ignored_modules": ignored_modules, "ignored_parameters": ignored_parameters}
    chosen = choose_units(module, policy, arguments, **leave)
    if container := is_container(module):
        rest = own_modules(module, ignored_modules.union(chosen))
        if any(p not in ignored_parameters for inner in rest for p in inner.parameters(recurse=False)):
            raise UserError(
                f"FSDP: a {type(module).__name__} is never called, so nothing would gather its parameters: wrap its "
                f"members, or the module around it"
            )
    warn_of_experts(module)
    units: list[tuple[nn.Module, Options]] = []
    for inner, own in [*((inner, read_options(own)) for inner, own in chosen.items()), (module, options)]:
        # What a folded axis splits is sharded over other ranks: a unit of its own, before the one around it.
        split = [each for each in own_modules(inner, ignored_modules.union(dict(units))) if split_axis(each)]
        units += [*((each, own) for each in split if each is not inner), (inner, own)]
    with following_optimizers(module):
        for inner, own in units:
            original = type(inner)
            unit = shard_unit(inner, own, **leave)
            inner.__class__ = _wrapped_class(wrapper, original)
            state_dicts.register_hooks(inner, unit)
    refuse_ddp(module, "FSDP")
    leave_out_cache(module)
    keep_apart_in_script(module)
    if options.forward_prefetch and not container:
        prefetch_in_forward(module)
    if not ignored_parameters and not container:  # a script reduces the gradients of what it has ignored
        refuse_added(module, "FSDP")
    return module


def _deprecated(name: str, instead: str, kind: str = "") -> staticmethod:
    """Return a method that refuses a name that torch has deprecated; ``kind`` is the type that gives its result."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        config = ", None, FullOptimStateDictConfig(rank0_only=True)" if kind == "FULL_STATE_DICT" else ""
        where = f", inside FSDP.state_dict_type(model, StateDictType.{kind}{config})" if kind else ""
        raise UserError(f"FSDP.{name} is not available: call FSDP.{instead}{where}, as torch advises")

    return staticmethod(refuse)


class FullyShardedDataParallel(FSDPModule):
    """Shard a model's parameters, gradients and optimizer state over ranks, as torch's class of this name (FSDP1).

    The first sixteen arguments are FSDP1's, with torch's own enums and configurations, or the enums' names. The module
    is changed in place and returned. With :func:`smp.init` done, and neither ``process_group`` nor ``device_mesh``
    given, its mesh is used, and a ``hybrid_shard_degree`` above 0 decides the strategy, as in SMP v2.

    Args:
        module: the model, or a part of it; real or on the meta device.
        process_group: the ranks to shard over; for hybrid sharding (group to shard over, group to replicate over).
        sharding_strategy: FULL_SHARD unless given.
        cpu_offload: keep shards, gradients and so the optimizer's state in host memory.
        auto_wrap_policy: which modules become units; any of FSDP1's kinds.
        backward_prefetch: BACKWARD_PRE gathers the next unit during the computation; else it is gathered when needed.
        mixed_precision: dtypes of computation, reduction and buffers.
        ignored_modules: are not sharded, and their gradients not reduced.
        param_init_fn: called with every module that has to leave the meta device.
        device_id: where to shard and compute; must be this process's device.
        sync_module_states: take parameters and buffers from the first rank.
        forward_prefetch: gather the next unit before this one computes, in the order of the modules.
        limit_all_gathers: no effect, the gathers in flight are always bounded.
        use_orig_params: no effect, parameters are always the model's own.
        ignored_states: modules or parameters to ignore.
        device_mesh: instead of ``process_group``: 1-D, or (replicate, shard) for hybrid sharding.
        post_param_init_fn: SMP v2's: called with each unit's module after ``param_init_fn``.

    Raises:
        UserError: an argument's value is not allowed; the text says what is.
    """

    def __new__(
        cls,
        module: nn.Module,
        process_group: ProcessGroups | None = None,
        sharding_strategy: ShardingStrategy | str | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | str | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        post_param_init_fn: Callable[[nn.Module], None] | None = None,
    ) -> Any:
        """Shard ``module`` in place and return it."""
        arguments = {name: value for name, value in locals().items() if name not in _OF_THE_MODEL}
        return _shard(cls, module, arguments, auto_wrap_policy, (ignored_modules, ignored_states))

    def __init__(self, *args: Any, **kwargs: Any):
        """Do nothing: the module was made by its own class."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UserError("FSDP: a sharded model cannot be copied: make another one and load the state_dict() into it")

    @property
    def module(self) -> nn.Module:
        """The module itself, or its own submodule of that name, which its forward needs."""
        own = self.__dict__.get("_modules", {}).get("module")
        return self if own is None else own  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        """Read FSDP1's attributes, such as ``sharding_strategy`` and ``rank``; the module's own go first."""
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            unit = unit_of(self)  # type: ignore[arg-type]
            if unit is None or name not in attributes.READERS:
                raise
            return attributes.READERS[name](unit)

    def check_is_root(self) -> bool:
        """Return True if no other FSDP module that can be called is around this one."""
        unit = unit_of(self)  # type: ignore[arg-type]
        return unit is not None and unit.root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the FSDP modules in ``module``, outer ones first; with ``root_only`` only the outermost."""
        return [inner for inner, unit in units_below(module) if unit.root or not root_only]  # type: ignore[misc]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters; outside of forward and backward, the parameters are the shards."""
        shards = shards_of_gathered(self)  # type: ignore[arg-type]
        for name, parameter in super().named_parameters(*args, **kwargs):  # type: ignore[misc]
            yield name, shards.get(parameter, parameter)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Convert as ``nn.Module.to`` does, and note the parameters anew: torch may replace their contents."""
        result = super()._apply(*args, **kwargs)
        param_group.note_converted(self)
        return result

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply ``fn`` to every module with unsharded parameters, unit by unit; collective."""
        with full_params.summon_full_params(self, recurse=False):  # type: ignore[arg-type]
            return super().apply(fn)  # type: ignore[misc]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients without reducing them; the first backward after the context reduces all.

        Until then the parameters' ``grad`` is zeros. ``zero_grad`` of the model or an optimizer drops what accumulated.

        Raises:
            UserError: this is no root.
        """
        unit = self._root_unit("no_sync")
        before, unit.syncs = unit.syncs, False
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            unit.syncs = before
            self.set_requires_gradient_sync(before)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also those that accumulated under :meth:`no_sync`."""
        param_group.drop_accumulated(self)  # type: ignore[arg-type]
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``; collective.

        Returns:
            The norm before, a 0-d tensor, in fp32 or finer. If it is not finite, nothing is scaled.

        Raises:
            UserError: this is no root, or gradients are not reduced yet.
        """
        unit = self._root_unit("clip_grad_norm_")
        if param_group.accumulates(self):  # type: ignore[arg-type]
            raise UserError(
                "FSDP.clip_grad_norm_: gradients have accumulated under no_sync, and no backward has reduced them: run "
                "the last backward before it outside of no_sync, or drop them by zero_grad()"
            )
        norm = _clip_grad_norm(self, float(max_norm), float(norm_type))  # type: ignore[arg-type]
        if all(parameter.grad is None for parameter in self.parameters()):
            warnings.warn(
                f"Called FSDP.clip_grad_norm_() on rank {attributes.process_group(unit).rank()} with no gradients -- "
                f"returning the total norm in the default dtype {norm.dtype}",
                stacklevel=2,
            )
        if max_norm == 0:  # to smp.clip_grad_norm_ this means: only measure
            for parameter in self.parameters():  # type: ignore[attr-defined]
                if parameter.grad is not None:
                    parameter.grad.zero_()
        return norm

    def _root_unit(self, method: str) -> Unit:
        unit = unit_of(self)  # type: ignore[arg-type]
        if unit is None or not unit.root:
            raise UserError(f"FSDP.{method}: another FSDP module is around this one: call it on the outermost")
        return unit

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Refuse FSDP1's communication hook."""
        raise UserError(
            "FSDP.register_comm_hook is not available: set MixedPrecision(reduce_dtype=torch.bfloat16) to send less, "
            "call set_custom_reduce_scatter of torch's fully_shard on each of FSDP.fsdp_modules(model) for a sum of "
            "your own, or use DistributedDataParallel and its register_comm_hook"
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Allocate buffers by the process group, as torch's method of ``fully_shard``.

        Raises:
            UserError: the unit has smp's collectives, with separate buffers.
        """
        try:
            super().set_allocate_memory_from_process_group_for_comm(enable)
        except AssertionError:
            raise UserError(
                "FSDP.set_allocate_memory_from_process_group_for_comm: this unit communicates through smp's own "
                "buffers, which it would replace: leave it out"
            ) from None

    set_state_dict_type = staticmethod(state_dicts.set_state_dict_type)
    get_state_dict_type = staticmethod(state_dicts.get_state_dict_type)
    state_dict_type = staticmethod(state_dicts.chosen_state_dict_type)
    summon_full_params = staticmethod(full_params.summon_full_params)
    optim_state_dict = staticmethod(optimizer_states.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optimizer_states.optim_state_dict_to_load)
    rekey_optim_state_dict = staticmethod(TorchFSDP.rekey_optim_state_dict)
    full_optim_state_dict = _deprecated("full_optim_state_dict", "optim_state_dict", "FULL_STATE_DICT")
    sharded_optim_state_dict = _deprecated("sharded_optim_state_dict", "optim_state_dict", "SHARDED_STATE_DICT")
    shard_full_optim_state_dict = _deprecated("shard_full_optim_state_dict", "optim_state_dict_to_load")
    flatten_sharded_optim_state_dict = _deprecated("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    scatter_full_optim_state_dict = _deprecated(
        "scatter_full_optim_state_dict", "optim_state_dict_to_load", "FULL_STATE_DICT"
    )
