"""From token files to training rows and batches.

Two ways to cut: :class:`WindowRows` keeps stored rows apart (long ones become consecutive windows, short ones are
padded), :class:`PackedRows` concatenates all of them and cuts every ``sequence_length`` tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from smp.data.sampler import samples_at
from smp.data.token_cache import IGNORED, Columns, digest_of
from smp.errors import UserError
from smp.parallel.microbatch import Microbatch

BLOCK = 1 << 22  # values of a column that are looked at at once
FEWEST_COLUMNS = 64  # of rows that are padded to what they need


class Row(NamedTuple):
    """At most ``sequence_length`` tokens: ids (n,), mask (n,) or None, labels (n,) or None.

    ``documents`` (d,), or None: the lengths of the documents that they consist of; None: ``document_end`` ends them.
    """

    tokens: np.ndarray
    mask: np.ndarray | None = None
    labels: np.ndarray | None = None
    documents: np.ndarray | None = None


class RowSource(Protocol):
    """Rows by number, and their order; sources inherit from it.

    Attributes:
        fingerprint: changes with the names, sizes and order of their files, and with their cutting.
        digest: changes with the rows and their order, before the cutting.
    """

    fingerprint: str
    digest: str

    def __len__(self) -> int:
        """Return the number of rows."""

    def rows(self, indices: np.ndarray) -> list[Row]:
        """Return the rows of the given numbers, (k,) int64; of pairs that are not packed two each."""

    def lengths(self) -> np.ndarray | None:
        """Return the tokens that each row needs, (rows,); None: rows are full, or padded to a full one's."""
        return None

    def samples_at(self, positions: np.ndarray, *, seed: int, shuffle: bool) -> np.ndarray:
        """Return the number of the row at each stream position; unless overridden, each epoch has every row once.

        Arguments: as of :func:`smp.data.sampler.samples_at`, of which the result must be as pure a function.
        """
        return samples_at(positions, len(self), seed=seed, shuffle=shuffle)


