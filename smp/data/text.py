"""Raw text files, tokenised once and packed: one file is one document unless a separator line is given."""

from __future__ import annotations

import codecs
import functools
import hashlib
import io
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smp.data.convert import Format, Rows, joined, token_files
from smp.data.packing import PackedRows
from smp.data.storage import DataFile, open_file
from smp.data.token_cache import digest_of, token_dtype
from smp.errors import UserError, first_line, hub_advice

MAX_TOKENIZER = 1 << 30  # bytes of a tokenizer's files, which are read whole
PART = 256_000  # characters that are tokenised at once; longer documents are split at a line end
BATCH = 1_000_000  # characters that are tokenised at once: their encodings take some hundred times as many bytes
MOST_DOCUMENTS = 20_000  # in a batch: each costs memory beyond its characters
TEXT_CONVERSION = 2  # raised by a change that gives a text other tokens, so that no cache is used again
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece")
log = logging.getLogger("smp.data")


class TextTokenizer:
    """A Hugging Face tokenizer, called with texts for their ids.

    Attributes:
        vocab_size: ids are below it. eos_token_id: ends a document. digest: hash of the files.
        prefix: ids that begin a document: those that the tokenizer puts in front of a text by default.
        limit: ids of texts must be below it, see :meth:`require_below`.

    Raises:
        UserError: the directory has no usable tokenizer, or the tokenizer no end-of-sequence token.
    """

    def __init__(self, folder: str):
        root = Path(folder).expanduser()
        files = sorted(each for each in root.glob("*") if each.is_file() and each.name.startswith(_TOKENIZER_FILES))
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
            was_cutting, self.prefix = _keep_documents_whole(tokenizer), prefix_of(tokenizer)
        except Exception as error:  # of any type, for malformed files
            raise UserError(f"cannot load the tokenizer in {folder}: {first_line(error)}") from error
        if tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer in {folder} has no eos_token, which separates documents: set one in it")
        self._tokenizer, self.folder, self.eos_token_id = tokenizer, folder, int(tokenizer.eos_token_id)
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # not len(): ids may have gaps
        content = b"".join(each.name.encode() + each.read_bytes() for each in files)
        if was_cutting:
            content += b"documents whole"  # not the digest of caches made while documents were truncated
        if self.prefix:
            content += f"documents begin with {self.prefix}".encode()  # not of caches made while they did not
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.digest = hashlib.sha256(content).hexdigest()
        self.limit = self.vocab_size

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens around them."""
        if self._backend is not None:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        return self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    @property
    def hugging_face(self) -> Any:
        """Return the tokenizer of transformers; not in a worker process."""
        return self._tokenizer

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a worker process would import transformers for."""
        return {**self.__dict__, "_tokenizer": self._tokenizer if self._backend is None else None}

    def require_below(self, vocab_size: int) -> None:
        """Refuse ids outside the model's vocabulary: here those around every document, where they occur those of texts.

        A tokenizer may have more than the model, such as one for images, as long as no text has them.

        Raises:
            UserError: the id that ends a document, or one that begins it, is outside.
        """
        self.limit = vocab_size
        if max(self.eos_token_id, *self.prefix, 0) >= vocab_size:
            raise UserError(
                f"the tokenizer in {self.folder} puts tokens {[*self.prefix, self.eos_token_id]} around documents, and "
                f"the model's vocabulary is {vocab_size}: {self._advice}"
            )

    def beyond(self, rows: list[Rows]) -> int | None:
        """Return the first id of some rows that is not below ``limit``."""
        found = (each.ids[each.ids >= self.limit] for each in rows if each.ids.max(initial=0) >= self.limit)
        return next((int(ids[0]) for ids in found), None)

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens, special ones included."""
        if self._backend is not None:
            return str(self._backend.decode(tokens, skip_special_tokens=False))
        return str(self._tokenizer.decode(tokens))

    def refusal(self, where: str, token: int) -> str:
        """Format the refusal of a text with a token that the model does not have."""
        return (
            f"{where}: the text has {self.text([token])!r}, token id {token}, which is outside the model's vocabulary "
            f"of {self.limit}: {self._advice}, or take it out of the text"
        )

    @property
    def _advice(self) -> str:
        return (
            f"set --vocab_size to at least {self.vocab_size} (pretrained weights need transformers' "
            f"resize_token_embeddings), or give the model's own tokenizer"
        )


def contradiction(folder: str, other: str) -> str | None:
    """Return a token that two tokenizers have under different ids, with these; None: none, or one cannot be loaded."""
    try:
        ids, others = (TextTokenizer(each).hugging_face.get_vocab() for each in (folder, other))
    except UserError:
        return None
    found = ((token, number, others.get(token, number)) for token, number in ids.items())
    return next(
        (f"{token!r} is {one} in {folder} and {two} in {other}" for token, one, two in found if one != two), None
    )


def prefix_of(tokenizer: Any) -> list[int]:
    """Return the ids that a tokenizer puts in front of a text: mostly its beginning-of-sequence token, or none."""
    text = "a"
    plain = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    full = tokenizer(text, verbose=False)["input_ids"]
    starts = range(len(full) - len(plain) + 1)
    return [int(each) for each in full[: next((at for at in starts if full[at : at + len(plain)] == plain), 0)]]


def _keep_documents_whole(tokenizer: Any) -> bool:
    """Switch off truncation and padding saved in tokenizer.json; returns whether there were any."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or (backend.truncation is None and backend.padding is None):
        return False
    backend.no_truncation()
    backend.no_padding()
    return True


