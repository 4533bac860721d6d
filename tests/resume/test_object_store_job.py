"""A job whose checkpoints are mirrored to a URL: what is there, a new machine goes on from it, what is refused."""

from __future__ import annotations

import pathlib
import shutil
import threading

import pytest

from smp.checkpoint.object_store import ObjectStore
from smp.report.run_files import read_run
from tests.clock import HANG_SECONDS, wait_until
from tests.faults.jobs import at_call, wrapped
from tests.job import LLAMA, flip, losses, run_job
from tests.job import steps_of_valid as whole

JOB = [*LLAMA, "--use_synthetic_data", 1, "--lr_decay_iters", 8]
JOB += ["--sharding_strategy", "full_shard", "--checkpoint_freq", 2]


@pytest.mark.full
def test_a_run_goes_on_from_the_url_on_a_new_machine(tmp_path):
    store, url = tmp_path / "store" / "run", f"file://{tmp_path}/store/run"
    job = [*JOB, "--checkpoint_dir", url]
    run_job(*JOB, "--max_steps", 8, "--output_dir", tmp_path / "whole", world_size=2).succeeded()
    first = run_job(*job, "--max_steps", 6, "--output_dir", tmp_path / "one", world_size=2).succeeded()
    assert f"Uploaded {url}/llama_v2-6steps" in first.output
    assert whole(tmp_path / "one" / "checkpoints") == [4, 6]
    there = whole(store)  # an older one is left out where uploading takes longer than two steps
    assert there[-1] == 6 and len(there) <= 2
    names = [f"llama_v2-{step}steps" for step in there]
    assert sorted(path.name for path in store.iterdir()) == [*names, "llama_v2.writer.json"]

    refused = run_job(*job, "--max_steps", 8, "--output_dir", tmp_path / "fresh", world_size=2)
    assert set(refused.statuses) == {2} and f"{url} already contains checkpoints up to step 6" in refused.output
    assert not (tmp_path / "fresh").exists()

    shutil.rmtree(tmp_path / "one")  # the machine is gone
    second = [*job, "--max_steps", 8, "--resume_from_checkpoint", "latest", "--output_dir", tmp_path / "two"]
    outcome = run_job(*second, world_size=2).succeeded()
    assert f"Resumed from {url}/llama_v2-6steps" in outcome.output and "Downloading" not in outcome.output
    assert losses(tmp_path / "two") == losses(tmp_path / "whole")[6:]
    assert whole(store) == [6, 8] and whole(tmp_path / "two" / "checkpoints") == [8]
    assert f"checkpoints in {url} are not listed here: `smp inspect {url}` does" in read_run(tmp_path / "two").notes

    branch = [*JOB, "--max_steps", 7, "--resume_from_checkpoint", f"{url}/llama_v2-6steps"]
    outcome = run_job(*branch, "--output_dir", tmp_path / "three", world_size=1).succeeded()
    assert whole(tmp_path / "three" / "checkpoints") == [7] and f"Resumed from {url}/llama_v2-6steps" in outcome.output
    assert losses(tmp_path / "three") == losses(tmp_path / "whole")[6:7]
    disks = [*branch, "--checkpoint_type", "local", "--output_dir", tmp_path / "four"]
    run_job(*disks, world_size=2).succeeded()
    assert losses(tmp_path / "four") == losses(tmp_path / "three")
    assert not [*tmp_path.glob("four/**/*-6steps")]
    older = run_job(*second[:-1], tmp_path / "two", "--resume_from_checkpoint", f"{url}/llama_v2-6steps", world_size=1)
    assert older.statuses == [2] and "is newer than the checkpoint to resume from, step 6" in older.output

    again = [*second[:-1], tmp_path / "five", "--max_steps", 7]
    for newest, words in ((8, again), (7, [*again, "--checkpoint_cache_dir", tmp_path / "copies"])):
        flip(sorted((store / f"llama_v2-{newest}steps").glob("*.safetensors"))[-1])
        outcome = run_job(*words, world_size=2).succeeded()
        assert f"Passed over: checkpoint {url}/llama_v2-{newest}steps is damaged: " in outcome.output
        assert f"Resumed from {url}/llama_v2-6steps at step 6" in outcome.output
        assert losses(tmp_path / "five") == losses(tmp_path / "whole")[6:7]
        assert whole(store) == [6, 7] and whole(tmp_path / "five" / "checkpoints") == [7]
        shutil.rmtree(tmp_path / "five")
    (copies,) = (tmp_path / "copies").iterdir()  # of the URL
    assert whole(copies) == [6]


def _held_at_first(store: pathlib.Path) -> None:
    """Hold the first upload until the second checkpoint waits; let step 6 wait for the second to be there."""
    upload, go = ObjectStore.upload, threading.Event()

    def held(store, file, name, advance):
        assert go.wait(HANG_SECONDS)
        upload(store, file, name, advance)

    def idle() -> None:
        go.set()
        wait_until(lambda: not [t for t in threading.enumerate() if t.name == "smp-upload"])

    ObjectStore.upload = held
    wrapped("forward", at_call(5, idle))
    wrapped("forward", at_call(6, lambda: wait_until((store / "llama_v2-4steps" / "manifest.json").exists)))


@pytest.mark.full
def test_the_checkpoint_that_waits_is_uploaded_at_a_step_boundary(tmp_path):
    store = tmp_path / "store"
    words = ["--max_steps", 6, "--checkpoint_dir", f"file://{store}", "--output_dir", tmp_path / "run"]
    run_job(*JOB, *words, world_size=1, prepare=lambda rank: _held_at_first(store)).succeeded()
    assert whole(store) == [4, 6]
