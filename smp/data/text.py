"""Raw text files, tokenised once and packed: one file is one document unless a separator line is given."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import hashlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from smp.data.convert import Rows, joined, token_files
from smp.data.packing import PackedRows
from smp.data.storage import DataFile, open_file
from smp.data.token_cache import digest_of, token_dtype
from smp.errors import UserError, hub_advice

MAX_TOKENIZER = 1 << 30  # bytes of a tokenizer's files, which are read whole
PART = 256_000  # characters that are tokenised at once; longer documents are split at a line end
BATCH = 1_000_000  # characters that are tokenised at once: their encodings take some hundred times as many bytes
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
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.digest = hashlib.sha256(content).hexdigest()

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens around them."""
        if self._backend is not None:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        return self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a worker process would import transformers for."""
        return {**self.__dict__, "_tokenizer": self._tokenizer if self._backend is None else None}

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


def read_text(file: DataFile, separator: str | None) -> Iterator[tuple[tuple[str, bool], int]]:
    """Read the documents of one file as :func:`read_documents`; each part with the file's bytes read so far."""
    with open_file(file) as (content, raw):
        lines = iter(functools.partial(content.readline, PART), b"")
        for part in read_documents(lines, separator, file.url):
            yield part, raw.tell()


def batches(parts: Iterable[tuple[tuple[str, bool], Any]]) -> Iterator[tuple[list[tuple[str, bool]], Any]]:
    """Collect parts of documents for the tokenizer, leaving out documents of white space only.

    Args:
        parts: (text, whether its document ends there), and the position.

    Yields:
        Some parts, and the position of the last one.
    """
    batch: list[tuple[str, bool]] = []
    size, begun, position = 0, False, None
    for part, position in parts:
        if not begun and not part[0].strip():
            continue
        batch.append(part)
        begun = not part[1]
        size += len(part[0])
        if size >= BATCH or len(batch) >= MOST_DOCUMENTS:
            yield batch, position
            batch, size = [], 0
    if batch:
        yield batch, position


def tokenized(batch: list[tuple[str, bool]], tokenizer: TextTokenizer) -> list[Rows]:
    """Tokenise parts of documents, and end each document with the end-of-sequence token."""
    dtype, found = token_dtype(tokenizer.vocab_size), []
    for words, (_, ends) in zip(tokenizer([text for text, _ in batch]), batch, strict=True):
        ids = np.array([*words, tokenizer.eos_token_id] if ends else words, dtype)
        found.append(Rows(ids, np.array([len(ids)] if ends else [], np.int64)))
    return joined(found)


def tokenized_texts(texts: Iterable[tuple[str, str]], tokenizer: TextTokenizer) -> list[Rows]:
    """Tokenise documents as the same text in a file of its own would be.

    Args:
        texts: text, and where it is from, for messages.

    Raises:
        UserError: a text is no valid Unicode.
    """

    def parts() -> Iterator[tuple[tuple[str, bool], None]]:
        for text, where in texts:
            try:
                content = io.BytesIO(text.encode())
            except UnicodeEncodeError as error:
                raise UserError(f"{where}: the text is no Unicode ({error.reason}); leave the row out") from error
            lines = iter(functools.partial(content.readline, PART), b"")
            yield from ((part, None) for part in read_documents(lines, None, where))

    return joined([rows for batch, _ in batches(parts()) for rows in tokenized(batch, tokenizer)])


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Format of text files: a file is a document, or ``separator`` lines separate several."""

    tokenizer: TextTokenizer
    separator: str | None
    name = "text"
    content = "text"

    @property
    def key(self) -> list[Any]:
        """Return what the tokens depend on besides the file."""
        return [self.tokenizer.digest, self.separator]

    @property
    def dtype(self) -> str:
        """Return the number format of the ids."""
        return token_dtype(self.tokenizer.vocab_size)

    def chunks(self, file: DataFile) -> Iterator[tuple[list[tuple[str, bool]], int]]:
        """Yield parts of documents."""
        return batches(read_text(file, self.separator))

    def convert(self, file: DataFile, chunk: list[tuple[str, bool]]) -> list[Rows]:
        """Return the tokens of parts."""
        return tokenized(chunk, self.tokenizer)


def open_text(
    files: list[DataFile], form: Any, *, sequence_length: int, cache_dir: str | None, what: str = "data"
) -> PackedRows:
    """Tokenise files, unless they are cached, and pack all documents, in the order given.

    Args:
        files: all of one kind.
        form: their format, with a tokenizer.

    Raises:
        UserError: a file is unreadable, not UTF-8 or without text.
    """
    stores = token_files(files, form, what=what, cache_dir=cache_dir)
    identity = (form.name, *form.key, [file.identity for file in files])
    return PackedRows(stores, sequence_length, digest_of(sequence_length, *identity))
