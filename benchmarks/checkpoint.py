"""Checkpoints beside plain torch: how long training stands still, what hashing and flushing cost, loading, memory.

    python benchmarks/checkpoint.py --directory /fast/disk --output benchmarks/results/checkpoint.md
    python benchmarks/checkpoint.py --directory /tmp --model llama_tiny --rounds 2   # a trial

What is compared, and how, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pages import Bystanders, origin, publish
from step_variants import OPTIM, SIZES, resolved_model
from torch import nn

from smp.checkpoint import safetensors_io
from smp.checkpoint.background import HostCopies
from smp.checkpoint.checkpointer import Checkpointer
from smp.checkpoint.directory import checkpoint_name
from smp.checkpoint.fetch import verify_together
from smp.checkpoint.manifest import Manifest, read_manifest
from smp.checkpoint.restore import restore
from smp.checkpoint.state import model_entry, state_tensors
from smp.checkpoint.storage import Storage
from smp.config import ActivationConfig, ParallelConfig, Settings
from smp.data.data_pipeline import StepBatch
from smp.loss import shift_labels
from smp.memory.tracker import rss_bytes
from smp.mesh import Mesh, resolve_mesh
from smp.optim.optimizers import build_optimizer
from smp.parallel.parallelize import prepare_model
from smp.parallel.technique import Setup
from smp.train.step import train_step

PROCESSES = 2
MIB = 2**20


class Subject:
    """A model, sharded, with its optimizer's state."""

    def __init__(self, name: str):
        parallel = ParallelConfig(sharding_strategy="full_shard")
        mesh = resolve_mesh(parallel, world_size=PROCESSES, local_world_size=PROCESSES)
        self.mesh: Mesh = mesh.join("cpu")
        self.resolved = resolved_model(name)
        settings = Settings((parallel, ActivationConfig()))
        self.setup = Setup(self.resolved.family, self.mesh, settings)
        self.model: nn.Module = prepare_model(
            self.resolved, mesh=self.mesh, settings=settings,
            dtype=torch.float32, device=torch.device("cpu"), seed=0, load_weights=False,
        )  # fmt: skip
        self.optimizer = build_optimizer(self.model, OPTIM, lr=1e-4)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter] = self.optimizer.initial_state(parameter, group)
        self.tensors = state_tensors(self.model, self.optimizer)
        ids = torch.randint(0, 500, (1, 128))
        self.batch = StepBatch([{"input_ids": ids, "targets": shift_labels(ids)}], torch.zeros(1, dtype=torch.int64))

    def manifest(self, step: int) -> Manifest:
        return Manifest(
            step=step, world_size=PROCESSES, degrees={"tp": 1},
            model=model_entry("m", self.resolved.hf_config),
            run={"progress": {"step": step, "samples": 0, "tokens": 0}},
        )  # fmt: skip


def dcp_save(subject: Subject, folder: Path, step: int) -> float:
    """Seconds that training stands still."""
    start = time.perf_counter()
    dcp.save(subject.tensors, checkpoint_id=folder / f"dcp-{step}")
    return time.perf_counter() - start


def checkpointer(subject: Subject, folder: Path) -> Checkpointer:
    """Build what the job saves with."""
    return Checkpointer(Storage(folder), subject.model, subject.optimizer, name="m", copies=_copies)


def smp_save(subject: Subject, folder: Path, step: int, *, check: bool = True) -> float:
    """Time a save of the same state as the job does it."""
    start = time.perf_counter()
    checkpointer(subject, folder).write(subject.manifest(step), wait=True, verify=check)
    return time.perf_counter() - start


class _NoDigest:
    def update(self, data: Any) -> None:
        """Costs nothing."""

    def hexdigest(self) -> str:
        return "0"


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def without_digests(subject: Subject, folder: Path, step: int) -> float:
    """Leave the hashing out, to time the rest."""
    with replaced(safetensors_io, "new_digest", _NoDigest):
        return smp_save(subject, folder, step, check=False)


def without_flush(subject: Subject, folder: Path, step: int) -> float:
    """Leave the flushes to the disk out, to time the rest: not a checkpoint to rely on."""
    with replaced(os, "fsync", lambda descriptor: None):
        return smp_save(subject, folder, step, check=False)


