"""What FSDP1 promises and ``fully_shard`` does not: unused parameters, dropped gradients, parameters changed since."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from smp.errors import UserError


class Shard(FSDPParam):
    """A parameter's shard, which knows whether somebody has assigned to its ``.data``.

    Of a DTensor that exchanges the storage which it names, and not the local tensor that is computed with: the value
    would be lost. It cannot be found again either, so it is refused.
    """

    _storage: torch.UntypedStorage  # kept, so that no other one has its address

    def note_storage(self) -> None:
        """Take the parameter for unassigned as it is now."""
        self._storage = self.sharded_param.untyped_storage()

    def reset_sharded_param(self) -> None:
        """torch's own after ``load_state_dict`` and conversions."""
        if not isinstance(getattr(self._module_info.module, self._module_info.param_name), DTensor):
            return  # summon_full_params shows the whole, and writes what was loaded back at its end
        super().reset_sharded_param()
        self.note_storage()

    def refuse_assigned(self) -> None:
        """Raise UserError if ``.data`` was assigned."""
        if self.sharded_param.untyped_storage()._cdata != self._storage._cdata:
            where = f"{self._module_info.param_name} of a {type(self._module_info.module).__name__}"
            raise UserError(
                f"FSDP: .data of {self._param_fqn or where} was assigned, which has no effect on a sharded parameter: "
                f"write param.data.copy_(value), with backups as param.data.clone(), or assign inside "
                f"FSDP.summon_full_params"
            )


class ParameterGroup(FSDPParamGroup):
    """A unit's parameters. Its reduction takes part for all of them, and ``zero_grad`` reaches what it accumulated.

    Whole gradients that accumulate without reduction are out of an optimizer's sight. So the shard shows a gradient of
    zeros meanwhile: when it is gone, somebody has called ``zero_grad``.
    """

    # By parameter: the gradient that its shard showed after a backward without reduction, and whether it is ours.
    _shown: dict[Any, tuple[torch.Tensor, bool]]

    def post_backward(self, *unused: Any) -> None:
        """``fully_shard``'s own, with zeros for what this rank did not use: another may have."""
        if self._orig_dtype is None:  # all was frozen at the first forward
            self._init_mp_dtypes()
        if self.reduce_grads:
            self._hide_zeros()
            self._fill_unused()
        elif not all(hasattr(held, "_unsharded_param") for held in self.fsdp_params):
            return  # never gathered, so never used
        super().post_backward(*unused)
        if not self.reduce_grads:
            self._show_zeros()

    def _fill_unused(self) -> None:
        held = [p for p in self.fsdp_params if hasattr(p, "_unsharded_param")]
        accumulated = any(p.unsharded_accumulated_grad is not None for p in held)
        own = [_accumulated(p) for p in held]
        found = [gradient for gradient in own if gradient is not None]
        # Without a gradient here, a unit that backward has come to may have one on another rank.
        if not found and self._training_state.name != "PRE_BACKWARD":
            return
        if accumulated:  # all of one dtype: some were converted when they accumulated
            for parameter in held:
                parameter.accumulate_unsharded_grad_if_needed()
                if parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()
            found = [gradient for p in held if (gradient := _accumulated(p)) is not None]
        for parameter, gradient in zip(held, own, strict=True):
            if gradient is None and parameter.sharded_param.requires_grad:
                whole = parameter._unsharded_param.detach()
                # Read of its shape alone: its memory may be free already.
                dtype = found[0].dtype if found else whole.dtype
                parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype)

    @torch.no_grad()
    def _show_zeros(self) -> None:
        for parameter in self.fsdp_params:
            if parameter in self._shown or _accumulated(parameter) is None:
                continue
            shown = parameter.sharded_param.grad
            if shown is None:
                # Negative, which counts as nothing: ``zero_grad(set_to_none=False)`` makes it positive.
                shown = parameter.sharded_param.grad = torch.full_like(parameter.sharded_param, -0.0)
                self._shown[parameter] = (shown, True)
            elif bool(_local(shown).any()):  # else it looks the same when it is cleared
                self._shown[parameter] = (shown, False)

    def _hide_zeros(self) -> None:
        for parameter, (shown, ours) in self._shown.items():
            if ours and parameter.sharded_param.grad is shown:
                parameter.sharded_param.grad = None
        self._shown.clear()

    def drop_accumulated(self, parameters: Any = None) -> None:
        """Forget gradients that are not reduced yet, of all parameters or those given."""
        for parameter in self.fsdp_params if parameters is None else parameters:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
            shown, ours = self._shown.pop(parameter, (None, False))
            if ours and parameter.sharded_param.grad is shown:
                parameter.sharded_param.grad = None

    def take_dtypes(self) -> None:
        """Compute in the dtype that the shards have now, not in the one of the first forward."""
        if not hasattr(self, "_orig_dtype"):
            return  # the first forward will
        before = self._orig_dtype
        self._init_mp_dtypes()
        if self._orig_dtype == before:
            return
        for parameter in self.fsdp_params:
            parameter.all_gather_outputs = []
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                del parameter._unsharded_param

    def refuse_assigned(self) -> None:
        """Raise UserError if ``.data`` of a parameter was assigned."""
        for parameter in self.fsdp_params:
            if isinstance(parameter, Shard):
                parameter.refuse_assigned()

    @property
    def accumulates(self) -> bool:
        """Whether there are gradients that are not reduced yet."""
        return any(_accumulated(parameter) is not None for parameter in self.fsdp_params)


