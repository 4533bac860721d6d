"""The checks of ``smp doctor`` that look at the job's data and model."""

from __future__ import annotations

import gzip
import json
import pathlib
import re

import pytest

from smp.doctor import data, model
from smp.doctor.room import Request, Room
from smp.errors import UserError
from smp.runtime import Launch
from tests.test_doctor_checks import found

ROOT = pathlib.Path(__file__).parent.parent


# ----------------------------------------------------------------------------------------------------------------- data


def rows(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())
    return str(path.parent)


ROW = {"input_ids": [1, 2, 63]}


def test_good_rows(tmp_path):
    place = rows(tmp_path / "a" / "x.jsonl", *[ROW] * 500)
    message = found(data.check_data, "ok", r"1 file\(s\)", training_dir=place, vocab_size=64, max_context_width=2)
    assert "about 500 rows with about 1,500 tokens: 750 sample(s) of 2 tokens" in message
    found(data.check_data, "ok", " 500 rows with 1,500 tokens", training_dir=place, vocab_size=64, full=True)
    rows(tmp_path / "a" / "y.json.gz", *[ROW] * 10)
    found(data.check_data, "ok", r"2 file\(s\)", training_dir=place, vocab_size=64)
    found(data.check_data, "ok", r"1 file\(s\)", training_dir=f"{place}/*.jsonl", vocab_size=64)
    found(data.check_data, "ok", " 10 rows", training_dir=place, vocab_size=64, zipped_data=True)
    rows(tmp_path / "a" / "deeper" / "z.jsonl", ROW)  # as the job, which reads direct children
    found(data.check_data, "ok", r"2 file\(s\)", training_dir=place, vocab_size=64)
    words = {"training_dir": place, "dataset_type": "hf"}
    found(data.check_data, "problem", "no files for --dataset_type hf but of gpt_jsonl", **words)


@pytest.mark.parametrize(
    ("lines", "pattern"),
    [
        (
            [ROW, {"input_ids": [64]}],
            "token id 64 is outside the model's vocabulary of 64: set --vocab_size to at least",
        ),
        ([ROW, {"input_ids": [-1]}], "x.jsonl, line 2: token id -1 is negative"),
        ([ROW, {"text": "abc"}], "x.jsonl, line 2: no input_ids but text"),
        ([ROW, "{oops\n"], "x.jsonl, line 2: no JSON"),
        ([ROW, {"input_ids": "abc"}], "x.jsonl, line 2: input_ids must be a list of whole numbers"),
        (["\n"], "it holds no rows"),
        ([], "x.jsonl is empty"),
    ],
)
def test_bad_rows(lines, pattern, tmp_path):
    place = rows(tmp_path / "a" / "x.jsonl", *lines)
    found(data.check_data, "problem", re.escape(pattern), training_dir=place, vocab_size=64)


def test_a_bad_row_in_the_middle_is_found_in_full(tmp_path):
    place = rows(tmp_path / "a" / "x.jsonl", *[ROW] * 2000, {"input_ids": [9999]}, *[ROW] * 2000)
    found(data.check_data, "problem", "token id 9999", training_dir=place, vocab_size=64, full=True)


def test_files_that_are_not_there_or_cut(tmp_path):
    found(data.check_data, "problem", "there are no data files", training_dir=str(tmp_path / "no"), vocab_size=64)
    found(data.check_data, "problem", "cannot be read .*ftp_", training_dir="ftp_://x/y", vocab_size=64)
    place = pathlib.Path(rows(tmp_path / "a" / "x.json.gz", *[{"input_ids": list(range(64))}] * 3000))
    file = place / "x.json.gz"
    file.write_bytes(file.read_bytes()[:-200])
    found(data.check_data, "problem", "is truncated", training_dir=str(place), vocab_size=64, full=True)
    file.write_bytes(b"no gzip at all")
    found(data.check_data, "problem", "x.json.gz cannot be read", training_dir=str(place), vocab_size=64)


def test_too_few_samples(tmp_path):
    place = rows(tmp_path / "a" / "x.jsonl", ROW)
    found(data.check_data, "warning", r"1 sample\(s\) of 3 tokens and less than one step of 8",
          training_dir=place, max_context_width=3, global_batch_size=8)  # fmt: skip


