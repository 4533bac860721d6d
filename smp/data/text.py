"""Raw text files, tokenised once and packed: one file is one document unless a separator line is given."""

from __future__ import annotations

import codecs
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from smp.data.packing import PackedRows
from smp.data.progress import Progress
from smp.data.storage import DataFile, open_file
from smp.data.token_cache import TokenWriter, cached, digest_of, token_dtype
from smp.errors import UserError, hub_advice

MAX_TOKENIZER = 1 << 30  # bytes of a tokenizer's files, which are read whole
PART = 256_000  # characters that are tokenised at once; longer documents are split at a line end
BATCH = 8_000_000  # characters that are tokenised in parallel, on all cores
MOST_DOCUMENTS = 20_000  # in a batch: each costs memory beyond its characters


class TextTokenizer:
    """A Hugging Face tokenizer, called with texts for their ids.

    Attributes:
        vocab_size: ids are below it. eos_token_id: ends a document. digest: hash of the files.

    Raises:
        UserError: the directory has no usable tokenizer, or the tokenizer no end-of-sequence token.
    """

    def __init__(self, folder: str):
        root = Path(folder).expanduser()
        files = sorted(each for each in root.glob("*") if each.is_file() and _belongs_to_tokenizer(each.name))
        if not files:
            raise UserError(
                f"no tokenizer in {folder}: --tokenizer_name_or_dir must be a local directory with tokenizer.json"
                f"{hub_advice(folder)}"
            )
        if (size := sum(each.stat().st_size for each in files)) > MAX_TOKENIZER:
            raise UserError(
                f"the tokenizer in {folder} has {size} bytes, more than the {MAX_TOKENIZER} that are read: give a "
                f"directory with the tokenizer's files alone"
            )
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(root), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # of any type, for malformed files
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"cannot load the tokenizer in {folder}: {reason}") from error
        if tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer in {folder} has no eos_token, which separates documents: set one in it")
        self._tokenizer, self.folder, self.eos_token_id = tokenizer, folder, int(tokenizer.eos_token_id)
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # not len(): ids may have gaps
        content = b"".join(each.name.encode() + each.read_bytes() for each in files)
        if _keep_documents_whole(tokenizer):
            content += b"documents whole"  # not the digest of caches made while documents were truncated
        self.digest = hashlib.sha256(content).hexdigest()

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens around them."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        return self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def require_below(self, vocab_size: int) -> None:
        """Refuse a tokenizer with ids outside the model's vocabulary.

        Raises:
            UserError: it has some.
        """
        if self.vocab_size > vocab_size:
            raise UserError(
                f"the tokenizer in {self.folder} has ids up to {self.vocab_size - 1}, the model's vocabulary is "
                f"{vocab_size}: set --vocab_size to at least {self.vocab_size}, or give the model's own tokenizer"
            )


def _keep_documents_whole(tokenizer: Any) -> bool:
    """Switch off truncation and padding saved in tokenizer.json; returns whether there were any."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or (backend.truncation is None and backend.padding is None):
        return False
    backend.no_truncation()
    backend.no_padding()
    return True


def _belongs_to_tokenizer(name: str) -> bool:
    return name.startswith(
        ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece")
    )


def read_documents(lines: Iterable[bytes], separator: str | None, name: str) -> Iterator[tuple[str, bool]]:
    """Yield documents in parts, in order.

    Args:
        lines: the file's lines with their ends; a long one may come in several parts.
        separator: a line that separates documents (without surrounding blanks), or None.
        name: for messages.

    Yields:
        (text, ends): at most ``3 * PART`` characters, and whether its document ends there.

    Raises:
        UserError: a line is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held: list[str] = []
    size, number = 0, 1
    for raw in lines:
        try:
            line = decoder.decode(raw)
        except UnicodeDecodeError as error:
            raise UserError(f"{name}, line {number}: not UTF-8 ({error.reason}); convert it") from error
        if raw.endswith(b"\n"):
            number += 1
            line = line[:-2] + "\n" if line.endswith("\r\n") else line
        if separator is not None and line.strip() == separator:
            yield "".join(held), True
            held, size = [], 0
            continue
        held.append(line)
        size += len(line)
        # Not between blank lines, which tokenizers join, unless there is nothing else.
        if size >= PART and (line.strip() or size >= 2 * PART):
            yield "".join(held), False
            held, size = [], 0
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(f"{name}, line {number}: ends inside a UTF-8 character; copy it again") from error
    yield "".join(held), True


def read_text(file: DataFile, separator: str | None) -> Iterator[tuple[str, bool]]:
    """Read the documents of one file as :func:`read_documents`, with progress."""
    with Progress(f"tokenizing {file.name}", file.size) as progress, open_file(file) as (content, raw):

        def lines() -> Iterator[bytes]:
            while line := content.readline(PART):
                yield line
                progress.reach(raw.tell())

        yield from read_documents(lines(), separator, file.url)


def tokenized(parts: Iterable[tuple[str, bool]], tokenizer: TextTokenizer) -> Iterator[tuple[np.ndarray, bool]]:
    """Tokenise parts of documents in parallel, and end each document with the end-of-sequence token.

    Documents of white space only are left out.

    Args:
        parts: (text, whether its document ends there).

    Yields:
        (ids, whether the document ends there), ids (n,) int64.
    """
    batch: list[tuple[str, bool]] = []
    size, begun = 0, False
    for part in itertools.chain(parts, [None]):
        if part is not None:
            if not begun and not part[0].strip():
                continue
            batch.append(part)
            begun = not part[1]
            size += len(part[0])
        if batch and (part is None or size >= BATCH or len(batch) >= MOST_DOCUMENTS):
            for ids, (_, ends) in zip(tokenizer([text for text, _ in batch]), batch, strict=True):
                yield np.array([*ids, tokenizer.eos_token_id] if ends else ids, np.int64), ends
            batch, size = [], 0


def _convert(file: DataFile, tokenizer: TextTokenizer, separator: str | None, writer: TokenWriter) -> None:
    for ids, ends in tokenized(read_text(file, separator), tokenizer):
        writer.add(ids, [len(ids)] if ends else [])
    if writer.rows == 0:
        raise UserError(f"{file.url} holds no text: remove it, or write it again")


def open_text(
    files: list[DataFile],
    tokenizer: TextTokenizer,
    *,
    sequence_length: int,
    separator: str | None,
    cache_dir: str | None,
) -> PackedRows:
    """Tokenise files, unless they are cached, and pack all of them, in the order given.

    Raises:
        UserError: a file is unreadable, not UTF-8 or without text.
    """
    stores = [
        cached(
            cache_dir,
            file.name,
            ["text", file.url, file.size, file.stamp, tokenizer.digest, separator],
            functools.partial(_convert, file, tokenizer, separator),
            dtype=token_dtype(tokenizer.vocab_size),
        )
        for file in files
    ]
    identity = ("text", tokenizer.digest, separator, [file.identity for file in files])
    return PackedRows(stores, sequence_length, digest_of(sequence_length, *identity))
