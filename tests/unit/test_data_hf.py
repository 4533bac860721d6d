"""Hugging Face datasets, by name and saved, parquet, Arrow and CSV: data/hf.py."""

import gzip
import json
import pickle
import sys

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sample.build import HERE
from smp.data import hf as module
from smp.data.data_pipeline import DataConfig, create_data_pipeline, open_samples
from smp.data.hf import MappedRows
from smp.data.source import find_data, open_rows
from smp.data.storage import list_files
from smp.data.token_cache import Columns, cached, recorded
from smp.errors import UserError
from tests.unit.test_data_any import shape
from tests.unit.test_data_packing import tokens_of

ROWS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]


def save(path, columns, shards=1):
    import datasets

    datasets.Dataset.from_dict(columns).save_to_disk(str(path), num_shards=shards)


def open_all(path, cache, split="train", width=4, vocab=100):
    found = find_data([str(path)], split, dataset_type="hf")
    return open_rows(
        found, sequence_length=width, vocab_size=vocab, tokenizer=no_tokenizer, cache_dir=str(cache), what="data"
    )


def no_tokenizer():
    raise UserError("this is text")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_saved_dataset_is_mapped_in_place(tmp_path, shards):
    save(tmp_path / "d", {"input_ids": ROWS, "text": ["a"] * 4}, shards)
    source = open_all(tmp_path / "d", tmp_path / "cache")
    assert tokens_of(source) == [[1, 2, 3], [4], [5, 6, 7, 8], [9], [10, 11]]
    assert isinstance(source, MappedRows) and not source.rows(np.array([0]))[0].tokens.flags.owndata
    assert not list((tmp_path / "cache").glob("*/tokens.bin"))


def test_a_mapped_dataset_pickles_as_its_path(tmp_path):
    save(tmp_path / "d", {"input_ids": [list(range(1, 90))] * 200})
    source = open_all(tmp_path / "d", tmp_path / "cache")
    pickled = pickle.dumps(source)
    assert len(pickled) < 2000
    assert tokens_of(pickle.loads(pickled)) == tokens_of(source)


def test_parquet_and_remote_files_give_the_same_rows(tmp_path):
    columns = {"input_ids": ROWS, "attention_mask": [[0] + [1] * (len(row) - 1) for row in ROWS]}
    columns["labels"] = [[-100] * (len(row) - 1) + row[-1:] for row in ROWS]
    save(tmp_path / "d", columns)
    (tmp_path / "p").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "p" / "a.parquet", row_group_size=3)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "d"), "/hf", recursive=True)
    for path in (tmp_path / "p", tmp_path / "p" / "a.parquet", "memory://hf"):
        source = open_all(path, tmp_path / "cache")
        assert tokens_of(source) == tokens_of(open_all(tmp_path / "d", tmp_path / "cache"))
        row = source.rows(np.array([2]))[0]
        assert row.mask.tolist() == [0, 1, 1, 1] and row.labels.tolist() == [-100] * 4


def test_fixed_and_large_lists_and_masks_are_read(tmp_path):
    ids = pa.array([[1, 2], [3, 4]], pa.list_(pa.uint16(), 2))
    mask = pa.array([[True, True], [False, True]], pa.large_list(pa.bool_()))
    pq.write_table(pa.table({"input_ids": ids, "attention_mask": mask}), tmp_path / "a.parquet")
    source = open_all(tmp_path, tmp_path / "cache")
    assert tokens_of(source) == [[1, 2], [3, 4]] and source.rows(np.array([1]))[0].mask.tolist() == [0, 1]


@pytest.mark.parametrize("split", ["test", "valid", "dev"])
def test_a_dataset_dict_gives_the_split(tmp_path, split):
    import datasets

    parts = {name: datasets.Dataset.from_dict({"input_ids": [[n]]}) for n, name in enumerate(("train", split))}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    assert tokens_of(open_all(tmp_path / "d", tmp_path / "c")) == [[0]]
    assert tokens_of(open_all(tmp_path / "d", tmp_path / "c", "validation")) == [[1]]
    datasets.DatasetDict({"other": parts[split]}).save_to_disk(str(tmp_path / "o"))
    with pytest.raises(UserError, match="has the splits other, but no train"):
        open_all(tmp_path / "o", tmp_path / "c")


