"""Checkpoints at a URL: what is uploaded, committed, kept, passed over and gone on with; the store's own calls."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint import fetch, mirror, object_store, writer
from smp.checkpoint.checkpointer import Checkpointer
from smp.checkpoint.config import CheckpointConfig
from smp.checkpoint.manifest import MANIFEST_FILE, problems_of_files, read_manifest
from smp.checkpoint.object_store import ObjectStore, StoreError
from smp.checkpoint.remote import RemoteCheckpoint
from smp.checkpoint.restore import Search
from smp.checkpoint.saver import Saver
from smp.checkpoint.storage import Storage, storage_at
from smp.errors import ConfigError, RunError, UserError
from tests.clock import HANG_SECONDS
from tests.distributed import run_distributed, run_ranks


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(mirror, "POLL_SECONDS", (0.01, 0.1))


def of(folder: str, keep: int = 2, here: str = "here", **options) -> Checkpointer:
    """A checkpointer that writes to ``<folder>/<here>`` and uploads to ``<folder>/there``."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Checkpointer(f"file://{folder}/there", model, optimizer, keep=keep, staging=f"{folder}/{here}", **options)


def committed(folder: str) -> list[int]:
    """Steps of the checkpoints at the URL, each of which must be whole."""
    found = sorted(path.parent for path in pathlib.Path(folder, "there").glob(f"*/{MANIFEST_FILE}"))
    for path in found:
        assert problems_of_files(path, read_manifest(path), content=True) == []
    return sorted(read_manifest(path).step for path in found)


def folders(folder: str) -> list[str]:
    return sorted(path.name for path in pathlib.Path(folder, "there").iterdir() if path.is_dir())


@pytest.mark.parametrize("where", ["memory://bucket/run", "file://{}/run"])
def test_objects_are_written_listed_read_and_deleted(tmp_path, monkeypatch, where):
    monkeypatch.setattr(object_store, "_RANGE", 1000)
    store = ObjectStore(where.format(tmp_path) + "/")
    assert (store.folders(), store.sizes("a"), store.read("a/b")) == ([], {}, None)
    source, moved = tmp_path / "source", []
    source.write_bytes(bytes(range(256)) * 10)
    store.upload(source, "m-1steps/data", moved.append)
    store.write("m-1steps/manifest.json", b"{}")
    store.write("m-10steps/data", b"x")
    assert store.folders() == ["m-10steps", "m-1steps"]
    assert store.sizes("m-1steps") == {"data": 2560, "manifest.json": 2} and store.sizes("m-") == {}
    assert b"".join(store.pieces("m-1steps/data", 0, 2560)) == source.read_bytes()
    assert b"".join(store.pieces("m-1steps/data", 999, 2002)) == source.read_bytes()[999:2002]
    with pytest.raises(StoreError, match="ends too early"):
        list(store.pieces("m-1steps/data", 0, 2561))
    store.remove("m-1steps/manifest.json")
    store.remove("m-1steps/manifest.json")
    assert store.sizes("m-1steps") == {"data": 2560}
    store.remove_folder("m-1steps")
    store.remove_folder("m-1steps")
    assert store.folders() == ["m-10steps"]
    with pytest.raises(StoreError, match="m-1steps/data is no longer there"):
        list(store.pieces("m-1steps/data", 0, 5))
    store.remove_folder("m-10steps")


def test_a_call_that_fails_is_made_again_a_few_times(tmp_path, monkeypatch):
    store, calls = ObjectStore(f"file://{tmp_path}"), []

    def fails(error: Exception, times: int):
        def write(path, data):
            calls.append(path)
            if len(calls) <= times:
                raise error

        calls.clear()
        monkeypatch.setattr(store._fs, "pipe_file", write, raising=False)

    fails(OSError(5, "Input/output error"), object_store.ATTEMPTS - 1)
    store.write("a", b"")
    assert len(calls) == object_store.ATTEMPTS
    fails(OSError(5, "Input/output error"), 99)
    with pytest.raises(StoreError, match=r"/a cannot be written \(.*Input/output error"):
        store.write("a", b"")
    assert len(calls) == object_store.ATTEMPTS
    fails(FileNotFoundError("The specified upload does not exist. It may have been completed."), 1)
    store.write("a", b"")  # S3's answer to an upload's completion that was lost
    assert len(calls) == 2
    fails(PermissionError("Access Denied"), 99)
    with pytest.raises(StoreError, match="Access Denied; check the credentials"):
        store.write("a", b"")
    assert len(calls) == 1


