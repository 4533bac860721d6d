"""Tokens per second and peak memory of a training step, beside the usual ways to write one, on CPU processes.

    python benchmarks/train_step.py --output benchmarks/results/train_step.md
    python benchmarks/train_step.py --models llama_tiny --rounds 1 --steps 2 --precision fp32     # a trial, seconds

What is compared, and how, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import multiprocessing
import os
import platform
import resource
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from step_variants import SHARDED, SIZES, VARIANTS, Case, resolved_model

from smp.errors import UserError
from smp.models.registry import count_parameters

WARMUP_STEPS = 2
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  # relative; in bf16 the peers cast in other places
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


def _worker(rank: int, case: Case, folder: str, barrier) -> None:
    """One process of a case: build, warm up, time, and write what was seen to ``folder``."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.processes), LOCAL_WORLD_SIZE=str(case.processes),
        OMP_NUM_THREADS=str(case.threads),
    )  # fmt: skip
    if case.isa:
        os.environ["ONEDNN_MAX_CPU_ISA"] = case.isa
    torch.set_num_threads(case.threads)
    imported = _peak_mib()
    if case.variant in SHARDED:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.processes)
    step = VARIANTS[case.variant][1](case, rank)
    losses = [step(number) for number in range(WARMUP_STEPS)]
    barrier.wait()
    start = time.perf_counter()
    losses += [step(WARMUP_STEPS + number) for number in range(case.steps)]
    seconds = time.perf_counter() - start
    report = {"seconds": seconds, "imported": imported, "peak": _peak_mib(), "losses": [float(x) for x in losses]}
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(case: Case) -> Result:
    """Run one case in fresh processes, so that its peak memory is its own.

    They are forked: the libraries are imported already, and no thread has been started here.
    """
    barrier = multiprocessing.get_context("fork").Barrier(case.processes)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_worker, args=(case, folder, barrier), nprocs=case.processes, start_method="fork")
        reports = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.processes)]
    return Result(
        tokens_per_second=case.tokens / max(r["seconds"] for r in reports),
        peak_mib=max(r["peak"] for r in reports),
        imported_mib=max(r["imported"] for r in reports),
        losses=[statistics.fmean(values) for values in zip(*(r["losses"] for r in reports), strict=True)],
    )


def _bf16_product(isa: str) -> None:
    if isa:
        os.environ["ONEDNN_MAX_CPU_ISA"] = isa
    matrix = torch.ones(256, 256, dtype=torch.bfloat16)
    if (matrix @ matrix)[0, 0] != 256:
        sys.exit("wrong product")


