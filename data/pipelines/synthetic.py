"""Random tokens, for measuring speed: the same for a seed at any layout, different for every sample."""

from __future__ import annotations

import numpy as np

from data.packing import Row
from data.sampler import mix64


class SyntheticRows:
    """Rows of uniform random tokens; each is a pure function of (seed, stream, index, position in the row).

    Args:
        samples: rows per epoch.
        sequence_length: tokens per row.
        vocab_size: ids are in [0, vocab_size).
        seed, stream: the key; streams of one seed (training, validation) share nothing.
    """

    def __init__(self, samples: int, sequence_length: int, *, vocab_size: int, seed: int, stream: str):
        self.samples, self.sequence_length, self.vocab_size = samples, sequence_length, vocab_size
        key = np.random.SeedSequence([seed, *stream.encode()]).generate_state(1, np.uint64)
        self._key = key
        self.fingerprint = f"synthetic-{stream}-{seed}-{samples}x{sequence_length}-{vocab_size}"

    def __len__(self) -> int:
        return self.samples

    def row(self, index: int) -> Row:
        """Row ``index``."""
        counter = np.arange(index * self.sequence_length, (index + 1) * self.sequence_length, dtype=np.uint64)
        return Row((mix64(mix64(counter + self._key)) % np.uint64(self.vocab_size)).astype(np.int64))
