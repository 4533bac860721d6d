"""Tokens per second and peak memory of a training step, beside the usual ways to write one, on CPU processes.

    python benchmarks/train_step.py --output benchmarks/results/train_step.md
    python benchmarks/train_step.py --models llama_tiny --rounds 1 --steps 2 --precision fp32     # a trial, seconds

What is compared, and how, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from pages import origin, publish
from step_variants import SIZES, VARIANTS, Case, Variant, resolved_model
from torch.testing._internal.distributed.fake_pg import FakeStore

from smp.cpu_bf16 import ensure_bf16_works
from smp.errors import UserError
from smp.models.meta_model import count_parameters

WARMUP_STEPS = 2
NOT_COMPARED = ("floor", "smp_fake", "fsdp2_fake")  # without exchange the numbers are others
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  # relative; in bf16 the peers cast in other places
# What the pages set against each other, round by round.
COMPARED = [
    ("smp", "fsdp2"), ("smp", "fsdp2_fused"), ("smp", "accelerate"), ("smp", "smp_gloo"), ("smp", "smp_unshared"),
    ("smp", "smp_fake"), ("smp", "one_process"), ("fsdp2_smddp", "fsdp2_fused"), ("fsdp2_shared", "fsdp2_fused"),
    ("fsdp2_shared", "fsdp2_fake"),
]  # fmt: skip
Results = dict[tuple[str, str], dict[str, list["Result"]]]  # (model, precision) -> variant -> a result for each round


@dataclasses.dataclass(frozen=True)
class Result:
    """What the processes of one case report."""

    tokens_per_second: float
    peak_mib: float  # of the largest process
    imported_mib: float  # what of it was resident before the model was built: libraries
    losses: list[float]  # of each step with the warm-up, mean over processes


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _worker(rank: int, case: Case, variant: Variant, folder: str, barrier) -> None:
    """One process of a case: build, warm up, time, and write what was seen to ``folder``."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.processes), LOCAL_WORLD_SIZE=str(case.processes),
        OMP_NUM_THREADS=str(case.threads),
    )  # fmt: skip
    torch.set_num_threads(case.threads)
    imported = _peak_mib()
    if variant.backend == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.processes)
    elif variant.backend:
        store = f"file://{folder}/store"
        dist.init_process_group(variant.backend, init_method=store, rank=rank, world_size=case.processes)
    step = variant.build(case, rank)
    losses = [step(number) for number in range(WARMUP_STEPS)]
    barrier.wait()
    start = time.perf_counter()
    losses += [step(WARMUP_STEPS + number) for number in range(case.steps)]
    seconds = time.perf_counter() - start
    report = {"seconds": seconds, "imported": imported, "peak": _peak_mib(), "losses": [float(x) for x in losses]}
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(case: Case, variant: Variant) -> Result:
    """Run one case in fresh processes, so that its peak memory is its own.

    They are forked: the libraries are imported already, and no thread has been started here.
    """
    barrier = multiprocessing.get_context("fork").Barrier(case.processes)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_worker, args=(case, variant, folder, barrier), nprocs=case.processes, start_method="fork")
        reports = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.processes)]
    return Result(
        tokens_per_second=case.tokens / max(r["seconds"] for r in reports),
        peak_mib=max(r["peak"] for r in reports),
        imported_mib=max(r["imported"] for r in reports),
        losses=[statistics.fmean(values) for values in zip(*(r["losses"] for r in reports), strict=True)],
    )


def check_losses(case: Case, losses: list[float], expected: list[float]) -> None:
    """Check that the variants compute the same numbers: only then do they the same work."""
    tolerance = LOSS_TOLERANCE[case.precision]
    for step, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        if not abs(loss - wanted) <= tolerance * abs(wanted):
            raise UserError(
                f"{case.model} {case.precision}: the loss of {case.variant} at step {step} is {loss:.6f}, smp's is "
                f"{wanted:.6f}, further apart than {tolerance} relative: they do not do the same work"
            )


def run(arguments: argparse.Namespace) -> tuple[Results, list[str]]:
    """All rounds of all variants, in turn; the results of each (model, precision), and remarks."""
    notes, precisions = [], list(arguments.precision)
    if "bf16" in precisions:
        try:
            if ceiling := ensure_bf16_works():  # the forked processes inherit it
                notes.append(f"bf16 under ONEDNN_MAX_CPU_ISA={ceiling}: without it a bf16 product kills the process.")
        except UserError as error:
            notes.append(f"bf16 is left out: {error}.")
            precisions.remove("bf16")
    pairs = [(model, precision) for model in arguments.models for precision in precisions]
    results: Results = {pair: defaultdict(list) for pair in pairs}
    todo = [
        (pair, number, variant)
        for pair in pairs
        for number in range(arguments.rounds)
        for variant in arguments.variants
    ]
    started = time.perf_counter()
    for done, (pair, number, variant) in enumerate(todo):
        alone = variant == "one_process"
        case = Case(
            *pair, variant, processes=1 if alone else arguments.processes,
            threads=arguments.processes * arguments.threads if alone else arguments.threads, steps=arguments.steps,
            rows=arguments.processes if alone else 1,
        )  # fmt: skip
        result = measure(case, VARIANTS[variant])
        results[pair][variant].append(result)
        if variant not in NOT_COMPARED and "smp" in arguments.variants:
            check_losses(case, result.losses, results[pair]["smp"][-1].losses)
        left = (time.perf_counter() - started) / (done + 1) * (len(todo) - done - 1)
        print(
            f"[{done + 1}/{len(todo)}, {left / 60:.0f} min left] {' '.join(pair)} round {number + 1} {variant}: "
            f"{result.tokens_per_second:.0f} tokens/s, {result.peak_mib:.0f} MiB", file=sys.stderr
        )  # fmt: skip
    return results, notes


