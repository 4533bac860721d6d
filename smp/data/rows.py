"""Rows of token ids and of texts, from files of any kind that a :class:`Reader` reads by example."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from smp.data.convert import Format, Rows, joined, token_files
from smp.data.packing import WindowRows
from smp.data.storage import DataFile
from smp.data.text import TEXT_CONVERSION, TextTokenizer, tokenized_texts
from smp.data.token_cache import IGNORED, digest_of, token_dtype
from smp.errors import UserError

COLUMNS = ("input_ids", "attention_mask", "labels")  # the last two optional
# Besides masks, names under which other programs keep what decides about the loss or the attention of a row.
UNREAD = ("position_ids", "segment_ids", "sequence_ids", "document_ids", "seq_lengths", "shift_labels", "loss_weights")
KNOWN_MASKS = ("attention_mask", "special_tokens_mask")  # the second one, of tokenizers, changes nothing


class Reader(NamedTuple):
    """Reads files of one kind as examples: objects by key, or rows of a table by column.

    Attributes:
        name: first part of a token file's key.
        chunks: called with the columns that are needed, the first of them in every row, and a file; yields chunks that
            can be pickled, each with the number of the file's bytes read so far.
        examples: called with a file and one of its chunks; yields (file and row for messages, example).
    """

    name: str
    chunks: Callable[[tuple[str, ...], DataFile], Iterator[tuple[Any, int]]]
    examples: Callable[[DataFile, Any], Iterator[tuple[str, dict[str, Any]]]]

    def read(self, file: DataFile, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the examples of a file."""
        for chunk, _ in self.chunks(columns, file):
            yield from self.examples(file, chunk)


def integers(values: Any, key: str, where: str) -> np.ndarray:
    """Return a list or an array of integers as an array.

    Raises:
        UserError: it is no such list, or empty.
    """
    array, kinds = (values, "iub") if isinstance(values, np.ndarray) else (None, "i")
    if isinstance(values, list):
        try:
            array = np.array(values)
        except (ValueError, OverflowError):  # ragged nesting
            array = None
    if array is not None and array.ndim == 1 and len(array) == 0:
        raise UserError(f"{where}: {key} is empty; leave the row out")
    if array is None or array.ndim != 1 or array.dtype.kind not in kinds:
        raise UserError(f"{where}: {key} must be a list of integers")
    return array


def checked_row(found: Mapping[str, Any], where: str, vocab_size: int) -> tuple[np.ndarray, ...]:
    """Return input_ids, attention_mask or None, labels or None of one example.

    Args:
        where: file and row, for messages.
        vocab_size: ids must be in [0, vocab_size).

    Raises:
        UserError: a column is missing or has unusable content.
    """
    if "input_ids" not in found:
        raise UserError(
            f"{where}: has no input_ids; found: {', '.join(found) or 'nothing'}; every row must have them, as the "
            f"first one has, or every row a text (python -m smp.data.prepare --text_key KEY reads another key)"
        )
    refuse_unread(found, where)
    ids = integers(found["input_ids"], "input_ids", where)
    if (lowest := int(ids.min())) < 0:
        raise UserError(f"{where}: token id {lowest} is negative; ids must be in [0, {vocab_size})")
    _refuse_beyond(ids, where, vocab_size, name="token id")
    mask = labels = None
    if found.get("attention_mask") is not None:
        mask = integers(found["attention_mask"], "attention_mask", where)
        if len(others := mask[(mask != 0) & (mask != 1)]):
            raise UserError(
                f"{where}: attention_mask must contain 0 and 1 only, it contains {others[0]}: where it numbers the "
                f"documents of a packed sequence, leave it out and set --document_mask 1, which keeps them apart at "
                f"their end-of-sequence tokens"
            )
        mask = None if mask.all() and len(mask) == len(ids) else mask
    if found.get("labels") is not None:
        labels = integers(found["labels"], "labels", where)
        if len(negative := labels[(labels < 0) & (labels != IGNORED)]):
            raise UserError(
                f"{where}: label {negative[0]} is negative; labels must be in [0, {vocab_size}), or -100 for "
                f"positions out of the loss"
            )
        _refuse_beyond(labels, where, vocab_size, name="label")
        labels = None if np.array_equal(labels, ids) else labels
    for key, column in (("attention_mask", mask), ("labels", labels)):
        if column is not None and len(column) != len(ids):
            raise UserError(f"{where}: {key} has {len(column)} entries, input_ids {len(ids)}; they must be equal")
    return ids, mask, labels  # type: ignore[return-value]