def read_documents(lines: Iterable[bytes], separator: str | None, name: str) -> Iterator[tuple[str, bool]]:
    """Yield documents in parts, in order.

    Args:
        lines: the file's lines with their ends; a long one may come in several parts.
        separator: a line that separates documents (without surrounding blanks), or None.

    Yields:
        (text, ends): at most ``3 * PART`` characters, and whether its document ends there.

    Raises:
        UserError: a line is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    document: list[str] = []
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
            yield "".join(document), True
            document, size = [], 0
            continue
        document.append(line)
        size += len(line)
        # Not between blank lines, which tokenizers join, unless there is nothing else.
        if size >= PART and (line.strip() or size >= 2 * PART):
            yield "".join(document), False
            document, size = [], 0
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(f"{name}, line {number}: ends inside a UTF-8 character; copy it again") from error
    yield "".join(document), True


def read_text(file: DataFile, separator: str | None) -> Iterator[tuple[tuple[str, bool], int]]:
    """Read the documents of one file as :func:`read_documents`; each part with the file's bytes read so far."""
    with open_file(file) as (content, raw):
        lines = iter(functools.partial(content.readline, PART), b"")
        for part in read_documents(lines, separator, file.url):
            yield part, raw.tell()


class Part(NamedTuple):
    """Part of a document, and whether the document begins or ends with it."""

    text: str
    begins: bool
    ends: bool


def batches(parts: Iterable[tuple[tuple[str, bool], Any]]) -> Iterator[tuple[list[Part], Any]]:
    """Collect parts of documents for the tokenizer, leaving out documents of white space only.

    Args:
        parts: (text, whether its document ends there), and the position.

    Yields:
        Some parts, and the position of the last one.
    """
    batch: list[Part] = []
    size, begun, position = 0, False, None
    for (text, ends), position in parts:
        if not begun and not text.strip():
            continue
        batch.append(Part(text, not begun, ends))
        begun = not ends
        size += len(text)
        if size >= BATCH or len(batch) >= MOST_DOCUMENTS:
            yield batch, position
            batch, size = [], 0
    if batch:
        yield batch, position


def tokenized(batch: list[Part], tokenizer: TextTokenizer) -> list[Rows]:
    """Tokenise parts of documents, each document between the tokenizer's prefix and the end-of-sequence token."""
    dtype, found = token_dtype(tokenizer.vocab_size), []
    prefix, end = tokenizer.prefix, [tokenizer.eos_token_id]
    for words, part in zip(tokenizer([part.text for part in batch]), batch, strict=True):
        # A text may have it already, as one made by a chat template.
        before = prefix if part.begins and words[: len(prefix)] != prefix else []
        after = end if part.ends and words[-1:] != end else []
        ids = np.array([*before, *words, *after], dtype)
        found.append(Rows(ids, np.array([len(ids)] if part.ends else [], np.int64)))
    return joined(found)


