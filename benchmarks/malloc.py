"""What glibc's malloc costs a training step on CPUs, and where the rest of the step's time goes, beside its floor.

    python benchmarks/malloc.py --output benchmarks/results/malloc.md                       # half an hour on two cores
    python benchmarks/malloc.py --model llama_tiny --rounds 1 --steps 1                     # a trial

What is compared, and how, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from pages import Bystanders, origin, publish
from step_variants import SIZES, VARIANTS, Case, Step
from torch.profiler import ProfilerActivity, profile
from train_step import WARMUP_STEPS, Result, measure

from smp.environment import malloc

_SET = malloc.TUNABLES.split(":")
# Name in the tables -> GLIBC_TUNABLES of the processes; None: unset, so that smp sets its own process by mallopt.
SETTINGS: dict[str, str | None] = {
    "glibc's own": "",
    "blocks from 1 MiB given back": "glibc.malloc.mmap_threshold=1048576",
    "kept, by thresholds": ":".join(_SET[:2]),
    "kept, by mallopt (smp alone)": None,
    "kept, huge pages": ":".join(_SET[:3]),
    "kept, huge pages, no caches (smp.launch.local)": malloc.TUNABLES,
}
COMPARED = ("smp", "floor", "one_process")
# The row of the account that a range names by its beginning; the innermost one counts.
RANGES = {
    "aten::mm": "products", "aten::addmm": "products", "aten::bmm": "products", "aten::baddbmm": "products",
    "aten::scaled_dot_product": "attention", "aten::_scaled_dot_product": "attention",
    "fsdp::all_gather_copy_in": "copy_in", "fsdp::split_with_sizes_copy": "copy_out", "fsdp::chunk_cat": "chunk_cat",
    "smddp:": "wait", "FSDP::": "hooks", "aten::_foreach_norm": "clip", "aten::_foreach_mul": "clip",
    "Optimizer.": "optimizer",
}  # fmt: skip
GROUPS = {
    "products": "matrix products",
    "attention": "attention",
    "elementwise": "norms, activations, residuals, loss",
    "optimizer": "AdamW",
    "clip": "norm of the gradients, clipping",
    "copy_in": "shards into the gathered buffer (all_gather_copy_in)",
    "copy_out": "gathered buffer into parameters (split_with_sizes_copy)",
    "chunk_cat": "gradients into the buffer to reduce (chunk_cat)",
    "add": "adding up the ranks' gradients",
    "wait": "waiting for the other rank",
    "hooks": "fully_shard's hooks",
    "host": "Python and dispatch elsewhere",
}


def group_of(event: Any) -> str:
    """Return the row of the account to which an operation's own time belongs."""
    above: Any = event
    while above is not None:
        for beginning, row in RANGES.items():
            if above.name.startswith(beginning):
                return "add" if row == "wait" and event.name.startswith("aten::") else row
        above = above.cpu_parent
    return "elementwise" if event.name.startswith("aten::") else "host"


def account(step: Step, steps: int) -> dict[str, float]:
    """Return milliseconds of a step by row, and its page faults."""
    for number in range(WARMUP_STEPS):
        step(number)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        begun = time.perf_counter()
        for number in range(steps):
            step(WARMUP_STEPS + number)
        seconds = time.perf_counter() - begun
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    found: dict[str, float] = defaultdict(float)
    main = max(profiler.events(), key=lambda event: event.cpu_time_total).thread
    for event in profiler.events():
        if event.thread == main:
            found[group_of(event)] += event.self_cpu_time_total / 1000 / steps
    whole = seconds * 1000 / steps
    found["host"] += whole - sum(found.values())
    return {**found, "whole": whole, "faults": faults / steps}


def child(order: dict[str, Any]) -> dict[str, Any]:
    """Measure one case in this process's environment; of an account, rank 0's."""
    case = Case(**order["case"])
    variant = VARIANTS[case.variant]
    if not order["account"]:
        return dataclasses.asdict(measure(case, variant))

    def build(case: Case, rank: int) -> Step:
        step = variant.build(case, rank)
        found = account(step, case.steps)
        if rank == 0:
            Path(order["account"]).write_text(json.dumps(found))
        return step

    measure(case, variant._replace(build=build))
    return json.loads(Path(order["account"]).read_text())


