"""Conversion on all cores: what one process writes, in order, and nothing left behind."""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from data.sample.build import HERE
from smp.data import convert, jsonl, progress, text, token_cache
from smp.data.convert import Rows, token_files
from smp.data.rows import ids_format
from smp.data.source import find_data, open_rows
from smp.data.storage import list_files
from smp.data.text import TextTokenizer
from smp.errors import UserError
from tests.clock import HANG_SECONDS, Clock, wait_until

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Lines:
    """A format whose rows are a file's lines, for what happens around a conversion.

    Attributes:
        seen: a folder in which each process that converts leaves its number.
        main: the number of the process that may convert; every other one kills itself.
        endless: whether reading never ends.
    """

    seen: str
    main: int = 0
    endless: bool = False
    name = "lines"
    content = "lines"
    dtype = "uint16"
    key = ()

    def chunks(self, file):
        content = Path(file.url).read_bytes().splitlines()
        while True:
            yield from ((line, position) for position, line in enumerate(content))
            if not self.endless:
                return

    def convert(self, file, chunk):
        (Path(self.seen) / str(os.getpid())).touch()
        if self.main and os.getpid() != self.main:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.endless:
            time.sleep(0.01)
        ids = np.frombuffer(chunk, np.uint8)
        return [Rows(ids, np.array([len(ids)]))]


@pytest.fixture
def cores(monkeypatch):
    """Let tests choose the number of cores; whatever there is to convert is worth a process."""
    monkeypatch.setattr(convert, "WORKER_BYTES", 1)

    def use(count):
        monkeypatch.setattr(convert, "available_cores", lambda: count)

    use(2)
    return use


def lines_folder(root, *sizes):
    (root / "seen").mkdir()
    (root / "in").mkdir()
    for number, size in enumerate(sizes):
        (root / "in" / f"{number}.txt").write_text("".join(f"{number} {line}\n" for line in range(size)))
    return list_files(str(root / "in"), extensions=(".txt",))


def content(cache):
    return {str(path.relative_to(cache)): path.read_bytes() for path in sorted(cache.rglob("*.*")) if path.is_file()}


def write_texts(folder):
    sample = (HERE / "train.txt").read_text()
    (folder / "a.txt").write_text(sample[:900_000])
    for number in range(4):
        (folder / f"b{number}.txt").write_text(sample[number * 9000 : number * 9000 + 40_000])


def write_ids(folder):
    rows = [{"input_ids": [row % 90, 5, 6]} for row in range(3000)]
    rows[700]["labels"], rows[1500]["attention_mask"] = [-100, 5, 6], [0, 1, 1]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for number in range(4):
        (folder / f"b{number}.jsonl").write_text("\n".join(map(json.dumps, rows[600 * number : 600 * number + 200])))