class WindowRows(RowSource):
    """Stored rows, each cut into windows of at most ``sequence_length`` tokens; no token is left out.

    Args:
        origins: of each of ``stores`` its file and the number of the file's rows before it, for messages.
    """

    def __init__(
        self,
        stores: Sequence[Columns],
        sequence_length: int,
        fingerprint: str,
        origins: Sequence[tuple[str, int]] = (),
    ):
        self.stores, self.sequence_length, self.fingerprint = stores, sequence_length, fingerprint
        self.digest = digest_of(*(store.digest for store in stores))
        self._origins = origins
        windows = [-(-np.diff(store.offsets) // sequence_length) for store in stores]
        self._first_window = np.concatenate([[0], *windows]).cumsum()  # of each row, over all stores
        self._first_row = np.cumsum([0, *map(len, windows)])  # of each store

    def __len__(self) -> int:
        return int(self._first_window[-1])

    def rows(self, indices: np.ndarray) -> list[Row]:
        """Return windows by their number over all stores."""
        rows = np.searchsorted(self._first_window, indices, side="right") - 1
        stores = np.searchsorted(self._first_row, rows, side="right") - 1
        skipped = (indices - self._first_window[rows]) * self.sequence_length
        inside = rows - self._first_row[stores]
        return [self._cut(*each) for each in zip(stores.tolist(), inside.tolist(), skipped.tolist(), strict=True)]

    def refuse_left_padding(self, misfit: str) -> None:
        """Refuse rows that hide a token before one that they show in the same window.

        Args:
            misfit: the settings that cannot use them.

        Raises:
            UserError: naming the first such row.
        """
        for store, (file, before) in zip(self.stores, self._origins, strict=True):
            for start in range(0, 0 if store.mask is None else len(store.mask), BLOCK):
                shown = store.mask[start : start + BLOCK + 1].astype(bool)  # type: ignore[index]
                after_hidden = np.flatnonzero(~shown[:-1] & shown[1:]) + start + 1
                rows = np.searchsorted(store.offsets, after_hidden, side="right") - 1
                inside = (after_hidden - store.offsets[rows]) % self.sequence_length != 0
                if inside.any():
                    raise UserError(
                        f"{file}, row {before + rows[inside][0] + 1}: attention_mask hides a token before one that it "
                        f"shows, and {misfit} takes padding on the right alone: pad there (a tokenizer's "
                        f"padding_side='right'), or set --document_mask 1"
                    )

    def _cut(self, which: int, row: int, skipped: int) -> Row:
        store = self.stores[which]
        start = int(store.offsets[row]) + skipped
        stop = min(start + self.sequence_length, int(store.offsets[row + 1]))
        mask, labels = store.mask, store.labels
        return Row(
            store.tokens[start:stop],
            None if mask is None else mask[start:stop],
            None if labels is None else labels[start:stop],
        )


class PackedRows(RowSource):
    """All tokens of all files concatenated, cut every ``sequence_length``; the last row may be shorter."""

    def __init__(self, stores: Sequence[Columns], sequence_length: int, fingerprint: str):
        self.stores, self.sequence_length, self.fingerprint = stores, sequence_length, fingerprint
        self.digest = digest_of(*(store.digest for store in stores))
        self._first_token = np.cumsum([0, *(len(store.tokens) for store in stores)])

    def __len__(self) -> int:
        return -(-int(self._first_token[-1]) // self.sequence_length)

    def rows(self, indices: np.ndarray) -> list[Row]:
        """Return rows by number: the end of one file may share its row with the beginning of the next."""
        starts = indices * self.sequence_length
        stores = np.searchsorted(self._first_token, starts, side="right") - 1
        return [self._cut(*each) for each in zip(stores.tolist(), starts.tolist(), strict=True)]

    def _cut(self, which: int, start: int) -> Row:
        stop = min(start + self.sequence_length, int(self._first_token[-1]))
        parts = []
        while start < stop:
            begin, end = int(self._first_token[which]), int(self._first_token[which + 1])
            parts.append(self.stores[which].tokens[start - begin : stop - begin])
            start, which = end, which + 1
        return Row(parts[0] if len(parts) == 1 else np.concatenate(parts))


def columns_for(tokens: int, most: int) -> int:
    """Return the columns of rows of so many tokens, at most ``most``: 64, 96, 128, 192, 256, 384, 512 ...

    A multiple of 32, of which few are used: each is a shape that kernels are compiled or tuned for.
    """
    power = 1 << (max(tokens, FEWEST_COLUMNS) - 1).bit_length()
    return min(most, power * 3 // 4 if FEWEST_COLUMNS < tokens <= power * 3 // 4 else power)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collator:
    """Stacks rows into a micro-batch.

    Attributes:
        sequence_length: columns of every tensor, or the most.
        pad_token_id: pads short rows on the right.
        document_end: the id that ends a document where documents are masked from each other and rows do not say where
            they begin; None: they are not.
        fitted: as many columns as the longest row needs, rounded up by :func:`columns_for`.
    """

    sequence_length: int
    pad_token_id: int
    document_end: int | None = None
    fitted: bool = False

    def __call__(self, rows: list[Row | None]) -> Microbatch:
        """Pad and stack.

        Args:
            rows: B rows; None is a padding row, without labels.

        Returns:
            input_ids and targets; row_tokens where some row is shorter; attention_mask only where some row has a masked
            token before a real one (causal attention needs none for padding on the right); with ``document_end``
            instead what is known of documents.
        """
        tokens = [0 if row is None else len(row.tokens) for row in rows]
        columns = columns_for(max(tokens), self.sequence_length) if self.fitted else self.sequence_length
        shape = (len(rows), columns)
        ids, labels = np.full(shape, self.pad_token_id, np.int64), np.full(shape, IGNORED, np.int64)
        for b, row in enumerate(rows):
            if row is not None:
                n = len(row.tokens)
                ids[b, :n] = row.tokens
                labels[b, :n] = ids[b, :n] if row.labels is None else row.labels
        masks: Microbatch = {}
        padded: Microbatch = {"row_tokens": torch.tensor(tokens)} if min(tokens) < columns else {}
        known = [row for row in rows if row is not None]
        if self.document_end is not None or any(row.mask is not None or row.documents is not None for row in known):
            masks = self._apply_masks(ids, labels, rows)
        targets = np.full(shape, IGNORED, np.int64)
        targets[:, :-1] = labels[:, 1:]
        return {"input_ids": torch.from_numpy(ids), "targets": torch.from_numpy(targets), **padded, **masks}

    def _apply_masks(self, ids: np.ndarray, labels: np.ndarray, rows: list[Row | None]) -> Microbatch:
        """Ignore the labels of masked tokens and of documents' first tokens; return the attention mask or documents."""
        real = np.zeros(ids.shape, bool)
        for b, row in enumerate(rows):
            if row is not None:
                real[b, : len(row.tokens)] = True if row.mask is None else row.mask
        # A token after a masked one would be predicted from a masked position.
        after_masked = np.zeros(ids.shape, bool)
        after_masked[:, 1:] = real[:, 1:] & ~real[:, :-1]
        labels[~real | after_masked] = IGNORED
        given = [(b, row.documents) for b, row in enumerate(rows) if row is not None and row.documents is not None]
        if self.document_end is not None or given:
            starts = after_masked
            starts[:, 1:] |= real[:, :-1] & ~real[:, 1:]
            if not given:
                starts[:, 1:] |= real[:, :-1] & (ids[:, :-1] == self.document_end)
            for b, lengths in given:
                starts[b, np.cumsum(lengths)[:-1]] = True
            labels[starts] = IGNORED
            columns = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
            positions = columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
            bounds = np.append(np.flatnonzero(positions == 0), positions.size).astype(np.int32)
            return {
                "position_ids": torch.from_numpy(positions),
                "document_bounds": torch.from_numpy(bounds),
                "longest_document": int(np.diff(bounds).max()),
            }
        if not after_masked.any():
            return {}
        # A query without any key gives NaN: a padding row is left unmasked.
        real[~real.any(axis=1)] = True
        return {"attention_mask": torch.from_numpy(real.astype(np.int64))}
