"""Makes the texts, the tokenizer and the baseline of ``data/sample`` again, byte for byte.

The texts come from the Debian package ``r-cran-janeaustenr`` 1.0.0-1, whose data file is read here without R::

    apt-get download r-cran-janeaustenr
    dpkg-deb -x r-cran-janeaustenr_*.deb unpacked
    python -m data.sample.build unpacked/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb

``--baseline_only 1`` recomputes ``baseline.json`` from the files that are there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SOURCE_SHA256 = "8fb5198960d0da724b1562f96e4221e5c1b41ff455000280b02c55980c3d8f21"
NOVELS = ("PRIDE AND PREJUDICE", "SENSE AND SENSIBILITY", "NORTHANGER ABBEY")
VOCAB_SIZE = 2048
HELD_OUT_EVERY = 16  # chapters: one of so many goes to the validation file
END_OF_TEXT = "<|endoftext|>"


def read_character_vectors(rdb: bytes) -> list[list[str]]:
    """Return the character vectors of an R lazy-load database, in file order.

    Each record is a 4-byte big-endian length and a zlib stream; inside is R's XDR serialisation version 3: a header
    that ends in the encoding's name, the vector's flags and length, then per string its flags, length and bytes.
    """
    vectors, offset = [], 0
    while offset < len(rdb):
        stream = zlib.decompressobj()
        raw = stream.decompress(rdb[offset + 4 :])
        offset = len(rdb) - len(stream.unused_data)
        place = raw.index(b"UTF-8") + 5
        _, count = struct.unpack_from(">II", raw, place)
        place += 8
        lines = []
        for _ in range(count):
            _, length = struct.unpack_from(">II", raw, place)
            lines.append(raw[place + 8 : place + 8 + length].decode())
            place += 8 + length
        vectors.append(lines)
    return vectors


def chapters(lines: list[str]) -> list[str]:
    """Split a novel into chapters: a paragraph per line, a blank line between them; leave out title and end matter."""
    body = re.split(r"(?im)^chapter [ivxl\d]+$", "\n".join(lines))[1:]
    body[-1] = re.split(r"(?m)^(?:THE END|FINIS|A NOTE ON THE TEXT)$", body[-1], maxsplit=1)[0]
    found = []
    for number, text in enumerate(body, 1):
        paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.replace("_", ""))]
        prose = [paragraph for paragraph in paragraphs if paragraph and not paragraph.startswith("[")]  # editors' notes
        found.append("\n\n".join([f"Chapter {number}", *prose]) + "\n")
    return found


def write_texts(rdb_file: Path) -> None:
    """Write ``train.txt`` and ``validation.txt``: whole chapters, disjoint."""
    rdb = rdb_file.read_bytes()
    if (digest := hashlib.sha256(rdb).hexdigest()) != SOURCE_SHA256:
        raise SystemExit(f"{rdb_file} has SHA-256 {digest}, expected {SOURCE_SHA256} (janeaustenr 1.0.0-1)")
    novels = {lines[0]: chapters(lines) for lines in read_character_vectors(rdb)}
    every = [chapter for title in NOVELS for chapter in novels[title]]
    held_out = [chapter for index, chapter in enumerate(every, 1) if index % HELD_OUT_EVERY == 0]
    kept = [chapter for index, chapter in enumerate(every, 1) if index % HELD_OUT_EVERY]
    for name, texts in (("train.txt", kept), ("validation.txt", held_out)):
        (HERE / name).write_text("\n\n".join(texts), encoding="utf-8", newline="\n")


def write_tokenizer() -> None:
    """Train a byte-level BPE tokenizer on ``train.txt`` and write it as a Hugging Face tokenizer directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(HERE / "train.txt").read_text(encoding="utf-8")], trainer)
    folder = HERE / "tokenizer"
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def tokens_of(name: str) -> np.ndarray:
    """One file's token ids with the end-of-text token behind them, as training sees them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer" / "tokenizer.json"))
    text = (HERE / name).read_text(encoding="utf-8")
    return np.array([*tokenizer.encode(text).ids, tokenizer.token_to_id(END_OF_TEXT)])


def baseline() -> dict[str, float | int]:
    """Nats per validation token of a model that knows only how often each token occurs in the training text.

    Add-one smoothing over the vocabulary: p(t) = (count(t) + 1) / (train_tokens + vocab_size).
    """
    train, validation = tokens_of("train.txt"), tokens_of("validation.txt")
    counts = np.bincount(train, minlength=VOCAB_SIZE)
    log_p = np.log(counts + 1) - np.log(len(train) + VOCAB_SIZE)
    return {
        "unigram_nll_validation": round(float(-log_p[validation].mean()), 6),
        "train_tokens": len(train),
        "validation_tokens": len(validation),
        "vocab_size": VOCAB_SIZE,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rdb_file", nargs="?", type=Path, help="Rdata.rdb of the unpacked package")
    parser.add_argument("--baseline_only", type=int, choices=(0, 1), default=0)
    args = parser.parse_args()
    if not args.baseline_only:
        if args.rdb_file is None:
            parser.error("the package's Rdata.rdb is needed (or --baseline_only 1)")
        write_texts(args.rdb_file)
        write_tokenizer()
    (HERE / "baseline.json").write_text(json.dumps(baseline(), indent=2) + "\n")


if __name__ == "__main__":
    main()
