"""JSON lines: ``{"input_ids": [...], "attention_mask": [...], "labels": [...]}``, the last two optional, or
``{"text": "..."}``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from smp.data.convert import Rows, joined, token_files
from smp.data.packing import WindowRows
from smp.data.storage import DataFile, open_file
from smp.data.text import TextTokenizer, tokenized_texts
from smp.data.token_cache import TokenFile, digest_of, token_dtype
from smp.errors import UserError, a_type

# Beside masks, names under which other programs keep what decides about the loss or the attention of a row.
UNREAD = ("position_ids", "segment_ids", "sequence_ids", "document_ids", "seq_lengths", "shift_labels", "loss_weights")
KNOWN_MASKS = ("attention_mask", "special_tokens_mask")  # the second one, of tokenizers, changes nothing
CHUNK = 1 << 20  # bytes that are converted at once
ARRAY = "datasets.load_dataset('json', data_files='F.json')['train'].to_json('F.jsonl') writes an array so"
BOM = b"\xef\xbb\xbf"
# A row of more than ten million tokens. Without a bound, a small compressed file could hold one line of many gigabytes.
MAX_LINE = 64 << 20


def read_lines(file: DataFile) -> Iterator[tuple[tuple[int, bytes], int]]:
    """Yield a file in blocks of whole lines: (number of the first line, lines), and the file's bytes read so far.

    Raises:
        UserError: a line is longer than ``MAX_LINE`` bytes.
    """
    with open_file(file) as (content, raw):
        number = 1
        while block := content.read(CHUNK):
            if not block.endswith(b"\n"):
                block += content.readline(MAX_LINE + 1)
            if len(block) > MAX_LINE:
                _refuse_long(file, number, block)
            yield (number, block), raw.tell()
            number += block.count(b"\n")


def _refuse_long(file: DataFile, number: int, block: bytes) -> None:
    for at, line in enumerate(block.split(b"\n"), number):
        if len(line) > MAX_LINE:
            raise UserError(f"{file.url}, line {at}: has more than {MAX_LINE >> 20} MiB; cut the row into several")


def objects_of(file: DataFile, first: int, block: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of lines, each with its file and line for messages, without blank lines.

    Args:
        first: number of the block's first line, from 1.

    Raises:
        UserError: a line is not JSON, not UTF-8 or not an object.
    """
    if first == 1:
        block = block.removeprefix(BOM)
    for number, line in enumerate(block.split(b"\n"), first):
        if not line.strip():
            continue
        where = f"{file.url}, line {number}"
        try:
            found = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 ({error.reason}); convert the file") from error
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg}: column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            advice = ARRAY if number == 1 and line.startswith(b"[") else "mend the line or remove it"
            raise UserError(
                f"{where}: not valid JSON ({reason}); each line must be one whole object: {advice}"
            ) from error
        if not isinstance(found, dict):
            advice = f": {ARRAY}" if isinstance(found, list) else ""
            raise UserError(
                f"{where}: holds {a_type(found)}; each line must be one object "
                f'such as {{"input_ids": [1, 2, 3]}} or {{"text": "..."}}{advice}'
            )
        yield where, found


