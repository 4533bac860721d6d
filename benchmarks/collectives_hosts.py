"""Speed of the ``smddp`` backend's collectives between hosts, beside gloo's, which knows no hosts.

    python benchmarks/collectives_hosts.py --output benchmarks/results/collectives_hosts.md
    python benchmarks/collectives_hosts.py --quick                                      # a look, a minute

The hosts are network namespaces of one machine, so this needs root. What is compared, and how, is in
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from collective_ranks import Case, Gate, Times, Torch, buffers, measure
from collectives import duration, median, readable, slowest, times_as_fast
from pages import origin, publish

from tests import netns

KIB, MIB = 2**10, 2**20
SIZES = [64 * KIB << 2 * i for i in range(6)]  # 64 KiB to 64 MiB
QUICK_SIZES = [64 * KIB, 4 * MIB, 16 * MIB]
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
BACKENDS = ("smddp", "gloo")
GOAL, GOAL_OF, GOAL_FROM, GOAL_LAYOUT = 1.6, ("all_gather", "reduce_scatter"), 4 * MIB, (2, 2)
Layout = tuple[int, int]  # hosts, ranks on each


@dataclasses.dataclass(frozen=True)
class Result:
    """One case: by backend the times of the slowest rank, and the most bytes that one host has sent in a call."""

    times: dict[str, Times]
    sent: dict[str, int]


def cases(*, quick: bool) -> list[Case]:
    """List the cases. Sizes are of one rank: its input, or its output of a reduce_scatter."""
    found = []
    for operation in OPERATIONS:
        for nbytes in QUICK_SIZES if quick else SIZES:
            rounds, calls = (20, 3) if nbytes <= MIB else (11, 1) if nbytes <= 16 * MIB else (7, 1)
            found.append(Case(operation, nbytes, max(3, rounds // 4) if quick else rounds, calls))
    return found


def least(case: Case, layout: Layout) -> int:
    """Bytes that must leave the host that sends most."""
    hosts, ranks = layout
    if case.operation == "all_reduce":
        return 2 * (hosts - 1) * case.nbytes // hosts
    return (hosts - 1) * case.nbytes * (1 if case.operation == "broadcast" else ranks)


def _sent(case: Case, contender: Torch, rank: int, size: int, gate: Gate) -> int:
    """Bytes that this rank's host sends in one call."""
    call = getattr(contender, case.operation)(buffers(case, rank, size))
    gate()
    before = netns.sent_bytes()
    gate()
    call.run()
    gate()
    sent = netns.sent_bytes() - before
    gate()
    return sent


