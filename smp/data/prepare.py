"""Turns data of any kind that the job reads into a packed token dataset with a disjoint validation split.

    python -m smp.data.prepare --input corpus/*.txt --output tokens --tokenizer tokenizer_dir --sequence_length 2048

writes ``tokens/train`` and ``tokens/validation``, which ``datasets.load_from_disk`` and ``--dataset_type hf`` open by
memory map. Documents are joined, an end-of-sequence token behind each, and cut into rows; the last row of a split may
be shorter. Rows of ids that have labels or masks are refused. Input is streamed: memory does not grow with it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smp.data.sampler import mix64
from smp.data.source import find_data, open_rows
from smp.data.text import TextTokenizer
from smp.data.token_cache import Columns
from smp.errors import UserError

TYPES = {"auto": "auto", "text": "text", "jsonl": "gpt_jsonl", "hf": "hf"}  # as --dataset_type
ROWS_PER_BATCH = 1000
SPLITS = ("train", "validation")


class SplitWriter:
    """Packs tokens into rows of ``sequence_length`` and writes them in the layout of ``Dataset.save_to_disk``."""

    def __init__(self, folder: Path, split: str, sequence_length: int):
        import pyarrow as pa

        folder.mkdir()
        self.folder, self.split, self.sequence_length, self.rows, self.documents = folder, split, sequence_length, 0, 0
        self._held: list[np.ndarray] = []
        self._held_tokens = 0
        self._schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
        self._file = pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)

    def add(self, ids: np.ndarray) -> None:
        """Append tokens (n,)."""
        self._held.append(ids.astype(np.int32))
        self._held_tokens += len(ids)
        if self._held_tokens >= ROWS_PER_BATCH * self.sequence_length:
            self._write(self._held_tokens // self.sequence_length)

    def _write(self, rows: int) -> None:
        import pyarrow as pa

        tokens = np.concatenate([*self._held, np.empty(0, np.int32)])
        used = min(rows * self.sequence_length, len(tokens))
        offsets = np.minimum(np.arange(rows + 1) * self.sequence_length, used).astype(np.int32)
        column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens[:used]))
        self._stream.write_batch(pa.record_batch([column], schema=self._schema), {})
        self.rows += rows
        self._held, self._held_tokens = [tokens[used:]], len(tokens) - used

    def close(self) -> None:
        """Write the last, possibly shorter row and the JSON files."""
        if self._held_tokens:
            self._write(-(-self._held_tokens // self.sequence_length))
        self._stream.close()
        self._file.close()
        feature = {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"}
        state: dict[str, Any] = {
            "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
            "_fingerprint": os.urandom(8).hex(),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": self.split,
        }
        (self.folder / "dataset_info.json").write_text(json.dumps({"features": {"input_ids": feature}}, indent=2))
        (self.folder / "state.json").write_text(json.dumps(state, indent=2))


def documents(stores: Sequence[Columns], eos_token_id: int) -> Iterator[np.ndarray]:
    """Yield the ids of every row of token files, each with the end-of-sequence token behind it."""
    for store in stores:
        for start, stop in itertools.pairwise(store.offsets.tolist()):
            ids = store.tokens[start:stop]
            yield ids if ids[-1] == eos_token_id else np.append(ids, eos_token_id)


def refuse_labels(stores: Sequence[Columns]) -> None:
    """Refuse rows some of whose tokens are not to be trained on, which packed rows of ids cannot say.

    Raises:
        UserError: a mask hides a token, or labels are not the ids.
    """
    for store in stores:
        for name, values, plain in (("attention_mask", store.mask, 1), ("labels", store.labels, store.tokens)):
            if values is not None and not (values == plain).all():
                raise UserError(
                    f"the input has {name} that keep tokens out of the loss, and the output would have ids alone: "
                    f"train on the input as it is"
                )


def in_validation(document: int, fraction: float) -> bool:
    """Return whether a document, by its number from 0, is held out: a hash below ``fraction`` of its range."""
    return int(mix64(np.array([document + 1], np.uint64))[0]) < fraction * 2.0**64


def write_splits(
    found: Iterator[np.ndarray], folder: Path, *, sequence_length: int, validation_fraction: float
) -> list[SplitWriter]:
    """Distribute documents over the splits and write them under ``folder``.

    Raises:
        UserError: a split that was asked for got no document.
    """
    names = SPLITS if validation_fraction > 0 else SPLITS[:1]
    writers = [SplitWriter(folder / name, name, sequence_length) for name in names]
    document = 0
    for document, ids in enumerate(found, 1):
        writer = writers[in_validation(document - 1, validation_fraction)]
        writer.add(ids)
        writer.documents += 1
    for writer in writers:
        writer.close()
        if writer.documents == 0:
            raise UserError(
                f"the input has {document} document(s), and none fell to {writer.split} with --validation_fraction "
                f"{validation_fraction}: give more documents (--text_document_separator splits files), or another "
                f"fraction (0: no validation split)"
            )
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(names)}))
    return writers


def prepare(args: argparse.Namespace) -> list[SplitWriter]:
    """Run one preparation; ``args`` as :func:`main` parses them.

    Raises:
        UserError: the input or the tokenizer is unusable, or the output is not empty.
    """
    if args.sequence_length < 1 or not 0 <= args.validation_fraction < 1:
        raise UserError(
            f"--sequence_length must be at least 1 and --validation_fraction in [0, 1), "
            f"got {args.sequence_length} and {args.validation_fraction}"
        )
    output = Path(args.output).expanduser().absolute()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists and is not empty: choose another --output, or remove it")
    found = find_data(args.input, "train", dataset_type=TYPES[args.input_type])
    tokenizer = TextTokenizer(args.tokenizer)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise UserError(f"cannot write {output}: {error}; choose another --output") from error
    try:
        source = open_rows(
            found,
            sequence_length=args.sequence_length,
            vocab_size=tokenizer.vocab_size,
            tokenizer=lambda: tokenizer,
            cache_dir=str(partial / "tokens"),
            what="input",
            separator=args.text_document_separator,
            text_key=args.text_key,
        )
        refuse_labels(source.stores)
        writers = write_splits(
            documents(source.stores, tokenizer.eos_token_id),
            partial,
            sequence_length=args.sequence_length,
            validation_fraction=args.validation_fraction,
        )
        shutil.rmtree(partial / "tokens")
        partial.chmod(0o755)  # mkdtemp makes it private
        os.replace(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return writers


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 2 for input that cannot be used."""
    parser: Any = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", nargs="+", required=True, help="files, folders, globs or URLs")
    parser.add_argument("--output", required=True, help="folder to make; it must not exist, or be empty")
    parser.add_argument("--tokenizer", required=True, help="local tokenizer directory")
    parser.add_argument("--sequence_length", type=int, required=True, help="tokens per sequence")
    parser.add_argument("--validation_fraction", type=float, default=0.01, help="share of documents; 0: no split")
    parser.add_argument("--input_type", choices=sorted(TYPES), default="auto", help="which files to read")
    parser.add_argument("--text_key", default="text", help="key or column of the text in JSON lines and tables")
    parser.add_argument("--text_document_separator", help="line that separates documents in a text file")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        writers = prepare(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for writer in writers:
        print(f"{args.output}/{writer.split}: {writer.documents:,} documents, {writer.rows:,} sequences")
    return 0


if __name__ == "__main__":
    sys.exit(main())
