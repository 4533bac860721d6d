"""What an MPI program needs, on torch.distributed and on mpi4py; received arrays are filled in place."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist


class OnTorch:
    """On torch.distributed."""

    def __init__(self, device: torch.device):
        self.rank, self.size, self._device = dist.get_rank(), dist.get_world_size(), device

    def send(self, array: np.ndarray, dest: int) -> None:
        dist.send(torch.from_numpy(array).to(self._device), dest)

    def recv(self, array: np.ndarray, source: int) -> None:
        tensor = torch.from_numpy(array).to(self._device)
        dist.recv(tensor, source)
        array[...] = tensor.cpu().numpy()

    def broadcast(self, array: np.ndarray) -> None:
        tensor = torch.from_numpy(array).to(self._device)
        dist.broadcast(tensor, src=0)
        array[...] = tensor.cpu().numpy()

    def gather(self, array: np.ndarray) -> np.ndarray | None:
        """Rank 0 gets a row of each rank, the others None."""
        tensor = torch.from_numpy(array).to(self._device)
        rows = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(tensor, rows, dst=0)
        return torch.stack(rows).cpu().numpy() if rows else None


class OnMpi4py:
    """On mpi4py, which takes the elements' type from the array; one that is named beside it must be the same."""

    def __init__(self):
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()

    def send(self, array: np.ndarray, dest: int) -> None:
        self._world.Send(array, dest=dest)

    def recv(self, array: np.ndarray, source: int) -> None:
        self._world.Recv(array, source=source)

    def broadcast(self, array: np.ndarray) -> None:
        self._world.Bcast(array, root=0)

    def gather(self, array: np.ndarray) -> np.ndarray | None:
        rows = np.empty((self.size, *array.shape), array.dtype) if self.rank == 0 else None
        self._world.Gather(array, rows, root=0)
        return rows
