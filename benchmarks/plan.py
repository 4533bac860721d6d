"""How wrong is `smp plan`: the closed form against published runs, and predicted bytes against bytes measured here.

python benchmarks/plan.py published --output benchmarks/results/plan_published.md          # a second
python benchmarks/plan.py bytes --output benchmarks/results/plan_bytes.md                   # ten minutes
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pages import origin, publish

from smp.config import ActivationConfig, Settings
from smp.data.data_pipeline import StepBatch
from smp.environment import malloc, read_launch
from smp.errors import Problems, UserError
from smp.loss import shift_labels
from smp.memory.profile import profile_memory
from smp.memory.shape import FULL, NONE, SELECTIVE, ModelShape, Workload
from smp.memory.tracker import peak_rss_bytes
from smp.mesh import Mesh, lay_out
from smp.models.model_config import resolve_model
from smp.optim.optimizers import build_optimizer
from smp.parallel.microbatch import Microbatch
from smp.parallel.parallelize import prepare_model
from smp.plan.closed_time import step_time
from smp.plan.devices import DEVICES, DeviceRow
from smp.plan.worker import worker
from smp.runtime import process_group
from smp.train.arguments import parse_args
from smp.train.checked_job import make_job
from smp.train.step import train_step

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
    mesh: Mesh
    work: Workload
    tokens_per_second: float  # of a GPU


def _layout(line: dict[str, str]) -> tuple[Mesh, Workload]:
    gpus, tp = int(line["gpus"]), int(line["tp"] or 1)
    shard = int(line["fsdp"]) if line["fsdp"].isdigit() and int(line["fsdp"]) else gpus // tp
    mode = {"full": FULL, "none": NONE}.get(line["activation_checkpointing"], SELECTIVE)
    activation = ActivationConfig(
        activation_checkpointing=mode != NONE, activation_checkpointing_mode=FULL if mode == NONE else mode,
        compile=line["compile"] == "1",
    )  # fmt: skip
    work = Workload(
        int(line["seq_len"]), int(line["micro_batch"]), 2, Settings((activation,)),
        accumulation=int(line["grad_accum"] or 1),
    )  # fmt: skip
    reshards = line["fsdp"] != "SHARD_GRAD_OP"
    return lay_out(gpus // tp // shard, shard, tp, reshard_after_forward=reshards), work


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
                *_layout(line), float(line["tokens_per_s_per_gpu"]),
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
    work = run.work
    tokens = work.accumulation * work.tokens(run.mesh) / run.mesh.tp.size
    return tokens / step_time(run.shape, run.mesh, work, row_of(run), local=8).seconds


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


class StepJob(NamedTuple):
    """A job whose step is predicted and measured."""

    name: str
    processes: int
    words: str


SMALL = "--model llama_tiny --max_context_width 256 --train_batch_size 4"
LLAMA = (
    "--model_type llama_v3 --hidden_width 512 --num_layers 8 --num_heads 8 --num_key_value_heads 4 --vocab_size 8192 "
    "--intermediate_size 1408 --max_context_width 512 --train_batch_size 2"
)
NEOX = (
    "--model_type gpt_neox --hidden_width 512 --num_layers 8 --num_heads 8 --vocab_size 8192 --max_context_width 512 "
    "--train_batch_size 2"
)
WIDE = (
    "--model_type llama_v3 --hidden_width 768 --num_layers 6 --num_heads 12 --num_key_value_heads 12 "
    "--vocab_size 16384 --intermediate_size 2048 --max_context_width 1024 --train_batch_size 1"
)
KEPT, SELECTED = "--activation_checkpointing 0", "--activation_checkpointing_mode selective"
SHARDED = "--sharding_strategy full_shard"
TP, DEFERRED = "--tensor_parallel_degree 2", "--gradient_accumulation_steps 4 --defer_gradient_sync 1"
JOBS = (
    StepJob("tiny Llama, recomputed", 1, SMALL),
    StepJob("Llama 512 x 8, kept", 1, f"{LLAMA} {KEPT}"),
    StepJob("Llama 512 x 8, selective", 1, f"{LLAMA} {SELECTED}"),
    StepJob("Llama 768 x 6, recomputed", 1, WIDE),
    StepJob("GPT-NeoX 512 x 8, recomputed", 1, NEOX),
    StepJob("tiny Llama, recomputed", 2, SMALL),
    StepJob("Llama 512 x 8, kept", 2, f"{LLAMA} {KEPT}"),
    StepJob("Llama 512 x 8, kept, gloo", 2, f"{LLAMA} {KEPT} --distributed_backend gloo"),
    StepJob("Llama 512 x 8, selective, 2 micro-batches", 2, f"{LLAMA} {SELECTED} --gradient_accumulation_steps 2"),
    StepJob("GPT-NeoX 512 x 8, recomputed, tp 2", 2, f"{NEOX} {TP}"),
    StepJob("Llama, bf16, kept", 2, f"{LLAMA} {SHARDED} {KEPT} --bf16 1"),
    StepJob("Llama, tp 2 over gloo", 2, f"{LLAMA} {TP} --distributed_backend gloo"),
    StepJob(
        "Llama, ZeRO-2, deferred, gloo",
        2,
        f"{LLAMA} --sharding_strategy shard_grad_op --distributed_backend gloo {KEPT} {DEFERRED}",
    ),
    StepJob("GPT-NeoX, tied, whole logits, kept", 1, f"{NEOX} --tie_word_embeddings 1 {KEPT} --loss_chunk_tokens 0"),
    StepJob("Llama 512 x 8, kept", 4, f"{LLAMA} {KEPT}"),
)
MORE_JOBS = (
    StepJob("GPT-NeoX, hybrid 2 x 2, recomputed", 4, f"{NEOX} --hybrid_shard_degree 2"),
    StepJob("Llama, tp 2 x shard 2, selective", 4, f"{LLAMA} {SHARDED} {TP} {SELECTED}"),
    StepJob(
        "Llama, offloaded to a disk, gloo", 2,
        f"{LLAMA} {SHARDED} --distributed_backend gloo --offload_activations 1 --activation_loading_horizon 1 "
        "--offload_dir .",
    ),
)  # fmt: skip


def run_job(output: str, words: Sequence[str]) -> None:
    """Measure the bytes of a job's step in this process, one of the job's; rank 0 writes them."""
    launch, config = read_launch(), parse_args(list(words))
    device, problems = torch.device("cpu"), Problems()
    malloc.keep_freed_memory()
    job = make_job(config, launch, device, resolve_model(config.model), problems)
    with process_group(config.comm, launch, device):
        mesh = job.mesh.join("cpu")
        model = prepare_model(
            job.model, mesh=mesh, settings=job.settings, dtype=job.dtype, device=device, seed=0, load_weights=False
        )
        optimizer = build_optimizer(model, config.optim, lr=1e-4)
        size, length = config.run.train_batch_size, job.model.sequence_length
        count, vocabulary = config.run.gradient_accumulation_steps, job.model.hf_config.vocab_size
        ids = [torch.randint(0, vocabulary, (size, length)) for _ in range(count)]
        micro: list[Microbatch] = [
            {"input_ids": own, "targets": shift_labels(own), "sample_ids": torch.arange(size)} for own in ids
        ]
        batch = StepBatch(micro, torch.arange(size * len(micro)))
        setup = dataclasses.replace(job.setup, mesh=mesh)
        options: dict[str, Any] = {"setup": setup, "device": device, "grad_clip": 1.0}

        for _ in range(3):
            train_step(model, optimizer, batch, **options)
        resident = peak_rss_bytes()
        with profile_memory(model, optimizer) as profile:
            train_step(model, optimizer, batch, record=profile.mark, **options)
        if launch.rank == 0:
            held = dict(profile.peak().categories)
            Path(output).write_text(json.dumps({"bytes": held, "resident": resident}))


def measured_job(job: StepJob, folder: Path) -> dict[str, Any]:
    """Run a job, and return the bytes of its tensors at the peak and of its process."""
    output = folder / "job.json"
    launcher = [sys.executable, "-m", "smp.launch.local", "--nproc_per_node", str(job.processes), "--no_gpus"]
    command = [*launcher, __file__, "run", str(output), *job.words.split()]
    subprocess.run(command, check=True)
    return json.loads(output.read_text())


def bytes_page(jobs: Sequence[StepJob], output: Path | None) -> str:
    """Predict the bytes of a step's tensors, then measure them; what was predicted is written at once."""
    row, found = DEVICES["cpu"], []
    lines = ["# Predicted and measured bytes of steps on CPUs", "", *origin("`smp plan`")]
    lines += ["Rank 0, bytes of tensors at the peak. Predictions were written before any job ran.", ""]
    with worker(row) as ask:
        for job in jobs:
            (plan,) = ask("plan_layouts", [job.words.split()], nodes=1, local=job.processes, row=row)
            if isinstance(plan, UserError):
                raise plan
            found.append(plan.memory)
    lines += ["| job | processes | predicted | where | process |", "|---|---:|---:|---|---:|"]
    for job, memory in zip(jobs, found, strict=True):
        lines.append(
            f"| {job.name} | {job.processes} | {memory.peak.total:,} | {memory.peak.where} | {memory.needed:,} |"
        )
    publish("\n".join(lines) + "\n", output)
    lines += ["", "| job | processes | measured | off | categories that are off | process, resident | predicted |"]
    lines += ["|---|---:|---:|---:|---|---:|---:|"]
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        for job, memory in zip(jobs, found, strict=True):
            real = measured_job(job, Path(folder))
            held, total = real["bytes"], sum(real["bytes"].values())
            differences = {name: memory.peak.categories[name] - held[name] for name in held}
            off = ", ".join(f"{name} {difference:+,}" for name, difference in differences.items() if difference)
            lines.append(
                f"| {job.name} | {job.processes} | {total:,} | {memory.peak.total - total:+,} | {off or 'none'} | "
                f"{real['resident']:,} | {memory.needed / real['resident'] - 1:+.1%} |"
            )
            errors.append(memory.needed / real["resident"] - 1)
    lines += [
        "", f"Resident, at most: {min(errors):+.1%} to {max(errors):+.1%}, median "
        f"{statistics.median(errors):+.1%}; {sum(0 <= e <= 0.05 for e in errors)} of {len(errors)} within 0 and +5 %.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        return run_job(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("published").add_argument("--output", type=Path)
    commands.add_parser("bytes").add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.command == "published":
        return publish(published_page(), options.output)
    return publish(bytes_page([*JOBS, *MORE_JOBS], options.output), options.output)


if __name__ == "__main__":
    main()
