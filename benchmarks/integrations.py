"""What two changed lines give each kind of training script: its speed over smddp, of that over gloo, on CPU processes.

    python benchmarks/integrations.py --output benchmarks/results/integrations.md
    python benchmarks/integrations.py --rounds 1 --only ddp fsdp2                        # a trial, seconds

What is run are the scripts in examples/. What is compared, and how, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from pages import Bystanders, origin, publish

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.examples import SHARED, Outcome, free_port, run_example

BACKENDS = ("gloo", "smddp")
TOLERANCE = 1e-5  # relative, between the losses of the two; two ranks' sums are the same in any order
WARMUP = 2  # steps that the examples leave out of their speed
# 7.2M parameters, 27.6 MiB of them in fp32, and one sample of 128 tokens on each process.
LLAMA = {"width": 384, "layers": 4, "length": 128, "batch": 1}
MLP = {"width": 1536, "batch": 64}  # 2.4M parameters, 9 MiB


class Integration(NamedTuple):
    """A row of the table: the example with its flags, and what was expected of it before it was measured."""

    title: str
    example: str
    flags: dict[str, object]
    predicted: float
    because: str
    needs: str = ""  # a package that is not one of the project's


_GATHERED = "parameters gathered twice, gradients reduce-scattered: 120 ms over gloo, 15 ms here, beside 200 ms"
INTEGRATIONS = {
    "ddp": Integration(
        "DistributedDataParallel", "ddp", MLP, 1.2, "an all_reduce of 9 MiB: 8 ms over gloo, 2 ms here, beside 35 ms"
    ),
    "by_hand": Integration(
        "gradients averaged by hand", "gradient_averaging", MLP, 1.2, "the same bytes, after backward and not beside it"
    ),
    "mpi": Integration(
        "an MPI-style program", "mpi_style", MLP, 1.1, "gather is gloo's on both; only the broadcast differs"
    ),
    "fsdp1": Integration("torch's FSDP1", "fsdp1", LLAMA, 1.4, _GATHERED),
    "fsdp1_smp": Integration(
        "smp.FullyShardedDataParallel", "fsdp1", {**LLAMA, "engine": "smp"}, 1.5,
        "as fully_shard with shared buffers, which it installs",
    ),
    "fsdp2": Integration(
        "fully_shard, shared buffers", "fsdp2", LLAMA, 1.55, "as FSDP1, and the copies of the gathers fall away"
    ),
    "fsdp2_private": Integration(
        "fully_shard, its own buffers", "fsdp2", {**LLAMA, "private_buffers": True}, 1.4, _GATHERED
    ),
    "dtensor": Integration(
        "DTensor tensor parallelism", "dtensor_tp", {**LLAMA, "batch": 2}, 1.15,
        "32 exchanges of 200 KiB: 0.5 ms each over gloo, 0.1 ms here, beside 200 ms of halved products and dispatch",
    ),
    "accelerate": Integration(
        "Accelerate", "accelerate_loop", {**LLAMA, "accumulate": 1}, 1.08,
        "DDP: an all_reduce of 28 MiB, 22 ms over gloo, 6 ms here",
    ),
    "trainer": Integration(
        "Hugging Face Trainer, BERT", "trainer_qa", {"width": 256, "layers": 4, "batch": 8}, 1.06,
        "DDP: an all_reduce of 12 MiB beside 250 ms of computing",
    ),
    "zero1": Integration(
        "DeepSpeed ZeRO-1", "deepspeed_llama", {**LLAMA, "stage": 1}, 1.25,
        "gradients reduced, updated parameters gathered once: 60 ms over gloo, 12 ms here", "deepspeed",
    ),
    "zero2": Integration(
        "DeepSpeed ZeRO-2", "deepspeed_llama", {**LLAMA, "stage": 2}, 1.25, "the bytes of ZeRO-1", "deepspeed"
    ),
    "zero3": Integration(
        "DeepSpeed ZeRO-3", "deepspeed_llama", {**LLAMA, "stage": 3}, 1.3,
        "the bytes of FSDP, in more and smaller exchanges, and more of DeepSpeed's own time", "deepspeed",
    ),
    "smp": Integration(
        "smp.parallelize", "pretrain", LLAMA, 1.5, "as fully_shard with shared buffers; 8.6M parameters"
    ),
}  # fmt: skip


class Row(NamedTuple):
    """What one integration showed."""

    integration: Integration
    speeds: dict[str, list[float]]  # by backend, round by round
    ours: Outcome  # of the last round


def measure(integration: Integration, backend: str, steps: int) -> Outcome:
    """One run in fresh processes, forked from this one, which has imported the libraries."""
    words: list[object] = ["--backend", backend, "--steps", steps]
    for name, value in integration.flags.items():
        words += [f"--{name}"] if value is True else [f"--{name}", value]
    with tempfile.TemporaryDirectory() as folder:
        if integration.example == "trainer_qa":
            words += ["--output_dir", folder]
        environments = None
        if integration.example == "gradient_averaging":
            hosts = '["localhost", "algo-2"]'
            environments = [{"SM_HOSTS": hosts, "SM_CURRENT_HOST": host} for host in ("localhost", "algo-2")]
            words += ["--port", free_port()]
        outcome = run_example(integration.example, *words, environments=environments)
    if set(outcome.statuses) != {0}:
        sys.exit(f"{integration.title} over {backend} has ended with {outcome.statuses}:\n{outcome.output}")
    return outcome


def compare(name: str, gloo: Outcome, ours: Outcome) -> None:
    """Check that both compute the same numbers: only then do they the same work."""
    for step, (loss, wanted) in enumerate(zip(ours.losses, gloo.losses, strict=True), start=1):
        if not abs(loss - wanted) <= TOLERANCE * abs(wanted):
            sys.exit(f"{name}: loss {loss:.7f} over smddp at step {step}, {wanted:.7f} over gloo: not the same work")


def run(names: list[str], rounds: int, steps: int) -> dict[str, Row]:
    """All rounds of all integrations; each is run over both backends one after the other, in turns which first."""
    rows: dict[str, Row] = {}
    for number in range(rounds):
        for name in names:
            integration = INTEGRATIONS[name]
            order = BACKENDS if number % 2 == 0 else BACKENDS[::-1]
            found = {backend: measure(integration, backend, steps) for backend in order}
            compare(name, found["gloo"], found["smddp"])
            speeds = rows[name].speeds if name in rows else {backend: [] for backend in BACKENDS}
            for backend, outcome in found.items():
                speeds[backend].append(outcome.results["speed"])
            rows[name] = Row(integration, speeds, found["smddp"])
            ratio = speeds["smddp"][-1] / speeds["gloo"][-1]
            print(f"[round {number + 1} of {rounds}] {name}: {ratio:.2f} times gloo", file=sys.stderr)
    return rows


def _line(row: Row) -> str:
    ratios = sorted(ours / gloo for ours, gloo in zip(row.speeds["smddp"], row.speeds["gloo"], strict=True))
    gloo, ours = (statistics.median(row.speeds[backend]) for backend in BACKENDS)
    shared, calls = row.ours.calls(*SHARED), row.ours.calls()
    others = sorted(row.ours.operations("gloo"))
    left = f" ({', '.join(others)} to gloo)" if others else ""
    return (
        f"| {row.integration.title} | {gloo:.0f} | {ours:.0f} {row.ours.results['unit']} | "
        f"**{statistics.median(ratios):.2f}** | {ratios[0]:.2f}-{ratios[-1]:.2f} | {row.integration.predicted:.2f} | "
        f"{shared} of {calls}{left} |"
    )


def report(rows: dict[str, Row], remarks: list[str], arguments: argparse.Namespace) -> str:
    """Return the page for ``benchmarks/results``."""
    packages = ("transformers", "accelerate", *(["deepspeed"] if "zero1" in rows or "zero3" in rows else []))
    versions = [f"{package} {importlib.metadata.version(package)}" for package in packages]
    lines = [
        "# smddp under other libraries", "",
        *origin(*versions, f"two processes of one thread, {arguments.rounds} rounds of {arguments.steps} steps"),
        "The scripts in examples/, with `--backend gloo` and `--backend smddp`, one after the other in each round.",
        f"Speeds are of the median step after {WARMUP} to warm up, medians over rounds, in what the table says;",
        "`times gloo` is the median over rounds of the two speeds in one round. Shared: calls through the host's",
        "shared memory, of all that rank 0 made from start to end.",
        f"In every round the losses of all steps were equal to {TOLERANCE:g} relative, or this page would not be.",
        *remarks, "",
        "| integration | gloo, /s | smddp, /s | times gloo | rounds | predicted | shared |",
        "|---|---:|---:|---:|---|---:|---|",
        *(_line(row) for row in rows.values()), "",
        "## Predicted before, and why", "",
        "From the times of single collectives in [collectives.md](collectives.md) and 30 GFLOP/s of a core.", "",
        "| integration | predicted | because |", "|---|---:|---|",
        *(f"| {i.title} | {i.predicted:.2f} | {i.because} |" for i in (row.integration for row in rows.values())),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=INTEGRATIONS, default=list(INTEGRATIONS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="times that every integration is measured (default 5)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a measurement, 10 at least (default 10)")
    parser.add_argument("--output", type=Path, help="write the page here; it is printed in any case")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.steps < 10:
        parser.error("--rounds must be at least 1 and --steps at least 10")
    return arguments


def main(argv: list[str]) -> None:
    """Measure, then print and write the page."""
    arguments = parse(argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    missing = [name for name in arguments.only if INTEGRATIONS[name].needs and not _imports(INTEGRATIONS[name].needs)]
    names = [name for name in arguments.only if name not in missing]
    models = [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "llama")]
    for module in ("accelerate", "transformers.trainer", *models):
        importlib.import_module(module)  # before the processes are forked
    bystanders = Bystanders()
    rows = run(names, arguments.rounds, arguments.steps)
    remarks = [bystanders.describe(), *(f"Left out, not installed: {name}." for name in missing)]
    publish(report(rows, remarks, arguments), arguments.output)


def _imports(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
