"""FSDP1's sharded tensors, which older checkpoints and ``load_sharded_optimizer_state_dict`` hand out, as DTensors."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from smp.fsdp.units import local_part


def is_sharded_tensor(value: Any) -> bool:
    """Whether a value is torch's ``ShardedTensor``."""
    return type(value).__name__ == "ShardedTensor"


def as_dtensor(value: Any, like: DTensor) -> DTensor:
    """This rank's part of a ``ShardedTensor``, placed as a parameter.

    Both are cut into equal chunks of rows, so over the same ranks nothing is exchanged; else the whole tensor is made
    for a moment. Collective then.

    Args:
        value: of ``like``'s shape, in one chunk of rows per rank.
        like: a sharded parameter.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants DTensors instead, which these become
        group: Any = value._process_group or dist.group.WORLD
        shards = [shard.tensor for shard in value.local_shards()]
    mesh = like.device_mesh
    if like.placements == (Shard(0),) and mesh.get_group() == group:
        local = shards[0] if shards else torch.empty(like.to_local().shape, dtype=value.dtype)
        if local.shape == like.to_local().shape:
            return DTensor.from_local(
                local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
            )
    return local_part(_whole(value, shards, group), like)


def _whole(value: Any, shards: list[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    rows, *rest = value.size()
    most = -(-rows // group.size())
    device = shards[0].device if shards else torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    own = torch.zeros(most, *rest, dtype=value.dtype, device=device)
    if shards:
        own[: len(shards[0])] = shards[0]
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts)[:rows]
