"""The S3 server and the proxy of tests: what other tests rely on."""

import threading

import fsspec
import pytest

from tests.clock import wait_until
from tests.s3 import PART, Fault, nth, proxy, s3, s3_port, small_parts  # noqa: F401  fixtures

pytestmark = pytest.mark.full


def test_objects_go_through_the_proxy(s3, proxy):  # noqa: F811
    fs, _ = fsspec.url_to_fs(s3.url)
    fs.pipe_file(f"{s3.bucket}/a/b", b"hello")
    assert s3.get("a/b") == b"hello" and s3.keys("a") == ["a/b"]
    wait_until(lambda: proxy.answered("put") == ["a/b"])  # noted when it has been handed over


def test_large_files_go_in_parts_and_a_cut_one_leaves_nothing(s3, proxy, tmp_path, monkeypatch):  # noqa: F811
    small_parts(monkeypatch.setattr)
    fs, _ = fsspec.url_to_fs(s3.url, config_kwargs={"retries": {"total_max_attempts": 1}})
    fs.retries = 1
    (tmp_path / "f").write_bytes(bytes(4 * PART))
    # Every time: the client asks once more where a connection ends that it has used before.
    proxy.rules = [lambda r: Fault(cut="middle") if r.query.get("partNumber") == "2" else None]
    with pytest.raises(Exception):  # noqa: B017  the client's own
        fs.put_file(str(tmp_path / "f"), f"{s3.bucket}/f")
    assert s3.keys() == []
    proxy.rules.clear()
    fs.put_file(str(tmp_path / "f"), f"{s3.bucket}/f")
    assert len(s3.get("f")) == 4 * PART
    assert [r.kind for r in proxy.requests].count("part") >= 5


def test_what_is_held_and_what_is_refused(s3, proxy):  # noqa: F811
    fs, _ = fsspec.url_to_fs(s3.url)
    held = Fault(cut="applied", hold=threading.Event())
    proxy.rules = [nth(0, lambda r: r.kind == "put", held), nth(1, lambda r: r.kind == "put", Fault(status=503))]
    thread = threading.Thread(target=fs.pipe_file, args=(f"{s3.bucket}/x", b"1"))
    thread.start()
    held.reached.wait(60)
    assert s3.get("x") == b"1" and proxy.answered("put") == []
    held.hold.set()
    thread.join()
    wait_until(lambda: [r.status for r in proxy.requests if r.kind == "put"] == [None, 503, 200])
    proxy.away, fs.retries = True, 1
    with pytest.raises(Exception):  # noqa: B017  the client's own
        fs.pipe_file(f"{s3.bucket}/y", b"1")
