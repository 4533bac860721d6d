"""Finding and opening files: data/storage.py."""

import gzip
import os
import sys

import fsspec
import pytest

from smp.data.storage import list_files, open_file
from smp.errors import UserError
from tests.clock import wait_until

TYPES = (".json", ".jsonl", ".ndjson")


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
        ("empty", None, r"no data files in .*looked for \*.json, \*.jsonl, \*.ndjson, \*.json.gz"),
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


def test_links_to_files_are_read_as_the_files(tmp_path):
    """As by a glob, and as the hub's cache has them."""
    write(tmp_path / "store", "b.json", "c.json", content=b'{"a": 1}\n')
    folder = write(tmp_path / "d", "a.json")
    for name in ("b.json", "c.json"):
        (folder / name).symlink_to(tmp_path / "store" / name)
    assert names(folder) == names(f"{folder}/*.json") == ["a.json", "b.json", "c.json"]
    (folder / "a.json").unlink()
    before, _ = list_files(str(folder), extensions=TYPES)
    assert before.size == 9
    os.utime(tmp_path / "store" / "b.json", (1, 1))
    after, _ = list_files(str(folder), extensions=TYPES)
    assert before.stamp != after.stamp  # of what the link points to: a cache of it is not used


def test_other_content_of_the_same_size_and_time_has_another_stamp(tmp_path):
    """A cache of the earlier content is not used: ``cp -p`` and programs that keep the time may have replaced it."""
    file = write(tmp_path, "a.json", content=b"[1]\n") / "a.json"

    def listed():
        (found,) = list_files(str(file), extensions=TYPES)
        return found

    before, times = listed(), os.stat(file)

    def replaced():
        file.write_bytes(b"[2]\n")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        return os.stat(file).st_ctime_ns != times.st_ctime_ns  # the clock of files has ticked

    wait_until(replaced)
    after = listed()
    assert before.size == after.size and os.stat(file).st_mtime_ns == times.st_mtime_ns
    assert before.stamp != after.stamp


@pytest.mark.parametrize("tag", ["ETag", "etag", "blob_id", "Content-MD5"])
def test_an_object_of_the_same_second_has_another_stamp_by_its_tag(tmp_path, monkeypatch, tag):
    with fsspec.open("memory://tags/a.json", "wb") as handle:
        handle.write(b"[1]\n")
    kind = type(fsspec.filesystem("memory"))
    stamps = set()
    for each in "ab":
        found = {"name": "/tags/a.json", "size": 4, "type": "file", "LastModified": "2026-11-28 10:00:00", tag: each}
        monkeypatch.setattr(kind, "info", lambda self, path, found=found, **_: found)
        stamps |= {file.stamp for file in list_files("memory://tags/a.json", extensions=TYPES)}
    assert len(stamps) == 2


def test_a_broken_link_is_named(tmp_path):
    folder = write(tmp_path / "d", "a.json")
    (folder / "latest").symlink_to("nowhere")  # no data by its name
    assert names(folder) == ["a.json"]
    (folder / "b.json").symlink_to("nowhere.json")
    for path in (folder, folder / "b.json", folder / "*.json"):
        with pytest.raises(UserError, match=r"b.json is a link to nowhere.json, which is not there: mend the link"):
            names(path)


def test_a_suffix_in_another_case_is_read(tmp_path):
    folder = write(tmp_path / "d", "a.jsonl", "B.JSONL", "C.Json", "d.ndjson")
    (folder / "E.JSON.GZ").write_bytes(gzip.compress(b"{}\n"))
    assert names(folder) == ["B.JSONL", "C.Json", "E.JSON.GZ", "a.jsonl", "d.ndjson"]
    assert names(folder, zipped=True) == ["E.JSON.GZ"]
    (file,) = list_files(str(folder), extensions=TYPES, zipped=True)
    with open_file(file) as (content, _):
        assert content.read() == b"{}\n"


def nested(tmp_path):
    """A folder whose data lies partly where it is not read."""
    folder = write(
        tmp_path / "d", "a.jsonl", "a.jsonl.zst", "b.jsonl.zst", "c.json.xz", "t.csv.gz", "README.md", "x.py"
    )
    write(folder / "2024", "n.jsonl")
    write(folder / "images", "1.png")
    write(folder / ".cache", "h.jsonl")
    (folder / "images" / "deep").mkdir()
    write(tmp_path / "elsewhere", "l.jsonl")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    return folder


def test_what_looks_like_data_and_is_not_read_is_counted_and_named(tmp_path, caplog):
    folder = nested(tmp_path)
    assert names(folder) == ["a.jsonl"]
    (warning,) = caplog.records
    assert "3 file(s) not read (b.jsonl.zst, c.json.xz, t.csv.gz): decompress" in warning.getMessage()
    assert "2 folder(s) with data not read (2024, linked): a glob" in warning.getMessage()
    # The advice, followed.
    pattern = warning.getMessage().rpartition("'")[0].rpartition("'")[2]
    caplog.clear()
    assert names(pattern) == ["n.jsonl", "a.jsonl", "l.jsonl"] and not caplog.records
    with pytest.raises(UserError, match=r"a.jsonl.zst is not read: decompress what is compressed"):
        names(folder / "*")
    with pytest.raises(UserError, match=r"t.csv.gz is not read: decompress .*, and write another format as JSON lines"):
        names(folder / "*.csv*")
    caplog.clear()
    assert names(folder / "a*l") == ["a.jsonl"] and not caplog.records


def test_files_of_other_names_are_told(tmp_path, caplog):
    lost = ["b.jsonlines", "c.jl", "d.text", "e.parq", "shard-00000", "g.jsonl.bak"]
    plain = ["README", "LICENSE.old", "SHA256SUMS", "x.py", "a.md5", "_SUCCESS", "c.txt", ".x"]
    assert names(write(tmp_path / "d", "a.jsonl", *lost, *plain)) == ["a.jsonl"]
    (warning,) = caplog.records
    assert "6 file(s) of other names not read (b.jsonlines, c.jl, d.text, e.parq, g.jsonl.bak, ...): rename" in (
        warning.getMessage()
    )


def test_a_folder_of_folders_says_what_reads_them(tmp_path):
    folder = nested(tmp_path)
    (folder / "a.jsonl").unlink()
    with pytest.raises(UserError, match=r"no data files in .*4 file\(s\) not read .*2 folder\(s\) with data not read"):
        names(folder)
    with pytest.raises(UserError, match=r"1 folder\(s\) with data not read \(2024\): .* such as '.*/d/\*\*/\*.jsonl'"):
        names(folder / "20*")


def test_what_was_left_out_on_purpose_is_not_told(tmp_path, caplog):
    folder = write(tmp_path / "d", "a.json", "b.json.gz", "c.txt", "dataset_info.json", "config.json", ".x.json")
    assert names(folder, zipped=False) == ["a.json"] and not caplog.records
    assert names(folder / "*.json*") == ["a.json", "b.json.gz"]
    assert names(folder / ".x.json") == names(folder / ".x*") == [".x.json"]
