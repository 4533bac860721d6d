"""Speed of the ``smddp`` backend's collectives inside one host, beside gloo, Open MPI and what memory allows.

    python benchmarks/collectives.py --output benchmarks/results/collectives.md
    python benchmarks/collectives.py --quick                                            # a look, a minute

What is compared, and how, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from collective_ranks import CONTENDERS, Case, Gate, Times
from pages import Bystanders, origin, publish

KIB, MIB = 2**10, 2**20
SIZES = [4 * KIB << 2 * i for i in range(9)]  # 4 KiB to 256 MiB
QUICK_SIZES = [4 * KIB, 64 * KIB, MIB, 16 * MIB]
SMALL = 64 * KIB  # up to here there are enough calls for a 99th percentile
MEMORY_LIMIT = 4 * 2**30  # buffers of a case, over all ranks
# Buffers of one rank, in parts, for so many ranks: those of the memory limit and the shared ones included.
OPERATIONS: dict[str, Callable[[int], int]] = {
    "all_gather": lambda size: 2 + 2 * size,
    "reduce_scatter": lambda size: 2 + 2 * size,
    "all_reduce": lambda size: 3,
    "broadcast": lambda size: 2,
    "barrier": lambda size: 0,
}
Measured = dict[tuple[int, Case], dict[str, Times]]  # (processes, case) -> contender -> times of the slowest rank


@dataclasses.dataclass(frozen=True)
class Target:
    """A figure to reach: at least so many times as fast as ``other``, or, without one, at most so many seconds."""

    operation: str
    goal: float
    other: str = ""
    sizes: tuple[float, float] = (0, math.inf)  # bytes, both included
    contender: str = "smddp"
    processes: int = 0  # 0: any number

    def __str__(self) -> str:
        first, last = self.sizes
        sizes = f"{readable(int(first))}" if first else "any size"
        if last != first:
            sizes += "" if not first else " and more" if last == math.inf else f" to {readable(int(last))}"
        parts = [self.operation if self.contender == "smddp" else f"{self.operation}, {CONTENDERS[self.contender][0]}"]
        parts += [sizes] if self.operation != "barrier" else []
        goal = (
            f"at least {self.goal:g} x {CONTENDERS[self.other][0]}" if self.other else f"at most {duration(self.goal)}"
        )
        return f"{', '.join(parts)}: {goal}"

    def value(self, found: dict[str, Times]) -> float | None:
        """Return the value to compare with the goal; None if it was not measured."""
        if self.other:
            return times_as_fast(found, self.contender, self.other)
        return median(found[self.contender]) if self.contender in found else None


TARGETS = [
    Target("all_gather", 15, "gloo", (4 * KIB, 16 * KIB)),
    Target("all_gather", 10, "gloo", (64 * KIB, 64 * KIB)),
    Target("all_gather", 5, "gloo", (MIB, math.inf)),
    Target("all_gather", 0.7, "mpi", (MIB, math.inf), processes=2),
    Target("all_gather", 20e-6, contender="shared"),
    Target("reduce_scatter", 6, "gloo"),
    Target("all_reduce", 3, "gloo"),
    Target("barrier", 20, "gloo"),
]


# --- measuring


def cases(operations: Sequence[str], processes: int, *, quick: bool) -> list[Case]:
    """List the cases for this number of processes."""
    found = []
    for operation, parts in OPERATIONS.items():
        sizes = [0] if operation == "barrier" else QUICK_SIZES if quick else SIZES
        for nbytes in sizes if operation in operations else ():
            if nbytes * parts(processes) * processes > MEMORY_LIMIT:
                continue
            rounds = 40 if nbytes <= SMALL else 25 if nbytes <= MIB else 11 if nbytes <= 16 * MIB else 7
            calls = 10 if nbytes <= SMALL else 3
            found.append(Case(operation, nbytes, max(3, rounds // 4) if quick else rounds, calls))
    return found


def command(processes: int, folder: Path, *, mpi: bool) -> list[str]:
    """Return the command that starts the processes."""
    script = str(Path(__file__).with_name("collective_ranks.py"))
    if not mpi:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        return [sys.executable, *torchrun, script, str(folder)]
    options = ["-np", str(processes), "--oversubscribe", "--bind-to", "none"]
    if processes > len(os.sched_getaffinity(0)):
        # What Open MPI does by itself when a host file tells it how many cores there are: waiting lets others run.
        options += ["--mca", "mpi_yield_when_idle", "1"]
    return ["mpirun", *options, sys.executable, "-m", "mpi4py", "-rc", "threads=False", script, str(folder)]


def measure(processes: int, todo: Sequence[Case], contenders: Sequence[str]) -> Measured:
    """Run all cases in one set of processes.

    Raises:
        subprocess.CalledProcessError: a process failed; it has said why.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = {"processes": processes, "contenders": contenders, "cases": [dataclasses.asdict(c) for c in todo]}
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "gate").write_bytes(bytes(Gate.LINE * processes))
        subprocess.run(command(processes, folder, mpi="mpi" in contenders), env=environment, check=True)
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    return {
        (processes, case): {c: slowest([found[c] for found in of_ranks]) for c in of_ranks[0]}
        for case, of_ranks in zip(todo, zip(*ranks, strict=True), strict=True)
    }