_dcp_group: list[dist.ProcessGroup] = []
_copies = HostCopies()
STEPS = 3  # of training, beside an asynchronous save


def _train(subject: Subject, enter: Callable[[str], None] = lambda phase: None) -> float:
    """Seconds of some steps."""
    start = time.perf_counter()
    for _ in range(STEPS):
        train_step(
            subject.model, subject.optimizer, subject.batch, setup=subject.setup, device=torch.device("cpu"),
            grad_clip=1.0, enter=enter,
        )  # fmt: skip
    return time.perf_counter() - start


def dcp_async(subject: Subject, folder: Path, step: int) -> tuple[float, float]:
    """Seconds until training may go on, and seconds that it loses with what the writing takes from the next steps."""
    if not _dcp_group:
        _dcp_group.append(dist.new_group(backend="gloo"))
    alone = _train(subject)
    start = time.perf_counter()
    future = dcp.async_save(subject.tensors, checkpoint_id=folder / f"dcpa-{step}", process_group=_dcp_group[0])
    stalled = time.perf_counter() - start
    lost = stalled + _train(subject) - alone
    start = time.perf_counter()
    future.result()  # type: ignore[union-attr]
    return stalled, lost + time.perf_counter() - start


def smp_async(subject: Subject, folder: Path, step: int) -> tuple[float, float]:
    """Time the job's asynchronous save: beginning, the update that waits for the copy, publishing."""
    alone = _train(subject)
    start = time.perf_counter()
    saving = checkpointer(subject, folder)
    saving.write(subject.manifest(step), wait=False, verify=True)
    write = saving.writing
    assert write is not None
    stalled = time.perf_counter() - start
    waited = [0.0]

    def enter(phase: str) -> None:
        if phase == "optimizer":
            begun = time.perf_counter()
            write.wait_for_copy()
            waited[0] += time.perf_counter() - begun

    lost = stalled + _train(subject, enter) - alone
    start = time.perf_counter()
    write.wait()
    lost += time.perf_counter() - start
    dist.barrier()
    start = time.perf_counter()
    saving.finish()
    published = time.perf_counter() - start
    return stalled + waited[0] + published, lost + published


def dcp_load(subject: Subject, folder: Path, step: int) -> float:
    """Load what ``dcp_save`` has written in this round."""
    start = time.perf_counter()
    dcp.load(subject.tensors, checkpoint_id=folder / f"dcp-{step}")
    return time.perf_counter() - start


def smp_load(subject: Subject, folder: Path, step: int, *, content: bool = True) -> float:
    """Verify and load what ``smp_save`` has written in this round."""
    path = folder / checkpoint_name("m", step)
    start = time.perf_counter()
    manifest = read_manifest(path)
    problems = verify_together(path, manifest, content=content)
    assert problems == []
    restore(path, manifest, subject.model, subject.optimizer, seed="0")
    return time.perf_counter() - start


MEASURES: dict[str, Callable[[Subject, Path, int], float | tuple[float, float]]] = {
    "dcp.save": dcp_save,
    "smp, verified (hashed, flushed, read back)": smp_save,
    "dcp.load": dcp_load,
    "smp load, verified": smp_load,
    "smp, hashed and flushed": functools.partial(smp_save, check=False),
    "smp load, sizes only": functools.partial(smp_load, content=False),
    "smp, flushed only": without_digests,
    "smp, hashed only": without_flush,
    "dcp.async_save": dcp_async,
    "smp, asynchronous": smp_async,
}

# Measurements after which the files stay, for the loads that follow.
LOADED_LATER = {"dcp.save", "smp, verified (hashed, flushed, read back)", "dcp.load", "smp, hashed and flushed"}