def tokenized_texts(texts: Iterable[tuple[str, str]], tokenizer: TextTokenizer) -> list[Rows]:
    """Tokenise documents as the same text in a file would be.

    Args:
        texts: text, and where it is from, for messages.

    Raises:
        UserError: a text is no valid Unicode, or has an id that is outside the model's vocabulary.
    """
    texts = [*texts]

    def parts() -> Iterator[tuple[tuple[str, bool], None]]:
        for text, where in texts:
            try:
                content = io.BytesIO(text.encode())
            except UnicodeEncodeError as error:
                raise UserError(f"{where}: the text is no Unicode ({error.reason}); leave the row out") from error
            lines = iter(functools.partial(content.readline, PART), b"")
            yield from ((part, None) for part in read_documents(lines, None, where))

    found = joined([rows for batch, _ in batches(parts()) for rows in tokenized(batch, tokenizer)])
    if (token := tokenizer.beyond(found)) is not None:
        for each in texts if len(texts) > 1 else ():
            tokenized_texts([each], tokenizer)
        raise UserError(tokenizer.refusal(texts[0][1], token))
    return found


def text_files_format(tokenizer: TextTokenizer, separator: str | None) -> Format:
    """Return the format of text files: a file is a document, or ``separator`` lines separate several."""
    return Format(
        name="text",
        key=[TEXT_CONVERSION, tokenizer.digest, separator],
        dtype=token_dtype(tokenizer.vocab_size),
        content="text",
        chunks=functools.partial(_batches_of, separator),
        convert=functools.partial(_rows_of_parts, tokenizer),
    )


def _batches_of(separator: str | None, file: DataFile) -> Iterator[tuple[list[Part], int]]:
    return batches(read_text(file, separator))


def _rows_of_parts(tokenizer: TextTokenizer, file: DataFile, chunk: list[Part]) -> list[Rows]:
    found = tokenized(chunk, tokenizer)
    if (token := tokenizer.beyond(found)) is not None:
        raise UserError(tokenizer.refusal(_line_with(tokenizer, file, token), token))
    return found


def _line_with(tokenizer: TextTokenizer, file: DataFile, token: int) -> str:
    """Return the file, with the first line whose text has the token."""
    word = tokenizer.text([token]).strip().encode()
    with open_file(file) as (content, _):
        number = 1
        for raw in iter(functools.partial(content.readline, PART), b""):
            if word in raw and token in tokenizer([raw.decode(errors="replace")])[0]:
                return f"{file.url}, line {number}"
            number += raw.endswith(b"\n")
    return file.url


def open_text(
    files: list[DataFile],
    form: Format,
    tokenizer: TextTokenizer,
    *,
    sequence_length: int,
    cache_dir: str | None,
    what: str = "data",
    separator: str | None = None,
) -> PackedRows:
    """Tokenise files, unless they are cached, and pack all documents, in the order given.

    Raises:
        UserError: a file is unreadable, not UTF-8, without text, or has an id that is outside the model's vocabulary.
    """
    if tokenizer.prefix:
        log.info("%s: each document begins with %s", what, tokenizer.text(tokenizer.prefix))
    stores = token_files(files, form, what=what, cache_dir=cache_dir)
    if separator is not None and all(len(store.offsets) == 2 for store in stores):
        log.warning("%s: --text_document_separator %r separates nothing: each file is a document", what, separator)
    for file, store in zip(files, stores, strict=True):
        if store.highest >= tokenizer.limit:  # converted for a model with a larger vocabulary
            for chunk, _ in form.chunks(file):
                form.convert(file, chunk)  # names the line
    identity = (form.name, *form.key, [file.identity for file in files])
    return PackedRows(stores, sequence_length, digest_of(sequence_length, *identity))