def usable_isa() -> str | None:
    """The highest instruction set with which bf16 products live: some virtual machines offer AMX and trap it.

    Returns:
        A value for ONEDNN_MAX_CPU_ISA, "" where none is needed; None if there is none.
    """
    for isa in ("", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2"):
        process = multiprocessing.get_context("fork").Process(target=_bf16_product, args=(isa,))
        process.start()
        process.join()
        status = process.exitcode or 0
        if status == 0:
            return isa
        reason = signal.Signals(-status).name if status < 0 else f"status {status}"
        print(f"bf16 with ONEDNN_MAX_CPU_ISA={isa or 'unset'} dies: {reason}", file=sys.stderr)
    return None


def check_losses(case: Case, losses: list[float], expected: list[float]) -> None:
    """The variants do the same work only if they compute the same numbers."""
    tolerance = LOSS_TOLERANCE[case.precision]
    for step, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        if not abs(loss - wanted) <= tolerance * abs(wanted):
            raise UserError(
                f"{case.model} {case.precision}: the loss of {case.variant} at step {step} is {loss:.6f}, smp's is "
                f"{wanted:.6f}, further apart than {tolerance} relative: they do not do the same work"
            )


def run(arguments: argparse.Namespace) -> tuple[Results, list[str]]:
    """All rounds of all variants, in turn; the results of each (model, precision), and remarks."""
    isa = usable_isa() if "bf16" in arguments.precision else ""
    notes = []
    if isa is None:
        notes.append("bf16 is left out: a bf16 matrix product kills the process with every instruction set tried.")
    elif isa:
        notes.append(f"bf16 under ONEDNN_MAX_CPU_ISA={isa}: without it a bf16 matrix product kills the process.")
    precisions = [p for p in arguments.precision if not (p == "bf16" and isa is None)]
    pairs = [(model, precision) for model in arguments.models for precision in precisions]
    results: Results = {pair: defaultdict(list) for pair in pairs}
    todo = [(pair, number, variant) for pair in pairs for number in range(arguments.rounds) for variant in VARIANTS]
    started = time.perf_counter()
    for done, (pair, number, variant) in enumerate(todo):
        alone = variant == "one_process"
        case = Case(
            *pair, variant, processes=1 if alone else arguments.processes,
            threads=arguments.processes * arguments.threads if alone else arguments.threads, steps=arguments.steps,
            rows=arguments.processes if alone else 1, isa=(isa or "") if pair[1] == "bf16" else "",
        )  # fmt: skip
        result = measure(case)
        results[pair][variant].append(result)
        if variant != "floor":
            check_losses(case, result.losses, results[pair]["smp"][-1].losses)
        left = (time.perf_counter() - started) / (done + 1) * (len(todo) - done - 1)
        print(
            f"[{done + 1}/{len(todo)}, {left / 60:.0f} min left] {' '.join(pair)} round {number + 1} {variant}: "
            f"{result.tokens_per_second:.0f} tokens/s, {result.peak_mib:.0f} MiB", file=sys.stderr
        )  # fmt: skip
    return results, notes


def _paired(results: dict[str, list[Result]], variant: str, other: str) -> float:
    """Median over rounds of the speed of ``variant`` over that of ``other`` in the same round."""
    pairs = zip(results[variant], results[other], strict=True)
    return statistics.median(one.tokens_per_second / two.tokens_per_second for one, two in pairs)


def table(results: dict[str, list[Result]]) -> list[str]:
    """One markdown table, and what it says about the peers."""
    lines = [
        "| variant | tokens/s, median | min-max | times smp | of the floor | peak RSS per process, MiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for variant, found in results.items():
        speeds = [r.tokens_per_second for r in found]
        lines.append(
            f"| {VARIANTS[variant][0]} | {statistics.median(speeds):.0f} | {min(speeds):.0f}-{max(speeds):.0f} | "
            f"{_paired(results, variant, 'smp'):.2f} | {_paired(results, variant, 'floor'):.2f} | "
            f"{statistics.median(r.peak_mib for r in found):.0f} |"
        )
    better = max(("fsdp2", "fsdp2_fused"), key=lambda v: statistics.median(r.tokens_per_second for r in results[v]))
    against = [
        f"{VARIANTS[peer][0]} {_paired(results, 'smp', peer):.2f}" for peer in (better, "accelerate", "one_process")
    ]
    imported = statistics.median(r.imported_mib for r in results["smp"])
    return [
        *lines,
        "",
        f"smp's speed over its peers': {'; '.join(against)}. Imported libraries hold {imported:.0f} MiB of each peak.",
    ]


def report(results: Results, arguments: argparse.Namespace, notes: list[str]) -> str:
    """The page for ``benchmarks/results``."""
    machine = f"{len(os.sched_getaffinity(0))}-core {platform.machine().replace('_', '-')} machine"
    lines = [
        "# One training step: speed and memory", "",
        f"{datetime.date.today()}, {machine}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"accelerate {accelerate.__version__}; {arguments.processes} processes of {arguments.threads} thread(s); "
        f"{arguments.rounds} rounds of {arguments.steps} steps after {WARMUP_STEPS} to warm up.",
        "", f"    python {shlex.join(sys.argv)}", "",
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
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["llama70m", "neox70m"])
    parser.add_argument("--precision", nargs="+", choices=LOSS_TOLERANCE, default=["fp32", "bf16"])
    parser.add_argument("--processes", type=int, default=2, help="processes of the sharded variants (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="times that every variant is measured (default 5)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a measurement (default 5)")
    parser.add_argument("--output", type=Path, help="write the tables here; they are printed in any case")
    arguments = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    if min(arguments.processes, arguments.rounds, arguments.steps) < 1 or arguments.processes > cores:
        parser.error(f"--rounds and --steps must be at least 1, --processes 1 to {cores}, the cores of this machine")
    arguments.threads = cores // arguments.processes
    return arguments


def main(argv: list[str]) -> None:
    """Measure, then print and write the tables."""
    arguments = parse(argv)
    try:
        results, notes = run(arguments)
    except (UserError, mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(str(error))
    text = report(results, arguments, notes)
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
