"""What FSDP1 promises and ``fully_shard`` does not: unused parameters, dropped gradients, parameters changed since."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor


class ParameterGroup(FSDPParamGroup):
    """A unit's parameters. Its reduction takes part for all of them, and ``zero_grad`` reaches what it accumulated.

    Whole gradients that accumulate without reduction are out of an optimizer's sight. So the shard shows a gradient of
    zeros meanwhile: when it is gone, somebody has called ``zero_grad``.
    """

    # By parameter: the gradient that its shard showed after a backward without reduction, and whether it is ours.
    _shown: dict[Any, tuple[torch.Tensor, bool]]

    def post_backward(self, *unused: Any) -> None:
        """``fully_shard``'s own, with zeros for what this rank did not use: another may have."""
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
        # Zeroing shows nothing where a rank holds no element: what holds of the unit's others holds of it.
        group.drop_accumulated([*cleared, *unknown] if cleared and not kept else cleared)


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
        # One rank has it all: to take the parameters as they are now exchanges nothing.
        if group.is_unsharded and group.reshard_after_backward and _is_whole(group):
            group.reshard()


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
    module.register_forward_pre_hook(_before_forward, prepend=True)
    module.register_forward_hook(_after_forward)
