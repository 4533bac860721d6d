"""Hugging Face datasets, by name or saved with ``save_to_disk``, and parquet, Arrow and CSV files.

``datasets`` reads them. Local Arrow files with ids are memory mapped as they are; all others are converted once to
token files.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from smp.data.packing import BLOCK, WindowRows
from smp.data.rows import COLUMNS, Reader, is_unread
from smp.data.storage import ARROW, CSV, DataFile, filesystem_of, list_files, open_file, reading
from smp.data.token_cache import IGNORED, Columns, RowsDigest, digest_of, recorded
from smp.errors import UserError, a_type, first_line
from smp.json_input import MAX_JSON, strict_json

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev", "test")}
ROWS = 128  # that are read and converted at once
OPTIONS: dict[str, dict[str, Any]] = {"parquet": {"batch_size": ROWS}, "arrow": {}}
NO_VOCABULARY = 1 << 62  # is large enough


def import_datasets() -> Any:
    """Import ``datasets``, which JSON lines, text and token files do not need.

    Raises:
        UserError: it is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"saved datasets, parquet, Arrow and CSV files need the package datasets ({error}): run "
            f"`pip install datasets`, or give JSON lines"
        ) from error
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # a request to the hub for each local file
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs errors that it raises, too
    return datasets


@contextmanager
def _refusing(file: DataFile) -> Iterator[None]:
    """Turn whatever is raised for the content of a file into one sentence."""
    try:
        with reading(file.url):
            yield
    except UserError:
        raise
    except Exception as error:  # of any type, for malformed files
        raise UserError(
            f"{file.url} is not a readable file of its kind ({first_line(error)}); write it again"
        ) from error


def read_tables(columns: tuple[str, ...], file: DataFile) -> Iterator[tuple[tuple[int, Any], int]]:
    """Yield a file as tables: (number of rows before it, table), and the bytes of the tables so far.

    Args:
        columns: to keep, besides those that are refused; without the first of them all are, for the message.
    """
    kind = "arrow" if file.ends_with(ARROW) else "parquet"
    url = f"gzip://{glob.escape(file.name[:-3])}::{file.url}" if file.zipped else glob.escape(file.url)
    first = nbytes = 0
    with _refusing(file):
        datasets = import_datasets()
        if file.ends_with(CSV):
            tables = _csv_tables(file)
        else:
            found = datasets.load_dataset(kind, data_files=[url], split="train", streaming=True, **OPTIONS[kind])
            tables = found.with_format("arrow").iter(batch_size=ROWS)
        for table in tables:
            nbytes += table.nbytes
            if columns[0] in table.column_names:
                table = table.select([name for name in table.column_names if name in columns or is_unread(name)])
            yield (first, table), min(nbytes, file.size)
            first += len(table)


def _csv_tables(file: DataFile) -> Iterator[Any]:
    """Yield a CSV file as tables whose cells are texts as written: empty ones, NA and 007, too."""
    import pandas as pd
    import pyarrow as pa

    with open_file(file) as (content, _):
        for frame in pd.read_csv(content, dtype=str, keep_default_na=False, chunksize=ROWS):
            if not isinstance(frame.index, pd.RangeIndex):  # of the first cells, which pandas takes for names of rows
                raise ValueError("a row has more cells than the first line has names")
            yield pa.Table.from_pandas(frame, pa.schema([(str(name), pa.string()) for name in frame.columns]))