@contextlib.contextmanager
def peak_of_rss(into: list[int]) -> Iterator[None]:
    """Add the most that the process's resident memory grew to ``into``, sampled every 2 ms."""
    gc.collect()
    before, stop, found = rss_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.002):
            found[0] = max(found[0], rss_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        into.append(found[0])


def _rank(rank: int, port: int, name: str, folder: str, rounds: int, output: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(PROCESSES))
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    subject = Subject(name)
    seconds: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    memory: dict[str, list[int]] = {measure: [] for measure in MEASURES}
    lost: dict[str, list[float]] = {}
    for number in range(-1, rounds):  # the first only warms up
        for measure, run in MEASURES.items():
            dist.barrier()
            grown: list[int] = []
            with peak_of_rss(grown):
                found = run(subject, Path(folder), number + 1)
                spent = torch.tensor(found if isinstance(found, tuple) else (found, found), dtype=torch.float64)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)  # the slowest rank holds all up
            if number >= 0:
                seconds[measure].append(float(spent[0]))
                lost.setdefault(measure, []).append(float(spent[1]))
                memory[measure].append(grown[0])
            if rank == 0:
                print(f"round {number + 1} {measure}: {spent.tolist()} s, {grown[0] / MIB:.0f} MiB", file=sys.stderr)
            if measure not in LOADED_LATER:
                _remove(rank, folder)
    if rank == 0:
        size = sum(t.numel() * t.element_size() for t in subject.tensors.values())
        Path(output).write_text(json.dumps({"seconds": seconds, "memory": memory, "lost": lost, "bytes": size}))
    dist.destroy_process_group()


def _remove(rank: int, folder: str) -> None:
    """Delete what has been written."""
    dist.barrier()
    for path in Path(folder).iterdir() if rank == 0 else ():
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    dist.barrier()


def page(found: dict[str, Any], model: str, rounds: int, bystanders: Bystanders) -> str:
    """Return the result page."""
    seconds, memory, size = found["seconds"], found["memory"], found["bytes"]
    lines = ["# Saving and loading checkpoints", "", *origin(f"{PROCESSES} processes of one thread, {rounds} rounds")]
    lines += [
        f"State of {model} with AdamW: {size / MIB:.0f} MiB, fully sharded, fp32. {bystanders.describe()} "
        f"Seconds of the slowest rank; ratios are medians of the ratios of each round.",
        "",
        "| | median, s | p99, s | MiB/s | host memory of rank 0, MiB | of torch's |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for measure, values in seconds.items():
        peer = "dcp.load" if "load" in measure else "dcp.async_save" if "async" in measure else "dcp.save"
        ratio = statistics.median(a / b for a, b in zip(values, seconds[peer], strict=True))
        median = statistics.median(values)
        p99 = sorted(values)[min(len(values) - 1, round(0.99 * (len(values) - 1)))]
        speed = "" if "async" in measure else f"{size / MIB / median:.0f}"
        lines.append(
            f"| {measure} | {median:.3f} | {p99:.3f} | {speed} | {statistics.median(memory[measure]) / MIB:.0f} | "
            f"{ratio:.2f} |"
        )
    stall = statistics.median(
        a / b for a, b in zip(seconds["smp, asynchronous"], seconds["smp, hashed and flushed"], strict=True)
    )
    ours, theirs = (statistics.median(found["lost"][name]) for name in ("smp, asynchronous", "dcp.async_save"))
    lines += [
        "",
        f"An asynchronous save stops training for {stall:.2f} of a synchronous one. With what copying and writing take "
        f"from the cores that train meanwhile, training loses {ours:.2f} s to it, {theirs:.2f} s to dcp.async_save.",
        "",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="an existing directory on the disk to measure")
    parser.add_argument("--model", choices=[name for name in SIZES if name.startswith("llama")], default="llama108m")
    parser.add_argument("--rounds", type=int, default=9, help="times that everything is measured (default 9)")
    parser.add_argument("--output", type=Path, help="write the page here; it is printed in any case")
    arguments = parser.parse_args(argv)
    bystanders = Bystanders()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder, tempfile.NamedTemporaryFile() as output:
        context = multiprocessing.get_context("fork")
        port = 20_000 + os.getpid() % 20_000
        ranks = [
            context.Process(target=_rank, args=(r, port, arguments.model, folder, arguments.rounds, output.name))
            for r in range(PROCESSES)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("error: a process failed, see above")
        found = json.loads(Path(output.name).read_text())
    publish(page(found, arguments.model, arguments.rounds, bystanders), arguments.output)


if __name__ == "__main__":
    main()