def slowest(ranks: Sequence[Times]) -> Times:
    """Of every call, the time of the rank that took longest."""
    return [[max(of_ranks) for of_ranks in zip(*blocks, strict=True)] for blocks in zip(*ranks, strict=True)]


# --- reporting


def median(times: Times) -> float:
    """Over all calls, in seconds."""
    return statistics.median(itertools.chain(*times))


def times_as_fast(found: dict[str, Times], contender: str, other: str) -> float | None:
    """How many times as fast as another: median over rounds, each with the medians of its calls; None if not run."""
    if contender not in found or other not in found:
        return None
    pairs = zip(found[other], found[contender], strict=True)
    return statistics.median(statistics.median(theirs) / statistics.median(ours) for theirs, ours in pairs)


def readable(nbytes: int) -> str:
    """``4 KiB`` and the like."""
    if not nbytes:
        return "-"
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def duration(seconds: float) -> str:
    """Three digits, in µs or ms."""
    value, unit = (1e6 * seconds, "µs") if seconds < 1e-3 else (1e3 * seconds, "ms")
    return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} {unit}"


def cell(case: Case, times: Times) -> str:
    """Format a contender's time for a table."""
    if case.nbytes > SMALL:
        return duration(median(times))
    percentile = statistics.quantiles(itertools.chain(*times), n=100)[98]
    return f"{duration(median(times))} / {duration(percentile)}"


def table(rows: list[tuple[Case, dict[str, Times]]]) -> list[str]:
    """One operation with one number of processes, a row for each size."""
    contenders = list(rows[0][1])
    ratios = [name for name in contenders if name in ("gloo", "mpi", "limit")]
    head = ["per rank", *(CONTENDERS[name][0] for name in contenders), *(f"x {CONTENDERS[name][0]}" for name in ratios)]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for case, found in rows:
        cells = [readable(case.nbytes), *(cell(case, times) for times in found.values())]
        cells += [f"{times_as_fast(found, 'smddp', other):.3g}" for other in ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict(target: Target, measured: Measured, processes: int) -> str:
    """Whether a target is met at every size, and the worst value."""
    if target.processes not in (0, processes):
        return "-"
    values: dict[str, float] = {}
    for (size, case), found in measured.items():
        if (
            size == processes
            and case.operation == target.operation
            and target.sizes[0] <= case.nbytes <= target.sizes[1]
        ):
            value = target.value(found)
            if value is not None:
                values[readable(case.nbytes)] = value
    if not values:
        return "not measured"
    at = (min if target.other else max)(values, key=values.__getitem__)
    met = values[at] >= target.goal if target.other else values[at] <= target.goal
    shown = f"{values[at]:.3g} x" if target.other else duration(values[at])
    return f"{'met' if met else '**not met**'}: {shown}{f' at {at}' if len(values) > 1 else ''}"


def report(measured: Measured, arguments: argparse.Namespace, contenders: Sequence[str], remark: str) -> str:
    """Return the page for ``benchmarks/results``."""
    versions = []
    if "mpi" in contenders:
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
        versions = [version.partition("\n")[0].replace("mpirun (Open MPI)", "Open MPI").strip()]
        versions.append(f"mpi4py {importlib.metadata.version('mpi4py')}")
    counts = arguments.processes
    lines = [
        "# Collectives inside one host", "", *origin(*versions, "OMP_NUM_THREADS=1"),
        "Times are medians over all calls, up to 64 KiB with the 99th percentile (p50 / p99); a call takes as long as",
        "its slowest rank. Ratios are medians over rounds: how many times as fast smddp is; of the memory limit, what",
        "fraction of its speed. benchmarks/README.md describes the contenders.", remark,
    ]  # fmt: skip
    if "mpi" not in contenders:
        lines += ["", "Open MPI is left out: mpirun and mpi4py are not both installed."]
    lines += ["", "## Targets", "", f"| the worst of all sizes | {' | '.join(f'{n} processes' for n in counts)} |"]
    lines += ["|---|" + "---|" * len(counts)]
    for target in TARGETS:
        if target.operation in arguments.operations:
            lines.append(f"| {target} | {' | '.join(verdict(target, measured, n) for n in counts)} |")
    for processes in counts:
        for operation in arguments.operations:
            rows = [(c, found) for (n, c), found in measured.items() if (n, c.operation) == (processes, operation)]
            lines += ["", f"## {operation}, {processes} processes", "", *table(rows)]
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="ranks, one run each (default 2 4)")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--quick", action="store_true", help="four sizes, a quarter of the rounds")
    parser.add_argument("--output", type=Path, help="write the tables here; they are printed in any case")
    arguments = parser.parse_args(argv)
    if min(arguments.processes) < 2:
        parser.error("--processes must be at least 2: one process exchanges nothing")
    return arguments


def main(argv: list[str]) -> None:
    """Measure, then print and write the tables."""
    arguments = parse(argv)
    mpi = shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None
    contenders = [name for name in CONTENDERS if name != "mpi" or mpi]
    measured: Measured = {}
    bystanders = Bystanders()
    for processes in arguments.processes:
        try:
            measured |= measure(processes, cases(arguments.operations, processes, quick=arguments.quick), contenders)
        except subprocess.CalledProcessError as error:
            sys.exit(f"a process failed: {error}")
    publish(report(measured, arguments, contenders, bystanders.describe()), arguments.output)


if __name__ == "__main__":
    main(sys.argv[1:])