def table_examples(file: DataFile, chunk: tuple[int, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table by column; lists of integers as arrays, without a Python object per token."""
    first, table = chunk
    columns = {}
    for name in table.column_names:
        try:
            columns[name] = _values(table.column(name).combine_chunks())
        except ValueError as error:
            wrong = f"UTF-8 ({error.reason})" if isinstance(error, UnicodeDecodeError) else f"valid JSON ({error})"
            raise UserError(
                f"{file.url}, rows {first + 1} to {first + len(table)}: {name} is not {wrong}; convert the file"
            ) from error
    for at in range(len(table)):
        yield f"{file.url}, row {first + at + 1}", {name: values[at] for name, values in columns.items()}


TABLES = Reader("hf", read_tables, table_examples)


def _values(column: Any) -> list[Any]:
    flat = _flat(column)
    if flat is not None:
        return np.split(flat[0], flat[1][1:-1])
    return [_decoded(each, column.type) for each in column.to_pylist()]


def _decoded(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type as the JSON line would have it that the table was made of.

    Objects of JSON are texts in it, and structs have the keys of all rows, with null.
    """
    import pyarrow as pa

    if value is None:
        return None
    if getattr(kind, "extension_name", "") == "arrow.json":
        return strict_json(value)
    if pa.types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_decoded(each, kind.value_type) for each in value]
    return value


def _flat(column: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (values, offsets) of an array of lists of integers, or None of another one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        return None
    values = column.flatten()
    if column.null_count or values.null_count:
        return None
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return values.to_numpy(zero_copy_only=False), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


class MappedRows(WindowRows):
    """Rows of memory-mapped Arrow files; pickles as the arguments that open them again, ``reopen``."""

    def __init__(self, *rows: Any, reopen: tuple[Any, ...]):
        super().__init__(*rows)
        self._reopen = reopen

    def __reduce__(self) -> tuple[Callable[..., MappedRows | None], tuple[Any, ...]]:
        return open_mapped, self._reopen


def open_mapped(
    files: list[DataFile], sequence_length: int, vocab_size: int, cache_dir: str | None
) -> MappedRows | None:
    """Memory map local Arrow files with ids; None where some row is not as it could be trained on.

    The vocabulary that a file needs and the digest of its rows are computed once and kept in the cache folder.
    """
    datasets = import_datasets()
    stores: list[Columns] = []
    origins: list[tuple[str, int]] = []
    for file in files:
        with _refusing(file):
            batches = [batch for batch in datasets.Dataset.from_file(file.url).data.to_batches() if len(batch)]
        found = [columns for batch in batches if (columns := _columns(batch)) is not None]
        if len(found) < len(batches):
            return None
        key = ["vocabulary and digest", file.url, file.size, file.stamp]
        needed, digest = recorded(cache_dir, file.name, key, lambda found=found: _vocabulary_and_digest(found))  # type: ignore[misc]
        if needed > vocab_size:
            return None
        stores += (dataclasses.replace(columns, digest=digest) for columns in found)
        firsts = np.cumsum([0, *map(len, batches)]).tolist()[: len(batches)]
        origins += [(file.url, first) for first in firsts]
    identity = digest_of("hf", sequence_length, [file.identity for file in files])
    return MappedRows(
        stores, sequence_length, identity, origins, reopen=(files, sequence_length, vocab_size, cache_dir)
    )


def _columns(batch: Any) -> Columns | None:
    """Return a record batch's columns as flat arrays, without a copy; None if they are not such."""
    names = batch.schema.names
    present = [name for name in COLUMNS if name in names and batch.column(name).null_count < len(batch)]
    flat = [each for name in present if (each := _flat(batch.column(name))) is not None]
    if len(flat) < len(present) or "input_ids" not in present or any(map(is_unread, names)):
        return None
    offsets = flat[0][1]
    if not (np.diff(offsets) > 0).all() or not all(np.array_equal(offsets, theirs) for _, theirs in flat):
        return None
    values = {name: each for name, (each, _) in zip(present, flat, strict=True)}
    return Columns(values["input_ids"], offsets, values.get("attention_mask"), values.get("labels"))


def _vocabulary_and_digest(batches: list[Columns]) -> tuple[int, str]:
    """Return :func:`_vocabulary` and the digest of all rows, which are read once."""
    digest, needed = RowsDigest(), 0
    for rows in batches:
        digest.add("lengths", np.diff(rows.offsets))
        needed = max(needed, _vocabulary(rows, digest))
    return needed, digest.hexdigest()


def _vocabulary(rows: Columns, digest: RowsDigest) -> int:
    """Return the size of the smallest vocabulary with the ids and labels, in bounded memory.

    ``NO_VOCABULARY`` if they are negative, or a mask holds others than 0 and 1: such rows are not mapped.

    Args:
        digest: is given what is read.
    """
    needed = 0
    for name, values in (("tokens", rows.tokens), ("labels", rows.labels), ("mask", rows.mask)):
        for start in range(0, 0 if values is None else len(values), BLOCK):
            block = values[start : start + BLOCK]  # type: ignore[index]
            digest.add(name, block)
            counted = block[block != IGNORED] if values is rows.labels else block
            highest = int(counted.max(initial=0))
            if counted.min(initial=0) < 0 or (values is rows.mask and highest > 1):
                return NO_VOCABULARY
            needed = max(needed, highest + 1)
    return needed


def named_files(name: str, config: str | None, splits: tuple[str, ...]) -> list[DataFile]:
    """Return the Arrow files of a dataset's split in the local cache of ``datasets``, which may download it first.

    Args:
        splits: names, of which the first that it has is read.

    Raises:
        UserError: it cannot be loaded, or has no such split.
    """
    datasets = import_datasets()
    try:
        found = datasets.load_dataset(name, config, keep_in_memory=False)
    except Exception as error:  # of any type, for what is on the hub
        raise UserError(
            f"--dataset_name {name}: {first_line(error)}: where there is no network, load it once with "
            f"datasets.load_dataset, and copy the cache folder (HF_HOME) with it"
        ) from error
    chosen = _chosen_split(f"--dataset_name {name}", [*found], splits)
    files = [each["filename"] for each in found[chosen].cache_files]
    return [list_files(glob.escape(file), extensions=ARROW)[0] for file in files]


def _chosen_split(what: str, names: list[str], wanted: tuple[str, ...]) -> str:
    for name in wanted:
        if name in names:
            return name
    raise UserError(
        f"{what} has the splits {', '.join(names)}, but no {' or '.join(wanted)}: --dataset_split names one of a "
        f"dataset by name; of a saved one give its folder; --test_dir gives other validation data"
    )


def saved_files(path: str, split: str) -> list[DataFile] | None:
    """Return the Arrow files of a dataset saved with ``save_to_disk``, or None where ``path`` is no such folder.

    Raises:
        UserError: it is a saved DatasetDict without that split, or its JSON files are not what ``save_to_disk`` writes.
    """
    if (described := _described(path, "dataset_dict.json")) is not None:
        names = _plain_names(f"{path}/dataset_dict.json", described.get("splits"))
        path = f"{path.rstrip('/')}/{_chosen_split(path, names, SPLIT_NAMES[split])}"
    if (described := _described(path, "state.json")) is None:
        return None
    entries = described.get("_data_files")
    listed = [each.get("filename") if isinstance(each, dict) else None for each in entries or ()]
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
        raise UserError(f"{path}/{name} contains {a_type(found)} instead of an object: save the dataset again")
    return found


def _plain_names(where: str, names: Any) -> list[str]:
    """Return ``names``, which come from JSON, if they are file names without a path; else raise a UserError."""
    names = names if isinstance(names, list) and names else [None]
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise UserError(
                f"{where} lists {str(name)[:80]!r}, which is no name of a file beside it: save the dataset again"
            )
    return names