BAD = {
    "row 1: has no input_ids; found: ids; every row must": {"ids": [[1]]},
    "row 1: input_ids must be a list of integers": {"input_ids": [[1.5]]},
    "row 1: input_ids must be a list of": {"input_ids": [1, 2]},
    "row 2: input_ids must be a list": {"input_ids": [[1], None]},
    "row 2: input_ids must be a list of": {"input_ids": [[1], [2, None]]},
    "row 3: input_ids is empty": {"input_ids": [[1], [2], []]},
    "row 2: token id -3 is negative": {"input_ids": [[1, 2], [4, -3, 5], [300]]},
    "row 3: token id 100 is outside the model's vocabulary of 100": {"input_ids": [[1, 2], [4], [5, 100]]},
    "row 2: attention_mask has 1 entries, input_ids 2": {"input_ids": [[1], [2, 3]], "attention_mask": [[1], [1]]},
    r"row 2: label -1 is negative; labels must be in \[0, 100\), or -100": {
        "input_ids": [[1], [2, 3]], "labels": [[-100], [-100, -1]],
    },
    "row 2: label 100 is outside the model's vocabulary of 100: set --vocab_size to at least 101": {
        "input_ids": [[1], [2, 3]], "labels": [[99], [-100, 100]],
    },
    "row 1: label 4294967296 is outside": {"input_ids": [[1]], "labels": [[1 << 32]]},
}  # fmt: skip


@pytest.mark.parametrize("words", BAD)
def test_bad_rows_are_named_with_their_file(tmp_path, words):
    save(tmp_path / "d", BAD[words])
    with pytest.raises(UserError, match=rf"arrow.*{words}"):
        open_all(tmp_path / "d", tmp_path / "cache")
    pq.write_table(pa.table(BAD[words]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=rf"a.parquet.*{words}"):
        open_all(tmp_path / "a.parquet", tmp_path / "cache")


@pytest.mark.parametrize(("column", "said"), [("input_ids", "token id 77"), ("labels", "label 77 is outside")])
def test_rows_are_numbered_over_record_batches_and_checked_again_for_another_vocabulary(tmp_path, column, said):
    columns = {"input_ids": [[1, 2]] * 2500, column: [*[[1, 2]] * 2400, [1, 77], *[[1, 2]] * 99]}
    save(tmp_path / "d", columns)
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for path in (tmp_path / "d", tmp_path / "a.parquet"):
        open_all(path, tmp_path / "cache", vocab=78)
        with pytest.raises(UserError, match=f"row 2401: {said}"):
            open_all(path, tmp_path / "cache", vocab=77)


def test_a_cache_older_than_the_check_of_labels_is_not_trusted(tmp_path):
    columns = {"input_ids": [[1, 2], [3]], "labels": [[-100, 2], [-1]]}
    save(tmp_path / "d", columns)
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    cache = str(tmp_path / "cache")
    (arrow,) = list_files(str(tmp_path / "d" / "*.arrow"), extensions=(".arrow",))
    recorded(
        cache, arrow.name, ["extremes", "labels", "mask", arrow.url, arrow.size, arrow.stamp], lambda: [[[1, 3]] * 3]
    )
    (file,) = list_files(str(tmp_path / "a.parquet"), extensions=(".parquet",))
    labels = np.array([-100, 2, -1])
    key = ["hf", file.url, file.size, file.stamp]
    store = cached(cache, file.name, key, lambda w: w.add(np.array([1, 2, 3]), [2, 3], labels=labels), dtype="uint16")
    meta = store.folder / "meta.json"
    meta.write_text(meta.read_text().replace(', "highest_label": 2', ""))
    for path in (tmp_path / "d", tmp_path / "a.parquet"):
        with pytest.raises(UserError, match="row 2: label -1 is negative"):
            open_all(path, cache)


def test_the_vocabulary_is_computed_in_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 2)
    ids, offsets = np.array([1, 2, 3, 4, 5]), np.array([0, 5])
    for labels, mask, needed in (
        (None, None, 6), ([-100, 5, 3, -100, 7], None, 8), ([-100] * 5, [0, 1, 1, 1, 1], 6),
        ([-100, 5, 3, -100, -7], None, module.NO_VOCABULARY), (None, [1, 1, 1, 1, 2], module.NO_VOCABULARY),
    ):  # fmt: skip
        columns = (None if each is None else np.array(each) for each in (mask, labels))
        assert module._vocabulary_and_digest([Columns(ids, offsets, *columns)])[0] == needed


def test_files_of_another_kind_are_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"a.parquet is not a readable file"):
        open_all(tmp_path, tmp_path / "cache")
    save(tmp_path / "d", {"input_ids": ROWS})
    (arrow,) = (tmp_path / "d").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:200])
    with pytest.raises(UserError, match="arrow"):
        open_all(tmp_path / "d", tmp_path / "cache")


