"""The end of a script that has not waited for its last checkpoint: it is published, uploaded, or its loss is told."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from smp.checkpoint import safetensors_io
from smp.checkpoint.layout import quick_problem
from smp.checkpoint.manifest import read_manifest
from smp.checkpoint.writer import await_parts, part_name, write_part
from tests.clock import HANG_SECONDS
from tests.examples import torchrun_environment
from tests.ports import free_port

ROOT = pathlib.Path(__file__).parent.parent.parent

# What is done in the background begins when the interpreter exits.
SCRIPT = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
import smp
from smp.checkpoint import background, mirror, object_store, writer

how, place, staging = sys.argv[1:4]
ends = threading.Event()

def late(function):
    def call(*args, **kwargs):
        assert how == "fails" or ends.wait(600)  # that waits for a rank that has failed
        return function(*args, **kwargs)
    return call

def main():
    smp.init_process_group(backend="gloo")
    rank = dist.get_rank()
    model = smp.FSDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = smp.Checkpointer(place, model, optimizer, staging=staging, keep=1)
    if how == "uploads":
        if rank == 1:  # comes to the first when rank 0 might be at the last
            upload = mirror.Upload._upload
            mirror.Upload._upload = lambda self: (ends.wait(600), time.sleep(1), upload(self))
        checkpoints.save(1)
        checkpoints.save(2)
        object_store.ObjectStore.upload = late(object_store.ObjectStore.upload)
    background.write_part = late(background.write_part)
    if how == "dies":
        writer.VISIBLE_WITHIN = 0.5
        if rank == 1:
            background.write_part = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    if how == "disk" and rank == 1:
        writer.VISIBLE_WITHIN = 0.5
        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")
        background.write_part = full
    if how == "disk" and rank == 0:
        writer.VISIBLE_WITHIN = 0.5
    checkpoints.save(4, {"rank": rank}, wait=False)
    if how == "sys.exit":
        sys.exit(3)
    if how in ("destroy", "uploads"):
        dist.destroy_process_group()
    if how == "fails" and rank == 1:
        raise ValueError("the script's own")
    if how == "fails":
        dist.barrier()

threading._register_atexit(ends.set)
main()
"""


def run(tmp_path, how: str, place: str | None = None) -> tuple[list[int], str]:
    """Run the script on two ranks; returns their exit status, and what they wrote to standard error."""
    script, port = tmp_path / "script.py", free_port()
    script.write_text(SCRIPT)
    words = [sys.executable, "-W", "ignore", str(script), how, place or str(tmp_path / "run"), str(tmp_path / "here")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    ranks = [
        subprocess.Popen(
            words,
            env={**environment, **torchrun_environment(rank, 2, port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    end = time.monotonic() + HANG_SECONDS
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
    for process in ranks:
        process.send_signal(signal.SIGABRT)  # a rank that hangs tells where
    told = [f"rank {rank}:\n{process.communicate()[1]}" for rank, process in enumerate(ranks)]
    return [process.returncode for process in ranks], "\n".join(told)


@pytest.mark.parametrize(
    ("how", "status"),
    [
        pytest.param("ends", [0, 0], marks=pytest.mark.smoke),
        ("destroy", [0, 0]),
        pytest.param("sys.exit", [3, 3], marks=pytest.mark.slow),
        ("fails", [1, 1]),
    ],
)
def test_the_last_checkpoint_is_published(tmp_path, how, status):
    found, told = run(tmp_path, how)
    assert found == status, told
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"model-4steps", "latest"}, told
    assert quick_problem(tmp_path / "run" / "model-4steps") is None
    assert read_manifest(tmp_path / "run" / "model-4steps").run["extra"] == {"rank": 0}
    assert not list((tmp_path / "run").glob("*.tmp"))
    assert "not published" not in told and ("the script's own" in told) == (how == "fails")


def test_what_a_rank_has_written_is_listed_at_once(tmp_path, monkeypatch):
    """The first rank that ends publishes what all have listed, and waits for nothing else."""
    seen, write = [], safetensors_io.write_all

    def looked_at(*args):
        seen.append((tmp_path / part_name(0)).exists())
        write(*args)

    monkeypatch.setattr(safetensors_io, "write_all", looked_at)
    write_part(tmp_path, [], {}, rank=0)
    assert seen and not any(seen)
    assert [path.name for path in tmp_path.iterdir()] == [part_name(0)]
    await_parts(tmp_path, [0])


def test_what_a_lost_rank_has_not_written_is_told(tmp_path):
    found, told = run(tmp_path, "dies")
    assert found == [0, -signal.SIGKILL], told
    run_folder = tmp_path / "run"
    sentence = f"rank 0: checkpoint {run_folder}/model-4steps was not published as the script ended: rank 1 has not"
    assert sentence in told and "Traceback" not in told
    assert not (run_folder / "model-4steps").exists()

    found, told = run(tmp_path, "disk")
    assert found == [0, 0], told
    assert f"rank 1: checkpoint {run_folder}/model-4steps was not published as the script ended: " in told
    assert "No space left on device" in told and sentence in told


def test_uploads_get_there(tmp_path):
    there = tmp_path / "there"
    found, told = run(tmp_path, "uploads", f"file://{there}")
    assert found == [0, 0], told
    assert quick_problem(there / "model-4steps") is None, told
    assert [path.name for path in sorted(there.glob("model-*steps"))] == ["model-4steps"], "as finish() keeps"
    assert "not uploaded" not in told.replace("model-1steps was not uploaded: model-2steps is newer", ""), told
