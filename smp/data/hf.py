"""Hugging Face datasets saved with ``save_to_disk``, parquet and arrow files.

They have columns input_ids, attention_mask and labels, or a column of texts.

Local arrow files with ids are memory mapped as they are; parquet, which is compressed, texts, and remote files are
converted once to token files. None of them makes a Python object per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from smp.data.convert import Rows, token_files
from smp.data.jsonl import beyond_vocabulary, other_mask, refuse_unread
from smp.data.packing import BLOCK, WindowRows
from smp.data.storage import ARROW, DataFile, filesystem_of, list_files, open_file, reading
from smp.data.text import TextTokenizer, tokenized_texts
from smp.data.token_cache import IGNORED, Columns, digest_of, recorded, token_dtype
from smp.errors import UserError, a_type
from smp.json_input import MAX_JSON, strict_json

COLUMNS = ("input_ids", "attention_mask", "labels")
SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "val", "test")}


class MappedRows(WindowRows):
    """Rows of memory-mapped arrow files; pickles as the arguments that open them again, ``reopen``."""

    def __init__(self, *rows: Any, reopen: tuple[Any, ...]):
        super().__init__(*rows)
        self._reopen = reopen

    def __reduce__(self) -> tuple[Callable[..., MappedRows], tuple[Any, ...]]:
        return open_mapped, self._reopen


def rows_of(batch: Any, where: str, first_row: int) -> Columns:
    """Return a record batch's columns as flat arrays, without a copy where arrow allows it.

    Args:
        batch: pyarrow.RecordBatch with at least input_ids.
        where: file, for messages.
        first_row: number of rows before the batch.

    Raises:
        UserError: a column is missing, of another type, has gaps or another length than input_ids.
    """
    names = batch.schema.names
    if "input_ids" not in names:
        raise UserError(
            f"{where}: has no column input_ids; columns found: {', '.join(names) or 'none'}; name the one with token "
            f"ids input_ids, or the one with texts text"
        )
    refuse_unread(dict.fromkeys(names, True), where)
    tokens, lengths = _flat(batch.column("input_ids"), "input_ids", where, first_row)
    if len(empty := np.flatnonzero(lengths == 0)):
        raise UserError(f"{where}, row {first_row + empty[0] + 1}: input_ids is empty; leave the row out")
    others: list[np.ndarray | None] = []
    for name in COLUMNS[1:]:
        if name not in names or batch.column(name).null_count == len(batch):
            others.append(None)
            continue
        values, theirs = _flat(batch.column(name), name, where, first_row)
        if len(wrong := np.flatnonzero(theirs != lengths)):
            row = wrong[0]
            raise UserError(
                f"{where}, row {first_row + row + 1}: {name} has {theirs[row]} entries, input_ids {lengths[row]}; "
                f"they must be equal"
            )
        others.append(values)
    return Columns(tokens, np.concatenate([[0], np.cumsum(lengths)]), *others)


def _flat(array: Any, name: str, where: str, first_row: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (values, lengths) of a list column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        raise UserError(f"{where}: column {name} must hold lists of integers, it holds {kind}")
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise UserError(f"{where}, row {first_row + row + 1}: has no {name}")
    lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
    values = array.flatten()
    if values.null_count:
        place = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]
        row = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
        raise UserError(f"{where}, row {first_row + row + 1}: {name} has an empty place; it must hold integers only")
    return values.to_numpy(zero_copy_only=False), lengths


def extremes_of(rows: Columns) -> list[list[int]]:
    """Return [lowest, highest] of the ids, 0 and the labels in the loss, 0 and the mask, in bounded memory."""
    found = [[int(rows.tokens.min()), int(rows.tokens.max())], [0, 0], [0, 0]]
    for values, extremes in ((rows.labels, found[1]), (rows.mask, found[2])):
        for start in range(0, 0 if values is None else len(values), BLOCK):
            block = values[start : start + BLOCK]  # type: ignore[index]
            counted = block[block != IGNORED] if values is rows.labels else block
            extremes[0] = min(extremes[0], int(counted.min(initial=0)))
            extremes[1] = max(extremes[1], int(counted.max(initial=0)))
    return found


def check_rows(rows: Columns, extremes: list[list[int]], *, where: str, first_row: int, vocab_size: int) -> None:
    """Refuse ids and labels that the model does not have, and masks of other numbers than 0 and 1, naming the row.

    Args:
        rows: to check.
        extremes: :func:`extremes_of` of them.
        where: file, for messages.
        first_row: number of rows before these.
        vocab_size: ids must be in [0, vocab_size), labels too or -100.

    Raises:
        UserError: a value is outside.
    """
    columns = {"token id": (rows.tokens, vocab_size), "label": (rows.labels, vocab_size), "mask": (rows.mask, 2)}
    for (name, (values, end)), (lowest, highest) in zip(columns.items(), extremes, strict=True):
        if values is None or (lowest >= 0 and highest < end):
            continue
        is_label = name == "label"
        wrong = (values < 0) | (values >= end)
        place = int(np.flatnonzero(wrong & (values != IGNORED) if is_label else wrong)[0])
        at = f"{where}, row {first_row + int(np.searchsorted(rows.offsets, place, side='right'))}"
        value = int(values[place])
        if name == "mask":
            raise UserError(other_mask(at, value))
        if value >= vocab_size:
            raise UserError(beyond_vocabulary(at, value, vocab_size, name=name))
        allowed = f"labels must be in [0, {vocab_size}), or -100 for positions out of the loss"
        raise UserError(
            f"{at}: {name} {value} is negative; {allowed if is_label else f'ids must be in [0, {vocab_size})'}"
        )


def open_mapped(files: list[DataFile], sequence_length: int, vocab_size: int, cache_dir: str | None) -> MappedRows:
    """Memory map local arrow stream files.

    The extremes of each record batch's ids and labels are computed once and kept in the cache folder.
    """
    import pyarrow as pa

    stores: list[Columns] = []
    origins: list[tuple[str, int]] = []
    for file in files:
        try:
            batches = pa.ipc.open_stream(pa.memory_map(file.url)).read_all().to_batches()
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{file.url} is not a readable arrow file ({error}); save the dataset again") from error
        firsts = np.cumsum([0, *(len(batch) for batch in batches)]).tolist()
        found = [rows_of(batch, file.url, first) for batch, first in zip(batches, firsts, strict=False) if len(batch)]
        firsts = [first for batch, first in zip(batches, firsts, strict=False) if len(batch)]
        extremes = recorded(
            cache_dir,
            file.name,
            ["extremes", "labels", "mask", file.url, file.size, file.stamp],
            lambda found=found: [extremes_of(rows) for rows in found],  # type: ignore[misc]
        )
        for rows, first, theirs in zip(found, firsts, extremes, strict=True):
            check_rows(rows, theirs, where=file.url, first_row=first, vocab_size=vocab_size)
        stores += found
        origins += [(file.url, first) for first in firsts]
    identity = digest_of("hf", sequence_length, [file.identity for file in files])
    reopen = files, sequence_length, vocab_size, cache_dir
    return MappedRows(stores, sequence_length, identity, origins, reopen=reopen)


@contextmanager
def _table(file: DataFile) -> Iterator[tuple[Any, BinaryIO]]:
    """Open a parquet or arrow file on any file system; yields the reader, and the stored file for its position."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_file(file) as (content, raw):
        try:
            if not file.ends_with(ARROW):
                yield pq.ParquetFile(content), raw
            else:
                yield pa.ipc.open_stream(content), raw
        except pa.ArrowInvalid as error:
            raise UserError(f"{file.url} is not a readable file of its kind ({error}); write it again") from error


