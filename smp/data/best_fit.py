"""Packing of samples of any length into sequences: no sample is split, and little is padded."""

from __future__ import annotations

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack by best fit decreasing: each sample, from the longest to the shortest, where the least space remains.

    It needs at most 11/9 of the fewest sequences, and one more (Johnson, "Near-optimal bin packing algorithms", 1973).

    Args:
        lengths: (n,) tokens of each sample, in [1, capacity].
        capacity: tokens of a sequence.

    Returns:
        (n,) int64, the samples of the first sequence, then of the second, ..., ascending, and (sequences + 1,) int64
        offsets into them. Sequences are in the order of their first samples.
    """
    spaces: list[list[int]] = [[] for _ in range(capacity + 1)]  # sequences with so much space left
    some = 0  # bit s: there is a sequence with s tokens of space
    members: list[list[int]] = []
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        if fitting := some >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            which = spaces[space].pop()
            if not spaces[space]:
                some &= ~(1 << space)
            members[which].append(sample)
        else:
            space, which = capacity, len(members)
            members.append([sample])
        spaces[space - length].append(which)
        if space > length:  # nothing fits into none
            some |= 1 << (space - length)
    for each in members:
        each.sort()
    members.sort()
    offsets = np.cumsum([0, *map(len, members)])
    return np.array([sample for each in members for sample in each], np.int64), offsets
