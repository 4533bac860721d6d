"""Experts' parameters on rank 0, one expert's matrix in flight at a time: all of a layer's can be 30 GB."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp.checkpoint.file_tensors import FileTensor
from smp.comm.cuda import batch_isend_irecv
from smp.local_shards import local_part
from smp.models.experts import expert_modules
from smp.models.file_keys import Slices
from smp.models.file_names import clean_name

_MATRICES = 3  # axes of a parameter that has a matrix of each expert


def matrices_of_experts(model: nn.Module) -> set[str]:
    """Return the names of the parameters that have a matrix of each expert of a layer."""
    return {
        clean_name(f"{path}.{name}")
        for path, module in expert_modules(model)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == _MATRICES
    }


class Shards(NamedTuple):
    """Shards of a parameter.

    Attributes:
        local: this rank's.
        parts: rank, offsets and sizes of each, once if replicas have it too.
    """

    local: torch.Tensor
    parts: list[tuple[int, tuple[int, ...], tuple[int, ...]]]


def shards_of(parameter: torch.Tensor) -> Shards:
    """Return which rank has what of a parameter; collective."""
    local, offsets = local_part(parameter.detach())
    said = [(offsets, tuple(local.shape))]
    if isinstance(parameter, DTensor):
        said *= dist.get_world_size()
        dist.all_gather_object(said, said[0])
    first = {part: rank for rank, part in reversed(list(enumerate(said)))}
    return Shards(local, [(rank, *part) for part, rank in first.items()])


def gathered(tensor: FileTensor, read: Callable[[str], Shards]) -> torch.Tensor | None:
    """Return a tensor of the files on rank 0, on its CPU; collective.

    Each rank that has some of an expert's matrix sends that to rank 0, in the order of the ranks.

    Args:
        read: returns the shards of a parameter by name; collective.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = None if rank else torch.empty(tensor.shape, dtype=tensor.dtype)
    for name, row in tensor.rows:
        local, parts = read(name)
        for source, offsets, sizes in parts:
            both = row.overlap(offsets, sizes) if rank in (0, source) else None
            for index in range(both[0][0].start, both[0][0].stop) if both else ():
                one = row.overlap((offsets[0] + index, *offsets[1:]), (1, *sizes[1:]))
                assert one is not None
                value = None
                if rank == source:
                    box = local[index : index + 1][one[0]]
                    value = row.in_order(box[0] if row.is_piece else box).to(tensor.dtype).contiguous()
                _deliver(value, source, found, one[1], local.device)
    return found


def _deliver(
    value: torch.Tensor | None, source: int, found: torch.Tensor | None, at: Slices, device: torch.device
) -> None:
    """Copy a value of rank ``source`` to rank 0's tensor."""
    if found is not None and value is not None:
        found[at].copy_(value)
    elif found is not None:
        value = torch.empty_like(found[at], device=device, memory_format=torch.contiguous_format)
        _wait(dist.irecv, value, source)
        found[at].copy_(value)
    elif value is not None:
        _wait(dist.isend, value, 0)


def _wait(operation: Callable, value: torch.Tensor, peer: int) -> None:
    # In a batch: NCCL makes a communicator of its own for each pair of ranks that sends otherwise.
    for work in batch_isend_irecv([dist.P2POp(operation, value, peer)]):
        work.wait()
