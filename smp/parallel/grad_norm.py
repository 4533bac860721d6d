"""Global gradient norm and clipping over sharded and replicated parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp.errors import UserError


def _sharded_groups(gradient: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which a gradient is split; a replicated one has none."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        # Not `is_shard`: a DTensor that is split twice along one axis has a placement that is no Shard.
        if not placement.is_replicate() and mesh.size(axis) > 1
    )


def _place(groups: tuple[dist.ProcessGroup, ...]) -> list[tuple[int, int, str]]:
    """What orders sets of groups alike on every rank: the axes of the mesh, by stride and size."""
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    return [(own[1] - own[0], len(own), group.group_name) for own, group in zip(ranks, groups, strict=True)]


def _computing_device(gradient: torch.Tensor) -> torch.device:
    """Where a norm is reduced: on the GPU, if the gradient is kept on the CPU for it."""
    if isinstance(gradient, DTensor) and gradient.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return gradient.device


def _norm_power(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The ``norm_type``-th power of the norm of some local gradients (for infinity: the norm), 0-d, fp32 or finer."""
    if math.isinf(norm_type):  # of nothing, which a rank may hold of a parameter, it is undefined
        gradients = [g if g.numel() else g.new_zeros(1) for g in gradients]
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_dtype[gradient.dtype].append(gradient)
    found: list[torch.Tensor] = []
    for dtype, own in by_dtype.items():
        wide = torch.promote_types(dtype, torch.float32)  # a norm above 65504 would be infinite in fp16
        if norm_type in (1.0, 2.0, math.inf):
            found += torch._foreach_norm(own, norm_type, dtype=wide)
        else:
            found += [torch.linalg.vector_norm(gradient, norm_type, dtype=wide) for gradient in own]
    norms = torch.stack(found)
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter] | nn.Module, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; collective.

    Parameters may lie on different meshes (torch's own function refuses that): powers are summed locally per
    set of sharding groups, all-reduced over those groups, then added.

    Args:
        parameters: a module or its parameters; those without a gradient are skipped.
        max_norm: the bound; 0 or infinity only measures.
        norm_type: of the p-norm, above 0; may be infinity.

    Returns:
        The norm before clipping, a 0-d tensor, the same on every rank. If it is not finite, nothing is scaled.

    Raises:
        UserError: a number that is no bound, or no p.
    """
    if not max_norm >= 0:
        raise UserError(f"clip_grad_norm_: max_norm is {max_norm}: give a number from 0")
    if not norm_type > 0:
        raise UserError(f"clip_grad_norm_: norm_type is {norm_type}: give a number above 0, or infinity")
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    local: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    device = None
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            found = _computing_device(gradient)
            device = found if device is None or found.type == "cuda" else device
            local[_sharded_groups(gradient)].append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    if not local:
        return torch.tensor(0.0)
    largest = math.isinf(norm_type)
    powers = []
    for groups in sorted(local, key=_place):  # ranks may give their parameters in orders of their own
        power = _norm_power(local[groups], norm_type).to(device)
        for group in groups:
            dist.all_reduce(power, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        powers.append(power)
    total = torch.stack(powers)
    norm = total.max() if largest else total.sum().sqrt() if norm_type == 2 else total.sum().pow(1.0 / norm_type)
    if max_norm > 0 and not math.isinf(max_norm):
        # The same formula as torch.nn.utils.clip_grad_norm_, so that runs compare with other trainers.
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        # Left as they are, they still tell where it came from.
        scale = torch.where(norm.isfinite(), scale, torch.ones_like(scale))
        for gradients in local.values():
            torch._foreach_mul_(gradients, scale.to(gradients[0]))
    return norm
