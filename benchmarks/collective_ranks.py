"""What every process of ``collectives.py`` runs, which starts it: the contenders, and the clock.

    mpirun -np 2 python -m mpi4py benchmarks/collective_ranks.py FOLDER
    torchrun --nproc_per_node 2 benchmarks/collective_ranks.py FOLDER       # without Open MPI

The folder holds ``plan.json``; each rank leaves its times there.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from smp.comm.fsdp import SharedAllGather, SharedReduceScatter  # registers smddp, as all of smp.comm

WARMUP_CALLS = 3
Times = list[list[float]]  # seconds, by round and call


@dataclasses.dataclass(frozen=True)
class Case:
    """One table row: an operation at one size."""

    operation: str
    nbytes: int  # of a rank: given to all_gather, all_reduce and broadcast, got from reduce_scatter
    rounds: int
    calls: int  # timed calls in a row of each contender in a round


@dataclasses.dataclass(frozen=True)
class Rank:
    """This process, and the memory of one case, which all contenders use in turn.

    ``part`` is ``nbytes`` of fp32, ``whole`` as much for every rank (empty where the operation does not need it).
    """

    rank: int
    size: int
    part: Tensor
    whole: Tensor


@dataclasses.dataclass(frozen=True)
class Call:
    """A contender's call, ready to be timed; ``source`` and ``output`` (1-D) are looked at to see that it is right."""

    run: Callable[[], Any]
    source: Tensor | None = None
    output: Tensor | None = None


def touched(numel: int) -> Tensor:
    """Zeros in pages of their own: ``torch.zeros`` may be one page of the kernel's, read again and again."""
    return torch.empty(numel).zero_()


def connected(backend: str) -> Any:
    """Make a group of all ranks, with its connections and threads."""
    group = dist.new_group(backend=backend)
    dist.barrier(group=group)
    return group


def bind(rank: int, size: int) -> None:
    """Give this thread a core of its own, if there are enough; threads that exist already stay free.

    Otherwise the kernel may leave two ranks on one core for minutes, where they take turns.
    """
    cores = sorted(os.sched_getaffinity(0))
    if size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


# --- the contenders: one method for each operation they take part in, which makes ready everything but the call


class Torch:
    """torch.distributed over one backend."""

    def __init__(self, backend: str):
        self._group = connected(backend)

    def all_gather(self, r: Rank) -> Call:
        # The older names warn at each call since torch 2.13, which takes time.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return Call(lambda: gather(r.whole, r.part, group=self._group), r.part, r.whole)

    def reduce_scatter(self, r: Rank) -> Call:
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return Call(lambda: scatter(r.part, r.whole, group=self._group), r.whole, r.part)

    def all_reduce(self, r: Rank) -> Call:
        return Call(lambda: dist.all_reduce(r.part, group=self._group), r.part, r.part)

    def broadcast(self, r: Rank) -> Call:
        return Call(lambda: dist.broadcast(r.part, 0, group=self._group), r.part, r.part)

    def barrier(self, r: Rank) -> Call:
        return Call(lambda: dist.barrier(group=self._group))


class SharedBuffers:
    """What ``fully_shard`` exchanges through: gathered outputs and reduce-scatter inputs that the ranks share."""

    def __init__(self) -> None:
        self._group = connected("smddp")

    def all_gather(self, r: Rank) -> Call:
        gather = SharedAllGather(self._group)
        output = gather.allocate(r.whole.shape, dtype=r.whole.dtype, device=r.whole.device)
        source = output.view(r.size, -1)[r.rank]
        return Call(lambda: gather(output, source, self._group), source, output)

    def reduce_scatter(self, r: Rank) -> Call:
        scatter = SharedReduceScatter(self._group)
        source, output = (scatter.allocate(t.shape, dtype=t.dtype, device=t.device) for t in (r.whole, r.part))
        return Call(lambda: scatter(output, source, self._group, dist.ReduceOp.SUM), source, output)


