"""From a path to its rows: the kind of data is found from the files, and their content from the first row."""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from smp.data.hf import TABLES, open_mapped, saved_files
from smp.data.jsonl import LINES
from smp.data.packing import PackedRows, WindowRows
from smp.data.rows import COLUMNS, Reader, open_ids, refuse_unread, texts_format
from smp.data.storage import ARROW, CSV, GLOB_CHARACTERS, JSONL, PARQUET, TEXT, DataFile, list_files
from smp.data.text import TextTokenizer, open_text, text_files_format
from smp.errors import UserError

KINDS = {"JSON lines": JSONL, "text": TEXT, "parquet": PARQUET, "Arrow": ARROW, "CSV": CSV}
OF_TYPE = {"auto": tuple(KINDS), "gpt_jsonl": ("JSON lines",), "hf": ("parquet", "Arrow", "CSV"), "text": ("text",)}
OF_TYPE["chat"] = ("JSON lines", *OF_TYPE["hf"])

# As `datasets` has them, which takes such files of a folder for other splits.
HELD_OUT = {"validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation"}
log = logging.getLogger("smp.data")


@dataclasses.dataclass(frozen=True)
class Found:
    """The files of a source, in order.

    Attributes:
        path: as the user gave it.
        kind: a key of ``KINDS``.
        saved: they are a dataset by name or a folder of ``save_to_disk``, which is one unit.
    """

    path: str
    kind: str
    files: list[DataFile]
    saved: bool = False

    @property
    def reader(self) -> Reader:
        """Return what reads the examples of the files, which are no text files."""
        return LINES if self.kind == "JSON lines" else TABLES

    def examples(self, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (file and row for messages, example by column) of all files, which are no text files, in order.

        Args:
            columns: that are needed, the first of them in every row; more may come.
        """
        for file in self.files:
            yield from self.reader.read(file, columns)


def find_data(paths: Sequence[str], split: str, *, dataset_type: str = "auto", zipped: bool | None = None) -> Found:
    """Find the data files of paths, and their kind.

    Args:
        paths: files, folders, globs or URLs.
        split: of a saved DatasetDict: ``train`` or ``validation``.
        dataset_type: what to look for; ``auto`` is everything.
        zipped: see :func:`smp.data.storage.list_files`.

    Raises:
        UserError: nothing is there, or data of more than one kind.
    """
    shown, kinds = " ".join(paths), OF_TYPE[dataset_type]
    if "Arrow" in kinds and len(paths) == 1 and (saved := saved_files(paths[0], split)) is not None:
        return Found(shown, "Arrow", saved, saved=True)
    extensions = tuple(extension for kind in kinds for extension in KINDS[kind])
    files = [file for path in paths for file in list_files(path, extensions=extensions, zipped=zipped)]
    if len(paths) > 1:
        urls = collections.Counter(os.path.realpath(file.url) for file in files)
        if twice := next((file.url for file in files if urls[os.path.realpath(file.url)] > 1), None):
            raise UserError(f"{shown} names {twice} twice, which would be read twice: give it once")
    counts = collections.Counter(_kind(file, kinds) for file in files)
    if dataset_type == "auto" and len(counts) > 1 and (tables := counts.pop("CSV", 0)):
        log.warning("%s: %d CSV file(s) not read beside others: --dataset_type hf reads them", shown, tables)
        files = [file for file in files if _kind(file, kinds) != "CSV"]
    if len(counts) > 1:
        found = " and ".join(f"{count} {kind} file(s)" for kind, count in sorted(counts.items()))
        rarest = KINDS[min(counts, key=lambda kind: counts[kind])][0]
        raise UserError(
            f"{shown} contains {found}; a source has one kind: give a glob in quotes, such as 'FOLDER/*{rarest}', or "
            f"choose with --dataset_type gpt_jsonl, text or hf"
        )
    if split == "train" and not any(character in shown for character in GLOB_CHARACTERS):
        _warn_of_other_splits(shown, files)
    return Found(shown, next(iter(counts)), files)


def _warn_of_other_splits(shown: str, files: list[DataFile]) -> None:
    """Warn of files of a folder that are named after a split to evaluate on, beside files of the training split."""
    words = {file.name: set(re.split(r"[-._ 0-9]+", file.name.lower())) for file in files}
    others = sorted(name for name, found in words.items() if found & HELD_OUT)
    trained = [name for name, found in words.items() if found & {"train", "training"}]
    if others and trained:
        log.warning(
            "%s: %d file(s) of other splits by their names (%s) are trained on: --training_dir '%s/%s*' leaves them "
            "out",
            shown, len(others), ", ".join(others[:5]), shown.rstrip("/"), re.split(r"[-._ 0-9]", trained[0])[0],
        )  # fmt: skip


def _kind(file: DataFile, kinds: tuple[str, ...]) -> str:
    """Return the kind that a file's name says; the first one that is looked for where it says none."""
    return next((kind for kind in kinds if file.ends_with(KINDS[kind])), kinds[0])


def open_rows(
    found: Found,
    *,
    sequence_length: int,
    vocab_size: int,
    tokenizer: Callable[[], TextTokenizer],
    cache_dir: str | None,
    what: str,
    separator: str | None = None,
    text_key: str = "text",
) -> WindowRows | PackedRows:
    """Open the rows of files, converting first what is neither cached nor mapped.

    Args:
        sequence_length: most tokens per row.
        vocab_size: ids must be below it.
        tokenizer: called where the data is text.
        cache_dir: see :func:`smp.data.token_cache.cached`.
        separator: line between documents of a text file.
        text_key: key or column of a document.

    Raises:
        UserError: a file is unusable, the tokenizer is missing, or an id is not in the vocabulary.
    """
    files = found.files
    if found.kind != "text" and separator is not None:
        raise UserError(
            f"--text_document_separator is for text files, and {found.path} contains {found.kind}: leave it out"
        )
    if found.kind != "text" and not _is_text(found, text_key):
        is_local = not any("://" in file.url or file.zipped for file in files)
        if (
            found.kind == "Arrow"
            and is_local
            and (mapped := open_mapped(files, sequence_length, vocab_size, cache_dir))
        ):
            return mapped
        return open_ids(
            files, found.reader, sequence_length=sequence_length, vocab_size=vocab_size, cache_dir=cache_dir, what=what
        )
    if separator and not separator.strip():
        raise UserError(f"--text_document_separator {separator!r} is of white space alone: '' is a blank line")
    words, separator = tokenizer(), separator and separator.strip()
    words.require_below(vocab_size)
    if found.kind == "text":
        form = text_files_format(words, separator)
    else:
        form = texts_format(found.reader, words, text_key)
    return open_text(
        files, form, words, sequence_length=sequence_length, cache_dir=cache_dir, what=what, separator=separator
    )


def _is_text(found: Found, text_key: str) -> bool:
    """Return whether the first row has a text and no ids.

    Raises:
        UserError: it is a conversation, or has ids and beside them what is not read; also of files that earlier
            versions have converted.
    """
    where, row = next(found.examples(COLUMNS), ("", {}))
    if "input_ids" not in row:
        if text_key not in row and ("messages" in row or {"prompt", "completion"} <= row.keys()):
            raise UserError(f"{found.path} contains conversations: set --dataset_type chat")
        return text_key in row
    refuse_unread(row, where)
    return False
