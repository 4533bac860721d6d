"""``smp.fully_shard``: torch's function with smp's collectives."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as _fully_shard

from smp.fsdp.meshes import default_mesh, mesh_of_split, shared_buffers, split_axis
from smp.fsdp.units import placement_over, use_collectives
from smp.parallel.activation_checkpoint import leave_out_cache
from smp.parallel.documents import keep_apart_in_script
from smp.parallel.optimizers import following_optimizers
from smp.parallel.refusals import refuse_ddp
from smp.parallel.script_hooks import reshard_after_evaluation


def fully_shard(module: Any, *, mesh: DeviceMesh | None = None, **arguments: Any) -> Any:
    """Apply torch's ``fully_shard`` (FSDP2), averaging gradients on any backend and with smp's collectives.

    Args:
        module: a module, or a list of modules that make one unit.
        mesh: 1-D, or (replicate, shard); None: that of :func:`smp.init`, before it a 1-D mesh of all ranks.
        arguments: torch's others: ``reshard_after_forward``, ``shard_placement_fn``, ``mp_policy``,
            ``offload_policy``, ``ignored_params``, ``dp_mesh_dims``.

    Returns:
        What torch returns: ``module``, changed in place.
    """
    mesh = mesh or default_mesh()
    modules = [module] if isinstance(module, nn.Module) else module
    with following_optimizers(*modules):
        for each in modules:
            _shard_split(each, mesh, arguments)
        if all(map(split_axis, modules)):
            return module
        result = _fully_shard(module, mesh=mesh, **arguments)
    first = modules[0]
    assert isinstance(first, FSDPModule)
    reshard_after_evaluation(modules[0])
    refuse_ddp(modules[0], "smp.fully_shard")
    for each in modules:
        leave_out_cache(each)
        keep_apart_in_script(each)
    group = first._get_fsdp_state()._fsdp_param_group
    if group is not None and arguments.get("dp_mesh_dims") is None:
        use_collectives(first, group.mesh_info.mesh, shared_buffers=shared_buffers())
    return result


def _shard_split(module: nn.Module, mesh: DeviceMesh | None, arguments: dict[str, Any]) -> None:
    """Shard what ``smp.transform`` has split along a folded axis, as units of their own inside of the module."""
    for inner in list(module.modules()):
        if mesh is None or isinstance(inner, FSDPModule) or (axis := split_axis(inner)) is None:
            continue
        over = mesh_of_split(axis, mesh)
        _fully_shard(inner, mesh=over, **{"shard_placement_fn": placement_over(over, mesh)} | arguments)
        assert isinstance(inner, FSDPModule)
        use_collectives(inner, over, of_tokens=mesh, shared_buffers=shared_buffers())
