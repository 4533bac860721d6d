"""The memory-mapped token cache: data/token_cache.py."""

import multiprocessing
import os
import pickle
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from smp.data import token_cache
from smp.data.token_cache import cached, recorded, token_dtype
from smp.environment import devices_folder
from smp.errors import UserError
from tests.clock import HANG_SECONDS, wait_until


def put(writer):
    writer.add(np.array([1, 2, 3]), [3])
    writer.add(np.array([4, 5]), [])
    writer.add(np.array([6, 70000]), [1, 2])


def make(root, build=put, key=("k",), dtype="uint32"):
    return cached(str(root), "name", list(key), build, dtype=dtype)


def refuse(writer):
    raise AssertionError("built again")


def slow_count(root, barrier, results):
    look = token_cache._open_complete

    def looked(*arguments):
        found = look(*arguments)
        (root / f"looked-{os.getpid()}").touch()
        return found

    def build(writer):
        (root / f"built-{os.getpid()}").touch()
        wait_until(lambda: len(list(root.glob("looked-*"))) == 2)  # the other one has found nothing, and asks
        put(writer)

    token_cache._open_complete = looked
    barrier.wait()
    results.put(make(root, build).tokens.tolist())


def die_half_way(root):
    def build(writer):
        writer.add(np.arange(100_000), [100_000])
        os.kill(os.getpid(), signal.SIGKILL)

    make(root, build)


def test_what_was_written_comes_back_and_is_not_built_twice(tmp_path):
    make(tmp_path)
    store = make(tmp_path, refuse)
    assert store.tokens.tolist() == [1, 2, 3, 4, 5, 6, 70000]
    assert store.offsets.tolist() == [0, 3, 6, 7]
    assert (store.highest, store.mask, store.labels) == (70000, None, None)
    assert f"{store.folder}/tokens.bin" in Path("/proc/self/maps").read_text() and not store.tokens.flags.writeable


def test_another_key_or_format_is_another_file(tmp_path):
    make(tmp_path)
    for more in ({"key": ["other"]}, {"dtype": "uint16"}):
        with pytest.raises(AssertionError, match="built again"):
            make(tmp_path, refuse, **more)


def test_rare_columns_begin_when_first_needed(tmp_path):
    def build(writer):
        writer.add(np.array([1, 2]), [2])
        writer.add(np.array([3, 4]), [2], mask=np.array([0, 1]))
        writer.add(np.array([5]), [1], labels=np.array([-100]))

    store = make(tmp_path, build)
    assert store.mask.tolist() == [1, 1, 0, 1, 1]
    assert store.labels.tolist() == [1, 2, 3, 4, -100]


def test_a_pickle_is_a_path(tmp_path):
    store = make(tmp_path, lambda writer: writer.add(np.zeros(100_000, int), [100_000]))
    assert len(pickle.dumps(store)) < 1000
    assert pickle.loads(pickle.dumps(store)).tokens.shape == (100_000,)


def test_processes_that_ask_at_once_share_one_build(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=slow_count, args=(tmp_path, barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=HANG_SECONDS) for _ in workers] == [[1, 2, 3, 4, 5, 6, 70000]] * 2
    for worker in workers:
        worker.join()
    assert len(list(tmp_path.glob("built-*"))) == 1


def test_a_killed_builder_leaves_nothing_that_is_used(tmp_path):
    worker = multiprocessing.get_context("fork").Process(target=die_half_way, args=(tmp_path,))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL and list(tmp_path.glob("*.partial"))
    assert make(tmp_path).tokens.tolist() == [1, 2, 3, 4, 5, 6, 70000]
    assert not list(tmp_path.glob("*.partial"))


def test_a_damaged_cache_is_built_again(tmp_path):
    folder = make(tmp_path).folder
    for part in ("tokens.bin", "rows.bin", "meta.json"):
        (folder / part).write_bytes((folder / part).read_bytes()[:-1])
        assert make(tmp_path).tokens.tolist() == [1, 2, 3, 4, 5, 6, 70000]


def test_a_refusing_builder_leaves_nothing(tmp_path):
    def build(writer):
        raise UserError("bad line")

    with pytest.raises(UserError, match="bad line"):
        make(tmp_path, build)
    assert [path.suffix for path in tmp_path.iterdir()] in ([], [".lock"])


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--data_cache_dir"):
        make(tmp_path / "file" / "cache")


def test_a_name_that_is_not_utf8_is_cached(tmp_path):
    name = os.fsdecode(b"gr\xfc\xdfe.txt")
    assert cached(str(tmp_path), name, ["k"], put, dtype="uint32").tokens.tolist() == [1, 2, 3, 4, 5, 6, 70000]


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("SMP_DEVICES_DIR", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    convert = partial(cached, None, "name", ["k"], put, dtype="uint32")
    for asks, sets in ((convert, "--data_cache_dir or HOME"), (devices_folder, "SMP_DEVICES_DIR or HOME")):
        with pytest.raises(UserError, match=f"HOME is not set and .*: set {sets} to a folder you may write to"):
            asks()


def test_open_token_files_keep_no_descriptor(tmp_path):
    """A process may have 1024 by default, and data more files."""
    before = os.listdir("/proc/self/fd")
    kept = [make(tmp_path, key=(number,)) for number in range(3)]
    assert len(os.listdir("/proc/self/fd")) == len(before) and not any(file.tokens.flags.writeable for file in kept)


def test_a_recorded_result_is_computed_once(tmp_path):
    assert recorded(str(tmp_path), "n", ["k"], lambda: [1, 2]) == [1, 2]
    assert recorded(str(tmp_path), "n", ["k"], lambda: 1 / 0) == [1, 2]


def test_the_number_format_holds_the_vocabulary():
    assert [token_dtype(n) for n in (65_536, 65_537)] == ["uint16", "uint32"]