def _rank(rank: int, names: Sequence[str], layout: Layout, folder: str, todo: Sequence[Case]) -> None:
    netns.enter(names[rank // layout[1]])
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    size = layout[0] * layout[1]
    store, timeout = dist.FileStore(f"{folder}/store", size), datetime.timedelta(minutes=5)
    dist.init_process_group("smddp", store=store, rank=rank, world_size=size, timeout=timeout)
    gate = Gate(Path(folder, "gate"), rank, size)
    contenders = {backend: Torch(backend) for backend in BACKENDS}
    results = []
    for number, case in enumerate(todo):
        if rank == 0:
            where = f"{layout[0]} x {layout[1]}, {number + 1}/{len(todo)}"
            print(f"[{where}] {case.operation}, {case.nbytes} bytes", file=sys.stderr, flush=True)
        times = measure(case, rank, size, dict(contenders), gate)
        sent = {name: _sent(case, contender, rank, size, gate) for name, contender in contenders.items()}
        results.append({"times": times, "sent": sent})
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def run(layout: Layout, todo: Sequence[Case], rate: str) -> dict[Case, Result]:
    """Measure all cases in one set of processes."""
    hosts, ranks = layout
    size = hosts * ranks
    with netns.hosts(hosts, rate) as names, tempfile.TemporaryDirectory() as folder:
        Path(folder, "gate").write_bytes(bytes(Gate.LINE * size))
        mp.start_processes(_rank, args=(names, layout, folder, todo), nprocs=size, start_method="fork")
        reports = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    found = {}
    for case, of_ranks in zip(todo, zip(*reports, strict=True), strict=True):
        found[case] = Result(
            {name: slowest([r["times"][name] for r in of_ranks]) for name in BACKENDS},
            {name: max(r["sent"][name] for r in of_ranks) for name in BACKENDS},
        )
    return found


def table(found: dict[Case, Result], layout: Layout) -> list[str]:
    """One markdown table."""
    lines = [
        "| operation | per rank | smddp | gloo | times as fast | sent by a host, of the least: smddp | gloo |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for case, result in found.items():
        smddp, gloo = (duration(median(result.times[name])) for name in BACKENDS)
        wire = [f"{result.sent[name] / least(case, layout):.2f}" for name in BACKENDS]
        ratio = times_as_fast(result.times, *BACKENDS)
        lines.append(
            f"| {case.operation} | {readable(case.nbytes)} | {smddp} | {gloo} | {ratio:.2f} | {' | '.join(wire)} |"
        )
    return lines


def verdict(found: dict[Case, Result]) -> str:
    """Whether the goal is met."""
    worst = min(
        (times_as_fast(result.times, *BACKENDS) or 0.0, case.operation, readable(case.nbytes))
        for case, result in found.items()
        if case.nbytes >= GOAL_FROM and case.operation in GOAL_OF
    )
    met = "met" if worst[0] >= GOAL else "**not met**"
    goal = f"Goal, {GOAL} times gloo's speed for {' and '.join(GOAL_OF)} from {readable(GOAL_FROM)} on"
    return f"{goal}: {met}; least {worst[0]:.2f}, {worst[1]} of {worst[2]}."


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--layouts", nargs="+", default=["2x2", "3x1"], help="hosts x ranks on each (default 2x2 3x1)")
    parser.add_argument(
        "--rate", default="", help="limit what a host sends, as `tc` takes it: 4gbit (default: no limit)"
    )
    parser.add_argument("--quick", action="store_true", help="three sizes, a quarter of the rounds")
    parser.add_argument("--output", type=Path, help="write the tables here; they are printed in any case")
    arguments = parser.parse_args(argv)
    layouts = [layout.split("x") for layout in arguments.layouts]
    if any(len(layout) != 2 or not all(n.isdigit() for n in layout) or int(layout[0]) < 2 for layout in layouts):
        parser.error("--layouts takes such as 2x2: at least 2 hosts, and the ranks on each")
    arguments.layouts = [(int(hosts), int(ranks)) for hosts, ranks in layouts]
    if reason := netns.refusal():
        parser.error(f"no network namespaces: {reason}")
    return arguments


def main(argv: list[str]) -> None:
    """Measure, then print and write the tables."""
    arguments = parse(argv)
    lines = [
        "# Collectives between hosts", "",
        *origin(
            "the hosts are network namespaces of one machine, joined by a bridge",
            f"each host sends at most {arguments.rate}" if arguments.rate else "no limit on what a host sends",
            "OMP_NUM_THREADS=1",
        ),
        "Times are medians; a call takes as long as its slowest rank. Ratios are medians over rounds, in which the two",
        "take turns. Bytes are counted where they leave the host that sends most, with all headers, and are",
        "divided by the least that must cross. benchmarks/README.md says more.",
    ]  # fmt: skip
    for layout in arguments.layouts:
        found = run(layout, cases(quick=arguments.quick), arguments.rate)
        lines += ["", f"## {layout[0]} hosts, {layout[1]} rank(s) on each", "", *table(found, layout)]
        if layout == GOAL_LAYOUT:
            lines += ["", verdict(found)]
    publish("\n".join(lines) + "\n", arguments.output)


if __name__ == "__main__":
    main(sys.argv[1:])
