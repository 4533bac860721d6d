"""Shards of tensors: those that a rank writes, and those that it needs."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from smp.checkpoint.safetensors_io import Piece
from smp.local_shards import local_part


def rng_tensors(rank: int) -> dict[str, torch.Tensor]:
    """Return this rank's generator states, under keys with the rank."""
    states = {f"rng.cpu.{rank:05d}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.cuda.{rank:05d}"] = torch.cuda.get_rng_state()
    return states


def _is_writer(name: str, tensor: torch.Tensor, *, rank: int, world_size: int, turn: int) -> bool:
    """Tell whether this rank is the one, of all that hold the same part, whose turn it is to write it."""
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


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Shards that a rank writes, and dtype and shape of the tensors they are of."""

    pieces: list[Piece]
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the shards."""
        return sum(piece.tensor.nbytes for piece in self.pieces)


def snapshot_of(tensors: dict[str, torch.Tensor], *, everything: bool, of_rank0: Collection[str] = ()) -> Snapshot:
    """Return what this rank writes of ``tensors``, and its generators; on the tensors' devices, without a copy.

    Args:
        everything: all shards of the rank, instead of its share of what is replicated.
        of_rank0: tensors that may differ among their ranks, so that the first one's are taken, all of
            one moment; the others are spread by name.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    pieces = []
    for name, tensor in tensors.items():
        turn = 0 if name in of_rank0 else zlib.crc32(name.encode())
        if everything or _is_writer(name, tensor, rank=rank, world_size=world, turn=turn):
            local, offsets = local_part(tensor)
            if local.numel():
                pieces.append(Piece(name, local.detach(), offsets))
    generators = rng_tensors(rank)
    # Rank 0 also tells of tensors without elements, which nobody writes.
    listed_here = tensors.keys() if rank == 0 or everything else [piece.name for piece in pieces]
    named = {name: tensors[name] for name in listed_here} | generators
    pieces += [Piece(name, state, (0,)) for name, state in generators.items()]
    return Snapshot(pieces, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()})