def column_names(file: DataFile) -> list[str]:
    """Return the names of a parquet or arrow file's columns."""
    with _table(file) as (table, _):
        return (table.schema_arrow if hasattr(table, "schema_arrow") else table.schema).names


def _batches(file: DataFile, columns: tuple[str, ...], rows: int) -> Iterator[tuple[tuple[int, Any], int]]:
    """Yield record batches, each with the number of rows before it, and the file's bytes read so far.

    Args:
        columns: to read; without the first of them every column is, for the error to name them.
        rows: most in a batch of a parquet file.
    """
    with _table(file) as (table, raw):
        if hasattr(table, "schema_arrow"):
            names = table.schema_arrow.names
            if columns == COLUMNS:
                refuse_unread(dict.fromkeys(names, True), file.url)
            wanted = [name for name in columns if name in names] if columns[0] in names else None
            table = table.iter_batches(batch_size=rows, columns=wanted)
        first = 0
        for batch in table:
            if len(batch):
                yield (first, batch), raw.tell()
            first += len(batch)


@dataclasses.dataclass(frozen=True)
class TableIds:
    """Format of parquet and arrow files with ``input_ids`` below ``vocab_size``."""

    vocab_size: int
    name = "hf"
    content = "rows"
    key = ()

    @property
    def dtype(self) -> str:
        """Return the number format of the ids."""
        return token_dtype(self.vocab_size)

    def chunks(self, file: DataFile) -> Iterator[tuple[tuple[int, Any], int]]:
        """Yield record batches."""
        return _batches(file, COLUMNS, 1024)

    def convert(self, file: DataFile, chunk: tuple[int, Any]) -> list[Rows]:
        """Return the rows of a record batch."""
        first, batch = chunk
        rows = rows_of(batch, file.url, first)
        check_rows(rows, extremes_of(rows), where=file.url, first_row=first, vocab_size=self.vocab_size)
        return [Rows(rows.tokens.astype(self.dtype), rows.offsets[1:], rows.mask, rows.labels)]