def _refuse_beyond(ids: np.ndarray, where: str, vocab_size: int, *, name: str) -> None:
    if (highest := int(ids.max())) >= vocab_size:
        raise UserError(
            f"{where}: {name} {highest} is outside the model's vocabulary of {vocab_size}: set --vocab_size to at "
            f"least {highest + 1} for a model without pretrained weights, or use data made with the model's tokenizer"
        )


def is_unread(name: str) -> bool:
    """Return whether a column other than input_ids says what is trained on, in a way that is not read."""
    return name in UNREAD or (name.endswith(("_mask", "_masks")) and name not in KNOWN_MASKS)


def refuse_unread(row: Mapping[str, Any], where: str) -> None:
    """Refuse an example with input_ids and values that :func:`is_unread`."""
    for name, value in row.items():
        if value is not None and is_unread(name):
            raise UserError(
                f"{where}: {name} is not read, and rows would be trained on as if it were not there: remove it; labels "
                f"of -100 keep tokens out of the loss, and --document_mask 1 keeps packed documents apart"
            )


def text_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text of an example.

    Raises:
        UserError: there is none under ``key``.
    """
    if key not in row:
        raise UserError(
            f"{where}: has no {key}; found: {', '.join(row) or 'nothing'}; every row must have its text there, as "
            f"the first one has, or every row input_ids (python -m smp.data.prepare --text_key KEY reads another key)"
        )
    if not isinstance(row[key], str):
        raise UserError(f"{where}: {key} must be a string, its type is {type(row[key]).__name__}; leave the row out")
    return row[key]


def ids_format(reader: Reader, vocab_size: int) -> Format:
    """Return the format of examples with ``input_ids`` below ``vocab_size``."""
    chunks = functools.partial(reader.chunks, COLUMNS)
    return Format(
        reader.name, [], token_dtype(vocab_size), "rows", chunks, functools.partial(_rows_of_ids, reader, vocab_size)
    )


def _rows_of_ids(reader: Reader, vocab_size: int, file: DataFile, chunk: Any) -> list[Rows]:
    found = []
    for where, row in reader.examples(file, chunk):
        ids, mask, labels = checked_row(row, where, vocab_size)
        found.append(Rows(ids.astype(token_dtype(vocab_size)), np.array([len(ids)]), mask, labels))
    return joined(found)


def texts_format(reader: Reader, tokenizer: TextTokenizer, text_key: str) -> Format:
    """Return the format of examples with a text under ``text_key``, each a document."""
    return Format(
        name=f"{reader.name}_text",
        key=[TEXT_CONVERSION, tokenizer.digest, text_key],
        dtype=token_dtype(tokenizer.vocab_size),
        content="text",
        chunks=functools.partial(reader.chunks, (text_key,)),
        convert=functools.partial(_rows_of_texts, reader, tokenizer, text_key),
    )


def _rows_of_texts(reader: Reader, tokenizer: TextTokenizer, text_key: str, file: DataFile, chunk: Any) -> list[Rows]:
    texts = ((text_of(row, text_key, where), where) for where, row in reader.examples(file, chunk))
    return tokenized_texts(texts, tokenizer)


def open_ids(
    files: list[DataFile],
    reader: Reader,
    *,
    sequence_length: int,
    vocab_size: int,
    cache_dir: str | None,
    what: str = "data",
) -> WindowRows:
    """Convert files with ids, unless they are cached, and cut every row into windows, in the order of files and rows.

    Raises:
        UserError: a file or one of its rows is unusable, or an id is not in the vocabulary.
    """
    stores = token_files(files, ids_format(reader, vocab_size), what=what, cache_dir=cache_dir)
    for file, store in zip(files, stores, strict=True):
        if max(store.highest, store.highest_label) >= vocab_size:  # converted for a model with a larger vocabulary
            for where, row in reader.read(file, COLUMNS):
                checked_row(row, where, vocab_size)
    identity = digest_of(reader.name, sequence_length, [file.identity for file in files])
    return WindowRows(stores, sequence_length, identity, [(file.url, 0) for file in files])
