"""What a step frees stays with the process where this project may say so, and nowhere else."""

from __future__ import annotations

import inspect
import os
import resource
import subprocess
import sys

import pytest
import torch

from smp.environment import malloc
from smp.launch.local import LocalJob
from smp.train import __main__ as train_main
from tests.faults.jobs import JOB
from tests.job import running_job

pytestmark = pytest.mark.skipif(not malloc.is_glibc(), reason="needs glibc")

INIT = """
import smp, torch.distributed as dist
dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
smp.init({})
"""
FEW, MANY = 100, 300  # huge pages are few


def faults() -> int:
    """Take and free 64 MiB ten times, once the heap has room for it: the pages that are faulted in."""
    for _ in range(20):  # an aligned block seldom fits the hole that one of its size has left
        torch.ones(2**24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in [name for name in os.environ if name == "GLIBC_TUNABLES" or name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("code", "environment", "kept"),
    [
        ("import smp", {}, False),
        (INIT, {}, True),
        (INIT, {"GLIBC_TUNABLES": ""}, False),
        (INIT, {"MALLOC_TOP_PAD_": "0"}, False),
        ("", {"GLIBC_TUNABLES": malloc.TUNABLES}, True),
    ],
)
@pytest.mark.full
def test_a_process_keeps_what_it_frees_only_where_it_was_asked_to(code, environment, kept):
    # Its text: this module imports transformers, which each of these processes would import for nothing.
    words = [code, "import resource, torch", inspect.getsource(faults), "print(faults())"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(words)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    count = int(done.stdout.split()[-1])
    assert count < FEW if kept else count > MANY


def test_the_job_keeps_what_it_frees(tmp_path):
    def prepare(rank: int) -> None:
        finish = train_main.finish
        train_main.finish = lambda *args: print(f"faults: {faults()}.") or finish(*args)

    with running_job(*JOB, "--max_steps", 1, "--output_dir", tmp_path / "run", prepare=prepare) as job:
        outcome = job.wait().succeeded()
    assert int(outcome.output.split("faults: ")[1].split(".")[0]) < FEW


def test_the_launcher_sets_it_for_its_processes_unless_the_user_has(monkeypatch):
    def environment(**settings: bool) -> dict[str, str]:
        return LocalJob(["true"], 1, 0, **settings)._environment(0, 0, 29500)

    assert environment()["GLIBC_TUNABLES"] == malloc.TUNABLES
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "GLIBC_TUNABLES" not in environment() and "GLIBC_TUNABLES" in environment(no_gpus=True)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert "GLIBC_TUNABLES" not in environment(no_gpus=True)


@pytest.mark.parametrize(
    ("environment", "given_back"),
    [
        ({}, False),
        ({"GLIBC_TUNABLES": malloc.TUNABLES}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=8589934592"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=0x100000"}, True),
        ({"MALLOC_MMAP_THRESHOLD_": "1048576"}, True),
    ],
)
def test_the_prediction_counts_the_setting_in_force(environment, given_back, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = [*JOB, "--dry_run", 1, "--dry_run_world_size", 2, "--output_dir", tmp_path / "run"]
    with running_job(*words) as job:
        table = job.wait().succeeded().output
    assert ("free blocks of the heap" not in table) == given_back


STOCKED = """
import ctypes
from smp.environment import malloc
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", *"abcdefghi")]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype, libc.aligned_alloc.restype = Info, ctypes.c_void_p, ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
{stock}
def tensors(): return [libc.aligned_alloc(64, 2**20) for _ in range(100)]
taken = tensors()
for turn in range(10):
    small = [libc.malloc(32) for _ in range(300)]  # which stay
    for number in range(0, 100, 2): libc.free(taken[number])
    for number in range(0, 100, 2): taken[number] = libc.aligned_alloc(64, 2**20)
    # Not the first turn: a place between tensors cut from the heap's end one after another is short as it is.
    if turn == 0: before = libc.mallinfo2().arena
print(libc.mallinfo2().arena - before)
"""


@pytest.mark.parametrize(("stock", "grows"), [("malloc.keep_freed_memory()", False), ("", True)])
@pytest.mark.full
def test_a_freed_tensors_place_fits_the_next_beside_small_blocks(stock, grows):
    done = subprocess.run(
        [sys.executable, "-c", STOCKED.format(stock=stock)], env=os.environ | {"GLIBC_TUNABLES": malloc.TUNABLES},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 20 * 2**20) == grows, done.stdout
