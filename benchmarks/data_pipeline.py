"""Tokens per second of each data source, against `datasets` with a torch DataLoader doing the same job.

    python benchmarks/data_pipeline.py                # a minute
    python benchmarks/data_pipeline.py --gigabyte 1   # and a 1 GB JSON lines file: time to the first batch, deep inside

Both sides turn the same files into the same shuffled micro-batches of int64 input_ids and labels, in one process
without workers. *Cold* is the time from files never seen to the first batch; *warm* is the rate once everything is
converted and open. Rounds of the two sides alternate; medians are shown.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from smp.data.data_pipeline import BatchShape, DataConfig, create_data_pipeline  # noqa: E402

LENGTH, BATCH, VOCAB = 1024, 8, 32_000
SAMPLE = ROOT / "data" / "sample"
Batches = Iterator[object]
Opener = Callable[[Path], Batches]  # from an empty cache folder to an endless iterator of batches


def ours(kind: str, path: Path | None, *, start: int = 0, vocab: int = VOCAB) -> Opener:
    """Open this project's pipeline over a file or folder; None is synthetic data."""

    def open_at(cache: Path) -> Batches:
        config = DataConfig(
            dataset_type=kind,  # type: ignore[arg-type]
            use_synthetic_data=path is None,
            training_dir=None if path is None else str(path),
            tokenizer_name_or_dir=str(SAMPLE / "tokenizer") if kind == "text" else None,
            data_cache_dir=str(cache),
        )
        batch = BatchShape(
            sequence_length=LENGTH, vocab_size=vocab, global_batch_size=BATCH, micro_batch_size=BATCH, data_rank=0,
            data_size=1, seed=0,
        )  # fmt: skip
        pipeline = create_data_pipeline(config, split="train", batch=batch)
        pipeline.seek(start)
        return iter(pipeline)

    return open_at


class RandomTokens(torch.utils.data.Dataset):
    """The usual stand-in for data."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": torch.randint(VOCAB, (LENGTH,))}


def _with_labels(rows: list[dict]) -> dict:
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def _loader(dataset: object) -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_size=BATCH,
        shuffle=True,
        generator=generator,
        collate_fn=_with_labels,
        drop_last=True,
    )


def _text_rows(path: Path, cache: Path) -> object:
    """Tokenise, concatenate, cut: the steps of transformers' run_clm example."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SAMPLE / "tokenizer")
    lines = datasets.load_dataset(
        "text", data_files=str(path), split="train", cache_dir=str(cache), keep_linebreaks=True
    )
    tokens = lines.map(
        lambda rows: {"input_ids": tokenizer(rows["text"]).input_ids}, batched=True, remove_columns="text"
    )

    def cut(rows: dict) -> dict:
        flat = list(itertools.chain(*rows["input_ids"]))
        whole = len(flat) // LENGTH * LENGTH
        return {"input_ids": [flat[i : i + LENGTH] for i in range(0, whole, LENGTH)]}

    return tokens.map(cut, batched=True)


def theirs(kind: str, path: Path | None, *, skip: int = 0) -> Opener:
    """`datasets` and a DataLoader; ``skip`` batches are passed over with Accelerate's own helper."""

    def open_at(cache: Path) -> Batches:
        import datasets

        if kind == "synthetic":
            dataset: object = RandomTokens()
        elif kind == "hf":
            dataset = datasets.load_from_disk(str(path)).with_format("torch")
        elif kind == "text":
            assert path is not None
            dataset = _text_rows(path, cache).with_format("torch")  # type: ignore[attr-defined]
        else:
            loaded = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(cache))
            dataset = loaded.with_format("torch")
        loader = _loader(dataset)
        if skip:
            from accelerate import skip_first_batches

            return iter(skip_first_batches(loader, skip))
        return itertools.chain.from_iterable(itertools.repeat(loader))

    return open_at