def test_csv_is_read_as_written(tmp_path):
    """An empty cell is an empty text and NA a word, a quoted cell may have lines; gzip is read as it is."""
    content = b'text,n\nhello,1\nNA,\n,3\n"two\nlines",4\n'
    (tmp_path / "a.csv").write_bytes(content)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(content))
    (tmp_path / "c.parquet.gz").write_bytes(gzip.compress(parquet_of({"text": ["hello", "NA", "", "two\nlines"]})))
    for name in ("a.csv", "b.csv.gz", "c.parquet.gz"):
        found = [row["text"] for _, row in find_data([str(tmp_path / name)], "train").examples(("text",))]
        assert found == ["hello", "NA", "", "two\nlines"], name
    (tmp_path / "n.csv").write_bytes(b"\xef\xbb\xbftext,n\n" + b"007,1\n" * 200 + b"True,\nword\n")
    found = [row["text"] for _, row in find_data([str(tmp_path / "n.csv")], "train").examples(("text",))]
    assert found == ["007"] * 200 + ["True", "word"]
    (tmp_path / "m.csv").write_bytes(b"text,n\nx,hello,1\ny,NA,2\n")
    with pytest.raises(UserError, match=r"m.csv is not a readable file of its kind \(a row has more cells than"):
        open_all(tmp_path / "m.csv", tmp_path / "cache")
    (tmp_path / "d.csv").write_bytes(b"text\n\xff\n")
    with pytest.raises(UserError, match=r"d.csv is not a readable file of its kind \('utf-8' codec"):
        open_all(tmp_path / "d.csv", tmp_path / "cache")


