"""AllGather by copies between the GPUs of a host, over memory that all of them can read.

Every rank puts its part into such memory, a barrier on the GPU lets the copies begin, and each rank copies the peers'
parts to where they belong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from smp.comm.symmetric import Block


class CopyEngine:
    """The order of copies and barriers on one rank; whatever it calls is put on the current stream.

    The workspace has two halves, taken in turn. A rank fills a half in round k when its stream has passed the barrier
    of round k - 1; there every rank had done its copies of round k - 2, the last that read this half. So one barrier
    for a round is enough.

    Args:
        workspace: of two halves.
        seconds: how long a barrier may wait.
    """

    def __init__(self, workspace: Block, rank: int, size: int, seconds: Callable[[], float]):
        self._workspace, self._rank, self._size, self._seconds = workspace, rank, size, seconds
        # Each begins with another peer, so that no GPU is read by all at once.
        self._others = [(rank + distance) % size for distance in range(1, size)]
        self._half = workspace.nbytes // 2
        self._round = 0

    def _slot(self, rank: int, start: int, nbytes: int) -> torch.Tensor:
        return self._workspace.part(rank, self._round % 2 * self._half + start, nbytes)

    def _barrier(self) -> None:
        self._workspace.barrier(self._seconds())

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, block: Block | None) -> None:
        """Copy every rank's bytes to every rank.

        Args:
            output: 1-D, of bytes.
            source: 1-D, of bytes: this rank's.
            block: ``output`` itself, if it is the beginning of a block.
        """
        part = source.numel()
        slices = output.view(self._size, part)
        if slices[self._rank].data_ptr() != source.data_ptr():
            slices[self._rank].copy_(source)
        if block is not None:
            self._barrier()
            for other in self._others:
                slices[other].copy_(block.part(other, other * part, part))
            self._barrier()  # nobody may write into its slice before all have read it
            return
        for start in range(0, part, self._half):
            length = min(self._half, part - start)
            self._slot(self._rank, 0, length).copy_(source[start : start + length])
            self._barrier()
            for other in self._others:
                slices[other, start : start + length].copy_(self._slot(other, 0, length))
            self._round += 1
