"""AllGather of the GPUs of one host: copy engines beside NCCL, alone and beside matrix products.

    python benchmarks/collectives_cuda.py --output benchmarks/results/collectives_cuda.md      # as many ranks as GPUs
    python benchmarks/collectives_cuda.py --quick
    python benchmarks/collectives_cuda.py --processes 2 --one_gpu      # a trial, without NCCL, which refuses that

Each contender is timed alone, and then on a stream of its own while matrix products that last about as long run on
another; what counts there is how much longer the products take. Contenders take turns in shuffled order within every
round; the slowest rank counts, and the median over rounds is shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pages import origin, publish

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import smp.comm
from smp.comm.cuda import PATH, SymmetricAllGather, zero_copy_available

MIB = 2**20
SIZES = [MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]  # bytes of one rank's part
CONTENDERS = {"nccl": "NCCL", "smddp": "copy engine", "shared": "copy engine, symmetric buffer"}
WIDTH = 4096  # of the matrix products, bf16
Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation at one size."""

    operation: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.operation} {self.nbytes / MIB:g} MiB"


def contenders(case: Case, nccl: dist.ProcessGroup | None) -> dict[str, Call]:
    """Return the call of each contender, on the current stream."""
    size, rank, numel = dist.get_world_size(), dist.get_rank(), case.nbytes // 2
    world = dist.distributed_c10d._get_default_group()
    part = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    comm = SymmetricAllGather(world)
    whole = torch.ones(numel * size, dtype=torch.bfloat16, device="cuda")
    shared = comm.allocate((numel * size,), dtype=torch.bfloat16, device=part.device)
    shared.fill_(1)
    # torch 2.13's names, or the older ones.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls: dict[str, Call] = {
        "nccl": lambda: gather(whole, part, group=nccl),
        "smddp": lambda: gather(whole, part),
        "shared": lambda: comm(shared, shared[rank * numel :][:numel], world),
    }
    if nccl is None:
        del calls["nccl"]
    return calls


def meet() -> None:
    """Let all ranks begin together; NCCL has no part in it."""
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))


def clock(call: Call, calls: int) -> float:
    """Seconds of one call, of several in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    meet()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / calls


class Products:
    """Matrix products on the current stream, as many as last for some time."""

    def __init__(self) -> None:
        self._left = torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")
        self._out = torch.empty_like(self._left)
        clock(self._one, 5)
        self._seconds = clock(self._one, 20)

    def _one(self) -> None:
        torch.mm(self._left, self._left, out=self._out)

    def beside(self, call: Call | None, seconds: float) -> float:
        """Seconds of products that alone last ``seconds``, with a call on another stream that begins with them."""
        count, stream = max(4, round(seconds / self._seconds)), torch.cuda.Stream()

        def both() -> None:
            stream.wait_stream(torch.cuda.current_stream())
            if call is not None:
                with torch.cuda.stream(stream):
                    call()
            for _ in range(count):
                self._one()

        return clock(both, 1)


def measure(case: Case, nccl: dist.ProcessGroup | None, products: Products, rounds: int) -> dict[str, list[float]]:
    """Measure this rank's seconds by contender, a value for each round."""
    calls = contenders(case, nccl)
    for call in calls.values():
        clock(call, 3)
    slowest = [max(clock(call, 3) for call in calls.values())]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, slowest)  # so that all ranks compute the same
    seconds = max(value for (value,) in everyone)
    times, shuffle = defaultdict(list), random.Random(case.nbytes)
    for _ in range(rounds):
        names = list(calls)
        shuffle.shuffle(names)
        times["products"].append(products.beside(None, seconds))
        for name in names:
            times[name].append(clock(calls[name], 3))
            times[f"products beside {name}"].append(products.beside(calls[name], seconds))
    return times


