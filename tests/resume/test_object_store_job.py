"""A job whose checkpoints are mirrored to a URL: what is there, a new machine goes on from it, what is refused."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from smp.checkpoint.layout import find_checkpoints
from smp.checkpoint.manifest import problems_of_files, read_manifest
from tests.job import LLAMA, losses, run_job

JOB = [
    *LLAMA,
    "--use_synthetic_data",
    1,
    "--lr_decay_iters",
    8,
    "--sharding_strategy",
    "full_shard",
    "--checkpoint_freq",
    2,
]


def whole(folder: pathlib.Path) -> list[int]:
    """Steps of the checkpoints of a store on this disk, all of which must be whole."""
    found = find_checkpoints(folder, "llama_v2")
    for checkpoint in found:
        assert problems_of_files(checkpoint.path, read_manifest(checkpoint.path), content=True) == []
    return [checkpoint.step for checkpoint in found]


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
    assert set(refused.statuses) == {2} and f"{url} already holds checkpoints up to step 6" in refused.output
    assert not (tmp_path / "fresh").exists()

    shutil.rmtree(tmp_path / "one")  # the machine is gone
    second = [*job, "--max_steps", 8, "--resume_from_checkpoint", "latest", "--output_dir", tmp_path / "two"]
    outcome = run_job(*second, world_size=2).succeeded()
    assert f"Downloading {url}/llama_v2-6steps" in outcome.output
    assert losses(tmp_path / "two") == losses(tmp_path / "whole")[6:]
    assert whole(store) == [6, 8] == whole(tmp_path / "two" / "checkpoints")

    branch = [*JOB, "--max_steps", 7, "--resume_from_checkpoint", f"{url}/llama_v2-6steps"]
    outcome = run_job(*branch, "--output_dir", tmp_path / "three", world_size=1).succeeded()
    assert whole(tmp_path / "three" / "checkpoints") == [7] and whole(tmp_path / "three" / "downloads") == [6]
    older = run_job(*second[:-1], tmp_path / "two", "--resume_from_checkpoint", f"{url}/llama_v2-6steps", world_size=1)
    assert older.statuses == [2] and "is newer than the checkpoint to resume from, step 6" in older.output