def write_json_texts(folder):
    paragraphs = (HERE / "train.txt").read_text()[:400_000].split("\n\n")
    for number in range(5):
        part = paragraphs[100 * number : 100 * number + 60] if number else paragraphs
        (folder / f"{number}.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in part))


def write_table(folder):
    paragraphs = (HERE / "train.txt").read_text()[:300_000].split("\n\n")
    for number in range(5):
        part = paragraphs[100 * number : 100 * number + 60] if number else paragraphs
        pq.write_table(pa.table({"text": part}), folder / f"{number}.parquet", row_group_size=200)


@pytest.mark.full
@pytest.mark.parametrize("write", [
    write_texts, write_ids, *(pytest.param(each, marks=pytest.mark.slow) for each in (write_json_texts, write_table)),
])  # fmt: skip
def test_all_cores_write_the_bytes_that_one_writes(tmp_path, monkeypatch, cores, write):
    """A file with more than its share in chunks, the others whole."""
    monkeypatch.setattr(jsonl, "CHUNK", 10_000)
    monkeypatch.setattr(text, "BATCH", 300_000)
    (tmp_path / "in").mkdir()
    write(tmp_path / "in")
    submitted, begin = [], convert.Workers.__init__

    def spied(self, *arguments):
        begin(self, *arguments)
        pool = self.submit
        self.submit = lambda function, *more: submitted.append(function.__name__) or pool(function, *more)

    monkeypatch.setattr(convert.Workers, "__init__", spied)
    for count in (1, 3):
        cores(count)
        open_rows(
            find_data([str(tmp_path / "in")], "train"), sequence_length=8, vocab_size=2048,
            tokenizer=lambda: TextTokenizer(str(HERE / "tokenizer")), cache_dir=str(tmp_path / str(count)), what="data",
        )  # fmt: skip
        assert (count == 1) == (submitted == [])
    assert submitted.count("_open_here") == 4 and submitted.count("_convert_here") >= 2
    alone, together = content(tmp_path / "1"), content(tmp_path / "3")
    assert alone == together and len(alone) >= 15


@pytest.mark.full
def test_the_first_error_in_the_datas_order_is_told(tmp_path, cores):
    """Whatever process meets one first, and also behind an error of reading."""
    for name, rows in (("a", 9000), ("b", 1), ("c", 20), ("d", 2)):
        (tmp_path / f"{name}.jsonl").write_text('{"input_ids": [1]}\n' * rows)
    with open(tmp_path / "a.jsonl", "a") as handle:
        handle.write("{oops\n" + '{"input_ids": [2]}\n' * 5000 + "{worse\n")
    with open(tmp_path / "c.jsonl", "a") as handle:
        handle.write('{"input_ids": [-1]}\n')
    found = find_data([str(tmp_path)], "train")
    for kept, words in (
        (found.files, "a.jsonl, line 9001: not valid JSON"),
        (found.files[1:], "c.jsonl, line 21: token"),
    ):
        with pytest.raises(UserError, match=words):
            token_files(kept, ids_format(jsonl.LINES, 64), what="data", cache_dir=str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("*.partial"))


@pytest.mark.parametrize(("count", "worth", "expected"), [(8, 1 << 30, 0), (8, 500, 3), (2, 500, 2), (1, 1, 0)])
def test_there_are_never_more_processes_than_cores_or_work(tmp_path, monkeypatch, cores, count, worth, expected):
    files = lines_folder(tmp_path, 100, 200)
    assert 1500 <= sum(file.size for file in files) < 2000
    cores(count)
    monkeypatch.setattr(convert, "WORKER_BYTES", worth)
    asked = []
    monkeypatch.setattr(
        convert.Conversion, "_in_parallel", lambda self, files, processes, shown: asked.append(processes)
    )
    token_files(files, Lines(str(tmp_path / "seen")), what="data", cache_dir=str(tmp_path / "cache"))
    assert asked == ([expected] if expected else [])


@pytest.mark.full
def test_a_killed_worker_leaves_the_work_to_this_process(tmp_path, cores, caplog):
    files = lines_folder(tmp_path, 400, 10, 10, 10, 10)
    stores = token_files(
        files, Lines(str(tmp_path / "seen"), main=os.getpid()), what="data", cache_dir=str(tmp_path / "cache")
    )
    assert [len(store.offsets) - 1 for store in stores] == [400, 10, 10, 10, 10]
    assert "data: a process that converts has ended: killed by hand" in caplog.text
    assert len(list((tmp_path / "seen").iterdir())) >= 2 and not list((tmp_path / "cache").glob("*.partial"))


ENDLESS = """
import signal
import sys
from smp.data import convert
from smp.data.storage import list_files
from tests.unit.test_data_convert import Lines
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    root, convert.WORKER_BYTES, convert.available_cores = sys.argv[1], 1, lambda: 2
    files = list_files(root + "/in", extensions=(".txt",))
    convert.token_files(files, Lines(root + "/seen", endless=True), what="data", cache_dir=root + "/cache")
"""


@pytest.mark.full
@pytest.mark.parametrize(("number", "sizes"), [("SIGINT", (9,) * 6), ("SIGINT", (99, 1)), ("SIGTERM", (9,) * 6),
                                               ("SIGKILL", (99, 1))])  # fmt: skip
def test_a_stopped_conversion_leaves_no_process_and_nothing_published(tmp_path, number, sizes):
    lines_folder(tmp_path, *sizes)
    (tmp_path / "job.py").write_text(ENDLESS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "out", "w") as out:
        started = subprocess.Popen(
            [sys.executable, str(tmp_path / "job.py"), str(tmp_path)], stdout=out, stderr=out, env=environment
        )
    try:
        seen = lambda: [int(path.name) for path in (tmp_path / "seen").iterdir()]  # noqa: E731
        wait_until(lambda: len(seen()) == 2, alive=lambda: started.poll() is None, said=(tmp_path / "out").read_text)
        started.send_signal(getattr(signal, number))
        assert started.wait(HANG_SECONDS) != 0
    finally:
        started.kill()
        started.wait()
    wait_until(lambda: not any(alive(pid) for pid in seen()))
    assert not list((tmp_path / "cache").glob("*/meta.json"))
    if number == "SIGINT":
        assert "KeyboardInterrupt" in (tmp_path / "out").read_text()
        assert not list((tmp_path / "cache").glob("*.partial"))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_who_waits_for_another_process_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(token_cache, "SECONDS_BEFORE_FIRST_LINE", 0.0)
    files = lines_folder(tmp_path, 3, 3)
    form, cache = Lines(str(tmp_path / "seen")), tmp_path / "cache"
    caplog.set_level(logging.INFO, "smp.data")
    token_files(files, form, what="data", cache_dir=str(cache))
    (lock,) = cache.glob("source-*.lock")
    for folder in cache.glob("1.txt-*/"):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    found = []
    waiting = threading.Thread(
        target=lambda: found.extend(token_files(files, form, what="training data", cache_dir=str(cache)))
    )
    with FileLock(lock):
        waiting.start()
        wait_until(lambda: "training data: another process converts it, this one waits: 1/2 files" in caplog.text)
        assert found == []
    waiting.join()
    assert len(found) == 2


def test_progress_is_a_line_now_and_then_and_one_at_the_end(monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    caplog.set_level(logging.INFO, "smp.data")
    with progress.Progress("training data", 4, 8_000_000) as shown:
        for _ in range(4):
            clock.now += 20
            shown.add(1000, inside=1_000_000)
            shown.end_file(2_000_000)
    assert [record.getMessage() for record in caplog.records] == [
        "training data: 1/4 files, 3.0 of 8.0 MB in 40.0 s (0.025 files/s, 0.075 MB/s), 2,000 tokens, 67 s left",
        "training data: 3/4 files, 7.0 of 8.0 MB in 80.0 s (0.037 files/s, 0.087 MB/s), 4,000 tokens, 11 s left",
        "training data: 4/4 files, 8.0 of 8.0 MB in 80.0 s (0.050 files/s, 0.10 MB/s), 4,000 tokens",
    ]


def test_progress_on_a_terminal_is_one_bar(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "smp.data")
    written = []
    stream = type("Terminal", (), {"write": lambda s, t: written.append(t), "flush": lambda s: None})()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "is_terminal", lambda given: given is stream)
    with progress.Progress("training data", 2, 2000) as shown:
        shown.add(10)
        shown.end_file(1000)
        shown._bar.refresh()
    bar = "".join(written)
    assert "\n" not in bar and "training data:  50%" in bar and "1/2 files" in bar and "10 tokens" in bar
    assert [record.getMessage()[:24] for record in caplog.records] == ["training data: 1/2 files"]