def started(case: Case, setting: str, account_file: str = "") -> dict[str, Any]:
    """Run :func:`child` under a setting of malloc, which a process has from its start."""
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES" and not k.startswith("MALLOC_")}
    if SETTINGS[setting] is not None:
        environment["GLIBC_TUNABLES"] = str(SETTINGS[setting])
    order = json.dumps({"case": dataclasses.asdict(case), "account": account_file})
    done = subprocess.run(
        [sys.executable, __file__, "--order", order], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def case_of(arguments: argparse.Namespace, variant: str, steps: int) -> Case:
    """One case of the model, on both cores."""
    alone = variant == "one_process"
    return Case(
        arguments.model, "fp32", variant, processes=1 if alone else 2, threads=2 if alone else 1, steps=steps,
        rows=2 if alone else 1,
    )  # fmt: skip


def speeds_table(arguments: argparse.Namespace) -> list[str]:
    """Tokens per second and peak memory under each setting, with ratios taken within a round."""
    found: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for number in range(arguments.rounds):
        for setting, value in SETTINGS.items():
            for variant in COMPARED if value is not None else COMPARED[:1]:
                result = Result(**started(case_of(arguments, variant, arguments.steps), setting))
                found[variant, setting].append(result)
                print(
                    f"round {number + 1} {setting} {variant}: {result.tokens_per_second:.0f} tokens/s, "
                    f"{result.peak_mib:.0f} MiB", file=sys.stderr
                )  # fmt: skip

    def ratio(one: tuple[str, str], other: tuple[str, str]) -> str:
        if not found[other]:
            return "-"
        pairs = zip(found[one], found[other], strict=True)
        ratios = sorted(a.tokens_per_second / b.tokens_per_second for a, b in pairs)
        return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"

    first = next(iter(SETTINGS))
    lines = [
        "| what is freed is | smp, tokens/s | times glibc's own | of the floor | of one process | peak RSS, MiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for setting in SETTINGS:
        own = found["smp", setting]
        lines.append(
            f"| {setting} | {statistics.median(r.tokens_per_second for r in own):.0f} | "
            f"{ratio(('smp', setting), ('smp', first))} | {ratio(('smp', setting), ('floor', setting))} | "
            f"{ratio(('smp', setting), ('one_process', setting))} | {statistics.median(r.peak_mib for r in own):.0f} |"
        )
    return lines


def accounts_table(arguments: argparse.Namespace) -> list[str]:
    """Where a step's milliseconds go, by the profiler: medians over rounds of rank 0's."""
    settings = list(SETTINGS)
    ends = settings[0], settings[-1]
    columns = [(variant, setting) for setting in ends for variant in ("smp", "floor")]
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for variant, setting in columns:
            with tempfile.NamedTemporaryFile() as file:
                case = case_of(arguments, variant, arguments.steps)
                found[variant, setting].append(started(case, setting, file.name))
    rows = {**GROUPS, "whole": "a step under the profiler", "faults": "page faults of a step"}
    lines = ["| milliseconds | " + " | ".join(f"{variant}, {setting}" for variant, setting in columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    for key, name in rows.items():
        values = [statistics.median(each.get(key, 0.0) for each in found[column]) for column in columns]
        lines.append(f"| {name} | " + " | ".join(f"{value:.0f}" for value in values) + " |")
    return lines


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", choices=SIZES, default="llama70m")
    parser.add_argument("--rounds", type=int, default=5, help="times that each is measured (default 5)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a measurement (default 5)")
    parser.add_argument("--output", type=Path, help="write the page here; it is printed in any case")
    parser.add_argument("--order", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Measure, then print and write the page."""
    arguments = parse(argv)
    if arguments.order:
        print(json.dumps(child(json.loads(arguments.order))))
        return
    bystanders = Bystanders()
    speeds, accounts = speeds_table(arguments), accounts_table(arguments)
    run = (
        f"{arguments.model}, fp32, {arguments.rounds} rounds of {arguments.steps} steps after {WARMUP_STEPS} to warm up"
    )
    lines = [
        "# glibc's malloc, and where a step's time goes", "", *origin(run), bystanders.describe(), "",
        "## Settings", "", "Medians over rounds; ratios are taken within a round, with their range.", "", *speeds, "",
        "## The account", "", *accounts,
    ]  # fmt: skip
    publish("\n".join(lines) + "\n", arguments.output)


if __name__ == "__main__":
    main(sys.argv[1:])
