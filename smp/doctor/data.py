"""The data: there, readable, in rows that the model can take. A sample of it, or with ``--full`` all.

Only what needs no conversion: the training job's own dry run (``model.py``) opens the data as a run does.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import random
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from smp.comm.report import readable
from smp.doctor.room import Room
from smp.errors import UserError
from smp.json_input import MAX_JSON, read_object

_FIRST_ROWS = 64  # of each file
_PLACES = 8  # later in a file, a row of each
_MOST_FILES = 16
_LONGEST_LINE = 64 << 20
_KINDS = {".json": "gpt_jsonl", ".jsonl": "gpt_jsonl", ".parquet": "hf", ".arrow": "hf", ".txt": "text"}


@dataclasses.dataclass
class Sample:
    """What was looked at.

    Attributes:
        rows, tokens: so many.
        highest: the largest token id.
    """

    rows: int = 0
    tokens: int = 0
    highest: int = -1

    def add(self, ids: Any, where: str) -> None:
        """Take in a row.

        Raises:
            UserError: it is no list of token ids.
        """
        good = isinstance(ids, list) and ids and all(type(each) is int for each in ids)
        if not good:
            raise UserError(f"{where}: input_ids must be a list of whole numbers: write the row again")
        if (lowest := min(ids)) < 0:
            raise UserError(f"{where}: token id {lowest} is negative: write the row again")
        self.rows, self.tokens = self.rows + 1, self.tokens + len(ids)
        self.highest = max(self.highest, *ids)


def check_data(room: Room) -> None:
    """The folders of training and validation data."""
    settings = room.request.settings
    if settings.get("use_synthetic_data"):
        room.ok("random tokens (--use_synthetic_data 1): no data is read")
        return
    named = [(flag, settings[flag]) for flag in ("training_dir", "test_dir") if settings.get(flag)]
    if not named:
        room.ok("no --training_dir was given: nothing was read")
    measured = {}
    for flag, place in named:
        try:
            measured[flag] = _look(room, flag, str(place))
        except UserError as error:
            room.problem(f"--{flag} {place}: {error}")
    room.measure("data", measured)


def _look(room: Room, flag: str, place: str) -> dict[str, Any]:
    """Look at one of them; what was found, for other hosts to compare."""
    settings = room.request.settings
    fs, files = _files(place, training=flag == "training_dir", zipped=settings.get("zipped_data"))
    kind = settings.get("dataset_type") or _kind_of(files)
    # What was named itself may be called anything.
    wanted = [(name, size) for name, size in files if _kind(name) in (kind, None)]
    if not wanted:
        raise UserError(
            f"there are no files for --dataset_type {kind} but of {_kind_of(files)}: choose that, or others"
        )
    vocabulary = settings.get("vocab_size") or room.state.get("vocab_size")
    if kind == "text":
        _look_at_text(room, flag, fs, wanted, vocabulary)
    else:
        _look_at_tokens(room, flag, fs, wanted, kind, vocabulary)
    sizes = {PurePosixPath(name).name: size for name, size in wanted}
    return {"files": len(wanted), "bytes": sum(sizes.values()), "names": sorted(sizes)[:64]}


def _files(place: str, *, training: bool, zipped: bool | None) -> tuple[Any, list[tuple[str, int]]]:
    """The file system of a path, glob or URL, and its data files with their sizes, by name.

    Args:
        place: what the user gave.
        training: which split of a saved DatasetDict.
        zipped: True keeps only ``.gz`` files, False only the others.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    import fsspec

    try:
        fs, inner = fsspec.core.url_to_fs(place if "://" in place else str(Path(place).expanduser()))
        found: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            if fs.isdir(inner):
                found = _in_folder(fs, inner, training=training)
                found = [each for each in found if zipped is None or each.endswith(".gz") == zipped]
            else:
                found = [inner] if fs.isfile(inner) else [each for each in fs.glob(inner) if fs.isfile(each)]
        files = sorted((each, int(fs.size(each) or 0)) for each in found)
    except (OSError, ImportError, ValueError) as error:
        raise UserError(f"it cannot be read ({error}): mend its permissions, or give another path") from None
    if not files:
        raise UserError("there are no data files: give a file, a folder, a glob or a URL of any of them")
    if empty := [name for name, size in files if size == 0]:
        raise UserError(f"{empty[0]} is empty: remove it, or write it again")
    return fs, files


def _in_folder(fs: Any, folder: str, *, training: bool) -> list[str]:
    """The data files of a folder: its direct children, or those of a saved dataset's split."""
    folder = folder.rstrip("/")
    if fs.exists(f"{folder}/dataset_dict.json"):
        splits = ("train",) if training else ("validation", "val", "test")
        folder = next((f"{folder}/{split}" for split in splits if fs.exists(f"{folder}/{split}")), folder)
    found = [entry["name"] for entry in fs.ls(folder, detail=True) if entry["type"] == "file"]
    if fs.exists(f"{folder}/state.json"):
        return [each for each in found if each.endswith(".arrow")]
    return [each for each in found if _kind(each) and not PurePosixPath(each).name.startswith(".")]


