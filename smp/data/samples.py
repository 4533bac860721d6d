"""Samples to finetune on, each a document, or a pair of two, packed into sequences."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence

import numpy as np
import xxhash

from smp.data.best_fit import best_fit
from smp.data.config import Overlong
from smp.data.packing import BLOCK, Row, RowSource
from smp.data.sampler import permute
from smp.data.token_cache import IGNORED, Columns, digest_of
from smp.errors import UserError

log = logging.getLogger("smp.data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Which samples are taken, and how.

    Attributes:
        most: samples, from the first on; None: all.
        validation_split: fraction of them that is kept for validation.
        validation: whether it is that part that is wanted.
        overlong: what becomes of samples longer than a sequence: ``cut`` at its end, ``drop`` or ``refuse``.
    """

    most: int | None = None
    validation_split: float = 0.0
    validation: bool = False
    overlong: Overlong = "cut"

    def of(self, samples: int) -> np.ndarray:
        """Return the numbers of the samples that are taken, ascending; the same on every rank and in every run."""
        samples = min(samples, samples if self.most is None else self.most)
        if not self.validation_split:
            return np.arange(samples)
        held_out = min(max(1, round(samples * self.validation_split)), samples - 1)
        order = permute(np.arange(samples), samples, seed=0, epoch=0)
        return np.sort(order[:held_out] if self.validation else order[held_out:])


class HeldOut(RowSource):
    """The sequences of rows of ids or of packed text that are trained on, or those that are kept for validation.

    Raises:
        UserError: there is one sequence alone.
    """

    def __init__(self, source: RowSource, choice: Choice):
        if len(source) < 2:
            raise UserError(
                "--validation_split keeps sequences for validation, and the data has one alone: give more data, or "
                "--test_dir"
            )
        self._source, self._numbers = source, choice.of(len(source))
        self.fingerprint = digest_of(source.fingerprint, dataclasses.astuple(choice))
        self.digest = source.digest

    def __len__(self) -> int:
        return len(self._numbers)

    def rows(self, indices: np.ndarray) -> list[Row]:
        """Return sequences by number."""
        return self._source.rows(self._numbers[indices])


