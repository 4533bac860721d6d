"""The job with activations on disk and parameters in host memory: same curve, nothing left behind, clear ends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import resource
import signal
import subprocess

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import smp.memory.tracker
from smp.parallel.offload import DiskStore
from tests.faults.jobs import last_step
from tests.job import NEOX, assert_resumes, assert_same_tensors, losses, read_metrics, run_job, running_job, tensors

DROPOUT = ["--attn_pdrop", 0.2, "--resid_pdrop", 0.1]
# Three blocks, whose inputs are 128 KiB on each of two ranks: a multiple of what is worth a move.
JOB = [
    *NEOX, *DROPOUT, "--num_layers", 3, "--train_batch_size", 64, "--use_synthetic_data", 1, "--lr_decay_iters", 10,
    "--sharding_strategy", "full_shard",
]  # fmt: skip


def offload(directory: pathlib.Path) -> list[object]:
    return ["--offload_activations", 1, "--offload_dir", directory, "--activation_loading_horizon", 1]


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.mark.parametrize("words", [[], ["--tensor_parallel_degree", 2]], ids=["fsdp", "tp"])
@pytest.mark.full
def test_offloading_trains_the_same_curve_and_leaves_nothing(words, disk, tmp_path):
    job = [*JOB, *words, "--max_steps", 3]
    run_job(*job, "--output_dir", tmp_path / "plain", world_size=2).succeeded()
    run_job(*job, *offload(disk), "--output_dir", tmp_path / "moved", world_size=2).succeeded()
    assert len(losses(tmp_path / "plain")) == 3 and losses(tmp_path / "moved") == losses(tmp_path / "plain")
    assert_same_tensors(tensors(tmp_path / "moved", 3), tensors(tmp_path / "plain", 3))
    assert list(disk.iterdir()) == []


def test_a_killed_run_leaves_no_file(disk, tmp_path):
    words = [*JOB, "--max_steps", 100_000, *offload(disk), "--output_dir", tmp_path / "run"]
    with running_job(*words, world_size=2) as job:
        job.wait_until(lambda: last_step(tmp_path / "run") >= 1)
        for pid in job.pids:
            held = []
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it has just closed this one
                    held.append(os.stat(f"/proc/{pid}/fd/{name}"))
            ours = [file for file in held if file.st_dev == disk.stat().st_dev and not file.st_nlink]
            assert max(file.st_size for file in ours) >= 2 * 128 * 1024  # it was at it
        job.signal(signal.SIGKILL)
        job.wait()
    assert list(disk.iterdir()) == []


@contextlib.contextmanager
def small_disk(directory: pathlib.Path, kib: int):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", directory], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", directory], check=True)


def test_a_full_directory_ends_the_run(disk, tmp_path):
    with small_disk(disk, 320):  # one rank needs 256
        outcome = run_job(*JOB, "--max_steps", 3, *offload(disk), "--output_dir", tmp_path / "run", world_size=2)
        assert list(disk.iterdir()) == []
    assert_ends_with_sentences(outcome)


@pytest.mark.parametrize(("full", "backend"), [(0, "gloo"), (1, "smddp")])
def test_a_directory_that_is_full_on_one_rank_ends_all(full, backend, disk, tmp_path):
    write = DiskStore.write

    def limit(rank: int) -> None:
        def fails(store, memory, offset):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            try:
                write(store, memory, offset)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        if rank == full:
            DiskStore.write = fails

    words = [*JOB, "--max_steps", 3, *offload(disk), "--distributed_backend", backend]
    outcome = run_job(*words, "--output_dir", tmp_path / "run", world_size=2, prepare=limit)
    if full == 0 and outcome.statuses == [2, 1]:  # rank 0 serves the store, and may be gone before it was asked why
        assert "rank 1: lost rank 0" in outcome.output
        outcome = dataclasses.replace(outcome, statuses=[2, 2])
    assert_ends_with_sentences(outcome)


def assert_ends_with_sentences(outcome) -> None:
    assert outcome.statuses == [2, 2] and "Traceback" not in outcome.output, (outcome.statuses, outcome.output)
    sentences = [line for line in outcome.output.splitlines() if line.startswith("error: ")]
    assert 1 <= len(sentences) <= 2, outcome.output  # each rank that finds it says so
    assert all("is full: " in line and "give a larger disk, or offload less" in line for line in sentences)


@pytest.mark.full
def test_the_lines_and_curves_of_smp(tmp_path, monkeypatch):
    monkeypatch.setattr(smp.memory.tracker, "cpu_tensor_bytes", lambda: 0)  # a walk over all objects each time
    words = ["--use_synthetic_data", 1, "--max_steps", 7, "--enable_memory_profiling", 1, "--save_final_model", 0]
    curves = tmp_path / "curves"
    outcome = run_job(*NEOX, *words, "--tensorboard_dir", curves, "--output_dir", tmp_path / "run").succeeded()
    places = ["Before train step", "After forward", "After train step", "After opt step"]
    expected = [
        *[(0, place) for place in ("Before model creation", "Before FSDP wrapper", "After FSDP wrapper")],
        *[(step, place) for step in range(5) for place in places],
        *[(7, f"{when} ckpt (StateDictType.SHARDED_STATE_DICT)") for when in ("Before", "After")],
    ]
    lines = re.findall(
        r"\[CPU MEMORY\]@(\d{4}) \(torch, rank, device\) = \(\S+, 0, 0\), \(torch tensor, mem, change since last "
        r"measurement, base\) = \( *\d+\.\d{4}, +-?\d+\.\d{4}, +-?\d+\.\d{4}, +\d+\.\d{4}\) GiB\. \[(.+)\]$",
        outcome.output,
        re.MULTILINE,
    )
    assert [(int(step), place) for step, place in lines] == expected
    for place, steps in (("After forward", range(5)), ("Before model creation", [0])):
        for name in ("base", "delta", "torch", "total"):
            events = EventAccumulator(str(curves / f"CPUMemoryGB_{place}_{name}"))
            events.Reload()
            assert [event.step for event in events.Scalars(f"CPUMemoryGB/{place}")] == list(steps)


@pytest.mark.parametrize(
    "words", [[], pytest.param(["--tensor_parallel_degree", 2], marks=pytest.mark.slow)], ids=["fsdp", "tp"]
)
@pytest.mark.full
def test_parameters_in_host_memory_resume_bit_for_bit(words, disk, tmp_path):
    job, host = [*JOB, *words, "--train_batch_size", 2, "--grad_clip", 0.1], ["--cpu_offload", 1]
    run_job(*job, "--max_steps", 6, "--output_dir", tmp_path / "plain", world_size=2).succeeded()
    parts = assert_resumes(tmp_path, *job, *host, at=3, steps=6)
    assert all(line["grad_norm"] > 0.1 for line in read_metrics(parts))  # so that all are clipped
    assert losses(parts) == losses(tmp_path / "plain")
    assert_same_tensors(tensors(parts, 6), tensors(tmp_path / "plain", 6))
