"""Draw the pictures of README.md and docs/ to docs/images: ``make docs``.

With a file of metrics, such as ``runs/demo/metrics.jsonl``: take the demo's losses from it first. With several, such as
``runs/muon/metrics.jsonl``, one for each of the optimizers that are compared, or of the recipes of fp8 with
``runs/bf16/metrics.jsonl`` as the first one: take theirs, named by their folders.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from smp.mesh import lay_out  # noqa: E402

IMAGES = ROOT / "docs" / "images"
LOSSES, OPTIMIZERS, FP8 = IMAGES / "demo.jsonl", IMAGES / "optimizers.jsonl", IMAGES / "fp8.jsonl"
H200 = ROOT / "benchmarks" / "results" / "gpu" / "2026-11-28-h200.md"
BLUE, RED, GREY, DARK = "#2c6fbb", "#d1495b", "#9aa5b1", "#24292f"
CATEGORIES = {
    "parameters": "#1f4e79",
    "optimizer state": "#2c6fbb",
    "gradients": "#7fb2e5",
    "gathered parameters": "#3a8f85",
    "gradients before reduction": "#7cc0b6",
    "communication buffers": "#b9ddd6",
    "activations": "#e8a33d",
    "logits and loss": "#d1495b",
    "other": "#9aa5b1",
}
# Text as text keeps the files small; the salt and the missing date make them equal each time.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "smp",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # equally wide
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": DARK,
    "axes.edgecolor": DARK,
}


def take_losses(metrics: list[pathlib.Path]) -> None:
    """Keep of runs' metrics what their picture needs."""
    several = FP8 if metrics[0].parent.name == "bf16" else OPTIMIZERS
    keys = ("step", "val_loss") if several is FP8 else ("step", "loss", "val_loss")
    kept = []
    for file in metrics:
        name = {} if len(metrics) == 1 else {"run": file.parent.name}
        for record in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            found = {key: round(record[key], 5) for key in keys if key in record}
            kept += [name | found] if len(found) > 1 else []
    lines = "".join(json.dumps(record) + "\n" for record in kept)
    (LOSSES if len(metrics) == 1 else several).write_text(lines, encoding="utf-8")


def optimizers() -> Figure:
    """Draw the training losses of one job by optimizer."""
    return _compared(OPTIMIZERS, "loss", "training loss", "make train's job, by optimizer")


def fp8() -> Figure:
    """Draw the validation losses of one job by recipe of fp8, beside bf16."""
    return _compared(FP8, "val_loss", "validation loss", "2,000 steps of a small Llama, by recipe", skipped=400)