def parquet_of(columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def test_examples_come_by_column_from_any_source(tmp_path):
    """What is no list of integers comes as Python's own objects."""
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}], "prompt": str(n), "id": n} for n in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.parquet").write_bytes(parquet_of({key: [row[key] for row in rows] for key in rows[0]}))
    save(tmp_path / "saved", {key: [row[key] for row in rows] for key in rows[0]}, 2)
    for path in ("a.jsonl", "b.parquet", "saved"):
        found = [row for _, row in find_data([str(tmp_path / path)], "train").examples(("messages", "prompt"))]
        assert [(row["messages"], row["prompt"]) for row in found] == [(r["messages"], r["prompt"]) for r in rows]


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A dataset with two configurations in the cache of `datasets`, which finds no network."""
    import datasets
    from datasets import load

    cache = tmp_path / "hub"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(load.config, "HF_HUB_OFFLINE", True)
    for config, shift in (("default", 0), ("large", 50)):
        folder = tmp_path / config
        folder.mkdir()
        for split, rows in (("train", ROWS), ("test", ROWS[:1])):
            ids = [[token + shift for token in row] for row in rows]
            (folder / f"{split}.parquet").write_bytes(parquet_of({"input_ids": ids}))
        datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "made"))
        (made,) = (each.parent for each in (tmp_path / "made" / config).glob("*/*/*/dataset_info.json"))
        to = cache / "someone___texts" / config / made.parent.name / made.name
        to.mkdir(parents=True)
        for file in made.iterdir():
            (to / file.name.replace(config, "texts")).write_bytes(file.read_bytes())
        info = json.loads((to / "dataset_info.json").read_text())
        (to / "dataset_info.json").write_text(json.dumps(info | {"dataset_name": "texts", "config_name": config}))
    return cache


def by_name(tmp_path, split="train", **settings):
    config = DataConfig(dataset_name="someone/texts", data_cache_dir=str(tmp_path / "cache"), **settings)
    assert config.missing() == []
    return tokens_of(create_data_pipeline(config, split=split, batch=shape(4, 100))._microbatches.source)


TURNS = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"to": "sea", "seen": None}}}]},
    {"role": "assistant", "content": "There."},
]


@pytest.mark.parametrize("typed", ["arguments", "messages"])
def test_columns_of_json_are_objects(tmp_path, typed):
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json"):
        pytest.skip("a type of datasets 4.7")
    name = {"name": datasets.Value("string"), "arguments": datasets.Json()}
    message = {
        "role": datasets.Value("string"),
        "content": datasets.Value("string"),
        "tool_calls": [{"function": name}],
    }
    kind = [message] if typed == "arguments" else datasets.List(datasets.Json())
    table = datasets.Dataset.from_list([{"messages": TURNS}], features=datasets.Features({"messages": kind}))
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "table.parquet")
    for path in ("saved", "table.parquet"):
        found = find_data([str(tmp_path / path)], "train", dataset_type="chat")
        assert [each["messages"] for _, each in found.reader.read(found.files[0], ("",))] == [TURNS], path


def test_nulls_of_structs_are_keys_of_other_rows(tmp_path):
    import datasets

    rows = [{"call": {"to": "sea"}, "text": None}, {"call": {"seen": [{"a": 1}, {"b": None, "c": 2}]}, "text": "a"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "table.parquet")
    found = find_data([str(tmp_path / "table.parquet")], "train", dataset_type="chat")
    rows[1]["call"]["seen"][1].pop("b")
    assert [each for _, each in found.reader.read(found.files[0], ("",))] == rows


def test_a_dataset_by_name_comes_from_the_cache(tmp_path, hub_cache):
    expected = [[1, 2, 3], [4], [5, 6, 7, 8], [9], [10, 11]]
    assert by_name(tmp_path, dataset_config_name="default") == expected
    assert by_name(tmp_path, dataset_config_name="large")[1] == [54]
    assert by_name(tmp_path, dataset_config_name="default", dataset_split="test") == expected[:1]
    assert by_name(tmp_path, "validation", dataset_config_name="default", validation_freq=1) == expected[:1]
    assert by_name(tmp_path, "validation", dataset_config_name="default", evaluate_only=True) == expected[:1]
    named = {"dataset_config_name": "default", "evaluate_only": True, "dataset_split": "train"}
    assert by_name(tmp_path, "validation", fast_validation=False, **named) == expected
    with pytest.raises(
        UserError, match=r"has the splits train, test, but no validation or valid or val or dev: .*--test_dir gives"
    ):
        by_name(tmp_path, "validation", dataset_config_name="default", dataset_split="test", validation_freq=1)
    with pytest.raises(UserError, match=r"someone/texts has the splits .*, but no train\[:1\]: --dataset_split names"):
        by_name(tmp_path, dataset_config_name="default", dataset_split="train[:1]")
    with pytest.raises(UserError, match=r"--dataset_name someone/texts: .*none.*: where there is no network, load it"):
        by_name(tmp_path, dataset_config_name="none")


def test_settings_of_a_dataset_by_name():
    for settings, problem in (
        ({"dataset_name": "a/b", "training_dir": "c"}, "--training_dir and --dataset_name both name"),
        ({"dataset_name": "a/b", "dataset_type": "text"}, "--dataset_name is not read as --dataset_type text"),
        ({"training_dir": "c", "dataset_split": "x"}, "--dataset_split is of a dataset by name: set --dataset_name"),
    ):
        with pytest.raises(UserError, match=problem):
            DataConfig(**settings)


def test_csv_files_beside_others_are_left_out_and_told(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "b.csv").write_text("text\ny\n")
    assert [file.name for file in find_data([str(tmp_path)], "train").files] == ["a.jsonl"]
    assert "1 CSV file(s) not read beside others: 'FOLDER/*.csv' reads them" in caplog.text
    assert [file.name for file in find_data([str(tmp_path)], "train", dataset_type="chat").files] == ["a.jsonl"]
    assert [file.name for file in find_data([f"{tmp_path}/*.csv"], "train", dataset_type="chat").files] == ["b.csv"]
    assert [file.name for file in find_data([str(tmp_path)], "train", dataset_type="hf").files] == ["b.csv"]


def test_without_datasets_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    """JSON lines, their token files and texts do without it, and without pyarrow."""
    (tmp_path / "a.parquet").write_bytes(parquet_of({"input_ids": ROWS}))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ROWS))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("datasets", "pyarrow")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UserError, match=r"parquet, Arrow and CSV files need the package datasets .*pip install datasets"
    ):
        open_all(tmp_path / "a.parquet", tmp_path / "cache")
    found = find_data([str(tmp_path / "a.jsonl")], "train")
    for _ in range(2):
        source = open_rows(found, sequence_length=4, vocab_size=100, tokenizer=no_tokenizer,
                           cache_dir=str(tmp_path / "cache"), what="data")  # fmt: skip
        assert len(tokens_of(pickle.loads(pickle.dumps(source)))) == 5


@pytest.mark.parametrize("by", ["name", "folder"])
def test_validation_split_is_of_the_training_split(tmp_path, monkeypatch, by):
    import datasets

    parts = {
        name: datasets.Dataset.from_list([{"text": f"{name} {n}"} for n in range(count)])
        for name, count in (("train", 20), ("test", 8))
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    if by == "name":  # the cache of `datasets` is not what is tested here
        load, saved = datasets.load_dataset, datasets.load_from_disk(str(tmp_path / "d"))
        monkeypatch.setattr(
            datasets, "load_dataset", lambda name, *more, **most: saved if "/" in name else load(name, *more, **most)
        )
    data = {"dataset_name": "someone/texts"} if by == "name" else {"training_dir": str(tmp_path / "d")}
    config = DataConfig(
        **data, dataset_type="chat", tokenizer_name_or_dir=str(HERE / "tokenizer"), validation_split=0.25,
        chat_template=str(HERE / "chat_template.jinja"), validation_freq=1, data_cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    taken = [open_samples(config, split=split, batch=shape(32)) for split in ("train", "validation")]
    assert [len(each.numbers) for each in taken] == [15, 5]
    assert sorted(np.concatenate([each.numbers for each in taken])) == [*range(20)]