@dataclasses.dataclass(frozen=True)
class TableText:
    """Format of parquet and arrow files with a column of texts, each a document."""

    tokenizer: TextTokenizer
    text_key: str
    name = "hf_text"
    content = "text"

    @property
    def key(self) -> list[Any]:
        """Return what the tokens depend on besides the file."""
        return [self.tokenizer.digest, self.text_key]

    @property
    def dtype(self) -> str:
        """Return the number format of the ids."""
        return token_dtype(self.tokenizer.vocab_size)

    def chunks(self, file: DataFile) -> Iterator[tuple[tuple[int, Any], int]]:
        """Yield record batches."""
        for (first, batch), position in _batches(file, (self.text_key,), 128):
            yield (first, self._texts(batch, file, first)), position

    def _texts(self, batch: Any, file: DataFile, first: int) -> list[str]:
        import pyarrow as pa

        if self.text_key not in batch.schema.names:
            raise UserError(
                f"{file.url}: has no column {self.text_key}; columns found: {', '.join(batch.schema.names) or 'none'}"
            )
        texts = batch.column(self.text_key)
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            raise UserError(f"{file.url}: column {self.text_key} must hold strings, it holds {texts.type}")
        if texts.null_count:
            row = texts.to_pylist().index(None)
            raise UserError(f"{file.url}, row {first + row + 1}: has no {self.text_key}; leave the row out")
        try:
            return texts.to_pylist()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file.url}, rows {first + 1} to {first + len(batch)}: {self.text_key} is not UTF-8 ({error.reason}); "
                f"convert the file"
            ) from error

    def convert(self, file: DataFile, chunk: tuple[int, list[str]]) -> list[Rows]:
        """Return the documents of a record batch."""
        first, texts = chunk
        where = ((text, f"{file.url}, row {row}") for row, text in enumerate(texts, first + 1))
        return tokenized_texts(where, self.tokenizer)


def open_converted(
    files: list[DataFile], *, sequence_length: int, vocab_size: int, cache_dir: str | None, what: str = "data"
) -> WindowRows:
    """Convert parquet or remote arrow files with ids, unless they are cached, and cut their rows into windows."""
    stores = token_files(files, TableIds(vocab_size), what=what, cache_dir=cache_dir)
    for file, store in zip(files, stores, strict=True):
        extremes = [[0, store.highest], [0, store.highest_label], [0, 1]]
        check_rows(store, extremes, where=file.url, first_row=0, vocab_size=vocab_size)
    identity = digest_of("hf", sequence_length, [file.identity for file in files])
    return WindowRows(stores, sequence_length, identity, [(file.url, 0) for file in files])


def saved_files(path: str, split: str) -> list[DataFile] | None:
    """Return the arrow files of a dataset saved with ``save_to_disk``, or None where ``path`` is no such folder.

    Raises:
        UserError: it is a saved DatasetDict without that split, or its JSON files are not what ``save_to_disk`` writes.
    """
    if (described := _described(path, "dataset_dict.json")) is not None:
        names = _plain_names(f"{path}/dataset_dict.json", described.get("splits"))
        chosen = next((name for name in SPLIT_NAMES[split] if name in names), None)
        if chosen is None:
            raise UserError(
                f"{path} has the splits {', '.join(names)}, but no {' or '.join(SPLIT_NAMES[split])}: give the folder "
                f"of one split"
            )
        path = f"{path.rstrip('/')}/{chosen}"
    if (described := _described(path, "state.json")) is None:
        return None
    entries = described.get("_data_files")
    entries = entries if isinstance(entries, list) else []
    listed = [each.get("filename") if isinstance(each, dict) else None for each in entries]
    names = _plain_names(f"{path}/state.json", listed)
    return [list_files(f"{path.rstrip('/')}/{name}", extensions=ARROW)[0] for name in names]


def _described(path: str, name: str) -> dict[str, Any] | None:
    """Read one of the JSON files that ``save_to_disk`` writes into a folder; None where it is missing."""
    fs, inner = filesystem_of(path)
    file = f"{inner.rstrip('/')}/{name}"
    with reading(path):
        if not fs.exists(file):
            return None
        content = fs.cat_file(file, start=0, end=MAX_JSON)
    try:
        found = strict_json(content)
    except ValueError as error:
        raise UserError(f"{path}/{name} is not valid JSON ({error}): save the dataset again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}/{name} holds {a_type(found)} instead of an object: save the dataset again")
    return found


def _plain_names(where: str, names: Any) -> list[str]:
    """Return ``names`` if they are plain file names, without a path.

    Args:
        where: the file that lists them, for messages.
        names: from JSON.

    Raises:
        UserError: they are no list of such names.
    """
    names = names if isinstance(names, list) and names else [None]
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise UserError(
                f"{where} lists {str(name)[:80]!r}, which is no name of a file beside it: save the dataset again"
            )
    return names