def _compared(file: pathlib.Path, key: str, what: str, title: str, *, skipped: int = 0) -> Figure:
    """Draw the losses of runs, and from step ``skipped`` on their differences from the first one's."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    runs = list(dict.fromkeys(record["run"] for record in records))
    curves = {run: {r["step"]: r[key] for r in records if r["run"] == run and key in r} for run in runs}
    figure = Figure(figsize=(8.4, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run, color in zip(runs, (DARK, BLUE, "#3a8f85", "#e8a33d", RED, GREY), strict=False):
        curve = curves[run]
        left.plot(list(curve), list(curve.values()), color=color, label=run, lw=1.4)
        if run != runs[0]:
            gaps = {step: loss - curves[runs[0]][step] for step, loss in curve.items() if step >= skipped}
            right.plot(list(gaps), list(gaps.values()), color=color, lw=1.4)
    left.set(xlabel="step", ylabel=f"{what}, nats per token", title=title)
    right.set(xlabel="step", title=f"difference from {runs[0]}")
    for axes in (left, right):
        axes.grid(axis="y", color="#e4e4e4", lw=0.8)
    left.legend(frameon=False, loc="upper right")
    return figure


def demo() -> Figure:
    """Draw the losses of ``make train``, beside those of a model that knows the frequency of words alone."""
    records = [json.loads(line) for line in LOSSES.read_text(encoding="utf-8").splitlines()]
    unigram = json.loads((ROOT / "data" / "sample" / "baseline.json").read_text())["unigram_nll_validation"]
    figure, axes = _figure(4.1, 2.9)
    for name, label, color, marker in (("loss", "training", BLUE, ""), ("val_loss", "validation", RED, "o")):
        points = [(r["step"], r[name]) for r in records if name in r]
        axes.plot(*zip(*points, strict=True), color=color, label=label, marker=marker, markersize=4, lw=1.6)
    axes.axhline(unigram, color=GREY, lw=1.2, ls="--")
    axes.text(200, unigram + 0.05, f"unigram model {unigram:.2f}", ha="right", va="bottom", color="#57606a")
    axes.set(xlabel="step", ylabel="loss, nats per token", title="make train: Llama of 2M parameters, 2 CPU processes")
    axes.grid(axis="y", color="#e4e4e4", lw=0.8)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.97))
    return figure


def plan() -> Figure:
    """Draw the memory that ``smp plan`` predicts for three ways of recomputation."""
    modes = {
        "full": ["--activation_checkpointing_mode", "full"],
        "selective": ["--activation_checkpointing_mode", "selective"],
        "none": ["--activation_checkpointing", "0"],
    }
    figure, axes = _figure(4.1, 2.9)
    for row, words in enumerate(modes.values()):
        memory, step = _planned(words)
        left = 0.0
        for name, color in CATEGORIES.items():
            size = memory["at_peak"].get(name, 0) / 2**30
            axes.barh(row, size, 0.62, left=left, color=color, label=name if not row else None)
            left += size
        fits = "" if memory["room"] >= 0 else "\ndoes not fit"
        box = {"facecolor": "white", "lw": 0, "pad": 1}
        axes.text(left + 1.5, row, f"{left:.1f} GiB\n{step:.2f} s a step{fits}", va="center", fontsize=8, bbox=box)
    limit = memory["limit"] / 2**30
    axes.axvline(limit, color=DARK, lw=1.2, ls="--")
    axes.text(limit + 1.5, -0.55, f"memory of an H100, {limit:.1f}", fontsize=8)
    axes.set(xlabel="GiB allocated at the peak", ylabel="recomputation", xlim=(0, 155))
    axes.set_title("smp plan: llama3_8b on 8 H100, 2 x 8192 tokens a GPU", x=0.42)
    axes.set_yticks(range(len(modes)), modes)
    axes.set_ylim(2.5, -0.8)
    handles, labels = axes.get_legend_handles_labels()
    shown = {name: handle for name, handle in zip(labels, handles, strict=True) if name not in ("gradients", "other")}
    axes.legend(  # gradients are 0 at these peaks, and other too small to see
        shown.values(), shown, frameon=False, fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.44, -0.2),
        columnspacing=0.9, handlelength=1, handletextpad=0.4,
    )  # fmt: skip
    return figure


def _planned(words: Sequence[str]) -> tuple[dict[str, Any], float]:
    job = "--model llama3_8b --gpus_per_node 8 --device h100 --max_context_width 8192 --train_batch_size 2 --search 0"
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "plan.json"
        subprocess.run(  # status 1: it does not fit
            [sys.executable, "-m", "smp", "plan", *job.split(), *words, "--json", str(file)], cwd=ROOT,
            stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        found = json.loads(file.read_text())
    [layout] = found["layouts"] or found["refused"]
    return layout["memory"], layout["step"]["seconds"]


def mesh() -> Figure:
    """Draw the ranks of each group of a mesh on two hosts, as ``smp.mesh`` computes them."""
    laid_out = lay_out(replicas=2, shard=4, tp=2, cp=2)
    rows = {
        "tp": "split each layer",
        "cp": "split each sequence (counted in dp_shard)",
        "dp_shard": "shard parameters, gradients, optimizer state",
        "dp_replicate": "copies of the same shard: all-reduce gradients",
    }
    figure, axes = _figure(8.4, 2.6)
    axes.axis("off")
    width = 0.9
    for rank in range(16):
        axes.text(_x(rank) + width / 2, -0.25, f"rank {rank}" if not rank else str(rank), ha="center", fontsize=8)
    for host in range(2):
        left, right = _x(8 * host), _x(8 * host + 7) + width
        axes.plot([left, right], [-0.62, -0.62], color=DARK, lw=1)
        axes.text((left + right) / 2, -0.78, f"host {host}", ha="center", va="bottom", fontsize=9)
    for row, (name, meaning) in enumerate(rows.items()):
        groups = laid_out._ranks_of_groups(name)
        axes.text(-0.3, row + 0.4, f"{name} {len(groups[0])}", ha="right", va="center", family="monospace")
        axes.text(_x(15) + width + 0.3, row + 0.4, meaning, va="center", fontsize=8)
        for number, ranks in enumerate(groups):
            color = matplotlib.colormaps["tab10"](number)
            for rank in ranks:
                axes.add_patch(
                    matplotlib.patches.Rectangle((_x(rank), row), width, 0.8, color=color, lw=0, clip_on=False)
                )
                letter = "ABCDEFGH"[number]
                axes.text(_x(rank) + width / 2, row + 0.42, letter, ha="center", va="center", color="white", fontsize=8)
    axes.set(xlim=(-2.6, 25.5), ylim=(4, -1.2))
    axes.set_title(f"{laid_out} = {laid_out.world_size} ranks; in each line, equal letters are one process group")
    return figure


def _x(rank: int) -> float:
    return rank + 0.6 * (rank // 8)


def h200() -> Figure:
    """Draw tokens per second of the steps timed on one H200, from the table of their page."""
    rows = [line.split("|") for line in H200.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    speed = {row[1].strip(): int(row[4]) for row in rows if len(row) > 10 and re.fullmatch(r" \d+ ", row[4])}
    panels = {
        "6 blocks of llama3_8b, all parameters": {
            "plain loop": "plain loop, 6 layers",
            "smp, eager": "eager, full, 6 layers",
            "smp, as auto chooses": "what auto is, 6 layers",
            "loop of torch's parts": "torch's parts, 6 layers",
        },
        "llama3_8b (32 blocks), LoRA": {
            "plain loop, peft": "adapters, plain loop with peft, 32 layers",
            "smp, eager": "adapters, eager, full, 32 layers",
        },
    }
    figure = Figure(figsize=(8.4, 2.1), layout="constrained")
    for axes, (title, bars) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        values = [speed[name] for name in bars.values()]
        colors = [BLUE if label.startswith("smp") else GREY for label in bars]
        axes.barh(range(len(bars)), values, 0.62, color=colors)
        for row, value in enumerate(values):
            axes.text(value, row, f" {value:,}", va="center", fontsize=8)
        axes.set_yticks(range(len(bars)), bars)
        axes.invert_yaxis()
        axes.set(title=title, xlim=(0, 1.2 * max(values)), xticks=[])
        axes.spines["bottom"].set_visible(False)
    figure.supxlabel("tokens/s on one H200, 2026-11-28, torch 2.11, sequences of 8192 tokens", fontsize=8)
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def main(arguments: list[str]) -> None:
    """Write the pictures."""
    if arguments:
        take_losses([pathlib.Path(argument) for argument in arguments])
    for draw in (demo, optimizers, fp8, plan, mesh, h200):
        with matplotlib.rc_context(STYLE):
            draw().savefig(IMAGES / f"{draw.__name__}.svg", format="svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main(sys.argv[1:])