@pytest.mark.parametrize("remote", [False, True])
def test_a_large_saved_dataset_is_not_read_whole(remote, tmp_path, monkeypatch):
    import fsspec
    import pyarrow as pa

    batch = pa.record_batch([pa.array([[1, 2, 63]] * 1000, pa.list_(pa.int32()))], names=["input_ids"])
    place = "memory://saved" if remote else str(tmp_path)
    path = f"{place}/data-00000-of-00001.arrow"
    with fsspec.open(path, "wb") as file, pa.ipc.new_stream(file, batch.schema) as writer:
        for _ in range(100):
            writer.write_batch(batch)
    for name in ("state.json", "dataset_info.json"):
        with fsspec.open(f"{place}/{name}", "w") as file:
            file.write("{}")
    opened, read, real = [], [], pa.ipc.open_stream
    monkeypatch.setattr(pa.ipc, "open_stream", lambda source: opened.append(source) or real(source))

    def add(self, ids, where):
        read.append(opened[0].tell())
        self.rows, self.tokens, self.highest = self.rows + 1, self.tokens + len(ids), 63

    monkeypatch.setattr(data.Sample, "add", add)
    message = found(data.check_data, "ok", "1 file", training_dir=place, vocab_size=64)
    rows = int(re.search(r"about ([\d,]+) rows", message)[1].replace(",", ""))
    assert 95_000 < rows < 105_000 and len(read) == 2 * 64
    assert max(read) < 10 * batch.nbytes if remote else isinstance(opened[0], pa.MemoryMappedFile)


def test_arrow_and_parquet(tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"input_ids": [[1, 2, 64]] * 20})
    table.save_to_disk(str(tmp_path / "saved"))
    found(data.check_data, "problem", "token id 64", training_dir=str(tmp_path / "saved"), vocab_size=64)
    found(data.check_data, "ok", " 20 rows with 60 tokens", training_dir=str(tmp_path / "saved"), vocab_size=65)
    both = datasets.DatasetDict(train=table, test=table.select(range(3)))
    both.save_to_disk(str(tmp_path / "both"))
    found(data.check_data, "ok", "--training_dir: .* 20 rows", training_dir=str(tmp_path / "both"), vocab_size=65)
    found(data.check_data, "ok", "--test_dir: .* 3 rows", test_dir=str(tmp_path / "both"), vocab_size=65)
    (tmp_path / "pq").mkdir()
    table.to_parquet(str(tmp_path / "pq" / "a.parquet"))
    found(data.check_data, "ok", " 20 rows with 60 tokens", training_dir=str(tmp_path / "pq"), vocab_size=65)
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(str(tmp_path / "pq" / "b.parquet"))
    found(data.check_data, "problem", "no column input_ids but text", training_dir=str(tmp_path / "pq"), vocab_size=65)


def test_text_and_its_tokenizer():
    sample = ROOT / "data" / "sample"
    words = {"training_dir": str(sample / "train.txt"), "tokenizer_name_or_dir": str(sample / "tokenizer")}
    found(data.check_data, "ok", r"1 text file\(s\), 1.6 MiB", vocab_size=2048, **words)
    found(data.check_data, "problem", r"makes ids up to 2047.*--vocab_size to at least 2048", vocab_size=64, **words)
    found(data.check_data, "problem", "text needs --tokenizer_name_or_dir", training_dir=words["training_dir"])
    found(data.check_data, "problem", "no tokenizer in", **words | {"tokenizer_name_or_dir": str(sample / "absent")})


# ---------------------------------------------------------------------------------------------------------------- model


def test_models_that_fit_and_that_do_not():
    found(model.check_model, "ok", "no --model was given")
    found(model.check_model, "ok", r"llama_tiny: 2,077,920 parameters; each process needs about \d", model="llama_tiny")
    found(
        model.check_model,
        "problem",
        r"llama3_405b on 2 process\(es\) needs about \d+.*use a smaller",
        model="llama3_405b",
    )
    found(model.check_model, "problem", "did you mean llama_tiny", model="lama_tiny")
    found(model.check_model, "problem", "does not divide", model="llama_tiny", tensor_parallel_degree=3)


def test_the_training_jobs_own_complaints():
    def plan(*words):
        said = []
        room = Room(Request({}, words), Launch(), said.append)
        try:
            model.check_plan(room)
        except UserError as error:
            return str(error)
        return said[0]["finding"][1:3]

    assert "no dry run was made" in plan()[1]
    complaint = plan("--lr", "x", "--model", "lama_tiny")
    assert "--lr takes a number" in complaint
    good = ("--model", "llama_tiny", "--use_synthetic_data", "1")
    assert plan(*good) == ["ok", "the training job accepts the settings and reads the data"]
    assert "does not divide" in plan(*good, "--tensor_parallel_degree", "3")