def _kind(name: str) -> str | None:
    """The ``--dataset_type`` that a file's name tells, if it tells one."""
    return _KINDS.get(PurePosixPath(name.removesuffix(".gz")).suffix)


def _kind_of(files: list[tuple[str, int]]) -> str:
    """The kind of most files."""
    kinds = [kind for name, _ in files if (kind := _kind(name))]
    return max(kinds, key=kinds.count) if kinds else "gpt_jsonl"


# --- rows of token ids


def _look_at_tokens(
    room: Room, flag: str, fs: Any, files: list[tuple[str, int]], kind: str, vocabulary: int | None
) -> None:
    full = room.request.full
    chosen = files if full or len(files) <= _MOST_FILES else random.Random(0).sample(files, _MOST_FILES)
    sample, seen = Sample(), 0
    for name, size in chosen:
        reader = _json_rows if kind == "gpt_jsonl" else _arrow_rows
        with _complaints(name):
            seen += reader(fs, name, size, sample, full)
    total = sum(size for _, size in files)
    if sample.rows == 0:
        raise UserError("it holds no rows: nothing to train on")
    whole = seen >= total
    rows = sample.rows if whole else round(sample.rows * total / max(seen, 1))
    tokens = sample.tokens if whole else round(sample.tokens * total / max(seen, 1))
    data = {"files": len(files), "bytes": total, "rows": rows, "tokens": tokens, "highest_id": sample.highest}
    about = "" if whole else "about "
    what = f"{len(files)} file(s), {readable(total)}, {about}{rows:,} rows with {about}{tokens:,} tokens"
    if vocabulary is not None and sample.highest >= vocabulary:
        room.problem(
            f"--{flag}: token id {sample.highest} is outside the model's vocabulary of {vocabulary}: set --vocab_size "
            f"to at least {sample.highest + 1}, or use data made with the model's tokenizer",
            **data,
        )
        return
    _say_amount(room, flag, what, tokens, data)


