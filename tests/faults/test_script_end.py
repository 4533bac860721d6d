"""The end of a script that has not waited for its last checkpoint: it is published, uploaded, or its loss is told."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from smp.checkpoint import safetensors_io
from smp.checkpoint.directory import quick_problem
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


# Has imported what every script would import, each for itself, and forks an interpreter for each script: it reads the
# words, the environment and the file of standard error of each of some processes, and prints their pids, then how they
# have ended.
FORKS = """
import json, os, sys
import torch._dynamo, torch.distributed
import smp
smp.FSDP, smp.Checkpointer

def begins():
    for line in sys.stdin:
        pids = []
        for words, environment, errors in json.loads(line):
            pids.append(os.fork())
            if not pids[-1]:
                os.environ.update(environment)
                os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
                sys.argv = words
                return True
        print(json.dumps(pids), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)

if begins():
    with open(sys.argv[0]) as file:
        script = compile(file.read(), sys.argv[0], "exec")
    exec(script)
"""


@pytest.fixture(scope="module")
def forks():
    """The process that runs ``FORKS``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    command, pipe = [sys.executable, "-W", "ignore", "-c", FORKS], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(forks, tmp_path):
    """Run the script on two ranks; returns their exit status, and what they wrote to standard error."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(how: str, place: str | None = None) -> tuple[list[int], str]:
        port, told = free_port(), [tmp_path / f"{how}{rank}" for rank in range(2)]
        words = [str(script), how, place or str(tmp_path / "run"), str(tmp_path / "here")]
        ranks = [[words, torchrun_environment(rank, 2, port), str(told[rank])] for rank in range(2)]
        print(json.dumps(ranks), file=forks.stdin, flush=True)
        pids = json.loads(forks.stdout.readline())

        def abort() -> None:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # a rank that hangs tells where

        hangs = threading.Timer(HANG_SECONDS, abort)
        hangs.start()
        statuses = json.loads(forks.stdout.readline())
        hangs.cancel()
        return statuses, "\n".join(f"rank {rank}:\n{file.read_text()}" for rank, file in enumerate(told))

    return start


@pytest.mark.parametrize(
    ("how", "status"),
    [
        pytest.param("ends", [0, 0], marks=pytest.mark.smoke),
        ("destroy", [0, 0]),
        pytest.param("sys.exit", [3, 3], marks=pytest.mark.slow),
        ("fails", [1, 1]),
    ],
)
def test_the_last_checkpoint_is_published(run, tmp_path, how, status):
    found, told = run(how)
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


def test_what_a_lost_rank_has_not_written_is_told(run, tmp_path):
    found, told = run("dies")
    assert found == [0, -signal.SIGKILL], told
    run_folder = tmp_path / "run"
    sentence = f"rank 0: checkpoint {run_folder}/model-4steps was not published as the script ended: rank 1 has not"
    assert sentence in told and "Traceback" not in told
    assert not (run_folder / "model-4steps").exists()

    found, told = run("disk")
    assert found == [0, 0], told
    assert f"rank 1: checkpoint {run_folder}/model-4steps was not published as the script ended: " in told
    assert "No space left on device" in told and sentence in told


def test_uploads_get_there(run, tmp_path):
    there = tmp_path / "there"
    found, told = run("uploads", f"file://{there}")
    assert found == [0, 0], told
    assert quick_problem(there / "model-4steps") is None, told
    assert [path.name for path in sorted(there.glob("model-*steps"))] == ["model-4steps"], "as finish() keeps"
    assert "not uploaded" not in told.replace("model-1steps was not uploaded: model-2steps is newer", ""), told
