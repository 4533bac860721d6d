"""From the meta device to real parameters, one unit at a time, and the first rank's values for everybody."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from smp.errors import UserError
from smp.fsdp.options import Options

Place = tuple[nn.Module, str]


def own_modules(unit: nn.Module, leave: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The modules of a unit, outer ones first; what ``leave`` names is left out, with all below it."""
    found, queue = [unit], collections.deque([unit])
    seen = {unit}
    while queue:
        for child in queue.popleft().children():
            if child not in seen and not leave(child):
                seen.add(child)
                found.append(child)
                queue.append(child)
    return found


def _parameters(modules: list[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, parameter


def _on_meta(modules: list[nn.Module], ignored: set[nn.Parameter]) -> str | None:
    """The name of a parameter or buffer without values, or None."""
    for module in modules:
        own = itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for name, tensor in own:
            if tensor.is_meta and tensor not in ignored:
                return f"{name} of a {type(module).__name__}"
    return None


def materialize(modules: list[nn.Module], options: Options, device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Give what is on the meta device its values, as FSDP1 does: ``param_init_fn``, else ``reset_parameters``.

    Parameters that were tied stay tied, whatever the function does.

    Args:
        modules: of one unit, outer ones first.
        options: its arguments.
        device: where to allocate without a ``param_init_fn``.
        ignored: parameters that are left alone.

    Raises:
        UserError: something is still on the meta device afterwards.
    """
    if _on_meta(modules, ignored) is None:
        return
    places: dict[nn.Parameter, list[Place]] = {}
    for module, name, parameter in _parameters(modules):
        places.setdefault(parameter, []).append((module, name))
    for module in modules:
        if options.param_init_fn is not None:
            options.param_init_fn(module)
        else:
            _reset(module, device)
    for (first, first_name), *others in places.values():
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]
    if options.post_param_init_fn is not None:
        options.post_param_init_fn(modules[0])
    if (left := _on_meta(modules, ignored)) is not None:
        raise UserError(
            f"FSDP: {left} is on the meta device, without values: give a param_init_fn that allocates and fills every "
            f"parameter and buffer of the module it is called with, such as smp.DelayedParamIniter(model)'s"
        )


def _reset(module: nn.Module, device: torch.device) -> None:
    own = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    if not any(tensor.is_meta for tensor in own):
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
    """Give parameters and buffers the values of the mesh's first rank; collective.

    Args:
        modules: of one unit.
        mesh: what it will be sharded and replicated over.
        device: to move the values to first; a backend may send nothing else.
        ignored: parameters that are left alone.
    """
    parameters = [p for _, _, p in _parameters(modules) if p not in ignored]
    buffers = [b for module in modules for b in module.buffers(recurse=False)]
    done: set[int] = set()
    for tensor in (*parameters, *buffers):
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        if not isinstance(tensor, DTensor) and (tensor.device != device or not tensor.is_contiguous()):
            # Row by row, as memory is sent as it lies, and may lie otherwise on another rank.
            tensor.data = tensor.detach().to(device).contiguous()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        # Replicas first: each sharding group then finds its values at its own first rank.
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                dist.broadcast(local, group=mesh.get_group(axis), group_src=0)