def _say_amount(room: Room, flag: str, what: str, tokens: int, data: dict[str, Any]) -> None:
    length = room.request.settings.get("max_context_width") or room.state.get("length")
    size = room.request.settings.get("global_batch_size")
    batch = int(size or (room.request.settings.get("train_batch_size") or 1) * room.launch.world_size)
    samples = None if not length else max(1, tokens // int(length))
    if samples is not None and samples < batch and flag == "training_dir":
        room.warn(
            f"--{flag}: {what}, which is {samples} sample(s) of {length} tokens and less than one step of {batch}: use "
            f"more data or a smaller batch",
            **data,
        )
        return
    amount = "" if samples is None else f": {samples:,} sample(s) of {length} tokens"
    room.ok(f"--{flag}: {what}{amount}", **data, samples=samples)


@contextlib.contextmanager
def _complaints(name: str) -> Iterator[None]:
    """Name the file that something complains about.

    Raises:
        UserError: instead.
    """
    try:
        yield
    except UserError:
        raise
    except EOFError:
        raise UserError(f"{name} is truncated: its gzip stream ends too early; copy it again") from None
    except (OSError, ValueError, zlib.error, RecursionError, ImportError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name} cannot be read ({first}): write it again") from None


@contextlib.contextmanager
def _opened(fs: Any, name: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(content, raw): decompressed and buffered; ``raw.tell()`` counts bytes of the file."""
    with fs.open(name, "rb") as raw:
        if not name.endswith(".gz"):
            with io.BufferedReader(raw, 1 << 20) as content:
                yield content, raw  # type: ignore[misc]
            return
        with gzip.GzipFile(fileobj=raw) as unzipped, io.BufferedReader(unzipped, 1 << 16) as content:
            yield content, raw  # type: ignore[misc]


def _json_rows(fs: Any, name: str, size: int, sample: Sample, full: bool) -> int:
    """Take in the first rows, and some later ones where the file can be entered anywhere; bytes that were looked at."""
    zipped = name.endswith(".gz")
    with _opened(fs, name) as (content, raw):
        seen, ended = 0, False
        for number in itertools.count(1):
            line = content.readline(_LONGEST_LINE)
            ended = not line
            if ended or (not full and number > _FIRST_ROWS):
                break
            seen += len(line)
            _take_line(line, f"{name}, line {number}", sample)
        if ended:
            return size
        if zipped:
            return raw.tell()  # what lies ahead in the buffer is little
        chance = random.Random(size)
        for _ in range(_PLACES):
            content.seek(chance.randrange(seen, size))
            content.readline(_LONGEST_LINE)  # the rest of a row
            place = content.tell()
            if line := content.readline(_LONGEST_LINE):
                seen += len(line)
                _take_line(line, f"{name}, byte {place}", sample)
        return seen


def _take_line(line: bytes, where: str, sample: Sample) -> None:
    if not line.strip():
        return
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{where}: no JSON ({error}): write the row again") from None
    if not isinstance(row, dict) or "input_ids" not in row:
        found = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise UserError(f'{where}: no input_ids but {found or "nothing"}: rows are {{"input_ids": [1, 2, 3]}}')
    sample.add(row["input_ids"], where)


def _arrow_rows(fs: Any, name: str, size: int, sample: Sample, full: bool) -> int:
    """Take in the first and the last batch of parquet or of a saved dataset, or all; bytes that they stand for.

    Of a saved dataset that is not on this machine's file systems: the first two.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from fsspec.implementations.local import LocalFileSystem

    with fs.open(name, "rb") as raw:
        if name.endswith(".parquet"):
            file = pq.ParquetFile(raw)
            _require_ids(name, file.schema_arrow.names)
            total, groups = file.metadata.num_rows, range(file.num_row_groups)
            chosen = groups if full or len(groups) < 3 else (groups[0], groups[-1])
            batches: Iterable[Any] = (file.read_row_group(i, columns=["input_ids"]) for i in chosen)
        elif isinstance(fs, LocalFileSystem):  # mapped: only what is looked at is read
            table = pa.ipc.open_stream(pa.memory_map(name)).read_all()
            _require_ids(name, table.column_names)
            total, parts = len(table), table.to_batches()
            batches = parts if full or len(parts) < 3 else (parts[0], parts[-1])
        else:
            reader = pa.ipc.open_stream(raw)
            _require_ids(name, reader.schema.names)
            batches = parts = list(itertools.islice(reader, None if full else 2))
            total = sum(len(part) for part in parts)
            size = size if full or len(parts) < 2 else min(size, raw.tell())
        rows = 0
        for batch in batches:
            column = batch.column("input_ids")
            for index, ids in enumerate(column.slice(0, len(column) if full else _FIRST_ROWS).to_pylist()):
                sample.add(ids, f"{name}, row {index + 1} of a batch")
                rows += 1
    return size if rows == total else size * rows // max(total, 1)


def _require_ids(name: str, columns: list[str]) -> None:
    if "input_ids" not in columns:
        raise UserError(f"{name} has no column input_ids but {', '.join(columns) or 'none'}: tokenize it first")


# --- text


def _look_at_text(room: Room, flag: str, fs: Any, files: list[tuple[str, int]], vocabulary: int | None) -> None:
    total = sum(size for _, size in files)
    for name, _ in files if room.request.full else files[:_MOST_FILES]:
        with _complaints(name), _opened(fs, name) as (content, _):
            start = content.read(1 << 20)
            codecs.getincrementaldecoder("utf-8")().decode(start)  # which may end within a character
            while room.request.full and content.read(1 << 20):
                pass
    folder = room.request.settings.get("tokenizer_name_or_dir")
    highest = None
    if folder:
        highest = highest_id(Path(str(folder)).expanduser())
        if highest is not None and vocabulary is not None and highest >= vocabulary:
            room.problem(
                f"--{flag}: the tokenizer in {folder} makes ids up to {highest}, outside the model's vocabulary of "
                f"{vocabulary}: set --vocab_size to at least {highest + 1}, or use the model's own tokenizer"
            )
            return
    elif flag == "training_dir":
        room.problem(f"--{flag}: text needs --tokenizer_name_or_dir, a local tokenizer directory")
        return
    data = {"files": len(files), "bytes": total, "highest_id": highest}
    room.ok(f"--{flag}: {len(files)} text file(s), {readable(total)}", **data)


def highest_id(folder: Path) -> int | None:
    """The largest id of a fast tokenizer, from its file alone; None where that does not tell.

    Raises:
        UserError: there is no tokenizer.
    """
    file = folder / "tokenizer.json"
    if not folder.is_dir() or not any(folder.glob("tokenizer*")):
        raise UserError(f"there is no tokenizer in {folder}: --tokenizer_name_or_dir must be a local directory")
    if not file.is_file():
        return None
    try:
        found = read_object(file, limit=MAX_JSON)
        table = found["model"]["vocab"]
        ids: list[int] = list(table.values()) if isinstance(table, dict) else [len(table) - 1]
        ids += [int(each["id"]) for each in found.get("added_tokens") or []]
        return max(ids)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no readable tokenizer ({error}): copy it again") from None
