"""Fill parameters from the meta device, one unit at a time, and broadcast the first rank's values."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp.delayed_init import refuse_other_numbers
from smp.errors import UserError
from smp.fsdp.options import Options


def own_modules(unit: nn.Module, leave: set[nn.Module]) -> list[nn.Module]:
    """Return the modules of a unit, outer ones first, without other units, ``leave``, and all below these."""
    found, queue = [unit], collections.deque([unit])
    seen = {unit}
    while queue:
        for child in queue.popleft().children():
            if child not in seen and child not in leave and not isinstance(child, FSDPModule):
                seen.add(child)
                found.append(child)
                queue.append(child)
    return found


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's parameters and buffers, without its submodules', by name."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _on_meta(modules: list[nn.Module], ignored: set[nn.Parameter]) -> str | None:
    """Return the name of a parameter or buffer without values, or None."""
    for module in modules:
        for name, tensor in own_tensors(module):
            if tensor.is_meta and tensor not in ignored:
                return f"{name} of a {type(module).__name__}"
    return None


def materialize(modules: list[nn.Module], options: Options, device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Fill what is on the meta device as FSDP1 does: by ``param_init_fn``, else by ``reset_parameters``.

    Parameters that were tied stay tied, whatever the function does; it may fill a tied one through one module only.

    Args:
        modules: of one unit, outer ones first.
        device: where to allocate without a ``param_init_fn``.

    Raises:
        UserError: something is still on the meta device afterwards.
    """
    if _on_meta(modules, ignored) is None:
        return
    tied: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            tied.setdefault(parameter, []).append((module, name))
    for module in modules:
        if options.param_init_fn is not None:
            options.param_init_fn(module)
        else:
            _reset(module, device)
    for holders in tied.values():
        filled = [p for module, name in holders if not (p := getattr(module, name)).is_meta]
        for module, name in holders if filled else ():
            module._parameters[name] = filled[0]
    if options.post_param_init_fn is not None:
        options.post_param_init_fn(modules[0])
    if (left := _on_meta(modules, ignored)) is not None:
        raise UserError(
            f"FSDP: {left} is on the meta device, without values: give a param_init_fn that allocates and fills every "
            f"parameter and buffer of the module it is called with, such as smp.DelayedParamIniter(model)'s"
        )


def _reset(module: nn.Module, device: torch.device) -> None:
    if not any(tensor.is_meta for _, tensor in own_tensors(module)):
        return
    if not callable(getattr(module, "reset_parameters", None)):
        raise UserError(
            f"FSDP: a {type(module).__name__} on the meta device has no reset_parameters() to fill it: give a "
            f"param_init_fn, such as smp.DelayedParamIniter(model).get_param_init_fn()"
        )
    with torch.no_grad():
        module.to_empty(device=device, recurse=False)
        module.reset_parameters()  # type: ignore[operator]


@torch.no_grad()
def take_from_first_rank(
    modules: list[nn.Module], mesh: DeviceMesh, device: torch.device, ignored: set[nn.Parameter]
) -> None:
    """Broadcast parameters and buffers from the mesh's first rank; collective.

    Args:
        modules: of one unit.
        mesh: what it will be sharded and replicated over.
        device: to move the values to first; a backend may send nothing else.

    Raises:
        UserError: ranks have unequal numbers of them.
    """
    parameters = [p for module in modules for p in module.parameters(recurse=False) if p not in ignored]
    buffers = [b for module in modules for b in module.buffers(recurse=False)]
    tensors = dict.fromkeys((*parameters, *buffers))  # tied ones once
    refuse_other_numbers(
        len(tensors), [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1], device
    )
    for tensor in tensors:
        if not isinstance(tensor, DTensor) and (tensor.device != device or not tensor.is_contiguous()):
            # Row-major: memory is sent as it lies, and another rank's may have another order.
            tensor.data = tensor.detach().to(device).contiguous()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        # Replicas first: each sharding group then finds its values at its own first rank.
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                dist.broadcast(local, group=mesh.get_group(axis), group_src=0)
