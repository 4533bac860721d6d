"""From token files to training rows and batches.

Two ways to cut: :class:`WindowRows` keeps every stored row for itself (long ones become consecutive windows, short
ones are padded), :class:`PackedRows` joins all of them end to end and cuts every ``sequence_length`` tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from data.token_cache import Columns

IGNORED = -100


class Row(NamedTuple):
    """At most ``sequence_length`` tokens: ids (n,), mask (n,) or None, labels (n,) or None."""

    tokens: np.ndarray
    mask: np.ndarray | None = None
    labels: np.ndarray | None = None


class RowSource(Protocol):
    """What a pipeline reads: rows by number, and a name for the whole that changes with its content."""

    fingerprint: str

    def __len__(self) -> int:
        """Rows."""

    def row(self, index: int) -> Row:
        """Row ``index``."""


def _slice(store: Columns, start: int, stop: int) -> Row:
    mask, labels = store.mask, store.labels
    return Row(
        store.tokens[start:stop],
        None if mask is None else mask[start:stop],
        None if labels is None else labels[start:stop],
    )


class WindowRows:
    """Stored rows, each cut into windows of at most ``sequence_length`` tokens; nothing is left out."""

    def __init__(self, stores: Sequence[Columns], sequence_length: int, fingerprint: str):
        self.stores, self.sequence_length, self.fingerprint = stores, sequence_length, fingerprint
        windows = [-(-np.diff(store.offsets) // sequence_length) for store in stores]
        self._firsts = [np.concatenate([[0], np.cumsum(each)]) for each in windows]  # first window of each row
        self._stores_first = np.concatenate([[0], np.cumsum([firsts[-1] for firsts in self._firsts])])

    def __len__(self) -> int:
        return int(self._stores_first[-1])

    def row(self, index: int) -> Row:
        """Window ``index`` over all files."""
        which = int(np.searchsorted(self._stores_first, index, side="right")) - 1
        store, firsts, window = self.stores[which], self._firsts[which], index - self._stores_first[which]
        row = int(np.searchsorted(firsts, window, side="right")) - 1
        start = int(store.offsets[row] + (window - firsts[row]) * self.sequence_length)
        return _slice(store, start, min(start + self.sequence_length, int(store.offsets[row + 1])))


class PackedRows:
    """All tokens of all files end to end, cut every ``sequence_length``; the last row may be shorter."""

    def __init__(self, stores: Sequence[Columns], sequence_length: int, fingerprint: str):
        self.stores, self.sequence_length, self.fingerprint = stores, sequence_length, fingerprint
        self._first_token = np.concatenate([[0], np.cumsum([len(store.tokens) for store in stores])])

    def __len__(self) -> int:
        return -(-int(self._first_token[-1]) // self.sequence_length)

    def row(self, index: int) -> Row:
        """Row ``index``: the end of one file may share it with the beginning of the next."""
        start = index * self.sequence_length
        stop = min(start + self.sequence_length, int(self._first_token[-1]))
        first = int(np.searchsorted(self._first_token, start, side="right")) - 1
        pieces = []
        for store, offset in zip(self.stores[first:], self._first_token[first:], strict=False):
            if offset >= stop:
                break
            pieces.append(store.tokens[max(0, start - offset) : stop - offset])
        return Row(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collator:
    """Makes rows into a micro-batch.

    Attributes:
        sequence_length: columns of every tensor.
        pad_token_id: what fills the right of short rows.
        document_end: the id that ends a document where documents are kept apart; None joins them.
    """

    sequence_length: int
    pad_token_id: int
    document_end: int | None = None

    def __call__(self, rows: list[Row | None]) -> dict[str, Tensor]:
        """Pad and stack.

        Args:
            rows: B rows; None is a padding row, which no loss sees.

        Returns:
            input_ids (B, S) int64 and labels (B, S) int64, not shifted, -100 where nothing is to be predicted;
            attention_mask (B, S) only where some row has a masked token before a real one (a causal model never looks
            right, so padding on the right needs none); with documents kept apart position_ids (B, S) instead, which
            restart at each document, from which transformers derives a block-diagonal mask.
        """
        shape = (len(rows), self.sequence_length)
        ids, labels = np.full(shape, self.pad_token_id, np.int64), np.full(shape, IGNORED, np.int64)
        real = np.zeros(shape, bool)
        for b, row in enumerate(rows):
            if row is not None:
                n = len(row.tokens)
                ids[b, :n] = row.tokens
                labels[b, :n] = row.tokens if row.labels is None else row.labels
                real[b, :n] = True if row.mask is None else row.mask
        # A token behind a masked one would be predicted from a position that saw nothing.
        after_masked = np.zeros(shape, bool)
        after_masked[:, 1:] = real[:, 1:] & ~real[:, :-1]
        labels[~real | after_masked] = IGNORED
        batch = {"input_ids": ids}
        if self.document_end is not None:
            starts = after_masked
            starts[:, 1:] |= real[:, :-1] & ((ids[:, :-1] == self.document_end) | ~real[:, 1:])
            labels[starts] = IGNORED
            columns = np.broadcast_to(np.arange(shape[1]), shape)
            batch["position_ids"] = columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
        elif after_masked.any():
            # Rows that are padded on the right keep an unmasked beginning, so no query of theirs is without a key;
            # a padding row has none at all and is left unmasked for the same reason.
            real[~real.any(axis=1)] = True
            batch["attention_mask"] = real.astype(np.int64)
        batch["labels"] = labels
        return {name: torch.from_numpy(array) for name, array in batch.items()}
