"""Order of the samples: a pure function of (seed, epoch, position), the same at any layout.

The *stream* numbers every sample of the run from 0: position ``g`` is index ``g % n`` of epoch ``g // n``, and each
epoch visits the ``n`` samples in an order of its own. A step takes the next ``global_batch_size`` positions, so the
last batch of an epoch is completed from the next one.
"""

from __future__ import annotations

import math

import numpy as np

ROUNDS = 6
PADDING = -1


def mix64(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).

    Args:
        x: uint64, any shape. A bijection of the 64-bit numbers in which every output bit depends on every input bit.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(indices: np.ndarray, n: int, *, seed: int, epoch: int) -> np.ndarray:
    """Apply a keyed permutation of ``range(n)`` to each index, in memory independent of ``n``.

    A Feistel network (Luby, Rackoff: "How to construct pseudorandom permutations", 1988) over the next power of four,
    applied again to results beyond ``n`` ("cycle walking": Black, Rogaway: "Ciphers with arbitrary finite domains",
    2002); ``n`` fills more than a quarter of the domain, which keeps the walks short.

    Args:
        indices: (k,) int64 in [0, n).
        n: at least 1.
        seed, epoch: the key; each pair has an order of its own.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)
    out = indices.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        left, right = out[walking] >> half, out[walking] & low
        for key in keys:
            left, right = right, left ^ (mix64(right + key) & low)
        out[walking] = (left << half) | right
        walking = walking[out[walking] >= n]
    return out.astype(np.int64)


def samples_at(positions: np.ndarray, n: int, *, seed: int, shuffle: bool) -> np.ndarray:
    """Return the sample at each stream position.

    Args:
        positions: (k,) int64, at least 0.
        n: samples per epoch.
        shuffle: False keeps the order of the data in every epoch.
    """
    epochs, indices = np.divmod(positions, n)
    if not shuffle:
        return indices
    out = np.empty_like(indices)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        out[chosen] = permute(indices[chosen], n, seed=seed, epoch=int(epoch))
    return out


def step_positions(*, batch: int, micro: int, rank: int, size: int) -> list[np.ndarray]:
    """Return one rank's micro-batches of a step, as positions counted from the step's first.

    Every rank gets the same number of micro-batches, so that collectives match; where a rank has no sample for one,
    it holds a single padding row.

    Args:
        batch: samples per step over all ranks.
        micro: most samples per micro-batch.
        rank, size: data-parallel rank and number of them.

    Returns:
        Arrays of positions in [0, batch), or ``[PADDING]``.
    """
    mine = np.arange(batch * rank // size, batch * (rank + 1) // size)
    count = math.ceil(math.ceil(batch / size) / micro)
    return [part if len(part) else np.array([PADDING]) for part in np.array_split(mine, count)]


def dealt_positions(*, batch: int, micro: int, rank: int, size: int) -> list[np.ndarray]:
    """Return one rank's micro-batches of a step of sorted samples, as :func:`step_positions` in their order.

    What all ranks compute at the same time are consecutive samples, so that none waits for another's longer rows.
    """
    of_ranks = [step_positions(batch=batch, micro=micro, rank=each, size=size) for each in range(size)]
    found, first = [], 0
    for parts in zip(*of_ranks, strict=True):
        for each, part in enumerate(parts):
            count = len(part) if part[0] != PADDING else 0
            if each == rank:
                found.append(np.arange(first, first + count) if count else part)
            first += count
    return found