def write_files(folder: Path, rows: int) -> dict[str, Path]:
    """Write the same random rows in every format."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids = np.random.default_rng(0).integers(0, VOCAB, (rows, LENGTH), dtype=np.int32)
    files = {name: folder / name for name in ("a.jsonl", "a.jsonl.gz", "a.parquet", "saved")}
    with open(files["a.jsonl"], "w") as handle:
        handle.writelines(json.dumps({"input_ids": row.tolist()}) + "\n" for row in ids)
    with open(files["a.jsonl"], "rb") as source, gzip.open(files["a.jsonl.gz"], "wb", compresslevel=3) as target:
        shutil.copyfileobj(source, target)
    column = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * LENGTH, pa.array(ids.ravel()))
    pq.write_table(pa.table({"input_ids": column}), files["a.parquet"])
    datasets.Dataset(pa.table({"input_ids": column})).save_to_disk(str(files["saved"]))
    return files


def measure(opener: Opener, cache: Path, batches: int) -> tuple[float, float]:
    """(seconds from an empty cache to the first batch, tokens per second of the following ``batches``)."""
    begin = time.perf_counter()
    iterator = opener(cache)
    next(iterator)
    cold = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    return cold, batches * BATCH * LENGTH / (time.perf_counter() - begin)


def compare(sides: tuple[Opener, Opener], work: Path, *, rounds: int, batches: int) -> list[tuple[float, float]]:
    """Medians of :func:`measure` for each side, rounds interleaved."""
    found: tuple[list, list] = ([], [])
    for number in range(rounds + 1):
        for opener, results in zip(sides, found, strict=True):
            cache = Path(tempfile.mkdtemp(dir=work))
            results.append(measure(opener, cache, batches))
            shutil.rmtree(cache)
        if number == 0:  # imports and first calls
            found[0].clear()
            found[1].clear()
    return [(statistics.median(c for c, _ in side), statistics.median(w for _, w in side)) for side in found]


def table_of_sources(work: Path, rows: int, rounds: int, batches: int) -> list[str]:
    """Every source against its peer."""
    files = write_files(work, rows)
    text = SAMPLE / "train.txt"
    jobs = {
        "synthetic": (ours("gpt_jsonl", None), theirs("synthetic", None)),
        "gpt_jsonl": (ours("gpt_jsonl", files["a.jsonl"]), theirs("json", files["a.jsonl"])),
        "gpt_jsonl, gz": (ours("gpt_jsonl", files["a.jsonl.gz"]), theirs("json", files["a.jsonl.gz"])),
        "hf, saved": (ours("hf", files["saved"]), theirs("hf", files["saved"])),
        "hf, parquet": (ours("hf", files["a.parquet"]), theirs("parquet", files["a.parquet"])),
        "text": (ours("text", text), theirs("text", text)),
    }
    lines = [
        f"{rows:,} rows of {LENGTH:,} tokens (text: the bundled sample), micro-batches of {BATCH} rows, "
        f"medians of {rounds} interleaved rounds.",
        "The peer of synthetic data is torch.randint in a DataLoader: faster, but other tokens at every layout.",
        "",
        "| source | cold, ours (s) | cold, datasets (s) | times faster "
        "| warm, ours (Mtoken/s) | warm, datasets | times faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, sides in jobs.items():
        (cold, warm), (their_cold, their_warm) = compare(sides, work, rounds=rounds, batches=batches)
        lines.append(
            f"| {name} | {cold:.3f} | {their_cold:.3f} | {their_cold / cold:.1f} "
            f"| {warm / 1e6:.1f} | {their_warm / 1e6:.1f} | {warm / their_warm:.1f} |"
        )
        print(lines[-1], flush=True)
    return lines


def _write_gigabyte(path: Path) -> tuple[int, int]:
    """(rows, bytes) of a JSON lines file of at least 1 GB."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (1000, LENGTH))
    block = "".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in ids)
    rows = 0
    with open(path, "w") as handle:
        while rows * len(block) < 1000 * 10**9:
            handle.write(block)
            rows += len(ids)
    return rows, path.stat().st_size


def table_of_resumes(work: Path, rounds: int) -> list[str]:
    """Time from starting to the first batch, converted data, at several depths of 1 GB."""
    path = work / "large.jsonl"
    rows, size = _write_gigabyte(path)
    caches = [work / "ours", work / "theirs"]
    lines = [
        f"{size / 1e9:.2f} GB of JSON lines, {rows:,} rows, {rows * LENGTH / 1e6:.0f} million tokens.",
        "Conversion, once:",
    ]
    for name, opener, cache in zip(
        ("ours", "datasets"), (ours("gpt_jsonl", path), theirs("json", path)), caches, strict=True
    ):
        cold = measure(opener, cache, 1)[0]
        lines.append(f"{name} {cold:.1f} s ({size / cold / 1e6:.0f} MB/s){';' if name == 'ours' else '.'}")
    lines += [
        f"Then, time from opening to the first batch (median of {rounds}, interleaved; datasets skips with",
        "Accelerate's skip_first_batches):",
        "",
        "| resumed at | ours (ms) | datasets (ms) | times faster |",
        "|---|---|---|---|",
    ]
    for share in (0.0, 0.5, 0.99):
        skip = int(rows // BATCH * share)
        sides = ours("gpt_jsonl", path, start=skip * BATCH), theirs("json", path, skip=skip)
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for opener, cache, found in zip(sides, caches, times, strict=True):
                begin = time.perf_counter()
                next(opener(cache))
                found.append(1000 * (time.perf_counter() - begin))
        mine, peer = map(statistics.median, times)
        lines.append(f"| {share:.0%} | {mine:.1f} | {peer:.1f} | {peer / mine:.0f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabyte", type=int, choices=(0, 1), default=0, help="also measure resuming inside 1 GB")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batches", type=int, default=200, help="batches per warm measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "data_pipeline.md")
    args = parser.parse_args()
    import datasets

    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    today = datetime.date.today()
    lines = ["# Data pipeline", "", f"`python benchmarks/data_pipeline.py`, {today}, 2-core x86-64 VM.", ""]
    with tempfile.TemporaryDirectory() as folder:
        lines += table_of_sources(Path(folder), args.rows, args.rounds, args.batches)
        if args.gigabyte:
            lines += ["", "## Resuming deep inside 1 GB", "", *table_of_resumes(Path(folder), args.rounds)]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