def worker(rank: int, size: int, folder: str, cases: list[Case], rounds: int, one_gpu: bool) -> None:
    """One rank: all cases."""
    torch.cuda.set_device(0 if one_gpu else rank)
    dist.init_process_group("smddp", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    if reason := zero_copy_available(dist.distributed_c10d._get_default_group()):
        raise SystemExit(f"the GPUs cannot read each other's memory: {reason}")
    nccl = None if one_gpu else dist.new_group(backend="nccl")
    products = Products()
    results = []
    for case in cases:
        results.append(measure(case, nccl, products, rounds))
        torch.cuda.empty_cache()
        if rank == 0:
            found = {name: f"{statistics.median(values) * 1e3:.3f} ms" for name, values in results[-1].items()}
            print(f"{case}: {found}", file=sys.stderr)
    timed = [key for key in smp.comm.report() if key.operation == "all_gather"]
    if any(key.path != PATH for key in timed if key.size >= SIZES[0]):
        raise SystemExit(f"not everything went by copy engine:\n{smp.comm.report()}")
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    meet()
    dist.destroy_process_group()


def tables(cases: list[Case], ranks: list[list[dict[str, list[float]]]]) -> list[str]:
    """Markdown: a line for each case and contender."""
    lines = [
        "| operation, bytes of a rank | contender | alone, ms | GB/s into a GPU | times NCCL | products longer by |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for number, case in enumerate(cases):
        found = {
            what: [max(values) for values in zip(*(rank[number][what] for rank in ranks), strict=True)]
            for what in ranks[0][number]
        }
        for name, title in CONTENDERS.items():
            if name not in found:
                continue
            alone = statistics.median(found[name])
            ratio = ""
            if "nccl" in found:
                ratio = f"{statistics.median(n / t for n, t in zip(found['nccl'], found[name], strict=True)):.2f}"
            slower = statistics.median(
                beside / lone for beside, lone in zip(found[f"products beside {name}"], found["products"], strict=True)
            )
            rate = (len(ranks) - 1) * case.nbytes / alone / 1e9
            lines.append(
                f"| {case} | {title} | {alone * 1e3:.3f} | {rate:.0f} | {ratio} | {(slower - 1) * 100:.1f} % |"
            )
    return lines


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    count = torch.cuda.device_count()
    parser.add_argument("--processes", type=int, default=count, help="ranks (default: the GPUs of this machine)")
    parser.add_argument("--one_gpu", action="store_true", help="all ranks on the first GPU, without NCCL")
    parser.add_argument("--rounds", type=int, default=15, help="times that everything is measured (default 15)")
    parser.add_argument("--quick", action="store_true", help="three rounds, fewer sizes")
    parser.add_argument("--output", type=Path, help="write the table here; it is printed in any case")
    arguments = parser.parse_args(argv)
    if not count:
        parser.error("no CUDA device is visible")
    if arguments.processes < 2 or (arguments.processes > count and not arguments.one_gpu):
        parser.error(f"--processes must be 2 to {count}, the GPUs of this machine; or give --one_gpu")
    return arguments


def main(argv: list[str]) -> None:
    """Measure, then print and write the table."""
    arguments = parse(argv)
    os.environ.update(SMP_SYMMETRIC_MINIMUM_BYTES="0")
    if arguments.one_gpu:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    sizes = SIZES[1:4] if arguments.quick else SIZES
    cases = [Case("all_gather", nbytes) for nbytes in sizes]
    rounds, size = 3 if arguments.quick else arguments.rounds, arguments.processes
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(size, folder, cases, rounds, arguments.one_gpu), nprocs=size)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    gpus = f"{size} ranks on {1 if arguments.one_gpu else size} x {torch.cuda.get_device_name(0)}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    lines = ["# Collectives of GPUs", "", *origin(f"CUDA {torch.version.cuda}, NCCL {nccl}", gpus)]
    lines += [(__doc__ or "").rpartition("\n\n")[2].strip(), "", *tables(cases, ranks)]
    publish("\n".join(lines) + "\n", arguments.output)


if __name__ == "__main__":
    main(sys.argv[1:])
