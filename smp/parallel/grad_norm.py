"""Global gradient norm and clipping over sharded and replicated parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor

from smp.errors import UserError
from smp.local_shards import local_tensor
from smp.parallel.gradient_sum import sum_of
from smp.parallel.sharding import fsdp_modules

_SCALED = 1 << 24  # elements at a time, of narrow gradients


def _sharded_groups(gradient: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups over which a gradient is sharded; a replicated one has none."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        # Not `is_shard`: a DTensor that is sharded twice along one axis has a placement that is no Shard.
        if not placement.is_replicate() and mesh.size(axis) > 1
    )


def _order(groups: tuple[dist.ProcessGroup, ...]) -> tuple[tuple[int, ...], ...]:
    """Return a sort key of sets of groups, in the same order on every rank: stride, size and ranks of each group."""
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    return tuple((own[1] - own[0], len(own), *own) for own in ranks)


def _computing_device(gradient: torch.Tensor) -> torch.device:
    """Return the device that a norm is reduced on: the GPU also for gradients that are offloaded to the CPU."""
    if isinstance(gradient, DTensor) and gradient.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return gradient.device


def _norms(gradients: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return the norm of each local gradient, 0-d, fp32 or finer."""
    if math.isinf(norm_type):  # undefined for an empty shard
        gradients = [g if g.numel() else g.new_zeros(1) for g in gradients]
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, gradient in enumerate(gradients):
        by_dtype[gradient.dtype].append(index)
    found: dict[int, torch.Tensor] = {}
    for dtype, indices in by_dtype.items():
        wide = torch.promote_types(dtype, torch.float32)  # a norm above 65504 would be infinite in fp16
        own = [gradients[index] for index in indices]
        if norm_type in (1.0, 2.0, math.inf):
            norms = list(torch._foreach_norm(own, norm_type, dtype=wide))
        else:
            norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=wide) for gradient in own]
        found.update(zip(indices, norms, strict=True))
    return [found[index] for index in range(len(gradients))]


def _require_reduced(model: nn.Module) -> None:
    """Refuse gradients that no backward has reduced, which no norm and no update would have."""
    for module in fsdp_modules(model):
        group = cast(Any, module)._get_fsdp_state()._fsdp_param_group
        # The first is reduced over the sharding group and not over replicas, the others are not reduced at all.
        sums = sum_of(module)
        found = [] if group is None else [group._partial_reduce_output]
        found += [] if sums is None else [sums.partial, *sums.partials.values()]
        for each in group.fsdp_params if found else ():
            found += [each.unsharded_accumulated_grad, getattr(getattr(each, "_unsharded_param", None), "grad", None)]
        if any(gradient is not None for gradient in found):
            raise UserError(
                "clip_grad_norm_: gradients have accumulated that no backward has reduced: call "
                "smp.set_gradient_sync(model, last=True, ...) before the last micro-batch of each step, also of one "
                "with fewer micro-batches"
            )


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter] | nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    norms: dict[nn.Parameter, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; collective.

    Parameters may lie on different meshes (torch's own function refuses that): powers are summed locally per
    set of sharding groups, all-reduced over those groups, then added.

    Args:
        parameters: a module or its parameters; those without a gradient are skipped.
        max_norm: the bound; 0 or infinity only measures.
        norm_type: of the p-norm, above 0; may be infinity.
        norms: receives the norm of each parameter's gradient on this rank, 0-d.

    Returns:
        The norm before clipping, a 0-d tensor, the same on every rank. If it is not finite, nothing is scaled.

    Raises:
        UserError: ``max_norm`` below 0, ``norm_type`` not above 0, or a module's gradients are not reduced yet.
    """
    if not max_norm >= 0:
        raise UserError(f"clip_grad_norm_: max_norm is {max_norm}: give a number from 0")
    if isinstance(parameters, TorchFSDP):  # its parameters are plain tensors, which do not show that they are shards
        return parameters.clip_grad_norm_(max_norm or math.inf, norm_type)
    if not norm_type > 0:
        raise UserError(f"clip_grad_norm_: norm_type is {norm_type}: give a number above 0, or infinity")
    if isinstance(parameters, nn.Module):
        _require_reduced(parameters)
        parameters = parameters.parameters()
    by_groups: dict[tuple, list[tuple[nn.Parameter, torch.Tensor]]] = defaultdict(list)
    device = None
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            found = _computing_device(gradient)
            device = found if device is None or found.type == "cuda" else device
            # The local tensor aliases the DTensor's storage: scaling it below scales what the optimizer reads.
            by_groups[_sharded_groups(gradient)].append((parameter, local_tensor(gradient)))
    if not by_groups:
        return torch.tensor(0.0)
    largest = math.isinf(norm_type)
    powers = []
    # [Note: Order of the norm's collectives] A rank is in several of these groups. Ranks that came to them in another
    # order, as that of their parameters may be, would wait for each other without end: the key is a fact of the mesh.
    # Groups of the same ranks are one: DTensor takes equal meshes for one, so that a process that has made two has
    # gradients over the groups of either, which no fact of the mesh tells apart.
    merged: dict[tuple, tuple[tuple[dist.ProcessGroup, ...], list[tuple[nn.Parameter, torch.Tensor]]]] = {}
    for groups, pairs in by_groups.items():
        merged.setdefault(_order(groups), (groups, []))[1].extend(pairs)
    for _, (groups, pairs) in sorted(merged.items()):
        own = _norms([gradient for _, gradient in pairs], norm_type)
        if norms is not None:
            norms.update((parameter, norm) for (parameter, _), norm in zip(pairs, own, strict=True))
        stacked = torch.stack(own)
        power = (stacked.max() if largest else stacked.pow(norm_type).sum()).to(device)
        # Axis after axis, which makes the sum over all of their ranks. A replicated axis is in no key: its ranks have
        # the same power, which a sum would count once for each of them.
        for group in groups:
            dist.all_reduce(power, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        powers.append(power)
    total = torch.stack(powers)
    norm = total.max() if largest else total.sum().sqrt() if norm_type == 2 else total.sum().pow(1.0 / norm_type)
    if max_norm > 0 and not math.isinf(max_norm):
        # The same formula as torch.nn.utils.clip_grad_norm_, so that runs compare with other trainers.
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        # Unscaled gradients still show which parameter is not finite. Not by `if`: the host would wait for the device,
        # and for all ranks, in every step.
        scale = torch.where(norm.isfinite(), scale, torch.ones_like(scale))
        for pairs in by_groups.values():
            _scale_([gradient for _, gradient in pairs], scale)
    return norm


def _scale_(gradients: list[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiply gradients, each by the scale in at least fp32: in bf16 it would be off by up to 1/256."""
    if gradients[0].dtype.itemsize >= scale.dtype.itemsize:
        torch._foreach_mul_(gradients, scale.to(gradients[0]))
        return
    for gradient in gradients:
        factor, rows = scale.to(gradient.device), len(gradient) if gradient.dim() else 0
        for part in gradient.split(max(1, _SCALED * rows // max(1, gradient.numel()))) if rows else [gradient]:
            part.copy_(part.to(scale.dtype) * factor)
