"""Activations move while other blocks compute: seen in a profiler's trace, and ready when they are asked for."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import pathlib
import sys
import threading

import pytest
import torch
from torch import nn

from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.offload import DiskStore, apply_activation_offload, stores
from smp.parallel.offload.stores import READ, WRITE
from tests.clock import HANG_SECONDS, wait_until
from tests.flags import in_child

LAYERS = 6


@pytest.fixture(scope="module")
def script():
    """``benchmarks/offload_trace.py``, whose command ``docs/memory.md`` gives."""
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "offload_trace.py"
    spec = importlib.util.spec_from_file_location("offload_trace", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def meet(monkeypatch) -> None:
    """A transfer lasts until a block has computed or somebody waits for it; a block computes when those asked for have
    begun. So each is beside a block, if it is asked for ahead of its own."""
    asked, begun, ended, free = [], [], [], threading.Event()
    forward, submit, wait = nn.Linear.forward, concurrent.futures.ThreadPoolExecutor.submit, stores._wait

    def compute(self, hidden):
        wait_until(lambda: len(begun) > len(ended) or len(begun) == len(asked))
        result = forward(self, hidden)
        free.set()
        free.clear()
        return result

    def waits(future):
        free.set()
        result = wait(future)
        free.clear()
        return result

    def asks(*args):
        asked.append(None)
        return submit(*args)

    monkeypatch.setattr(nn.Linear, "forward", compute)
    monkeypatch.setattr(stores, "_wait", waits)
    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", asks)
    for name in ("write", "read"):
        inner = getattr(DiskStore, name)

        def transfer(*args, inner=inner):
            begun.append(None)
            assert free.wait(HANG_SECONDS)
            inner(*args)
            ended.append(None)

        monkeypatch.setattr(DiskStore, name, transfer)


@in_child  # a process that has profiled and trained may not be forked again
def test_a_trace_shows_reads_and_writes_beside_computing(script, tmp_path, monkeypatch):
    meet(monkeypatch)
    horizon, trace = 2, tmp_path / "trace.json"
    script.traced_step(tmp_path, trace, horizon=horizon, layers=LAYERS, width=256, tokens=4096)
    every = script.ranges(trace)
    (forward,), (backward,) = ([r for r in every if r.name == name] for name in ("forward", "backward"))
    moved = LAYERS - horizon
    for name, phase, blocks in ((WRITE, forward, range(moved)), (READ, backward, range(moved - 1, -1, -1))):
        transfers = [r for r in every if r.name == name]
        assert len(transfers) == moved and len({r.thread for r in transfers}) == 1
        assert transfers[0].thread != phase.thread  # a thread of its own
        computing = {r.name: r for r in every if r.name.startswith("block ") and r.overlap(phase)}
        assert len(computing) == LAYERS and all(r.thread == phase.thread for r in computing.values())
        # Whose tensor it is follows from the order.
        beside = [
            (block, other)
            for block, transfer in zip(blocks, transfers, strict=True)
            for other in range(LAYERS)
            if transfer.overlap(computing[f"block {other}"]) > 0
        ]
        assert beside, (name, transfers, computing)
        if name == READ:  # ahead of its own block, which comes after higher ones
            assert all(block < other <= block + horizon for block, other in beside), beside
        count, milliseconds, share = script.beside_computing(every, name)
        assert count == moved and milliseconds > 0 and 0 < share <= 1


@in_child
def test_the_command_prints_a_row_for_each_horizon(script, tmp_path, capsys, monkeypatch):
    small = ["--layers", 4, "--width", 32, "--tokens", 64, "--horizons", 1, 3]
    words = ["offload_trace.py", "--offload_dir", tmp_path, *small, "--output", tmp_path / "kept.json"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    assert script.main() == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [[int(row[0]), int(row[1]), int(row[4])] for row in rows] == [[1, 3, 3], [3, 1, 1]]
    assert script.ranges(tmp_path / "kept.json") and sorted(p.name for p in tmp_path.iterdir()) == ["kept.json"]
    monkeypatch.setattr(sys, "argv", ["offload_trace.py", "--offload_dir", str(tmp_path / "none")])
    assert script.main() == 2 and "--offload_dir" in capsys.readouterr().err


class Patient(nn.Module):
    """A block that is computed again only when the disk has done all that it was asked for until then."""

    def __init__(self, store: DiskStore):
        super().__init__()
        self.linear, self.store, self.again = nn.Linear(32, 32), store, False

    def forward(self, hidden_states):
        if self.again:
            self.store.reader.submit(lambda: None).result(timeout=HANG_SECONDS)  # reads are done one after the other
        self.again = not self.again
        return hidden_states + self.linear(hidden_states).tanh()


@pytest.mark.parametrize("horizon", [1, 2, 3, 4])
def test_nobody_waits_for_what_was_read_beside_another_block(horizon, tmp_path):
    store = DiskStore(tmp_path)
    blocks = [Patient(store) for _ in range(LAYERS)]
    apply_activation_checkpointing(blocks)
    apply_activation_offload(blocks, store, horizon=horizon, minimum_bytes=1)
    for _ in range(2):
        hidden = torch.randn(2, 4, 32, requires_grad=True) * 1
        for block in blocks:
            hidden = block(hidden)
        hidden.sum().backward()
    assert store.waits == 0


def test_waiting_is_counted(tmp_path, monkeypatch):
    store, go = DiskStore(tmp_path), threading.Event()
    stored = store.put(torch.ones(64))
    quick = stored.load()
    store.reader.submit(lambda: None).result(timeout=HANG_SECONDS)
    assert quick().sum() == 64 and store.waits == 0
    store.reader.submit(go.wait, HANG_SECONDS)
    slow = stored.load()
    wait = stores._wait
    monkeypatch.setattr(stores, "_wait", lambda reading: (go.set(), wait(reading))[1])
    assert slow().sum() == 64 and store.waits == 1
