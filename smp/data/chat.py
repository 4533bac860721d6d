"""Conversations from files to packed samples."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

import numpy as np

from smp.data.columns import SYSTEM, lacks_system, read_by, unread
from smp.data.config import DataConfig
from smp.data.conversation import Chat, chat_of
from smp.data.convert import Format, Rows, joined, token_files
from smp.data.messages import ConversationError, NotTextError, is_empty
from smp.data.pairs import encode_pair
from smp.data.rows import Reader
from smp.data.samples import Choice, PackedSamples
from smp.data.source import Found
from smp.data.storage import DataFile
from smp.data.text import TextTokenizer
from smp.data.token_cache import IGNORED, digest_of, token_dtype
from smp.environment import read_launch
from smp.errors import UserError
from smp.log import say

_ALL_COLUMNS = ("",)
_CONVERSION = 6  # raised by a change that gives a conversation other tokens or labels, so that no cache is used again
MOST_NAMES = 20  # of columns in a warning
log = logging.getLogger("smp.data")


def conversations_format(reader: Reader, tokenizer: TextTokenizer, chat: Chat, *, pairs: bool) -> Format:
    """Return the format of examples that ``chat`` encodes, each a row with labels, of a pair two."""
    return Format(
        name=f"{reader.name}_{'pairs' if pairs else 'chat'}",
        key=[_CONVERSION, tokenizer.digest, chat.template, chat.train_on],
        dtype=token_dtype(tokenizer.vocab_size),
        content="conversations",
        chunks=functools.partial(reader.chunks, _ALL_COLUMNS),
        convert=functools.partial(_rows_of, reader, tokenizer, chat, pairs),
    )


def _rows_of(
    reader: Reader, tokenizer: TextTokenizer, chat: Chat, pairs: bool, file: DataFile, chunk: Any
) -> list[Rows]:
    found = []
    for where, sample in reader.examples(file, chunk):
        try:
            encoded = encode_pair(chat, sample) if pairs else [chat.encode(sample)]
        except NotTextError as error:
            count = sum(_has_more_than_text(chat, each, pairs) for _, each in reader.read(file, _ALL_COLUMNS))
            raise UserError(f"{where}: {error} ({count} samples of {file.url} have more than text)") from error
        except ConversationError as error:
            raise UserError(f"{where}: {error}") from error
        for ids, labels in encoded:
            if (highest := int(ids.max(initial=0))) >= tokenizer.limit:
                raise UserError(tokenizer.refusal(where, highest))
            if len(ids):
                found.append(Rows(ids.astype(token_dtype(tokenizer.vocab_size)), np.array([len(ids)]), None, labels))
    return joined(found)


def _has_more_than_text(chat: Chat, sample: Any, pairs: bool) -> bool:
    try:
        encode_pair(chat, sample) if pairs else chat.encode(sample)
    except NotTextError:
        return True
    except ConversationError:
        pass
    return False


def open_conversations(
    found: Found,
    words: TextTokenizer,
    config: DataConfig,
    *,
    sequence_length: int,
    validation: bool,
    what: str,
    pairs: bool = False,
) -> PackedSamples:
    """Encode conversations, unless they are cached, and pack them.

    Args:
        words: the tokenizer; its ``limit`` is the model's vocabulary.
        validation: whether the part to validate on is wanted.
        pairs: they are pairs of answers.

    Raises:
        UserError: a file or a conversation cannot be used; with file and row.
    """
    tokenizer, directory = words.hugging_face, words.folder
    chat = chat_of(tokenizer, directory, template=config.chat_template, train_on=config.train_on)
    form, files = conversations_format(found.reader, words, chat, pairs=pairs), found.files
    stores = token_files(files, form, what=what, cache_dir=config.data_cache_dir)
    if not validation or config.evaluate_only:
        _tell_columns(found, chat, what=what, pairs=pairs)
    for file, store in zip(files, stores, strict=True):
        if store.highest >= words.limit:  # encoded for a model with a larger vocabulary
            for chunk, _ in form.chunks(file):
                form.convert(file, chunk)  # names the row
    own = bool(config.validation_split) and validation
    choice = Choice(
        most=config.max_samples if not validation or own else None,
        validation_split=config.validation_split, validation=validation, overlong=config.overlong,
    )  # fmt: skip
    identity = digest_of(form.name, *form.key, [file.identity for file in files])
    origins = [file.url for file in files]
    packed = PackedSamples(
        stores, sequence_length, identity, choice, what=what, origins=origins, pairs=pairs,
        pack=config.pack is not False,
    )  # fmt: skip
    if config.show_masks and not validation and read_launch().rank == 0:
        show(packed, words, config.show_masks)
    return packed


def _tell_columns(found: Found, chat: Chat, *, what: str, pairs: bool) -> None:
    """Warn of columns of the first file's beginning that are not read, and of those that become a message."""
    reader, file = found.reader, found.files[0]
    chunk, _ = next(reader.chunks(_ALL_COLUMNS, file), (None, 0))
    samples = [] if chunk is None else [sample for _, sample in reader.examples(file, chunk)]
    if names := unread(samples, chat.template, pairs=pairs):
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        log.warning("%s: not read are %s%s", what, ", ".join(names[:MOST_NAMES]), more)
    for column in SYSTEM:
        given = [each for each in samples if not is_empty(each.get(column)) and column in read_by(each, pairs=pairs)]
        if any(lacks_system(each, pairs=pairs) for each in given):
            log.warning(
                "%s: the column %s becomes the first message of conversations without a system message", what, column
            )


def show(packed: PackedSamples, words: TextTokenizer, count: int) -> None:
    """Print the first conversations with what is trained on in green on a terminal, else between brackets."""
    begin, end = ("\033[32m", "\033[0m") if sys.stderr.isatty() else ("⟦", "⟧")
    for number in packed.numbers[:count].tolist():
        for name, (tokens, labels) in zip(packed.names, packed.documents(number), strict=True):
            trained = labels != IGNORED
            runs = np.split(tokens, np.flatnonzero(np.diff(trained)) + 1)  # tokens alone may be parts of characters
            text, inside = "", bool(trained[0])
            for run in runs:
                text += f"{begin}{words.text(run.tolist())}{end}" if inside else words.text(run.tolist())
                inside = not inside
            say(f"{name.format(number + 1)}, trained on between {begin}...{end}:\n{text}")
