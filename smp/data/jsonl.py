"""JSON lines: ``{"input_ids": [...], "attention_mask": [...], "labels": [...]}``, the last two optional."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from smp.data.packing import WindowRows
from smp.data.progress import Progress
from smp.data.storage import DataFile, open_file
from smp.data.token_cache import TokenFile, TokenWriter, cached, digest_of, token_dtype
from smp.errors import UserError

BOM = b"\xef\xbb\xbf"
# A row of more than ten million tokens. Without a bound, a small compressed file could hold one line of many gigabytes.
MAX_LINE = 64 << 20


def read_objects(file: DataFile, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSON lines file with their line numbers (from 1), without blank lines.

    Raises:
        UserError: a line is not JSON, not UTF-8, not an object or longer than ``MAX_LINE`` bytes.
    """
    with Progress(f"{what} {file.name}", file.size) as progress, open_file(file) as (content, raw):
        for number in itertools.count(1):
            line = content.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE:
                raise UserError(
                    f"{file.url}, line {number}: has more than {MAX_LINE >> 20} MiB; cut the row into several"
                )
            if number == 1 and line.startswith(BOM):
                line = line[len(BOM) :]
            if not line.strip():
                continue
            try:
                found = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise UserError(f"{file.url}, line {number}: not UTF-8 ({error.reason}); convert the file") from error
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file.url}, line {number}: not valid JSON: {error}") from error
            if not isinstance(found, dict):
                raise UserError(
                    f"{file.url}, line {number}: holds a {type(found).__name__}; each line must be one object "
                    f'such as {{"input_ids": [1, 2, 3]}}'
                )
            yield number, found
            if number % 64 == 0:
                progress.reach(raw.tell())


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
        raise UserError(f"{where}: has no input_ids; keys found: {', '.join(found) or 'none'}")
    ids = integers(found["input_ids"], "input_ids", where)
    if (lowest := int(ids.min())) < 0:
        raise UserError(f"{where}: token id {lowest} is negative; ids must be in [0, {vocab_size})")
    if (highest := int(ids.max())) >= vocab_size:
        raise UserError(beyond_vocabulary(where, highest, vocab_size))
    mask = labels = None
    if found.get("attention_mask") is not None:
        mask = integers(found["attention_mask"], "attention_mask", where)
        if not ((mask == 0) | (mask == 1)).all():
            raise UserError(f"{where}: attention_mask must hold 0 and 1 only")
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


def beyond_vocabulary(where: str, token: int, vocab_size: int, *, name: str = "token id") -> str:
    """Format the refusal of an id (or a label, by ``name``) outside the vocabulary."""
    return (
        f"{where}: {name} {token} is outside the model's vocabulary of {vocab_size}: set --vocab_size to at least "
        f"{token + 1}, or use data made with the model's tokenizer"
    )


def _convert(file: DataFile, vocab_size: int, writer: TokenWriter) -> None:
    for number, found in read_objects(file, "reading"):
        ids, mask, labels = checked_row(found, f"{file.url}, line {number}", vocab_size)
        writer.add(ids, [len(ids)], mask=mask, labels=labels)
    if writer.rows == 0:
        raise UserError(f"{file.url} holds no rows: remove it, or write it again")


def _refuse_beyond_vocabulary(file: DataFile, store: TokenFile, vocab_size: int) -> None:
    """Read the file of a cache that was made for a larger vocabulary again, to name the line that does not fit."""
    if max(store.highest, store.highest_label) >= vocab_size:
        for number, found in read_objects(file, "checking"):
            checked_row(found, f"{file.url}, line {number}", vocab_size)


def open_jsonl(files: list[DataFile], *, sequence_length: int, vocab_size: int, cache_dir: str | None) -> WindowRows:
    """Convert files, unless they are cached, and cut every row into windows, in the order of files and lines.

    Raises:
        UserError: a file or one of its lines is unusable, or an id is not in the vocabulary.
    """
    stores = []
    for file in files:
        store = cached(
            cache_dir,
            file.name,
            ["jsonl", file.url, file.size, file.stamp],
            functools.partial(_convert, file, vocab_size),
            dtype=token_dtype(vocab_size),
        )
        _refuse_beyond_vocabulary(file, store, vocab_size)
        stores.append(store)
    return WindowRows(stores, sequence_length, digest_of("jsonl", sequence_length, [file.identity for file in files]))
