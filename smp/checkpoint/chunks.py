"""Which part of each tensor a rank writes, and which it needs."""

from __future__ import annotations

import zlib
from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from smp.checkpoint.files import Piece


def run_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state by name; loading writes into these very tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optim.{key}.{name}"] = value
    return tensors


def rng_tensors(rank: int) -> dict[str, torch.Tensor]:
    """This rank's generator states, under keys of its own."""
    states = {f"rng.cpu.{rank:05d}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.cuda.{rank:05d}"] = torch.cuda.get_rng_state()
    return states


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What this rank holds of a tensor, and the index of its first element in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    local = tensor.to_local()
    if local.numel() == 0:
        return local, (0,) * tensor.dim()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local, tuple(offsets)


def _is_writer(name: str, tensor: torch.Tensor, *, rank: int, world_size: int, turn: int) -> bool:
    """Whether this rank is the one, of all that hold the same part, whose turn it is to write it."""
    if not isinstance(tensor, DTensor):
        return turn % world_size == rank
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise AssertionError(f"{name} is a sum that has not been made")
        if placement.is_replicate() and turn % mesh.size(axis) != coordinate[axis]:
            return False
    return True


def pieces_to_write(
    tensors: dict[str, torch.Tensor],
    *,
    rank: int,
    world_size: int,
    everything: bool,
    of_rank0: Collection[str] = (),
) -> list[Piece]:
    """What this rank writes, on the tensors' devices.

    Args:
        everything: all that the rank holds, instead of its share of what several ranks hold.
        of_rank0: tensors that may differ among the ranks that hold them, so that the first one's are taken, all of
            one moment; the others are spread by name.
    """
    pieces = []
    for name, tensor in tensors.items():
        turn = 0 if name in of_rank0 else zlib.crc32(name.encode())
        if everything or _is_writer(name, tensor, rank=rank, world_size=world_size, turn=turn):
            local, offsets = local_part(tensor)
            if local.numel():
                pieces.append(Piece(name, local.detach(), offsets))
    return pieces
