"""From a path to its rows: the kind of data is found from the files, and their content from the first row."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from smp.config import AUTO
from smp.data.config import DataConfig, Split
from smp.data.hf import SPLIT_NAMES, TABLES, named_files, open_mapped, saved_files
from smp.data.jsonl import LINES
from smp.data.messages import FORMS
from smp.data.packing import PackedRows, WindowRows
from smp.data.rows import COLUMNS, Reader, open_ids, refuse_unread, texts_format
from smp.data.storage import ARROW, CSV, GLOB_CHARACTERS, JSONL, PARQUET, TEXT, DataFile, list_files
from smp.data.text import TextTokenizer, open_text, text_files_format
from smp.errors import UserError

KINDS = {"JSON lines": JSONL, "text": TEXT, "parquet": PARQUET, "Arrow": ARROW, "CSV": CSV}
OF_TYPE = {"auto": tuple(KINDS), "gpt_jsonl": ("JSON lines",), "hf": ("parquet", "Arrow", "CSV"), "text": ("text",)}
OF_TYPE["chat"] = ("JSON lines", *OF_TYPE["hf"])

ANSWERS = ("chosen", "rejected")

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


def find_data(
    paths: Sequence[str], split: str, *, dataset_type: str = "auto", zipped: bool | None = None, tell: bool = True
) -> Found:
    """Find the data files of paths, and their kind.

    Args:
        paths: files, folders, globs or URLs.
        split: of a saved DatasetDict: ``train`` or ``validation``.
        dataset_type: what to look for; ``auto`` is everything.
        zipped: see :func:`smp.data.storage.list_files`.
        tell: warn of files that are not read, and of those of other splits that are.

    Raises:
        UserError: nothing is there, or data of more than one kind.
    """
    shown, kinds = " ".join(paths), OF_TYPE[dataset_type]
    if "Arrow" in kinds and len(paths) == 1 and (saved := saved_files(paths[0], split)) is not None:
        return Found(shown, "Arrow", saved, saved=True)
    extensions = tuple(extension for kind in kinds for extension in KINDS[kind])
    files = [file for path in paths for file in list_files(path, extensions=extensions, zipped=zipped, tell=tell)]
    if len(paths) > 1:
        urls = collections.Counter(os.path.realpath(file.url) for file in files)
        if twice := next((file.url for file in files if urls[os.path.realpath(file.url)] > 1), None):
            raise UserError(f"{shown} names {twice} twice, which would be read twice: give it once")
    counts = collections.Counter(_kind(file, kinds) for file in files)
    if dataset_type in ("auto", "chat") and len(counts) > 1 and (tables := counts.pop("CSV", 0)):
        if tell:
            log.warning("%s: %d CSV file(s) not read beside others: 'FOLDER/*.csv' reads them", shown, tables)
        files = [file for file in files if _kind(file, kinds) != "CSV"]
    if len(counts) > 1:
        found = " and ".join(f"{count} {kind} file(s)" for kind, count in sorted(counts.items()))
        rarest = KINDS[min(counts, key=lambda kind: counts[kind])][0]
        fitting = [each for each, read in OF_TYPE.items() if len(counts.keys() & {*read}) == 1]
        raise UserError(
            f"{shown} contains {found}; a source has one kind: give a glob in quotes, such as 'FOLDER/*{rarest}'"
            + f", or choose with --dataset_type {' or '.join(fitting)}" * bool(fitting and dataset_type == AUTO)
        )
    if tell and split == "train" and not any(character in shown for character in GLOB_CHARACTERS):
        _warn_of_other_splits(shown, files)
    return Found(shown, next(iter(counts)), files)


def find_split(config: DataConfig, split: Split, *, tell: bool = True) -> Found:
    """Find the files of one split; raises UserError where there are none. ``tell`` is that of :func:`find_data`."""
    of_training = split == "train" or bool(config.validation_split)
    flag, part = ("training_dir", "train") if of_training else ("test_dir", "validation")
    path: str | None = getattr(config, flag)
    if path is None and config.dataset_name is not None:
        chosen = config.dataset_split
        wanted = (chosen,) if chosen and (of_training or config.evaluate_only) else SPLIT_NAMES[part]
        # Validation reads another split than the one that is trained on.
        wanted = wanted if wanted == (chosen,) else tuple(each for each in wanted if each != chosen)
        files = named_files(config.dataset_name, config.dataset_config_name, wanted)
        return Found(config.dataset_name, "Arrow", files, saved=True)
    if path is None:
        raise UserError(f"no {split} data: set --{flag}")
    try:
        return find_data([path], part, dataset_type=config.dataset_type, zipped=config.zipped_data, tell=tell)
    except UserError as error:
        kind = "" if config.dataset_type == AUTO else f" with --dataset_type {config.dataset_type}"
        raise UserError(f"--{flag}{kind}: {error}") from None


def with_type(config: DataConfig, *, pairs: bool, look: bool = True) -> DataConfig:
    """Return the settings with ``--dataset_type chat`` where that is auto, and the data conversations or pairs.

    Data that cannot be read is left to :func:`create_data_pipeline`, which tells why.

    Args:
        pairs: the data is pairs.
        look: otherwise, read the first row to find out.
    """
    if config.dataset_type != AUTO or config.use_synthetic_data:
        return config
    if look and not pairs:
        with contextlib.suppress(UserError):
            split: Split = "validation" if config.evaluate_only else "train"
            pairs = _has_conversations(find_split(config, split, tell=False))  # opening it tells
            if pairs:
                log.info("The data has conversations: they are read as by --dataset_type chat")
    return dataclasses.replace(config, dataset_type="chat") if pairs else config


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
    if found.kind != "text" and not _is_text(found, text_key, what):
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


def _is_text(found: Found, text_key: str, what: str) -> bool:
    """Return whether the first row has a text and no ids.

    Raises:
        UserError: it is a conversation, or has ids and beside them what is not read; also of files that earlier
            versions have converted.
    """
    where, row = next(found.examples(COLUMNS), ("", {}))
    if "input_ids" not in row:
        if _form(row) and text_key not in row:
            advice = "train on them with --dataset_type chat"
            if what == "validation data":
                advice = "--dataset_type chat reads them, where the training data is conversations, too"
            raise UserError(f"{found.path} contains conversations: {advice}")
        return text_key in row
    refuse_unread(row, where)
    return False


def _has_conversations(found: Found) -> bool:
    """Return whether the first row is a conversation or a pair of answers; raises UserError where it cannot be read."""
    row = {} if found.kind == "text" else next(found.examples(COLUMNS), ("", {}))[1]
    form = () if "input_ids" in row else _form(row)
    if form and "text" in row:
        log.warning(
            "Rows have %s and text: all of the text is trained on; %s reads %s", ", ".join(form),
            "--dpo 1" if form == ANSWERS else "--dataset_type chat", " and ".join(form),
        )  # fmt: skip
    return bool(form) and "text" not in row


def _form(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns by which a row is a conversation or a pair of answers; () where it is neither."""
    return next((form for form in (*FORMS[:-1], ANSWERS) if row.keys() >= {*form}), ())
