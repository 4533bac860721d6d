"""Random tokens, for measuring speed: the same for a seed at any layout, different for every sample."""

from __future__ import annotations

import numpy as np

from smp.data.packing import Row, RowSource
from smp.data.sampler import mix64

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's step


class SyntheticRows(RowSource):
    """Rows of uniform random tokens; each is a pure function of (seed, stream, index, position in the row).

    Args:
        vocab_size: ids are in [0, vocab_size).
        seed, stream: the key; streams of one seed (training, validation) are independent.
    """

    def __init__(self, samples: int, sequence_length: int, *, vocab_size: int, seed: int, stream: str):
        self.samples, self.sequence_length, self.vocab_size = samples, sequence_length, vocab_size
        self._key = np.random.SeedSequence([seed, *stream.encode()]).generate_state(1, np.uint64)
        self.fingerprint = self.digest = f"synthetic-{stream}-{seed}-{samples}x{sequence_length}-{vocab_size}"

    def __len__(self) -> int:
        return self.samples

    def rows(self, indices: np.ndarray) -> list[Row]:
        """Return rows by number: each 64-bit output of splitmix64 makes two tokens, scaled by multiplication."""
        pairs = -(-self.sequence_length // 2)
        counters = indices.astype(np.uint64)[:, None] * np.uint64(pairs) + np.arange(pairs, dtype=np.uint64)
        halves = mix64(counters * GOLDEN_GAMMA + self._key).view(np.uint32)[:, : self.sequence_length]
        tokens = (halves.astype(np.uint64) * np.uint64(self.vocab_size)) >> np.uint64(32)
        return [Row(each) for each in tokens.astype(np.int64)]
