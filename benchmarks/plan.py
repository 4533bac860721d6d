"""How wrong is `smp plan`: the closed form against published runs, and predicted steps against steps measured here.

python benchmarks/plan.py published --output benchmarks/results/plan_published.md          # a second
python benchmarks/plan.py steps --output benchmarks/results/plan_steps.md                   # twenty minutes
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pages import origin, publish

from smp.memory.shape import ModelShape
from smp.plan.closed_time import FULL, NONE, SELECTIVE, ClosedLayout, closed_step
from smp.plan.devices import DEVICES, DeviceRow

RUNS = Path(__file__).with_name("published_runs.csv")
HARDWARE = {
    "a100_40gb": "a100_40gb", "A100-40GB": "a100_40gb", "a100_80gb": "a100_80gb", "A100-80GB": "a100_80gb",
    "h100_80gb": "h100", "H200-141GB": "h200",
}  # fmt: skip
# MosaicML's MPT ran Triton's FlashAttention (its submit_benchmarks.py: attn_impl triton), the algorithm before
# FlashAttention-2. arXiv:2307.08691 gives it 30 to 50 % of an A100's peak forward and 25 to 35 % backward: the middle.
# On an H100 it gains what FlashAttention-2 gained there (the same paper: 335 TFLOP/s for 230).
FIRST_FLASH = {"a100_40gb": (0.40, 0.30), "a100_80gb": (0.40, 0.30), "h100": (0.185, 0.138)}


class Run(NamedTuple):
    """A published run."""

    source: str
    hardware: str
    model: str
    gpus: int
    shape: ModelShape
    layout: ClosedLayout
    tokens_per_second: float  # of a GPU


def _layout(line: dict[str, str]) -> ClosedLayout:
    gpus, tp = int(line["gpus"]), int(line["tp"] or 1)
    shard = int(line["fsdp"]) if line["fsdp"].isdigit() and int(line["fsdp"]) else gpus // tp
    return ClosedLayout(
        int(line["seq_len"]), int(line["micro_batch"]), int(line["grad_accum"] or 1), shard, gpus // tp // shard, tp,
        recompute={"full": FULL, "none": NONE}.get(line["activation_checkpointing"], SELECTIVE),
        fused=line["compile"] == "1", keep_gathered=line["fsdp"] == "SHARD_GRAD_OP",
    )  # fmt: skip


def published(path: Path = RUNS) -> Iterator[Run]:
    """Read the runs of dense decoders in bf16 without pipeline and context parallelism on a device with a row."""
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            plain = all((line[name] or "1") == "1" for name in ("pp", "cp"))
            known = line["hardware"] in HARDWARE and line["layers"] and line["tokens_per_s_per_gpu"]
            if not known or not plain or "fp8" in line["precision"] or "activations to CPU" in line["notes"]:
                continue
            hidden, layers = int(line["hidden"]), int(line["layers"])
            shape = ModelShape(
                parameters=int(float(line["params_b"]) * 1e9), largest_unit=0, block=0, layers=layers, hidden=hidden,
                intermediate=int(line["intermediate"]), heads=int(line["heads"]), vocabulary=int(line["vocab"]),
                gated_mlp=not line["model"].startswith("mpt"), key_value_heads=int(line["kv_heads"]),
            )  # fmt: skip
            yield Run(
                line["source"].split()[0], HARDWARE[line["hardware"]], line["model"], int(line["gpus"]), shape,
                _layout(line), float(line["tokens_per_s_per_gpu"]),
            )  # fmt: skip


def row_of(run: Run) -> DeviceRow:
    """Return the device's row, with the attention kernel that the run had."""
    row = dataclasses.replace(DEVICES[run.hardware], factor=1.0)
    if not run.source.startswith("mosaicml"):
        return row
    forward, backward = FIRST_FLASH[run.hardware]
    share = dataclasses.replace(row.efficiency, attention_forward=forward, attention_backward=backward)
    return dataclasses.replace(row, efficiency=share)


def predicted_rate(run: Run) -> float:
    """Return the predicted tokens per second of a GPU."""
    layout = run.layout
    tokens = layout.accumulation * layout.batch * layout.sequence / layout.tp
    return tokens / closed_step(run.shape, layout, row_of(run)).seconds


def _ranks(values: Sequence[float]) -> list[float]:
    """Return each value's rank; equal values share the mean of theirs."""
    return [sum(o < v for o in values) + (sum(o == v for o in values) + 1) / 2 for v in values]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation."""
    return statistics.correlation(_ranks(first), _ranks(second))


class Errors(NamedTuple):
    """Of the runs of one source on one device; medians of absolute relative errors of tokens per second."""

    runs: int
    bias: float  # median of the signed errors, nothing fitted
    blind: float
    factor: float  # of the first, third, ... run
    held_out: float  # of the others
    within: float  # the share of these within 10 %
    ranking: float  # mean rank correlation of the runs of one model on as many GPUs
    groups: int


def errors_of(runs: Sequence[Run]) -> Errors:
    """Compare."""
    ratios = [predicted_rate(run) / run.tokens_per_second for run in runs]
    factor = statistics.median(1 / ratio for ratio in ratios[::2])
    held = [abs(factor * ratio - 1) for ratio in ratios[1::2]] or [float("nan")]
    groups = defaultdict(list)
    for run, ratio in zip(runs, ratios, strict=True):
        groups[run.model, run.gpus].append((run.tokens_per_second, ratio * run.tokens_per_second))
    compared = [spearman(*zip(*group, strict=True)) for group in groups.values() if len(group) > 2]
    return Errors(
        len(runs), statistics.median(ratios) - 1, statistics.median(abs(r - 1) for r in ratios), factor,
        statistics.median(held), sum(e <= 0.1 for e in held) / len(held),
        statistics.mean(compared) if compared else float("nan"), len(compared),
    )  # fmt: skip


def published_errors(path: Path = RUNS) -> dict[tuple[str, str], Errors]:
    """Return the errors by source and device."""
    groups = defaultdict(list)
    for run in published(path):
        groups[run.source, run.hardware].append(run)
    return {key: errors_of(runs) for key, runs in groups.items()}


def published_page(path: Path = RUNS) -> str:
    """Return the page."""
    lines = [
        "# Published runs against the planner's closed form", "", *origin("`smp.plan.closed_time`"),
        "Predicted tokens per second of a GPU over published ones, of dense decoders in bf16 without pipeline and",
        "context parallelism. *Blind*: data-sheet constants, nothing fitted. *Held out*: one factor for each source",
        "and device from every second run, errors of the other half. *Ranking*: Spearman's correlation of predicted",
        "and published speed among the runs (length, batch, recomputation) of one model on as many GPUs, mean.", "",
        "The constants and their sources are in `smp/plan/devices.py` and `smp/plan/closed_time.py`. The attention of",
        "these runs, Triton's FlashAttention, was looked up after a first comparison had shown errors that grew with",
        "the length; its constants are the paper's, not fitted. Nothing else was changed after looking.", "",
        "| source | device | runs | median error, blind | median abs., blind | factor | held out, median abs. | within "
        "10 % | ranking (models) |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for (source, hardware), e in published_errors(path).items():
        lines.append(
            f"| {source} | {hardware} | {e.runs} | {e.bias:+.1%} | {e.blind:.1%} | {e.factor:.3f} | {e.held_out:.1%} | "
            f"{e.within:.0%} | {e.ranking:.2f} ({e.groups}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("published", "steps"):
        command = commands.add_parser(name)
        command.add_argument("--output", type=Path)
    options = parser.parse_args()
    publish(published_page(), options.output)


if __name__ == "__main__":
    main()
