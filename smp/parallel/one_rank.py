"""``fully_shard`` over a group of one rank, which has nothing to gather and, without replicas, nothing to reduce.

torch takes copies, buffers and streams as for many ranks all the same. Here a parameter is cast into what is computed
with, without a copy between, or is computed with itself where it has that dtype, as frozen ones have. Without replicas
a parameter's gradient is its shard's as soon as backward has made it; and all is on one stream, so that the memory of
gradients serves activations again.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from smp.parallel.gradient_sum import sum_of


def use_in_place(module: FSDPModule, *, reduces: bool) -> None:
    """Let a module that is sharded over one rank neither gather nor, without replicas, reduce through buffers.

    Args:
        reduces: whether this rank has all of the sum; on one stream, as gradients are made on that of backward.
    """
    group = cast(Any, module)._get_fsdp_state()._fsdp_param_group
    if group is None:  # a root of which every child is a unit has none
        return
    gather, finalize, unit = group.wait_for_unshard, group.finalize_backward, weakref.ref(module)

    @functools.wraps(gather)
    def wait_for_unshard() -> None:
        if group._all_gather_result is None:
            return
        for each in group.fsdp_params:
            _choose_memory(each)
        gather()
        for each in group.fsdp_params if reduces else ():
            leaf = each._unsharded_param
            if leaf.requires_grad and not leaf._post_accumulate_grad_hooks:
                # By weak references: autograd's are not seen by Python's collector of circles.
                leaf.register_post_accumulate_grad_hook(functools.partial(_reduce, unit, weakref.ref(each)))

    @functools.wraps(finalize)
    def finalize_backward() -> None:
        finalize()
        sums = sum_of(module)
        if sums is not None and sums.last:  # of parameters that the last micro-batch has not used
            for each, total in sums.partials.items():
                _set_gradient(each, total)
            sums.partials.clear()

    group.wait_for_unshard, group.finalize_backward = wait_for_unshard, finalize_backward


def _choose_memory(parameter: Any) -> None:
    """Choose what ``fully_shard`` copies a parameter into: memory of the dtype of the computation, or itself."""
    data = parameter._sharded_param_data
    if hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):
        return
    if "free_unsharded_param" in vars(parameter) and parameter.all_gather_outputs[0] is not data:
        del parameter.free_unsharded_param, parameter._unsharded_param  # a script has replaced the parameter
        parameter.all_gather_outputs = []
    if parameter.param_dtype is not None:
        parameter.init_all_gather_outputs([data.numel()], [parameter.param_dtype], 1, parameter.device)
        parameter.param_dtype = None  # or torch would cast into other memory, and copy that
    elif not (parameter.all_gather_outputs or parameter.offload_to_cpu) and _fills_its_memory(data):
        parameter.all_gather_outputs = [data]  # a copy into itself is none
        parameter.free_unsharded_param = lambda: None


def _fills_its_memory(data: torch.Tensor) -> bool:
    return data.untyped_storage().nbytes() == data.nbytes  # else fully_shard would resize it


@torch.no_grad()
def _reduce(unit: Any, weight: Any, unsharded: torch.Tensor) -> None:
    """Make a gradient that backward has just made that of the parameter's shard, which is all of it.

    torch's are gradients that it sums before it reduces them, and those for which a script has set a hook or a factor.

    Args:
        unit: reference to the module that the parameter is of.
        weight: reference to what ``fully_shard`` has of the parameter.
    """
    module, parameter = unit(), weight()
    group, sums = module._get_fsdp_state()._fsdp_param_group, sum_of(module)
    summed = not group.reduce_grads or parameter.unsharded_accumulated_grad is not None
    asked = group._all_reduce_hook is not sums or len(unsharded._post_accumulate_grad_hooks or {}) > 1
    # The second of torch 2.13.
    asked |= any(getattr(group, name, None) for name in ("gradient_divide_factor", "reduce_scatter_unused_params"))
    if summed or asked:
        return
    gradient = parameter.unsharded_grad_data.detach()
    unsharded.grad = None
    if sums is not None and (gradient := sums.add(parameter, gradient)) is None:
        return
    _set_gradient(parameter, gradient)


def _set_gradient(parameter: Any, gradient: torch.Tensor) -> None:
    """Add to the gradient of a parameter's shard, and run its hooks."""
    shard = parameter.sharded_param
    if shard.grad is None:
        shard.grad = parameter.to_sharded_dtensor(gradient.to(shard.dtype))
    else:
        shard.grad._local_tensor += gradient
    for hook in (shard._post_accumulate_grad_hooks or {}).values():
        hook(shard)


def use_one_stream(model: nn.Module) -> None:
    """Let a model that is sharded over one rank, and has no replicas, do all on the stream of its first forward.

    [Note: one stream] The caching allocator keeps a pool for each stream. ``fully_shard`` makes fp32 gradients on its
    stream of reductions: their memory is then no activation's again, which is a gradient of all parameters more.
    The streams are those of this model's state: other models keep theirs.
    """
    context = cast(Any, model)._get_fsdp_state()._comm_ctx
    lazily = context.lazy_init

    def lazy_init(device: torch.device) -> None:
        lazily(device)
        own = context.device_handle.current_stream()
        for name in ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"):
            setattr(context, name, own)

    context.lazy_init = lazy_init
