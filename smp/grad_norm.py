"""Global gradient norm and clipping over sharded and replicated parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


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


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter] | nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``; collective.

    Parameters may lie on different meshes (torch's own function refuses that): squares are summed locally per
    set of sharding groups, all-reduced over those groups, then added.

    Args:
        parameters: a module or its parameters; those without a gradient are skipped.
        max_norm: the bound; 0 or infinity only measures.

    Returns:
        The norm before clipping, a 0-d tensor, the same on every rank. If it is not finite, nothing is scaled.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    local: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            local[_sharded_groups(gradient)].append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    if not local:
        return torch.tensor(0.0)
    squares = []
    for groups, gradients in local.items():
        norms = torch.stack(torch._foreach_norm(gradients))
        square = norms.to(torch.promote_types(norms.dtype, torch.float32)).square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    norm = torch.stack(squares).sum().sqrt()
    if max_norm > 0 and not math.isinf(max_norm):
        # The same formula as torch.nn.utils.clip_grad_norm_, so that runs compare with other trainers.
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        # Left as they are, they still tell where it came from.
        scale = torch.where(norm.isfinite(), scale, torch.ones_like(scale))
        for gradients in local.values():
            torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
    return norm
