"""Disks that fill up, fail, or take less than they are given."""

from __future__ import annotations

import errno
import os
import pathlib

import pytest

from smp.checkpoint.directory import find_checkpoints
from smp.checkpoint.outcome import attempt
from tests.faults.disk import fail, fill_after
from tests.faults.jobs import writes_end_first
from tests.job import LLAMA, losses, run_job, steps_of_valid

JOB = [*LLAMA, "--use_synthetic_data", 1, "--checkpoint_freq", 2, "--lr_decay_iters", 6]


def whole_steps(run: pathlib.Path) -> list[int]:
    return steps_of_valid(run / "checkpoints")


def nothing_left(run: pathlib.Path) -> bool:
    return not list(run.rglob("*.tmp"))


def test_a_disk_that_has_room_for_bytes_and_none_for_files_is_told(tmp_path, monkeypatch):
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    statvfs = os.statvfs(tmp_path)
    free = (*statvfs[:4], 10**6, 10**6, 0, 0, *statvfs[8:])  # of many, none
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(free))
    said = str(attempt(full, (tmp_path, 1)))
    assert said == f"No space left on device: the file system of {tmp_path} has no inodes left (df -i): delete files"


@pytest.fixture(scope="module")
def checkpoint_bytes(tmp_path_factory) -> int:
    """What rank 1 writes: its tensors, and the list of them."""
    run = tmp_path_factory.mktemp("size") / "run"
    log = run.with_name("log")

    def prepare(rank: int) -> None:
        write = os.pwrite

        def noted(descriptor, data, *rest):
            if rank == 1:
                with log.open("a") as file:
                    file.write(f"{len(data)}\n")
            return write(descriptor, data, *rest)

        os.pwrite = noted

    run_job(*JOB, "--max_steps", 2, "--output_dir", run, world_size=2, prepare=prepare).succeeded()
    return sum(map(int, log.read_text().split()))