def read_objects(file: DataFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON lines file as :func:`objects_of`."""
    for chunk, _ in read_lines(file):
        yield from objects_of(file, *chunk)


def integers(values: Any, key: str, where: str) -> np.ndarray:
    """Return a list of whole numbers as an int64 array.

    Raises:
        UserError: it is no such list, or empty.
    """
    array = None
    if isinstance(values, list):
        try:
            array = np.array(values)
        except (ValueError, OverflowError):  # ragged nesting
            array = None
    if array is not None and array.ndim == 1 and len(array) == 0:
        raise UserError(f"{where}: {key} is empty; leave the row out")
    if array is None or array.ndim != 1 or array.dtype.kind != "i":
        raise UserError(f"{where}: {key} must be a list of whole numbers")
    return array


def checked_row(found: dict[str, Any], where: str, vocab_size: int) -> tuple[np.ndarray, ...]:
    """Return input_ids, attention_mask or None, labels or None of one object.

    Args:
        where: file and line, for messages.
        vocab_size: ids must be in [0, vocab_size).

    Raises:
        UserError: a key is missing or has unusable content.
    """
    if "input_ids" not in found:
        raise UserError(
            f"{where}: has no input_ids; keys found: {', '.join(found) or 'none'}; every row must have them, as the "
            f"first one has, or every row a text (python -m smp.data.prepare --text_key KEY reads another key)"
        )
    refuse_unread(found, where)
    ids = integers(found["input_ids"], "input_ids", where)
    if (lowest := int(ids.min())) < 0:
        raise UserError(f"{where}: token id {lowest} is negative; ids must be in [0, {vocab_size})")
    if (highest := int(ids.max())) >= vocab_size:
        raise UserError(beyond_vocabulary(where, highest, vocab_size))
    mask = labels = None
    if found.get("attention_mask") is not None:
        mask = integers(found["attention_mask"], "attention_mask", where)
        if not ((mask == 0) | (mask == 1)).all():
            raise UserError(other_mask(where, mask[(mask != 0) & (mask != 1)][0]))
        mask = None if mask.all() and len(mask) == len(ids) else mask
    if found.get("labels") is not None:
        labels = integers(found["labels"], "labels", where)
        if not (((labels >= 0) & (labels < vocab_size)) | (labels == -100)).all():
            raise UserError(f"{where}: labels must be in [0, {vocab_size}), or -100 for positions out of the loss")
        labels = None if np.array_equal(labels, ids) else labels
    for key, column in (("attention_mask", mask), ("labels", labels)):
        if column is not None and len(column) != len(ids):
            raise UserError(f"{where}: {key} has {len(column)} entries, input_ids {len(ids)}; they must be equal")
    return ids, mask, labels  # type: ignore[return-value]


def refuse_unread(row: Mapping[str, Any], where: str) -> None:
    """Refuse keys or columns beside input_ids that say what is trained on, in ways that are not read.

    Args:
        row: by key or column; those without a value are let through.
        where: of it, for messages.

    Raises:
        UserError: there is one.
    """
    for name in (name for name, value in row.items() if value is not None):
        if name in UNREAD or (name.endswith(("_mask", "_masks")) and name not in KNOWN_MASKS):
            raise UserError(
                f"{where}: {name} is not read, and rows would be trained on as if it were not there: remove it; labels "
                f"of -100 keep tokens out of the loss, and --document_mask 1 keeps packed documents apart"
            )


def other_mask(where: str, value: Any) -> str:
    """Format the refusal of a value of attention_mask."""
    return (
        f"{where}: attention_mask must hold 0 and 1 only, it holds {value}: where it numbers the documents of a packed "
        f"row, leave it out and set --document_mask 1, which keeps them apart at their end-of-sequence tokens"
    )


def beyond_vocabulary(where: str, token: int, vocab_size: int, *, name: str = "token id") -> str:
    """Format the refusal of an id (or a label, by ``name``) outside the vocabulary."""
    return (
        f"{where}: {name} {token} is outside the model's vocabulary of {vocab_size}: set --vocab_size to at least "
        f"{token + 1} for a model without pretrained weights, or use data made with the model's tokenizer"
    )


@dataclasses.dataclass(frozen=True)
class JsonIds:
    """Format of JSON lines with ``input_ids`` below ``vocab_size``."""

    vocab_size: int
    name = "jsonl"
    content = "rows"
    key = ()
    chunks = staticmethod(read_lines)

    @property
    def dtype(self) -> str:
        """Return the number format of the ids."""
        return token_dtype(self.vocab_size)

    def convert(self, file: DataFile, chunk: tuple[int, bytes]) -> list[Rows]:
        """Return the rows of lines."""
        found = []
        for where, row in objects_of(file, *chunk):
            ids, mask, labels = checked_row(row, where, self.vocab_size)
            found.append(Rows(ids.astype(self.dtype), np.array([len(ids)]), mask, labels))
        return joined(found)


@dataclasses.dataclass(frozen=True)
class JsonText:
    """Format of JSON lines with a text under ``text_key``, each a document."""

    tokenizer: TextTokenizer
    text_key: str
    name = "jsonl_text"
    content = "text"
    chunks = staticmethod(read_lines)

    @property
    def key(self) -> list[Any]:
        """Return what the tokens depend on besides the file."""
        return [self.tokenizer.digest, self.text_key]

    @property
    def dtype(self) -> str:
        """Return the number format of the ids."""
        return token_dtype(self.tokenizer.vocab_size)

    def convert(self, file: DataFile, chunk: tuple[int, bytes]) -> list[Rows]:
        """Return the documents of lines."""
        texts = ((text_of(row, self.text_key, where), where) for where, row in objects_of(file, *chunk))
        return tokenized_texts(texts, self.tokenizer)


def text_of(row: dict[str, Any], key: str, where: str) -> str:
    """Return the text of an object.

    Raises:
        UserError: there is none under ``key``.
    """
    if key not in row:
        raise UserError(
            f"{where}: has no {key}; keys found: {', '.join(row) or 'none'}; every row must have its text there, as "
            f"the first one has, or every row input_ids (python -m smp.data.prepare --text_key KEY reads another key)"
        )
    if not isinstance(row[key], str):
        raise UserError(f"{where}: {key} must be a string, its type is {type(row[key]).__name__}; leave the row out")
    return row[key]


def _refuse_beyond_vocabulary(file: DataFile, store: TokenFile, vocab_size: int) -> None:
    """Read the file of a cache that was made for a larger vocabulary again, to name the line that does not fit."""
    if max(store.highest, store.highest_label) >= vocab_size:
        for where, found in read_objects(file):
            checked_row(found, where, vocab_size)


def open_jsonl(
    files: list[DataFile], *, sequence_length: int, vocab_size: int, cache_dir: str | None, what: str = "data"
) -> WindowRows:
    """Convert files with ids, unless they are cached, and cut every row into windows, in the order of files and lines.

    Raises:
        UserError: a file or one of its lines is unusable, or an id is not in the vocabulary.
    """
    stores = token_files(files, JsonIds(vocab_size), what=what, cache_dir=cache_dir)
    for file, store in zip(files, stores, strict=True):
        _refuse_beyond_vocabulary(file, store, vocab_size)
    identity = digest_of("jsonl", sequence_length, [file.identity for file in files])
    return WindowRows(stores, sequence_length, identity, [(file.url, 0) for file in files])
