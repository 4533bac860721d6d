"""Data of any kind, found from the files: what a user gives, and what trains."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sample.build import HERE
from smp.data import documents
from smp.data.data_pipeline import BatchShape, DataConfig, create_data_pipeline
from smp.errors import UserError
from tests.flags import plan_of
from tests.job import LLAMA

ROOT = Path(__file__).parents[2]
TOKENIZER = str(HERE / "tokenizer")
# Documents with what containers and tokenizers may treat differently, the last one longer than is tokenised at once.
TEXTS = [
    "One day.\n\nAnother day.\n", "Naïve £5\r\nend", "\ufeffmarked", " \n", "a\u2028b\x0cc\x85d", "x" * 600_000,
    "line of words\n" * 40_000,
]  # fmt: skip


def shape(width=8, vocab=2048, **more):
    return BatchShape(
        sequence_length=width, vocab_size=vocab, global_batch_size=1, micro_batch_size=1, data_rank=0, data_size=1,
        seed=0, **more,
    )  # fmt: skip


def opened(path, tmp_path, *, split="train", batch=None, tokenizer=TOKENIZER, **settings):
    config = DataConfig(
        training_dir=str(path), test_dir=str(path), tokenizer_name_or_dir=tokenizer,
        data_cache_dir=str(tmp_path / "cache"), **settings,
    )  # fmt: skip
    return create_data_pipeline(config, split=split, batch=batch or shape())


def tokens(path, tmp_path, **settings):
    source = opened(path, tmp_path, **settings)._microbatches.source
    return np.concatenate([row.tokens for row in source.rows(np.arange(len(source)))]).tolist()


def save(path, columns):
    import datasets

    datasets.Dataset.from_dict(columns).save_to_disk(str(path), num_shards=2)


def write(kind, folder, texts):
    """Write documents in a container."""
    folder.mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    match kind:
        case "txt":
            for number, text in enumerate(texts):
                if text.strip():  # a file without text is refused
                    (folder / f"{number}.txt").write_bytes(text.encode())
        case "txt.gz":
            for number, text in enumerate(texts):
                if text.strip():
                    (folder / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
        case "jsonl":
            (folder / "a.jsonl").write_text(lines)
        case "json.gz":
            (folder / "a.json.gz").write_bytes(gzip.compress(lines.encode()))
        case "parquet":
            pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), folder / "a.parquet", row_group_size=2)
        case "arrow":
            table = pa.table({"text": pa.array(texts, pa.large_string())})
            with pa.ipc.new_stream(str(folder / "a.arrow"), table.schema) as stream:
                stream.write_table(table)
        case "saved":
            save(folder, {"text": texts})
    return folder


CONTAINERS = ["txt", "txt.gz", "jsonl", "json.gz", "parquet", "arrow", "saved"]


OFTEN = ("jsonl", "parquet")


@pytest.fixture(scope="module")
def in_texts(tmp_path_factory):
    """The tokens of the documents in text files."""
    folder = tmp_path_factory.mktemp("texts")
    return tokens(write("txt", folder / "txt", TEXTS), folder)


@pytest.mark.parametrize(
    "kind", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.full) for each in CONTAINERS[1:]]
)
def test_the_same_documents_give_the_same_tokens_in_any_container(tmp_path, kind, in_texts):
    assert in_texts.count(0) == len(TEXTS) - 1 and len(in_texts) > 100_000
    assert tokens(write(kind, tmp_path / kind, TEXTS), tmp_path) == in_texts


def test_ids_are_found_in_every_container(tmp_path):
    ids = [[1, 2, 3], [4], [5, 6]]
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "a.jsonl").write_text("".join(json.dumps({"text": "x", "input_ids": row}) + "\n" for row in ids))
    (tmp_path / "p").mkdir()
    pq.write_table(pa.table({"input_ids": ids, "text": ["x"] * 3}), tmp_path / "p" / "a.parquet")
    save(tmp_path / "s", {"input_ids": ids})
    (tmp_path / "a").mkdir()
    for arrow in (tmp_path / "s").glob("*.arrow"):
        (tmp_path / "a" / arrow.name).write_bytes(arrow.read_bytes())
    for folder in ("j", "p", "s", "a"):
        assert tokens(tmp_path / folder, tmp_path, tokenizer=None) == [1, 2, 3, 4, 5, 6]


def test_a_folder_of_several_kinds_is_refused_unless_one_is_chosen(tmp_path):
    folder = write("txt", tmp_path / "d", TEXTS[:2])
    (folder / "a.jsonl").write_text('{"text": "One line."}\n')
    with pytest.raises(
        UserError,
        match=r"d contains 1 JSON lines file\(s\) and 2 text file\(s\); .* such as 'FOLDER/\*.json'.*--dataset_type",
    ):
        opened(folder, tmp_path)
    chosen = tokens(folder, tmp_path, dataset_type="gpt_jsonl")
    assert chosen == tokens(folder / "*.jsonl", tmp_path) != tokens(folder, tmp_path, dataset_type="text")


def test_the_types_of_a_refused_folder_are_those_that_read_one_of_its_kinds(tmp_path):
    folder = write("txt", tmp_path / "d", TEXTS[:2])
    (folder / "a.jsonl").write_text('{"text": "One line."}\n')
    (folder / "a.csv").write_text("text\nOne line.\n")
    with pytest.raises(UserError, match=r"or choose with --dataset_type gpt_jsonl or text or chat$"):
        opened(folder, tmp_path)
    write("parquet", tmp_path / "p", TEXTS[:2])
    (tmp_path / "p" / "a.jsonl").write_text('{"text": "One line."}\n')
    with pytest.raises(UserError, match=r"such as 'FOLDER/\*.json'$"):
        opened(tmp_path / "p", tmp_path, dataset_type="chat")


def test_files_of_other_splits_in_a_folder_are_told(tmp_path, caplog):
    folder = tmp_path / "d"
    folder.mkdir()
    for name in ("train-00000-of-00001", "test-00000-of-00001", "validation"):
        (folder / f"{name}.jsonl").write_text('{"input_ids": [1, 2]}\n')
    assert tokens(folder, tmp_path) == [1, 2] * 3
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "2 file(s) of other splits by their names (test-00000-of-00001.jsonl, validation.jsonl)" in warning
    advice = re.search(r"--training_dir '(.*)'", warning)[1]
    caplog.clear()
    assert tokens(advice, tmp_path) == [1, 2]
    assert len(tokens(folder, tmp_path, split="validation", fast_validation=False)) == 6 and not caplog.records


def test_the_models_own_tokenizer_is_used(tmp_path):
    folder = write("jsonl", tmp_path / "d", TEXTS[:2])
    own = shape(tokenizer_dir=TOKENIZER)
    assert tokens(folder, tmp_path, tokenizer=None, batch=own) == tokens(folder, tmp_path)
    with pytest.raises(UserError, match=r"d is text: set --tokenizer_name_or_dir, a local tokenizer directory"):
        opened(folder, tmp_path, tokenizer=None)


def test_validation_data_of_another_kind(tmp_path):
    write("txt", tmp_path / "t", TEXTS[:2])
    last = tokens(tmp_path / "t", tmp_path, split="validation")
    assert last == tokens(tmp_path / "t" / "1.txt", tmp_path)
    both = tokens(tmp_path / "t", tmp_path, split="validation", fast_validation=False)
    assert both == tokens(write("parquet", tmp_path / "p", TEXTS[:2]), tmp_path, split="validation")


def test_a_separator_is_for_text_files(tmp_path, caplog):
    folder = write("jsonl", tmp_path / "d", TEXTS[:2])
    with pytest.raises(UserError, match=r"--text_document_separator is for text files, and .*d contains JSON lines"):
        opened(folder, tmp_path, text_document_separator="")
    (tmp_path / "a.txt").write_text("one\n ---\ntwo\n")
    with pytest.raises(UserError, match="--text_document_separator ' ' is of white space alone: '' is a blank line"):
        opened(tmp_path / "a.txt", tmp_path, text_document_separator=" ")
    found = [tokens(tmp_path / "a.txt", tmp_path, text_document_separator=each) for each in ("---", " --- ")]
    assert found[0] == found[1] and found[0].count(0) == 2 and not caplog.records
    assert tokens(tmp_path / "a.txt", tmp_path, text_document_separator="\\n").count(0) == 1
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning == r"training data: --text_document_separator '\\n' separates nothing: each file is a document"


ROW, IDS = '{"text": "fine"}\n', '{"input_ids": [1]}\n'
BAD_LINES = [
    (ROW + '{"body": "x"}\n', r"a.jsonl, line 2: has no text; found: body; every row must have its text"),
    (ROW + IDS, "a.jsonl, line 2: has no text; found: input_ids; every row"),
    (IDS + ROW, "a.jsonl, line 2: has no input_ids; found: text; every row"),
    ('{"body": "x"}\n', "a.jsonl, line 1: has no input_ids; found: body; .* or every row a text"),
    (ROW + '{"text": 5}\n', "a.jsonl, line 2: text must be a string, its type is int; leave the row out"),
    (ROW + '{"text": null}\n', "a.jsonl, line 2: text must be a string"),
    (ROW + '{"text": "\\ud800"}\n', r"a.jsonl, line 2: the text is no Unicode \(surrogates not allowed\)"),
    (ROW + '{"text": "\udcff"}\n', "a.jsonl, line 2: not UTF-8"),
    ('{"text": " "}\n', "a.jsonl contains no text: remove it"),
    ("\n\n", "a.jsonl contains no rows: remove it"),
    ('[{"text": "x"}]', r"line 1: contains a list; .*: datasets.load_dataset\('json', data_files='F.json'\).*to_json"),
    ('[\n{"text": "x"}\n]', r"line 1: not valid JSON .*: datasets.load_dataset\('json', .*to_json"),
]


@pytest.mark.parametrize(("content", "words"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path, content, words):
    (tmp_path / "a.jsonl").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=words):
        opened(tmp_path / "a.jsonl", tmp_path)
    assert not list((tmp_path / "cache").glob("a.jsonl-*/*"))


BAD_TABLES = [
    ({"text": ["a", None]}, "row 2: text must be a string, its type is NoneType; leave the row out"),
    ({"text": [1, 2]}, "row 1: text must be a string, its type is int"),
    ({"body": ["a"]}, "row 1: has no input_ids; found: body; .* or every row a text"),
]


@pytest.mark.parametrize(("columns", "words"), BAD_TABLES)
def test_a_bad_row_of_a_table_is_named(tmp_path, columns, words):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=f"a.parquet.*{words}"):
        opened(tmp_path / "a.parquet", tmp_path)


def test_a_second_table_without_texts_is_named(tmp_path):
    folder = write("parquet", tmp_path / "d", ["One."])
    pq.write_table(pa.table({"body": ["a"]}), folder / "b.parquet")
    with pytest.raises(UserError, match=r"b.parquet, row 1: has no text; found: body"):
        opened(folder, tmp_path)


def job(tmp_path, folder, *more):
    return [
        *LLAMA, "--vocab_size", "2048", "--max_steps", "2", "--training_dir", str(folder), "--output_dir",
        str(tmp_path / "run"), "--data_cache_dir", str(tmp_path / "cache"), "--tokenizer_name_or_dir", TOKENIZER, *more,
    ]  # fmt: skip


@pytest.mark.full
def test_a_folder_of_151_texts_trains_and_shows_one_line(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(151):
        (folder / f"{number}.txt").write_text(f"Text number {number}, of a few words.\n" * 20)
    held = write("jsonl", tmp_path / "held", ["A held-out text of a few words.\n" * 60])
    words = job(tmp_path, folder, "--test_dir", str(held), "--validation_freq", "2", "--validation_batches", "1",
                "--val_batch_size", "1")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "smp.train", *words], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [line for line in (done.stdout + done.stderr).splitlines() if "files/s" in line or ".txt" in line]
    assert len(shown) == 2, shown
    assert re.search(
        r"training data: 151/151 files, 0.09\d of 0.09\d MB in .* files/s, .* MB/s\), \d\d,\d{3} tokens", shown[0]
    )
    assert re.search(r"validation data: 1/1 files", shown[1])


def containers(tmp_path, columns):
    """Rows of these columns in every container of token ids, by path."""
    tmp_path.mkdir(exist_ok=True)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    save(tmp_path / "saved", columns)
    return [tmp_path / "rows.jsonl", tmp_path / "rows.parquet", tmp_path / "saved"]


PACKED = {"input_ids": [[1, 2, 3, 4]] * 2, "attention_mask": [[1, 1, 1, 1], [1, 1, 2, 2]]}


def test_a_mask_that_numbers_documents_is_refused(tmp_path):
    """Taken as ones it would let the documents attend to each other."""
    for path in containers(tmp_path, PACKED):
        with pytest.raises(
            UserError, match=r"(line|row) [12]: attention_mask must contain 0 and 1 only, it contains 2: .*leave"
        ):
            opened(path, tmp_path)
    for value in (-1, 256):
        pq.write_table(pa.table({"input_ids": [[1, 2]], "attention_mask": [[1, value]]}), tmp_path / "rows.parquet")
        with pytest.raises(UserError, match=f"rows.parquet, row 1: .*, it contains {value}:"):
            opened(tmp_path / "rows.parquet", tmp_path)


def test_a_cache_older_than_the_check_of_masks_is_not_trusted(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2]], "attention_mask": [[1, 0]]}), path)
    opened(path, tmp_path)
    (meta,) = (tmp_path / "cache").glob("rows.parquet-*/meta.json")
    mask, told = meta.parent / "mask.bin", json.loads(meta.read_text())
    assert told.pop("highest_mask") == 1
    mask.write_bytes(bytes([1, 2]))
    meta.write_text(json.dumps(told))  # as it was written before
    source = opened(path, tmp_path)._microbatches.source
    assert source.rows(np.array([0]))[0].mask.tolist() == [1, 0]


@pytest.mark.parametrize("name", ["completion_mask", "loss_mask", "assistant_masks", "position_ids"])
def test_what_other_programs_say_about_the_loss_is_refused(tmp_path, name):
    """Unread it would be trained on."""
    columns = {"input_ids": [[1, 2], [3, 4]], name: [[0, 1], [0, 1]]}
    for path in containers(tmp_path, columns):
        with pytest.raises(UserError, match=rf"{name} is not read, .*: remove it; labels of -100 keep tokens out"):
            opened(path, tmp_path)
    harmless = {"input_ids": [[1], [2]], "special_tokens_mask": [[0], [0]], "token_type_ids": [[0], [0]]}
    for path in containers(tmp_path / "harmless", harmless):
        assert tokens(path, tmp_path) == [1, 2]


def test_an_unread_column_of_a_later_row_or_file_or_an_old_cache_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1]}\n{"input_ids": [2], "loss_mask": [0]}\n')
    with pytest.raises(UserError, match=r"a.jsonl, line 2: loss_mask is not read"):
        opened(tmp_path / "a.jsonl", tmp_path)
    (tmp_path / "d").mkdir()
    pq.write_table(pa.table({"input_ids": [[1]]}), tmp_path / "d" / "a.parquet")
    pq.write_table(pa.table({"input_ids": [[2]], "loss_mask": [[0]]}), tmp_path / "d" / "b.parquet")
    with pytest.raises(UserError, match=r"b.parquet, row 1: loss_mask is not read"):
        opened(tmp_path / "d", tmp_path)
    path = tmp_path / "null.jsonl"  # as a table with such a column is written, whose rows have none
    path.write_text('{"input_ids": [1], "loss_mask": null}\n')
    assert tokens(path, tmp_path) == [1]


def test_a_token_beyond_the_vocabulary_is_named_in_every_container(tmp_path):
    for kind in ("jsonl", "parquet", "saved"):
        folder = write(kind, tmp_path / kind, ["e", "Another xylophone."])
        at = "line 2" if kind == "jsonl" else "row 2" if kind == "parquet" else "row 1"
        with pytest.raises(UserError, match=rf"{at}: the text has '.*', token id \d+, .* outside .* of 1000: set"):
            opened(folder, tmp_path, batch=shape(vocab=1000))


def test_document_mask_of_ids_uses_the_end_that_the_model_names(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [5, 0, 7, 8]}\n')
    caplog.set_level("INFO")
    words = "--training_dir", tmp_path / "a.jsonl", "--document_mask", 1, "--train_batch_size", 1
    plan = plan_of([*words], tmp_path, model=["--model", "llama_tiny"], data=[])
    (microbatch,) = next(iter(plan.train_data)).microbatches
    assert microbatch["position_ids"][0, :4].tolist() == [0, 1, 0, 1]
    assert "training data: documents end with token 0, the model's eos_token_id: 2 in 1 rows" in caplog.text
    with pytest.raises(UserError, match="and the model's config names no one eos_token_id: set --tokenizer"):
        plan_of([*words], tmp_path, data=[])


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (
            [{"input_ids": [1, 5, 6, 1, 7]}],
            "separates nothing: in 1 rows (5 tokens) no document ends with token 0, the",
        ),
        ([{"input_ids": [1, 5, 6, 0]}] * 2, "separates nothing: in 2 rows (8 tokens) no document ends"),
        ([{"input_ids": [5, 0, 6, 0]}] * 2, "4 in 2 rows or texts (8 tokens)"),
        ([{"input_ids": [5, 0, 6, 0, 0, 0], "labels": [5, 0, 6, 0, -100, -100]}], "2 in 1 rows or texts (6 tokens)"),
        ([{"input_ids": [5, 0, 6, 0], "labels": [-100, -100, 6, 0]}], "1 of these 2 documents have no token that is"),
        (  # padding of another id
            [{"input_ids": [5, 0, 6, 0, 7, 7], "labels": [5, 0, 6, 0, -100, -100]}],
            "2 in 1 rows or texts (6 tokens)",
        ),
        ([{"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 1, 0]}], "separates nothing"),
    ],
)
def test_document_mask_says_what_it_separates(tmp_path, caplog, rows, told):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    caplog.set_level("INFO")
    config = DataConfig(training_dir=str(tmp_path), document_mask=True, data_cache_dir=str(tmp_path / "cache"))
    create_data_pipeline(config, split="train", batch=shape(eos_token_id=0))
    lines = [record for record in caplog.records if told in record.getMessage()]
    assert len(lines) == 1 and (lines[0].levelname == "WARNING") == ("no " in told or "nothing" in told)
    assert ("trained on" in caplog.text) == ("trained" in told or "have no token" in told)


def test_a_document_that_the_counted_tokens_cut_is_not_said_to_be_untrained(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", 6)
    (tmp_path / "a.jsonl").write_text(
        '{"input_ids": [5, 6, 0, 7, 8, 9, 6, 0], "labels": [5, 6, 0, -100, -100, -100, 6, 0]}'
    )
    caplog.set_level("INFO")
    config = DataConfig(training_dir=str(tmp_path), document_mask=True, data_cache_dir=str(tmp_path / "cache"))
    create_data_pipeline(config, split="train", batch=shape(eos_token_id=0))
    assert "2 in 1 rows or texts (6 tokens)" in caplog.text and "trained on" not in caplog.text
    monkeypatch.setattr(documents, "BLOCK", 8)
    monkeypatch.setattr(documents, "SHARE", 0.5)
    (tmp_path / "a.jsonl").write_text('{"input_ids": [5, 6, 0, 7, 8, 0], "labels": [5, 6, 0, -100, -100, -100]}')
    create_data_pipeline(config, split="train", batch=shape(eos_token_id=0))
    assert "have no token that is trained on" not in caplog.text


def test_conversations_are_named_where_they_are_not_asked_for(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "Where?"}]}\n')
    with pytest.raises(UserError, match="contains conversations: train on them with --dataset_type chat"):
        create_data_pipeline(DataConfig(training_dir=str(tmp_path)), split="train", batch=shape())
    with pytest.raises(UserError, match="chat reads them, where the training data is conversations, too"):
        create_data_pipeline(DataConfig(test_dir=str(tmp_path)), split="validation", batch=shape())