class PackedSamples(RowSource):
    """Samples packed by best fit, or one document in each sequence, without those of which no token is trained on.

    Args:
        stores: the samples, one a row, or a pair two.
        origins: of each of ``stores`` its file, for messages.
        pairs: two consecutive rows are a sample; packed, they stay in one sequence.
        pack: several samples are in a sequence; else each document has one to itself.

    Attributes:
        numbers: of the samples that are taken, in the data's order.
        names: of the documents of a sample, with a place for its number.
        summary: how full the sequences are, and how many of their tokens are trained on, in a line.

    Raises:
        UserError: a sample is too long and such are refused, or none remains.
    """

    def __init__(
        self,
        stores: Sequence[Columns],
        sequence_length: int,
        fingerprint: str,
        choice: Choice,
        *,
        what: str,
        origins: Sequence[str],
        pairs: bool = False,
        pack: bool = True,
    ):
        self._stores, self._pack = stores, pack
        self.names = ("pair {}, chosen", "pair {}, rejected") if pairs else ("conversation {}",)
        each = len(self.names)
        self._first = np.cumsum([0, *((len(store.offsets) - 1) // each for store in stores)])  # sample of each store
        of_rows = np.concatenate([np.diff(store.offsets) for store in stores]).reshape(-1, each)
        # Lengths of each sample's documents, which share a sequence or have one each.
        self._documents = _fitted(of_rows, sequence_length) if pack else np.minimum(of_rows, sequence_length)
        lengths = of_rows.sum(1) if pack else of_rows.max(1)
        fitted = self._documents.sum(1)
        chosen = choice.of(len(lengths))
        long = chosen[lengths[chosen] > sequence_length]
        if len(long) and choice.overlong == "refuse":
            which = int(np.searchsorted(self._first, long[0], side="right")) - 1
            raise UserError(
                f"{origins[which]}, sample {long[0] - self._first[which] + 1} has {lengths[long[0]]} tokens, more than "
                f"--max_context_width {sequence_length}: raise it, or use --overlong cut or drop"
            )
        if choice.overlong == "drop":
            chosen = np.setdiff1d(chosen, long, assume_unique=True)
        split = np.split(self._documents, self._first[1:-1])
        trained = np.concatenate([_trained(*both) for both in zip(stores, split, strict=True)])[chosen]
        idle, chosen = int((trained.min(1) == 0).sum()), chosen[trained.min(1) > 0]
        if not len(chosen):
            way = "raise --max_context_width" if pairs or len(long) else "--train_on all trains on all tokens"
            raise UserError(
                f"the {what} has no token to train on: all {idle} samples are without an assistant's turn in their "
                f"first {sequence_length} tokens; {way}"
            )
        self.numbers = chosen
        self._uncut = chosen[(self._documents == of_rows)[chosen].all(1)]
        one_each = np.arange(len(chosen)), np.arange(len(chosen) + 1)
        members, offsets = best_fit(fitted[chosen], sequence_length) if pack else one_each
        self._offsets: np.ndarray = offsets
        self._members = chosen[members]
        alone = () if pack else ("one each",)
        self.fingerprint = digest_of(fingerprint, sequence_length, dataclasses.astuple(choice), *alone)
        self.digest = digest_of(*(store.digest for store in stores))
        tokens, count = int(fitted[chosen].sum()), len(self) if pack else len(self) * each
        cut = f", {len(long)} {'cut' if choice.overlong == 'cut' else 'left out'} as too long" if len(long) else ""
        left_out = f", {idle} left out as nothing of them is trained on" if idle else ""
        full = f"{100 * tokens / count / sequence_length:.1f} % full" if pack else f"{tokens / count:.1f} tokens each"
        self.summary = (
            f"{what}: {len(chosen)} samples in {count} sequences ({full}), "
            f"{100 * int(trained.sum()) / tokens:.1f} % of their tokens trained on{cut}{left_out}"
        )
        log.info(self.summary)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def lengths(self) -> np.ndarray | None:
        """Return the tokens of each sample's longest document, which are its row's; None: samples are packed."""
        return None if self._pack else self._documents[self._members].max(1)

    @property
    def end(self) -> int | None:
        """Return the last token that is trained on of the first sample that is not cut; None: all are."""
        if not len(self._uncut):
            return None
        _, labels = self.documents(int(self._uncut[0]))[-1]
        return int(labels[labels != IGNORED][-1])

    def packed(self, indices: np.ndarray) -> np.ndarray:
        """Return the places of the samples of sequences, in the order in which all are packed, (k,) int64."""
        parts = [np.arange(*self._offsets[index : index + 2]) for index in indices]
        return np.concatenate([np.arange(0), *parts])

    @functools.cached_property
    def keys(self) -> np.ndarray:
        """Hash the tokens and labels of each sample, in the order in which all are packed, (k,) int64."""

        def key(sample: int) -> int:
            columns = (column.astype(np.int32) for document in self.documents(sample) for column in document)
            return xxhash.xxh3_64_intdigest(
                b"".join(len(each).to_bytes(8, "little") + each.tobytes() for each in columns)
            )

        return np.array([key(sample) for sample in self._members.tolist()], np.uint64).view(np.int64)

    def rows(self, indices: np.ndarray) -> list[Row]:
        """Return sequences by number, with the length of each sample in them; or those of each sample."""
        if not self._pack:
            documents = (each for sample in self._members[indices].tolist() for each in self.documents(sample))
            return [Row(tokens, None, labels) for tokens, labels in documents]
        return [self._sequence(int(index)) for index in indices]

    def _sequence(self, index: int) -> Row:
        members = self._members[self._offsets[index] : self._offsets[index + 1]]
        parts = [self.sample(sample) for sample in members.tolist()]
        tokens, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Row(tokens, None, labels, self._documents[members].ravel())

    def sample(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (n,) and labels (n,) of a sample by its number in the data."""
        tokens, labels = (np.concatenate(column) for column in zip(*self.documents(sample), strict=True))
        return tokens, labels

    def documents(self, sample: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids (n,) and labels (n,) of each document of a sample."""
        which = int(np.searchsorted(self._first, sample, side="right")) - 1
        store, found = self._stores[which], []
        row = int(sample - self._first[which]) * len(self.names)
        for start, length in zip(store.offsets[row:], self._documents[sample].tolist(), strict=False):
            part = slice(int(start), int(start) + length)
            tokens = store.tokens[part]
            found.append((tokens, tokens.astype(np.int64) if store.labels is None else store.labels[part]))
        return found


def _fitted(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return lengths (samples, 1 or 2) of documents, cut so that a sample fits: of two each has half, or the rest."""
    if lengths.shape[1] == 1:
        return np.minimum(lengths, capacity)
    first, second = lengths.T
    first = np.minimum(first, np.maximum(capacity - capacity // 2, capacity - second))
    return np.stack([first, np.minimum(second, capacity - first)], 1)


def _trained(store: Columns, lengths: np.ndarray) -> np.ndarray:
    """Count the tokens of each document that are predicted in training: labels but the first, within its length."""
    starts = store.offsets[:-1].reshape(lengths.shape)
    ends = starts + lengths
    if store.labels is None:
        return lengths - 1
    blocks = range(0, len(store.labels), BLOCK)
    trained = np.concatenate([np.flatnonzero(store.labels[at : at + BLOCK] != IGNORED) + at for at in blocks])
    return np.searchsorted(trained, ends) - np.searchsorted(trained, starts + 1)
