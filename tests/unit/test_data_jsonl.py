"""JSON lines with token ids: data/pipelines/jsonl.py."""

import gzip
import json

import fsspec
import numpy as np
import pytest

from smp.data.jsonl import LINES
from smp.data.rows import open_ids
from smp.data.storage import list_files
from smp.errors import UserError
from tests.unit.test_data_packing import tokens_of


def open_all(path, cache, width=4, vocab=100):
    files = list_files(str(path), extensions=(".json", ".jsonl"))
    return open_ids(files, LINES, sequence_length=width, vocab_size=vocab, cache_dir=str(cache))


def test_plain_gzip_and_remote_files_give_the_same_rows(tmp_path):
    """Blank lines and a byte-order mark are no rows; long rows become windows."""
    content = b'\xef\xbb\xbf{"input_ids": [1, 2, 3, 4, 5, 6]}\r\n\n   \n{"input_ids": [7], "other": "x"}'
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(content))
    with fsspec.open("memory://jsonl/a.jsonl.gz", "wb") as handle:
        handle.write(gzip.compress(content))
    expected = [[1, 2, 3, 4], [5, 6], [7]]
    for path in (tmp_path / "a.jsonl", tmp_path / "b.json.gz", "memory://jsonl"):
        assert tokens_of(open_all(path, tmp_path / "cache")) == expected
    assert tokens_of(open_all(tmp_path, tmp_path / "cache")) == expected * 2


def test_masks_and_labels_come_along(tmp_path):
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "attention_mask": [0, 1, 1, 1, 1]},
        {"input_ids": [6, 7], "labels": [-100, 8]},
        {"input_ids": [9], "attention_mask": None},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = open_all(tmp_path, tmp_path / "cache")
    found = [source.rows(np.array([index]))[0] for index in range(len(source))]
    assert [row.mask.tolist() for row in found] == [[0, 1, 1, 1], [1], [1, 1], [1]]
    assert [row.labels.tolist() for row in found] == [[1, 2, 3, 4], [5], [-100, 8], [9]]


BAD = {
    '{"input_ids": [1, 2': r"line 2: not valid JSON \(Expecting ',' delimiter: column 20\); .* mend the line",
    "[1, 2]": "line 2: contains a list",
    '{"ids": [1]}': "line 2: has no input_ids; found: ids",
    '{"input_ids": []}': "line 2: input_ids is empty",
    '{"input_ids": [1, 2.5]}': "line 2: input_ids must be a list of integers",
    '{"input_ids": [[1], [2, 3]]}': "line 2: input_ids must be a list",
    '{"input_ids": ["1"]}': "line 2: input_ids must be a list",
    '{"input_ids": [1, null]}': "line 2: input_ids must be a list",
    '{"input_ids": [true]}': "line 2: input_ids must be a list",
    '{"input_ids": [99999999999999999999]}': "line 2: input_ids must be a list",
    '{"input_ids": null}': "line 2: input_ids must be a list",
    '{"input_ids": [1, -4]}': "line 2: token id -4 is negative",
    '{"input_ids": [1, 100]}': "line 2: token id 100 is outside the model's vocabulary of 100: set --vocab_size to at",
    '{"input_ids": [1], "attention_mask": [1, 1]}': "line 2: attention_mask has 2 entries, input_ids 1",
    '{"input_ids": [1], "attention_mask": [2]}': "line 2: attention_mask must contain 0 and 1",
    '{"input_ids": [1], "labels": [1, 1]}': "line 2: labels has 2 entries",
    '{"input_ids": [1], "labels": [100]}': "line 2: label 100 is outside",
    "\ufffe": "line 2: not valid JSON",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named_with_its_file(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(f'{{"input_ids": [1]}}\n{line}\n{{"input_ids": [-9]}}\n')
    with pytest.raises(UserError, match=f"a.jsonl, {BAD[line]}"):
        open_all(tmp_path, tmp_path / "cache")


def test_a_truncated_gzip_leaves_no_cache(tmp_path):
    whole = gzip.compress(b"".join(b'{"input_ids": [%d]}\n' % (i * 7919 % 97) for i in range(5000)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-30])
    for _ in range(2):
        with pytest.raises(UserError, match=r"a.jsonl.gz is truncated"):
            open_all(tmp_path, tmp_path / "cache")


def test_a_cache_made_for_a_larger_vocabulary_is_checked_again(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"input_ids": [1]}\n{"input_ids": [50, 3]}\n{"input_ids": [60]}')
    open_all(tmp_path, tmp_path / "cache", vocab=100)
    with pytest.raises(UserError, match=r"a.jsonl, line 3: token id 50 is outside"):
        open_all(tmp_path, tmp_path / "cache", vocab=50)


def test_a_changed_file_is_read_again(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1]}')
    open_all(tmp_path, tmp_path / "cache")
    (tmp_path / "a.jsonl").write_text('{"input_ids": [2, 3]}')
    assert tokens_of(open_all(tmp_path, tmp_path / "cache")) == [[2, 3]]
