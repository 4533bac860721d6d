import logging
import mmap
import re

import pytest
import torch

from smp.memory import tracker as memory_tracker
from smp.memory.tracker import MemoryTracker, cpu_tensor_bytes, memory_stats, peak_rss_bytes, rss_bytes
from smp.units import GIB

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)


class FakeWriters:
    def __init__(self):
        self.found = {}

    def scalars(self, tag, values, step):
        self.found[tag, step] = values


@pytest.fixture
def lines():
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    level = memory_tracker.logger.level
    memory_tracker.logger.addHandler(handler)
    memory_tracker.logger.setLevel(logging.INFO)
    yield found
    memory_tracker.logger.removeHandler(handler)
    memory_tracker.logger.setLevel(level)


@pytest.fixture
def fake_cuda(monkeypatch):
    """torch.cuda with 2 GiB allocated (peak 3), 4 reserved (peak 5) and 10 of 16 in use."""
    calls = []
    numbers = {
        "memory_allocated": 2 * GIB, "max_memory_allocated": 3 * GIB, "memory_reserved": 4 * GIB,
        "max_memory_reserved": 5 * GIB, "mem_get_info": (6 * GIB, 16 * GIB), "synchronize": None,
        "reset_peak_memory_stats": None,
    }  # fmt: skip
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, *, n=name, v=value: (calls.append((n, device)), v)[1])
    return calls


@pytest.mark.full
def test_64_mib_of_floats_are_a_sixteenth_of_a_gib():
    before = cpu_tensor_bytes()
    tensor = torch.zeros(16 * 1024**2)
    view = tensor[5:]  # shares the storage: not counted again
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    assert (cpu_tensor_bytes() - before) / GIB == 0.0625
    del tensor, view, parameter
    assert cpu_tensor_bytes() == before


def test_stats_of_a_cpu():
    stats = memory_stats(CPU)
    assert stats["mem_allocated_gib"] is None
    # Not of malloc, which may have the pages of an earlier test.
    block = torch.frombuffer(mmap.mmap(-1, 64 * 1024**2), dtype=torch.float32).fill_(1.0)
    assert memory_stats(CPU)["host_rss_gib"] - stats["host_rss_gib"] == pytest.approx(0.0625, abs=0.02)
    assert memory_stats(CPU)["mem_peak_gib"] >= block.nbytes / GIB
    assert 0 < rss_bytes() <= peak_rss_bytes() * 1.01


def test_stats_of_a_gpu(fake_cuda):
    stats = memory_stats(CUDA)
    assert (stats["mem_allocated_gib"], stats["mem_peak_gib"]) == (2.0, 3.0)
    assert {device for _, device in fake_cuda} == {CUDA}


def test_the_cpu_line(lines, monkeypatch):
    writers = FakeWriters()
    monkeypatch.setattr(memory_tracker, "cpu_tensor_bytes", lambda: GIB // 2)
    sizes = iter([1 * GIB, 2 * GIB, 4 * GIB])
    monkeypatch.setattr(memory_tracker, "rss_bytes", lambda: next(sizes))
    tracker = MemoryTracker(CPU, enabled=True, rank=0)
    tracker.record("After forward", 3)
    tracker.connect(writers.scalars)  # what was before comes, too
    tracker.record("After train step", 3)
    assert len(lines) == 2
    assert re.fullmatch(
        r"\[CPU MEMORY\]@0003 \(torch, rank, device\) = \(\S+, 0, 0\), \(torch tensor, mem, change since last "
        r"measurement, base\) = \( 0\.5000,  3\.0000,  2\.0000,  1\.0000\) GiB\. \[After train step\]",
        lines[1],
    )
    assert list(writers.found) == [("CPUMemoryGB/After forward", 3), ("CPUMemoryGB/After train step", 3)]
    assert writers.found["CPUMemoryGB/After forward", 3] == {"base": 1.0, "delta": 1.0, "torch": 0.5, "total": 1.0}


def test_the_gpu_line_and_a_new_peak(lines, fake_cuda):
    writers = FakeWriters()
    tracker = MemoryTracker(CUDA, enabled=True, rank=0)
    tracker.connect(writers.scalars)
    tracker.record("After opt step", 12)
    assert re.fullmatch(
        r"\[GPU MEMORY\]@0012 \(torch, rank, device\) = \(\S+, 0, 1\), \(alloc, max_alloc, cache, max_cache\) = "
        r"\( 2\.0000,  3\.0000,  4\.0000,  5\.0000\) GiB\. Totally used GPU memory: 10\.0000 GiB\. \[After opt step\]",
        lines[0],
    )
    assert writers.found["GPUMemoryGB/After opt step", 12] == {
        "allocated": 2.0, "max_allocated": 3.0, "max_reserved": 5.0, "reserved": 4.0,
    }  # fmt: skip
    names = [name for name, _ in fake_cuda]
    assert names[0] == "synchronize" and names[-1] == "reset_peak_memory_stats"
    assert {device for _, device in fake_cuda} == {CUDA}


@pytest.mark.parametrize(("enabled", "rank"), [(False, 0), (True, 1)])
def test_another_rank_is_silent(lines, enabled, rank):
    tracker, writers = MemoryTracker(CPU, enabled=enabled, rank=rank), FakeWriters()
    tracker.connect(writers.scalars)
    tracker.record("After forward", 1)
    assert writers.found == {} and lines == []
