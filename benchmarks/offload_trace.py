"""A profiler's trace of a step whose activations go to disk: what moves while the main thread computes.

    python benchmarks/offload_trace.py --offload_dir /fast/disk --output trace.json    # open it at ui.perfetto.dev

Prints, for each horizon, how much of the writing and reading lay beside computing, and how often somebody waited.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

from smp.errors import UserError
from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.offload import DiskStore, apply_activation_offload, require_directory
from smp.parallel.offload.stores import READ, WAIT, WRITE


class Block(nn.Module):
    """Its forward, also when it is computed again, is a range ``block <index>``."""

    def __init__(self, index: int, width: int):
        super().__init__()
        self.name, self.linear = f"block {index}", nn.Linear(width, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        with record_function(self.name):
            return hidden_states + self.linear(hidden_states).relu()


class Range(NamedTuple):
    """A named range of one thread, in microseconds."""

    name: str
    thread: Any
    start: float
    end: float

    def overlap(self, other: Range) -> float:
        """Microseconds that both run."""
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


def traced_step(directory: Path, trace: Path, *, horizon: int, layers: int, width: int, tokens: int) -> DiskStore:
    """Write the trace of one forward and backward, after another that warms up."""
    torch.manual_seed(0)
    blocks = [Block(index, width) for index in range(layers)]
    apply_activation_checkpointing(blocks)
    store = DiskStore(directory)
    apply_activation_offload(blocks, store, horizon=horizon, minimum_bytes=1)

    def step() -> None:
        hidden = torch.randn(tokens, width, requires_grad=True) * 1
        with record_function("forward"):
            for block in blocks:
                hidden = block(hidden)
            loss = hidden.square().mean()
        with record_function("backward"):
            loss.backward()

    step()
    store.waits = 0
    # Without the option the profiler sees the thread that starts it alone, not the ones that write and read.
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiler:
        step()
    profiler.export_chrome_trace(str(trace))
    return store


def ranges(trace: Path) -> list[Range]:
    """All ranges of a trace, in the order of their starts."""
    events = json.loads(trace.read_text())["traceEvents"]
    found = [
        Range(event["name"], event["tid"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("ph") == "X"
    ]
    return sorted(found, key=lambda each: each.start)


def beside_computing(every: list[Range], name: str) -> tuple[int, float, float]:
    """Count transfers; sum their milliseconds, and the fraction of these in which the main thread computed."""
    main = next(each.thread for each in every if each.name == "backward")
    transfers = [each for each in every if each.name == name]
    # Operations that lie in no other one of their thread; while it waits, the main thread runs none.
    operations: list[Range] = []
    for each in every:
        computes = each.thread == main and each.name.startswith("aten::")
        if computes and (not operations or each.start >= operations[-1].end):
            operations.append(each)
    total = sum(each.end - each.start for each in transfers)
    beside = sum(transfer.overlap(operation) for transfer in transfers for operation in operations)
    return len(transfers), total / 1000, beside / total if total else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--offload_dir", required=True, help="directory on a fast disk")
    parser.add_argument("--horizons", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--output", help="where to keep the trace of the last horizon")
    arguments = parser.parse_args()
    shape = {key: getattr(arguments, key) for key in ("layers", "width", "tokens")}
    try:
        require_directory(directory := Path(arguments.offload_dir))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("| horizon | writes | ms | beside computing | reads | ms | beside computing | waits of backward | ms |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(arguments.output or Path(folder, "trace.json"))
        for horizon in arguments.horizons:
            store = traced_step(directory, trace, horizon=horizon, **shape)
            every = ranges(trace)
            writes, writing, hidden = beside_computing(every, WRITE)
            reads, reading, covered = beside_computing(every, READ)
            backward = next(each for each in every if each.name == "backward")
            waiting = sum(each.overlap(backward) for each in every if each.name == WAIT) / 1000
            print(
                f"| {horizon} | {writes} | {writing:.1f} | {hidden:.0%} | {reads} | {reading:.1f} | {covered:.0%} | "
                f"{store.waits} | {waiting:.1f} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