def _ratios(results: dict[str, list[Result]], variant: str, other: str) -> list[float]:
    """Return the speed of ``variant`` over that of ``other``, round by round."""
    pairs = zip(results[variant], results[other], strict=True)
    return [one.tokens_per_second / two.tokens_per_second for one, two in pairs]


def _paired(results: dict[str, list[Result]], variant: str, other: str) -> str:
    """Format the median of these ratios, or a dash if one of them was not measured."""
    if other not in results:
        return "-"
    return f"{statistics.median(_ratios(results, variant, other)):.2f}"


def _against(
    results: dict[str, list[Result]], pairs: Sequence[tuple[str, str]], variants: Mapping[str, Variant]
) -> list[str]:
    """Format a table of paired ratios with their spread."""
    lines = ["| speed of | over that of | median | range of the rounds |", "|---|---|---:|---:|"]
    for one, other in pairs:
        if one in results and other in results:
            ratios = sorted(_ratios(results, one, other))
            lines.append(
                f"| {variants[one].name} | {variants[other].name} | {statistics.median(ratios):.2f} | "
                f"{ratios[0]:.2f}-{ratios[-1]:.2f} |"
            )
    return lines if len(lines) > 2 else []


def table(
    results: dict[str, list[Result]],
    variants: Mapping[str, Variant] = VARIANTS,
    compared: Sequence[tuple[str, str]] = COMPARED,
) -> list[str]:
    """Two markdown tables: the variants, and what they say about each other."""
    floor = "floor" in variants
    lines = [
        "| variant | tokens/s, median | min-max | times smp |"
        + " of the floor |" * floor
        + " peak RSS per process, MiB |",
        "|---|---:|---:|---:|" + "---:|" * floor + "---:|",
    ]
    for variant, found in results.items():
        speeds = [r.tokens_per_second for r in found]
        of_floor = f" {_paired(results, variant, 'floor')} |" * floor
        lines.append(
            f"| {variants[variant].name} | {statistics.median(speeds):.0f} | {min(speeds):.0f}-{max(speeds):.0f} | "
            f"{_paired(results, variant, 'smp')} |{of_floor} {statistics.median(r.peak_mib for r in found):.0f} |"
        )
    imported = statistics.median(r.imported_mib for found in results.values() for r in found)
    return [
        *lines, "", f"Imported libraries hold {imported:.0f} MiB of each peak.", "",
        *_against(results, compared, variants),
    ]  # fmt: skip


def report(results: Results, arguments: argparse.Namespace, notes: list[str]) -> str:
    """Return the page for ``benchmarks/results``."""
    run = (
        f"{arguments.processes} processes of {arguments.threads} thread(s), {arguments.rounds} rounds of "
        f"{arguments.steps} steps after {WARMUP_STEPS} to warm up"
    )
    lines = [
        "# One training step: speed and memory", "",
        *origin(f"transformers {transformers.__version__}", f"accelerate {accelerate.__version__}", run),
        "Ratios are medians over rounds of the two speeds in one round; benchmarks/README.md describes the variants.",
        *notes,
    ]  # fmt: skip
    for (model, precision), found in results.items():
        hidden, blocks, intermediate, vocabulary, length = SIZES[model]
        size = count_parameters(resolved_model(model).hf_config) / 1e6
        lines += [
            "", f"## {model}, {precision}", "",
            f"{size:.1f}M parameters: width {hidden}, {blocks} blocks, intermediate width {intermediate}, vocabulary "
            f"{vocabulary}; {arguments.processes} samples of {length} tokens per step.", "", *table(found),
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["llama70m", "neox70m"])
    parser.add_argument("--precision", nargs="+", choices=LOSS_TOLERANCE, default=["fp32", "bf16"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--processes", type=int, default=2, help="processes of the sharded variants (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="times that every variant is measured (default 5)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a measurement (default 5)")
    parser.add_argument("--output", type=Path, help="write the tables here; they are printed in any case")
    arguments = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    if min(arguments.processes, arguments.rounds, arguments.steps) < 1:
        parser.error("--rounds, --steps and --processes must be at least 1")
    arguments.threads = max(1, cores // arguments.processes)  # more processes than cores take turns
    return arguments


def main(argv: list[str]) -> None:
    """Measure, then print and write the tables."""
    arguments = parse(argv)
    try:
        results, notes = run(arguments)
    except (UserError, mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(str(error))
    publish(report(results, arguments, notes), arguments.output)


if __name__ == "__main__":
    main(sys.argv[1:])