@pytest.mark.parametrize(
    "share", [pytest.param(0.0, marks=pytest.mark.slow), 0.4, pytest.param(0.999, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["sharded", "async_sharded"])
def test_a_full_disk_stops_the_run_and_keeps_the_checkpoint_before(share, kind, checkpoint_bytes, tmp_path):
    run = tmp_path / "run"
    room = int((1 + share) * checkpoint_bytes)  # the first checkpoint fits

    def prepare(rank: int) -> None:
        if rank == 1:
            fill_after(run / "checkpoints", room)

    words = [*JOB, "--max_steps", 6, "--checkpoint_type", kind, "--output_dir", run]
    outcome = run_job(*words, world_size=2, prepare=prepare)
    assert outcome.statuses == [1, 1], outcome.output
    assert "Traceback" not in outcome.output
    assert "could not be written: rank 1: No space left on device" in outcome.output
    assert "its part needs 1" in outcome.output and "GiB free" in outcome.output
    assert whole_steps(run) == [2] and nothing_left(run)
    run_job(*words, "--resume_from_checkpoint", "latest", world_size=2).succeeded()
    assert len(losses(run)) == 6


def test_training_goes_on_if_that_is_asked_for(checkpoint_bytes, tmp_path):
    run, room_again = tmp_path / "run", tmp_path / "room"

    def prepare(rank: int) -> None:
        if rank == 0:
            fill_after(run / "checkpoints", checkpoint_bytes // 2, until=room_again)
        from smp.train import step as one_step

        forward, seen = one_step.forward, [0]

        def call(*args):
            seen[0] += 1
            if seen[0] == 5:
                room_again.touch()
            return forward(*args)

        one_step.forward = call

    words = [*JOB, "--max_steps", 6, "--on_save_error", "continue", "--output_dir", run]
    outcome = run_job(*words, world_size=2, prepare=prepare).succeeded()
    assert outcome.output.count("Training continues without it: checkpoint") == 2, outcome.output
    assert whole_steps(run) == [6] and nothing_left(run) and len(losses(run)) == 6


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_an_error_that_passes_is_tried_again(kind, tmp_path):
    run = tmp_path / "run"

    def prepare(rank: int) -> None:
        if rank == 1:
            fail(run / "checkpoints", "pwrite data", {0, 1})

    words = [*JOB, "--max_steps", 2, "--checkpoint_type", kind, "--output_dir", run]
    run_job(*words, world_size=2, prepare=prepare).succeeded()
    folder = run / "checkpoints" / "rank00001-of-00002" if kind == "local" else run / "checkpoints"
    assert [c.step for c in find_checkpoints(folder, "llama_v2")] == [2]


def test_a_full_disk_of_reports_ends_no_training(tmp_path):
    """Of the run directory, with checkpoints elsewhere."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    for name in ("history.jsonl", "logs/rank0.log"):
        (run / name).symlink_to("/dev/full")
    (run / "config.yaml").mkdir()
    (run / "tensorboard").symlink_to("/dev/null")
    for words in (["--max_steps", 2], ["--max_steps", 4, "--resume_from_checkpoint", "latest"]):
        done = run_job(*JOB, *words, "--output_dir", run, "--checkpoint_dir", tmp_path / "saved").succeeded()
        for name in ("config.yaml", "rank0.log", "run/tensorboard"):
            assert done.output.count(f"{name} cannot be written") == 1, done.output
        assert "Traceback" not in done.output
    assert [c.step for c in find_checkpoints(tmp_path / "saved", "llama_v2")] == [2, 4]


@pytest.mark.parametrize(
    ("rank", "label", "saved"),
    [(1, "fsync data", []), (0, "pwrite manifest", []), (0, "rename directory", []), (0, "fsync directory", [2])],
)
def test_an_error_that_stays_in_writing_or_publishing_fails_on_every_rank(rank, label, saved, tmp_path):
    run = tmp_path / "run"

    def prepare(own: int) -> None:
        if own == rank:
            fail(run / "checkpoints", label, set(range(9)), errno.EDQUOT)

    outcome = run_job(*JOB, "--max_steps", 2, "--output_dir", run, world_size=2, prepare=prepare)
    assert outcome.statuses == [1, 1] and f"rank {rank}: {os.strerror(errno.EDQUOT)}" in outcome.output, outcome.output
    assert "Traceback" not in outcome.output
    assert whole_steps(run) in ([], saved) and (rank == 0 or nothing_left(run))


def test_a_write_that_fails_in_the_background_is_made_up_for_at_the_next_step(tmp_path):
    run = tmp_path / "run"

    def prepare(rank: int) -> None:
        if rank == 1:
            fail(run / "checkpoints", "fsync data", {0})
        writes_end_first()

    words = [*JOB, "--max_steps", 5, "--checkpoint_type", "async_sharded", "--output_dir", run]
    outcome = run_job(*words, world_size=2, prepare=prepare).succeeded()
    assert "llama_v2-2steps could not be written: rank 1: Input/output error" in outcome.output
    assert "Saving step 3 now, before training continues." in outcome.output
    assert whole_steps(run) == [4, 5] and nothing_left(run)


def no_room(rank: int) -> None:
    import smp.checkpoint.disk_forecast

    smp.checkpoint.disk_forecast.disk_free = lambda path: 100_000


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_no_room_at_all_is_said_before_anything_is_written(kind, tmp_path):
    words = [*JOB, "--max_steps", 2, "--checkpoint_type", kind, "--num_kept_checkpoints", 2]
    outcome = run_job(*words, "--output_dir", tmp_path / "runs/run", world_size=2, prepare=no_room)
    assert outcome.statuses == [2, 2] and "has 97.7 KiB free and a checkpoint needs about " in outcome.output
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_not_resumed_for_want_of_room_is_as_it_was(tmp_path):
    run = tmp_path / "run"
    job = [*JOB, "--num_kept_checkpoints", 9, "--output_dir", run]
    run_job(*job, "--max_steps", 5).succeeded()
    (run / "checkpoints/llama_v2-5steps/manifest.json").write_text("{}")  # set aside by a start that is not refused
    names = ("config.yaml", "metrics.jsonl")
    before = {path: path.read_bytes() if path.name in names else b"" for path in run.rglob("*") if path.name[0] != "."}
    outcome = run_job(*job, "--max_steps", 7, "--resume_from_checkpoint", "latest", prepare=no_room)
    assert outcome.statuses == [2] and "97.7 KiB free" in outcome.output, outcome.output
    assert before == {path: path.read_bytes() if path.name in names else b"" for path in run.rglob("*")}
