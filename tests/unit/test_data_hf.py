"""Saved Hugging Face datasets and parquet: data/pipelines/hf.py."""

import pickle

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smp.data import hf as module
from smp.data.hf import MappedRows, extremes_of
from smp.data.source import find_data, open_rows
from smp.data.storage import list_files
from smp.data.token_cache import Columns, cached, recorded
from smp.errors import UserError

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


def tokens_of(source):
    return [source.rows(np.array([index]))[0].tokens.tolist() for index in range(len(source))]


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
    columns = {"input_ids": ROWS, "attention_mask": [[1] * len(row) for row in ROWS], "labels": ROWS}
    save(tmp_path / "d", columns)
    (tmp_path / "p").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "p" / "a.parquet", row_group_size=3)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "d"), "/hf", recursive=True)
    for path in (tmp_path / "p", tmp_path / "p" / "a.parquet", "memory://hf"):
        source = open_all(path, tmp_path / "cache")
        assert tokens_of(source) == tokens_of(open_all(tmp_path / "d", tmp_path / "cache"))
        row = source.rows(np.array([2]))[0]
        assert row.mask.tolist() == [1, 1, 1, 1] and row.labels.tolist() == [5, 6, 7, 8]


def test_fixed_and_large_lists_and_masks_are_read(tmp_path):
    ids = pa.array([[1, 2], [3, 4]], pa.list_(pa.uint16(), 2))
    mask = pa.array([[True, True], [False, True]], pa.large_list(pa.bool_()))
    pq.write_table(pa.table({"input_ids": ids, "attention_mask": mask}), tmp_path / "a.parquet")
    source = open_all(tmp_path, tmp_path / "cache")
    assert tokens_of(source) == [[1, 2], [3, 4]] and source.rows(np.array([1]))[0].mask.tolist() == [0, 1]


def test_a_dataset_dict_gives_the_split(tmp_path):
    import datasets

    parts = {name: datasets.Dataset.from_dict({"input_ids": [[n]]}) for n, name in enumerate(("train", "test"))}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    assert tokens_of(open_all(tmp_path / "d", tmp_path / "c")) == [[0]]
    assert tokens_of(open_all(tmp_path / "d", tmp_path / "c", "validation")) == [[1]]
    datasets.DatasetDict({"other": parts["test"]}).save_to_disk(str(tmp_path / "o"))
    with pytest.raises(UserError, match="has the splits other, but no train"):
        open_all(tmp_path / "o", tmp_path / "c")


BAD = {
    "has no column input_ids; columns found: ids": {"ids": [[1]]},
    "column input_ids must hold lists of integers, it holds .*double": {"input_ids": [[1.5]]},
    "column input_ids must hold lists": {"input_ids": [1, 2]},
    "row 2: has no input_ids": {"input_ids": [[1], None]},
    "row 2: input_ids has an empty place": {"input_ids": [[1], [2, None]]},
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


def test_rows_are_numbered_over_record_batches(tmp_path):
    rows = [[1, 2]] * 2500
    rows[2400] = [1, 77]
    save(tmp_path / "d", {"input_ids": rows})
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "a.parquet")
    for path in (tmp_path / "d", tmp_path / "a.parquet"):
        open_all(path, tmp_path / "cache", vocab=78)
        with pytest.raises(UserError, match="row 2401: token id 77"):
            open_all(path, tmp_path / "cache", vocab=77)


def test_labels_are_checked_again_for_another_vocabulary(tmp_path):
    labels = [[-100, 2]] * 2500
    labels[2400] = [-100, 77]
    columns = {"input_ids": [[1, 2]] * 2500, "labels": labels}
    save(tmp_path / "d", columns)
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for path in (tmp_path / "d", tmp_path / "a.parquet"):
        open_all(path, tmp_path / "cache", vocab=78)
        with pytest.raises(UserError, match="row 2401: label 77 is outside"):
            open_all(path, tmp_path / "cache", vocab=77)


def test_a_cache_older_than_the_check_of_labels_is_not_trusted(tmp_path):
    columns = {"input_ids": [[1, 2], [3]], "labels": [[-100, 2], [-1]]}
    save(tmp_path / "d", columns)
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    cache = str(tmp_path / "cache")
    (arrow,) = list_files(str(tmp_path / "d" / "*.arrow"), extensions=(".arrow",))
    recorded(cache, arrow.name, ["extremes", arrow.url, arrow.size, arrow.stamp], lambda: [[1, 3]])
    (file,) = list_files(str(tmp_path / "a.parquet"), extensions=(".parquet",))
    labels = np.array([-100, 2, -1])
    key = ["hf", file.url, file.size, file.stamp]
    store = cached(cache, file.name, key, lambda w: w.add(np.array([1, 2, 3]), [2, 3], labels=labels), dtype="uint16")
    meta = store.folder / "meta.json"
    meta.write_text(meta.read_text().replace(', "highest_label": 2', ""))
    for path in (tmp_path / "d", tmp_path / "a.parquet"):
        with pytest.raises(UserError, match="row 2: label -1 is negative"):
            open_all(path, cache)


def test_labels_are_looked_at_in_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 2)
    ids, offsets = np.array([1, 2, 3, 4, 5]), np.array([0, 5])
    for labels, found in (([-100, 5, 3, -100, -7], [-7, 5]), ([-100] * 5, [0, 0]), (None, [0, 0])):
        rows = Columns(ids, offsets, None, None if labels is None else np.array(labels))
        assert extremes_of(rows) == [[1, 5], found, [0, 0]]


def test_files_of_another_kind_are_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"a.parquet is not a readable file"):
        open_all(tmp_path, tmp_path / "cache")
    save(tmp_path / "d", {"input_ids": ROWS})
    (arrow,) = (tmp_path / "d").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:200])
    with pytest.raises(UserError, match="arrow"):
        open_all(tmp_path / "d", tmp_path / "cache")


def test_many_rows_need_no_object_each(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 9, 20_000)
    values = pa.array(np.arange(lengths.sum()) % 100, pa.int32())
    column = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), values)
    pq.write_table(pa.table({"input_ids": column}), tmp_path / "a.parquet")
    source = open_all(tmp_path, tmp_path / "cache")
    assert len(source) == np.ceil(lengths / 4).sum()
    assert sum(len(source.rows(np.array([i]))[0].tokens) for i in range(len(source))) == lengths.sum()