def test_an_unknown_scheme_and_contradictions_are_refused():
    with pytest.raises(UserError, match="nowhere"):
        ObjectStore("nowhere://bucket/run")
    with pytest.raises(ConfigError, match="use --checkpoint_type async_sharded"):
        CheckpointConfig(checkpoint_dir=("s3://bucket/run",), checkpoint_type="async_local")
    with pytest.raises(ConfigError, match="credentials in the environment") as refused:
        CheckpointConfig(checkpoint_dir=("ftp://me:secret@host/run",))
    assert "secret" not in str(refused.value)
    urls = {"checkpoint_freq": (1, 1), "num_kept_checkpoints": (1, 1)}
    with pytest.raises(ConfigError, match=r"--checkpoint_cache_dir is for a URL in .*, or in --checkpoint_dir to"):
        CheckpointConfig(checkpoint_cache_dir="/copies", resume_from_checkpoint="latest")
    with pytest.raises(ConfigError, match="names a directory twice"):
        CheckpointConfig(checkpoint_dir=("s3://bucket/run", "s3://bucket/run/"), **urls)


def _saves(folder: str) -> None:
    checkpoints = of(folder)
    for step in (1, 2, 3):
        checkpoints.save(step, {"step": step})
        checkpoints.finish()
    if dist.get_rank() == 0:
        assert committed(folder) == [2, 3] and folders(folder) == ["model-2steps", "model-3steps"]
        shutil.rmtree(f"{folder}/here")
    dist.barrier()
    again = of(folder)
    torch.nn.init.zeros_(again._model.weight)
    found = again.load()
    assert (found.step, found.extra) == (3, {"step": 3}) and bool(again._model.weight.any())
    assert str(found.path) == f"file://{folder}/there/model-3steps"
    found = again.load(f"file://{folder}/there/model-2steps")
    assert found.step == 2
    with pytest.raises(UserError, match="it has no manifest"):
        again.load(f"file://{folder}/there/model-7steps")


@pytest.mark.full
def test_what_was_uploaded_is_loaded_where_nothing_is_local(tmp_path):
    run_distributed(_saves, str(tmp_path), world_size=2)


class Gate:
    """Holds uploads of files until it is opened."""

    def __init__(self) -> None:
        self.open, self.reached, upload = threading.Event(), threading.Event(), ObjectStore.upload

        def held(store, file, name, advance):
            self.reached.set()
            assert self.open.wait(HANG_SECONDS)
            upload(store, file, name, advance)

        ObjectStore.upload = held


def _slow(folder: str) -> None:
    checkpoints, gate = of(folder, keep=1), Gate()
    for step in (1, 2, 3, 4):
        checkpoints.save(step)  # does not wait for the network
    assert gate.reached.wait(HANG_SECONDS)
    here = sorted(path.name for path in pathlib.Path(folder, "here").glob("*steps"))
    assert here == ["model-1steps", "model-4steps"]  # being uploaded, and about to be
    assert committed(folder) == []
    gate.open.set()
    checkpoints.finish()
    assert committed(folder) == [4]  # and not the ones between
    assert sorted(path.name for path in pathlib.Path(folder, "here").glob("*steps")) == ["model-4steps"]
    checkpoints.save(5)
    checkpoints.finish()
    assert sorted(path.name for path in pathlib.Path(folder, "here").glob("*steps")) == ["model-5steps"]
    assert folders(folder) == ["model-5steps"]


@pytest.mark.full
def test_training_does_not_wait_and_the_newest_that_waits_is_uploaded_next(tmp_path):
    run_distributed(_slow, str(tmp_path), world_size=1)


def _fails_on_one(folder: str) -> None:
    checkpoints, upload, failing = of(folder), ObjectStore.upload, [True]

    def refuse(store, file, name, advance):
        if dist.get_rank() == 1 and failing[0]:
            raise StoreError(f"{name} cannot be written (no route)")
        upload(store, file, name, advance)

    ObjectStore.upload = refuse
    checkpoints.save(1)  # nothing fails here
    with pytest.raises(RunError, match=r"model-1steps could not be uploaded to file://.*: rank 1: .*no route.*kept in"):
        checkpoints.finish()
    assert committed(folder) == []
    failing[0] = False
    checkpoints.finish()  # again
    assert committed(folder) == [1]
    checkpoints.save(2)
    checkpoints.finish()
    assert committed(folder) == [1, 2]