class OpenMPI:
    """Open MPI through mpi4py, on the same memory."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD

    def all_gather(self, r: Rank) -> Call:
        part, whole = self._buffer(r.part), self._buffer(r.whole)
        return Call(lambda: self._comm.Allgather(part, whole), r.part, r.whole)

    def reduce_scatter(self, r: Rank) -> Call:
        part, whole = self._buffer(r.part), self._buffer(r.whole)
        return Call(lambda: self._comm.Reduce_scatter_block(whole, part), r.whole, r.part)

    def all_reduce(self, r: Rank) -> Call:
        in_place, part = self._mpi.IN_PLACE, self._buffer(r.part)
        return Call(lambda: self._comm.Allreduce(in_place, part), r.part, r.part)

    def broadcast(self, r: Rank) -> Call:
        part = self._buffer(r.part)
        return Call(lambda: self._comm.Bcast(part, 0), r.part, r.part)

    def barrier(self, r: Rank) -> Call:
        return Call(self._comm.Barrier)

    def _buffer(self, tensor: Tensor) -> list[Any]:
        return [tensor.numpy(), self._mpi.FLOAT]


class MemoryLimit:
    """The least that any algorithm must move into private memory, by all ranks at once and without any signal.

    All reads are of this rank's own memory; the results are not the operation's.
    """

    def __init__(self) -> None:
        self._copy = ctypes.CDLL(None).memcpy
        self._copy.argtypes, self._copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None

    def all_gather(self, r: Rank) -> Call:
        source = touched(r.whole.numel())
        return Call(lambda: self._copy_all(r.whole, source))

    def reduce_scatter(self, r: Rank) -> Call:
        parts = list(r.whole.view(r.size, -1))
        return Call(lambda: self._add(parts, r.part))

    def all_reduce(self, r: Rank) -> Call:
        """Each rank adds up its share of the ranks' tensors and copies the others' sums."""
        share = r.part.numel() // r.size
        shares, sums = [touched(share) for _ in range(r.size)], touched(r.part.numel() - share)

        def run() -> None:
            self._add(shares, r.part[:share])
            self._copy_all(r.part[share:], sums)

        return Call(run)

    def broadcast(self, r: Rank) -> Call:
        source = touched(r.part.numel())
        return Call((lambda: self._copy_all(r.part, source)) if r.rank else (lambda: None))

    def _copy_all(self, output: Tensor, source: Tensor) -> None:
        self._copy(output.data_ptr(), source.data_ptr(), output.nbytes)

    @staticmethod
    def _add(parts: list[Tensor], output: Tensor) -> None:
        torch.add(parts[0], parts[1], out=output)
        for part in parts[2:]:
            output.add_(part)


# To add one: a class with the operations it takes part in, and an entry here.
CONTENDERS: dict[str, tuple[str, Callable[[], object]]] = {
    "smddp": ("smddp", lambda: Torch("smddp")),
    "shared": ("shared buffers", SharedBuffers),
    "gloo": ("gloo", lambda: Torch("gloo")),
    "mpi": ("Open MPI", OpenMPI),
    "limit": ("memory limit", MemoryLimit),
}


# --- right, then fast


def buffers(case: Case, rank: int, size: int) -> Rank:
    """Return the memory that a case needs."""
    numel = case.nbytes // 4
    several = case.operation in ("all_gather", "reduce_scatter")
    return Rank(rank, size, touched(numel), touched(size * numel if several else 0))


class Gate:
    """A barrier that belongs to no contender: counters in a shared file, which everybody watches."""

    LINE = 128  # bytes of a rank

    def __init__(self, path: Path, rank: int, size: int):
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), size * self.LINE)).cast("Q")
        step = self.LINE // 8
        self._own, self._others = rank * step, [r * step for r in range(size) if r != rank]
        self._count = 0

    def __call__(self) -> None:
        """Return when all ranks have called it as often as this one."""
        words, count = self._words, self._count + 1
        self._count = words[self._own] = count
        for other in self._others:
            while words[other] < count:
                os.sched_yield()


def check(case: Case, r: Rank, name: str, call: Call, gate: Gate) -> None:
    """Run the call once with known values: contenders that do not do the work are not measured.

    Raises:
        RuntimeError: the result is wrong.
    """
    if call.source is None or call.output is None:
        call.run()
        return
    call.output.zero_()
    gate()  # the others may share this memory
    parts = call.source.view(r.size, -1) if case.operation == "reduce_scatter" else [call.source]
    for number, part in enumerate(parts):
        part.fill_(r.rank + 1 + 10 * number)
    call.run()
    total = r.size * (r.size + 1) // 2
    expected = {
        "all_gather": [number + 1 for number in range(r.size)],
        "reduce_scatter": [total + 10 * r.size * r.rank],
        "all_reduce": [total],
        "broadcast": [1],
    }[case.operation]
    for got, wanted in zip(call.output.view(len(expected), -1), expected, strict=True):
        if not (got.min() == got.max() == wanted):
            raise RuntimeError(
                f"{name}: {case.operation} of {case.nbytes} bytes on rank {r.rank} gives {got.min()} to {got.max()}, "
                f"{wanted} is right"
            )
    gate()
    call.source.zero_()  # sums in place must not grow through thousands of calls


def measure(case: Case, rank: int, size: int, contenders: dict[str, object], gate: Gate) -> dict[str, Times]:
    """Time every contender that has the operation on this rank, in rounds of shuffled order."""
    memory = buffers(case, rank, size)
    calls: dict[str, Call] = {}
    for name, contender in contenders.items():
        method = getattr(contender, case.operation, None)
        if method is not None:
            calls[name] = method(memory)
            check(case, memory, name, calls[name], gate)
            for _ in range(WARMUP_CALLS):
                calls[name].run()
    times: dict[str, Times] = {name: [] for name in calls}
    generator = random.Random(case.nbytes)  # the same order on every rank
    for _ in range(case.rounds):
        for name in generator.sample(list(calls), len(calls)):
            run, block = calls[name].run, []
            for _ in range(case.calls):
                gate()
                start = time.perf_counter()
                run()
                block.append(time.perf_counter() - start)
            times[name].append(block)
    return times


def main(folder: Path) -> None:
    """Measure the cases of the plan and leave the times in the folder."""
    torch.set_num_threads(1)
    plan = json.loads((folder / "plan.json").read_text())
    variable = "OMPI_COMM_WORLD_RANK" if "OMPI_COMM_WORLD_RANK" in os.environ else "RANK"
    rank, size = int(os.environ[variable]), plan["processes"]
    timeout = datetime.timedelta(minutes=5)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("smddp", store=store, rank=rank, world_size=size, timeout=timeout)
    gate = Gate(folder / "gate", rank, size)
    contenders = {name: CONTENDERS[name][1]() for name in plan["contenders"]}
    bind(rank, size)
    results = []
    for number, values in enumerate(plan["cases"]):
        case = Case(**values)
        if rank == 0:
            where = f"{size} processes, {number + 1}/{len(plan['cases'])}"
            print(f"[{where}] {case.operation}, {case.nbytes} bytes", file=sys.stderr, flush=True)
        results.append(measure(case, rank, size, contenders, gate))
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
