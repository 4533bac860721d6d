"""The stream of a rank's micro-batches: which samples each has."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from smp.data.packing import RowSource
from smp.data.sampler import PADDING

LOOKED_UP_AT_ONCE = 1024
Positions = tuple[np.ndarray, np.ndarray]  # of one micro-batch: stream positions, and the samples of the real ones


@dataclasses.dataclass(frozen=True)
class Order:
    """DataLoader's sampler: the endless stream of one rank's micro-batches, from any position.

    Attributes:
        step: the rank's positions of a step.
        lengths: of the rows: ``step`` counts those of a step from the longest on; None: in the stream's order.
    """

    step: list[np.ndarray]
    global_batch_size: int
    source: RowSource
    seed: int
    shuffle: bool
    start: int
    lengths: np.ndarray | None = None

    def _samples_at(self, positions: np.ndarray) -> np.ndarray:
        return self.source.samples_at(positions, seed=self.seed, shuffle=self.shuffle)

    def _positions(self, starts: np.ndarray, mine: np.ndarray) -> np.ndarray:
        """Return the stream positions of the steps that begin at ``starts``, ``(steps, positions)``."""
        if self.lengths is None:
            return starts[:, None] + mine
        every = starts[:, None] + np.arange(self.global_batch_size)
        needed = self.lengths[self._samples_at(every.ravel())].reshape(every.shape)
        return np.take_along_axis(every, np.argsort(-needed, axis=1, kind="stable")[:, mine], 1)

    def __iter__(self) -> Iterator[Positions]:
        mine = np.concatenate(self.step)
        # Looking up many positions at once costs little more than one.
        looked_up = len(mine) if self.lengths is None else self.global_batch_size
        ahead = np.arange(max(1, LOOKED_UP_AT_ONCE // looked_up)) * self.global_batch_size
        start = self.start
        while True:
            block = np.where(mine == PADDING, PADDING, self._positions(start + ahead, mine))
            found = np.full(block.shape, PADDING)
            real = block != PADDING
            found[real] = self._samples_at(block[real])
            edges = np.cumsum([0, *map(len, self.step)]).tolist()
            for positions, samples in zip(block, found, strict=True):
                for begin, end in itertools.pairwise(edges):
                    chosen = samples[begin:end]
                    yield positions[begin:end], chosen if chosen[0] != PADDING else chosen[:0]
            start += len(ahead) * self.global_batch_size