def _accumulated(parameter: Any) -> torch.Tensor | None:
    if parameter.unsharded_accumulated_grad is not None:
        return parameter.unsharded_accumulated_grad
    whole = getattr(parameter, "_unsharded_param", None)
    return None if whole is None else whole.grad


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _groups(module: nn.Module) -> Iterator[ParameterGroup]:
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            for group in inner._get_fsdp_state()._fsdp_param_groups:
                if isinstance(group, ParameterGroup):
                    yield group


def drop_accumulated(module: nn.Module) -> None:
    """Forget what the units in a module have accumulated without reducing it."""
    for group in _groups(module):
        group.drop_accumulated()


@torch.no_grad()
def drop_cleared(module: nn.Module) -> None:
    """Forget what was accumulated of parameters whose gradients somebody has cleared since."""
    found: list[tuple[ParameterGroup, list[Any], list[Any], list[Any]]] = []
    for group in _groups(module):
        cleared, kept, unknown = [], [], []
        for parameter, (shown, ours) in group._shown.items():
            if parameter.sharded_param.grad is not shown:
                cleared.append(parameter)
            elif (local := _local(shown)).numel() == 0:
                unknown.append(parameter)
            # The first element tells of them all: they are cleared together.
            elif not bool(local.flatten()[0].signbit()) if ours else not bool(local.any()):
                cleared.append(parameter)
            else:
                kept.append(parameter)
        found.append((group, cleared, kept, unknown))
    # Zeroing shows nothing where a rank holds no element: what holds of the others holds of it, the unit's first.
    all_cleared = any(cleared for _, cleared, _, _ in found) and not any(kept for _, _, kept, _ in found)
    for group, cleared, kept, unknown in found:
        group.drop_accumulated([*cleared, *unknown] if all_cleared or (cleared and not kept) else cleared)


def accumulates(module: nn.Module) -> bool:
    """Whether a unit in a module has gradients that are not reduced, and that nobody has cleared."""
    drop_cleared(module)
    return any(group.accumulates for group in _groups(module))


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep a hook out of ``torch.compile``'s graphs, as torch does with its own."""

    @functools.wraps(hook)
    def run(*args: Any) -> None:
        torch._dynamo.disable(hook, recursive=True)(*args)

    return run


def _outermost_of_forward(module: Any) -> bool:
    state = module._get_fsdp_state()
    return state._state_ctx.iter_forward_root is None and state._training_state.name == "IDLE"


@_untraced
def _before_forward(module: nn.Module, args: Any) -> None:
    if not _outermost_of_forward(module):
        return
    drop_cleared(module)
    for group in _groups(module):
        group.refuse_assigned()
        # One rank has it all: to take the parameters as they are now exchanges nothing.
        if group.is_unsharded and group.reshard_after_backward and _is_whole(group):
            group.reshard()


def refuse_assigned(module: Any) -> None:
    """Raise UserError if ``.data`` of a parameter of this unit was assigned."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        if isinstance(group, ParameterGroup):
            group.refuse_assigned()


def _is_whole(group: FSDPParamGroup) -> bool:
    return getattr(group.mesh_info, "shard_mesh_size", 1) == 1


@_untraced
def _after_forward(module: nn.Module, args: Any, output: Any) -> None:
    """Free what no backward will: parameters may change before the next forward."""
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
    """Make one unit keep them; ``fully_shard`` was applied to it."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group.__class__, group._shown = ParameterGroup, {}
        for parameter in group.fsdp_params:
            parameter.__class__ = Shard
            Shard.note_storage(parameter)
    module.register_forward_pre_hook(_before_forward, prepend=True)
    module.register_forward_hook(_after_forward)
