"""Finding and opening files: data/storage.py."""

import gzip
import sys

import fsspec
import pytest

from smp.data.storage import list_files, open_file
from smp.errors import UserError

TYPES = (".json", ".jsonl")


def write(folder, *names, content=b"{}\n"):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder


def names(path, **options):
    return [file.name for file in list_files(str(path), extensions=TYPES, **options)]


def test_a_folder_lists_its_data_files_in_order(tmp_path):
    folder = write(tmp_path / "d", "b.json", "a.jsonl.gz", "c.txt", ".hidden.json")
    assert names(folder) == ["a.jsonl.gz", "b.json"]
    assert names(folder, zipped=True) == ["a.jsonl.gz"]
    assert names(folder, zipped=False) == ["b.json"]


def test_a_file_by_name_or_glob_needs_no_known_extension(tmp_path):
    folder = write(tmp_path / "d", "part-0", "part-1", "other")
    assert names(folder / "part-0") == ["part-0"]
    assert names(folder / "part-*") == ["part-0", "part-1"]


def test_a_url_of_another_file_system(tmp_path):
    with fsspec.open("memory://bucket/x/a.jsonl.gz", "wb") as handle:
        handle.write(gzip.compress(b"hello"))
    (file,) = list_files("memory://bucket/x", extensions=TYPES)
    with open_file(file) as (content, _):
        assert content.read() == b"hello"
    assert (file.url, file.zipped) == ("memory:///bucket/x/a.jsonl.gz", True)


@pytest.mark.parametrize(
    "path,zipped,words",
    [
        ("nowhere", None, "no such file or folder: .*nowhere"),
        ("nowhere-*", None, "no such file or folder"),
        ("empty", None, r"no data files in .*looked for \*.json, \*.jsonl, \*.json.gz, \*.jsonl.gz"),
        ("texts", None, "no data files"),
        ("plain", True, "1 data file.*none is .gz and --zipped_data is 1: set --zipped_data 0"),
        ("zipped", False, "none is uncompressed and --zipped_data is 0: set --zipped_data 1"),
        ("twins", None, "a.json and a.json.gz.*twice"),
        ("hollow", None, "a.json is empty"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, path, zipped, words):
    write(tmp_path / "empty")
    write(tmp_path / "texts", "a.txt")
    write(tmp_path / "plain", "a.json")
    write(tmp_path / "zipped", "a.json.gz")
    write(tmp_path / "twins", "a.json", "a.json.gz")
    write(tmp_path / "hollow", "a.json", content=b"")
    with pytest.raises(UserError, match=words):
        names(tmp_path / path, zipped=zipped)


def test_a_broken_gzip_file_is_named(tmp_path):
    whole = gzip.compress(bytes(range(256)) * 4000)
    damaged = whole[:100] + bytes(50) + whole[150:]
    for name, content, words in (
        ("cut.gz", whole[:-20], "cut.gz is truncated"),
        ("plain.gz", b'{"input_ids": [1]}', "plain.gz is not a valid gzip file"),
        ("damaged.gz", damaged, "damaged.gz is not a valid gzip file"),
    ):
        (tmp_path / name).write_bytes(content)
        (file,) = list_files(str(tmp_path / name), extensions=TYPES)
        with pytest.raises(UserError, match=words), open_file(file) as (content, _):
            content.read()


def test_missing_s3_support_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # An earlier test may have opened one.
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(UserError, match="pip install s3fs"):
        names("s3://bucket/folder")


def test_an_unknown_scheme_is_named():
    with pytest.raises(UserError, match="nosuch://"):
        names("nosuch://bucket/folder")