@pytest.mark.full
def test_a_rank_that_cannot_upload_leaves_nothing_committed_and_holds_nobody(tmp_path):
    run_distributed(_fails_on_one, str(tmp_path), world_size=2)


def _stale(folder: str) -> None:
    there = pathlib.Path(folder, "there", "model-1steps")
    checkpoints = of(folder)
    checkpoints.save(1)
    checkpoints.finish()
    (file,) = there.glob("*.safetensors")
    good = file.read_bytes()
    (there / MANIFEST_FILE).unlink()
    file.write_bytes(bytes(len(good)))  # of an interrupted upload of other content: the size is the same
    (there / "rank00009-000.safetensors").write_bytes(b"x")
    writer = pathlib.Path(folder, "there", "model.writer.json")
    writer.write_text(json.dumps(json.loads(writer.read_text()) | {"uploading": ["model-1steps", "another"]}))
    checkpoints.save(1)
    checkpoints.finish()
    assert committed(folder) == [1] and sorted(p.suffix for p in there.iterdir()) == [".json", ".safetensors"]


@pytest.mark.full
def test_objects_of_an_interrupted_upload_of_other_content_are_not_taken_for_new_ones(tmp_path):
    run_distributed(_stale, str(tmp_path), world_size=1)


def _killed(folder: str, at: str) -> None:
    import os
    import signal

    checkpoints = of(folder)
    checkpoints.save(1)
    checkpoints.finish()
    method = getattr(ObjectStore, at)

    def kill(store, *args):
        method(store, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(ObjectStore, at, kill)
    checkpoints.save(2)
    checkpoints.finish()


def _goes_on(folder: str, at: str) -> None:
    uploads, upload = [], ObjectStore.upload

    def counted(store, file, name, advance):
        uploads.append(name)
        upload(store, file, name, advance)

    ObjectStore.upload = counted
    checkpoints = of(folder)
    assert checkpoints.load().step == 2  # the local one
    checkpoints.storage.mirror.open()
    checkpoints.storage.mirror.offer(checkpoints.storage.directory / "model-2steps", checkpoints.rule(2))
    checkpoints.finish()
    assert committed(folder) == [1, 2]
    assert uploads == ([] if at == "upload" else ["model-2steps/rank00000-000.safetensors"])


@pytest.mark.full
@pytest.mark.parametrize("at", ["upload", "remove_folder"])
def test_a_killed_upload_is_gone_on_with(tmp_path, at):
    (outcome,) = run_ranks(_killed, str(tmp_path), at, world_size=1)
    assert outcome.status == -9
    assert committed(str(tmp_path)) == [1]
    run_distributed(_goes_on, str(tmp_path), at, world_size=1)


def _damaged(folder: str) -> None:
    checkpoints = of(folder, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step)
        checkpoints.finish()
    there = pathlib.Path(folder, "there")
    if dist.get_rank() == 0:
        (file, *_) = there.glob("model-3steps/*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        (there / "model-2steps" / MANIFEST_FILE).write_bytes(b"{}")
        shutil.rmtree(f"{folder}/here")
    dist.barrier()
    again = of(folder, keep=3)
    assert again.load().step == 1
    if dist.get_rank() == 0:
        assert not [*pathlib.Path(folder, "here").glob("*steps*")]
    again.save(2)
    again.finish()
    if dist.get_rank() == 0:
        assert committed(folder) == [1, 2]
        assert (there / "model-3steps" / "manifest.aside.json").exists()
        shutil.rmtree(f"{folder}/here")
    dist.barrier()
    assert of(folder, keep=3).load().step == 2


@pytest.mark.full
def test_damaged_ones_are_passed_over_and_set_aside(tmp_path):
    run_distributed(_damaged, str(tmp_path), world_size=2)


def _local_damaged(folder: str) -> None:
    checkpoints = of(folder)
    for step in (1, 2):
        checkpoints.save(step)
        checkpoints.finish()
    (file,) = pathlib.Path(folder, "here").glob("model-2steps/*.safetensors")
    good = file.read_bytes()
    file.write_bytes(bytes(len(good)))
    found = of(folder).load()
    assert (found.step, str(found.path)) == (2, f"file://{folder}/there/model-2steps")
    assert file.read_bytes() != good


@pytest.mark.full
def test_what_is_damaged_here_and_whole_there_is_read_there(tmp_path):
    run_distributed(_local_damaged, str(tmp_path), world_size=1)


def _all_damaged(folder: str) -> None:
    checkpoints = of(folder)
    checkpoints.save(1)
    checkpoints.finish()
    (file,) = pathlib.Path(folder, "there").glob("model-1steps/*.safetensors")
    file.unlink()
    shutil.rmtree(f"{folder}/here")
    with pytest.raises(UserError, match=r"none of the 1 checkpoints in file://.*/there is valid"):
        of(folder).load()


@pytest.mark.full
def test_a_fresh_start_where_all_are_damaged_is_refused(tmp_path):
    run_distributed(_all_damaged, str(tmp_path), world_size=1)


def _fenced(folder: str) -> None:
    checkpoints = of(folder)
    checkpoints.save(1)
    checkpoints.finish()
    other = of(f"{folder}", name="model")
    other.storage.mirror.open()  # as another job would on another machine
    checkpoints.save(2)
    with pytest.raises(RunError, match=r"another job writes to file://.*/there \(host .* pid .* since .*\): end one"):
        checkpoints.finish()
    assert committed(folder) == [1]


@pytest.mark.full
def test_a_job_whose_url_another_one_has_taken_commits_nothing_more(tmp_path):
    run_distributed(_fenced, str(tmp_path), world_size=1)


def _taken_midway(folder: str) -> None:
    checkpoints, gate = of(folder), Gate()
    checkpoints.save(1)
    assert gate.reached.wait(HANG_SECONDS)
    of(folder).storage.mirror.open()  # as another job would on another machine
    gate.open.set()
    with pytest.raises(RunError, match="another job writes"):
        checkpoints.finish()
    uploaded = sorted(path.name for path in pathlib.Path(folder, "there", "model-1steps").iterdir())
    assert uploaded == ["rank00000-000.safetensors"]  # the one that was on its way


@pytest.mark.full
def test_a_job_whose_url_is_taken_in_the_middle_of_an_upload_uploads_no_more_files(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "FILE_BYTES", 1)  # a file of its own for each tensor
    run_distributed(_taken_midway, str(tmp_path), world_size=1)


def _no_room(folder: str) -> None:
    checkpoints = of(folder)
    checkpoints.save(1)
    checkpoints.finish()
    remote, cache = (
        RemoteCheckpoint(ObjectStore(f"file://{folder}/there"), "model-1steps"),
        pathlib.Path(folder, "copy"),
    )
    # Copies from one URL replace neither another's nor a run's checkpoints.
    elsewhere = RemoteCheckpoint(ObjectStore(f"file://{folder}/elsewhere"), "model-1steps")
    folders = {fetch.copies_of(Storage(cache), each).directory for each in (remote, elsewhere)}
    assert len(folders) == 2 and {each.parent for each in folders} == {cache}
    fetch.disk_free = lambda path: 10
    with pytest.raises(UserError, match=r"model-1steps has .* and .*/copy, where it is to be copied to, has 10 B free"):
        fetch.fetch(remote, Storage(cache), content=True)
    assert not cache.exists()


@pytest.mark.full
def test_a_checkpoint_that_does_not_fit_is_not_downloaded(tmp_path):
    run_distributed(_no_room, str(tmp_path), world_size=1)


def _best(folder: str) -> None:
    checkpoints = of(folder, keep=1, keep_best=1)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        manifest = checkpoints._manifest(step, None)
        manifest.run["val_loss"] = loss
        if step == 1:
            checkpoints.storage.mirror.open()
        checkpoints.write(manifest, wait=True, verify=False)
        checkpoints.finish()
    assert committed(folder) == [2, 3]


@pytest.mark.full
def test_the_best_stays_at_the_url_too(tmp_path):
    run_distributed(_best, str(tmp_path), world_size=1)


def _read_in_place(folder: str, run: str) -> None:
    checkpoints, generator = of(folder), torch.get_rng_state()
    checkpoints.save(1, {"step": 1})
    checkpoints.finish()
    saved = {name: tensor.clone() for name, tensor in checkpoints._model.state_dict().items()}
    fetched: list[tuple[str, int, int]] = []
    get = ObjectStore.range
    ObjectStore.range = lambda store, name, *part: fetched.append((name, *part)) or get(store, name, *part)
    object_store._RANGE = 64  # several requests for a file
    url = f"file://{folder}/there/model-1steps"
    dist.barrier()
    disk = f"host{dist.get_rank()}"  # of its own
    host = (lambda: of(folder, here=disk)) if run == "own" else (lambda: of(f"{folder}/{disk}"))
    alone = host()
    torch.nn.init.zeros_(alone._model.weight)
    start = len(fetched)
    torch.manual_seed(5)
    found = alone.load("latest" if run == "own" else url)
    assert (str(found.path), found.step, found.extra) == (url, 1, {"step": 1})
    assert all(torch.equal(tensor, saved[name]) for name, tensor in alone._model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    mine = fetched[start:]
    assert mine and len(set(mine)) == len(mine)  # nothing is fetched twice
    for file in {name for name, *_ in mine}:
        parts = sorted(part for name, *part in mine if name == file)
        size = pathlib.Path(folder, "there", file).stat().st_size
        assert parts == [[begin, min(begin + 64, size)] for begin in range(0, size, 64)]
    assert {path.name for path in pathlib.Path(folder, disk).rglob("*")} <= {"here"}  # nothing is written
    dist.barrier()
    damaged = sorted(pathlib.Path(folder, "there", "model-1steps").glob("*.safetensors"))[-1]
    if dist.get_rank() == 0:
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    dist.barrier()
    with pytest.raises(UserError, match=rf"{url} is damaged: {damaged.name} is not as it was written \(its digest"):
        host().load(url)


@pytest.mark.parametrize("run", ["another", "own"])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_checkpoint_is_read_at_its_url(tmp_path, world_size, run):
    """By hosts that share no disk: each rank fetches each file that it needs once, and verifies it as it comes."""
    run_distributed(_read_in_place, str(tmp_path), run, world_size=world_size)


def _copied(folder: str) -> None:
    checkpoints = of(folder)
    for step in (1, 2):
        checkpoints.save(step)
        checkpoints.finish()
    dist.barrier()
    if dist.get_rank() == 0:
        damaged = sorted(pathlib.Path(folder, "there", "model-2steps").glob("*.safetensors"))[-1]
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
        shutil.rmtree(f"{folder}/here")
    dist.barrier()
    copies, get, fetched = pathlib.Path(folder, "copies"), ObjectStore.range, list[str]()
    ObjectStore.range = lambda store, name, *part: fetched.append(name) or get(store, name, *part)

    def search() -> Search:
        candidate = functools.partial(of(folder)._candidate, "latest")
        return Search(candidate, latest=True, content=True, cache=Storage(copies))

    found = search().first().checkpoint
    assert found.name == "model-1steps"
    assert found.copy == fetch.copies_of(Storage(copies), found).directory / "model-1steps"
    assert problems_of_files(found.copy, read_manifest(found.copy), content=True) == []
    assert len(set(fetched)) == len(fetched) and not pathlib.Path(folder, "here", "model-1steps").exists()
    fetched.clear()
    again = search()
    assert again.fill(again.first(), of(folder)._fill).checkpoint.copy == found.copy
    assert {name.partition("/")[0] for name in fetched} <= {"model-2steps"}  # the damaged one is looked at again


@pytest.mark.full
def test_a_copy_is_made_once_and_of_a_valid_checkpoint(tmp_path):
    run_distributed(_copied, str(tmp_path), world_size=2)


def _offered(folder: str) -> None:
    for name in ("one", "other"):  # branches of a run
        checkpoints = of(f"{folder}/{name}")
        checkpoints.save(1, name)
        checkpoints.finish()
    url, there = f"file://{folder}/one/there", pathlib.Path(folder, "one", "there", "model-1steps", MANIFEST_FILE)
    here, written = pathlib.Path(folder, "other", "here"), there.read_bytes()
    for begins_from in (f"{url}/model-1steps", f"{here}/model-1steps"):
        saver = Saver(
            CheckpointConfig(checkpoint_dir=(url,)),
            [storage_at(url, "model", here)],
            model=checkpoints._model,
            optimizer=checkpoints._optimizer,
            model_name="model",
            first_step=1,
            max_steps=2,
            begins_from=begins_from,
        )
        saver.open_mirrors()
        with saver.finishing():
            pass
        assert (there.read_bytes() == written) == begins_from.startswith(url)


@pytest.mark.full
def test_what_a_run_starts_from_at_its_url_is_not_replaced_by_what_is_here(tmp_path):
    run_distributed(_offered, str(tmp_path), world_size=1)
