"""Tokens per second and memory of tensor-parallel training, beside transformers' own and torch's tutorial.

    python benchmarks/tensor_parallel.py --output benchmarks/results/tensor_parallel.md
    python benchmarks/tensor_parallel.py --model llama_tiny --rounds 1 --steps 1 --degrees 1     # a trial, seconds

What is compared, and how, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from pages import origin, publish
from step_variants import SIZES, Case, batch, plain_model, resolved_model
from tensor_variants import VARIANTS
from torch.distributed.tensor import DTensor
from train_step import WARMUP_STEPS, Result, check_losses, measure, table

import smp
from smp.errors import UserError
from smp.models.meta_model import count_parameters

COMPARED = [
    ("smp", "transformers"), ("smp", "dtensor"), ("smp_gloo", "transformers"), ("smp_gloo", "dtensor"),
    ("smp", "transformers_smddp"), ("smp", "dtensor_smddp"), ("smp", "smp_kept"), ("smp", "smp_whole"),
]  # fmt: skip


def speeds(arguments: argparse.Namespace) -> dict[str, list[Result]]:
    """All rounds of all variants, in turn."""
    results: dict[str, list[Result]] = defaultdict(list)
    todo = [(number, variant) for number in range(arguments.rounds) for variant in arguments.variants]
    started = time.perf_counter()
    for done, (number, variant) in enumerate(todo):
        case = Case(
            arguments.model, "fp32", variant, processes=2, threads=1, steps=arguments.steps, rows=1, data_parallel=False
        )
        result = measure(case, VARIANTS[variant])
        results[variant].append(result)
        if "smp" in arguments.variants:
            check_losses(case, result.losses, results["smp"][-1].losses)
        left = (time.perf_counter() - started) / (done + 1) * (len(todo) - done - 1)
        print(
            f"[{done + 1}/{len(todo)}, {left / 60:.0f} min left] round {number + 1} {variant}: "
            f"{result.tokens_per_second:.0f} tokens/s, {result.peak_mib:.0f} MiB", file=sys.stderr
        )  # fmt: skip
    return results


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes that rank 0 holds between forward and backward."""

    parameters: int
    activations: int  # saved for backward, without parameters and logits
    logits: int
    loss: int  # what the loss saves beside the logits


def _storages(tensors: dict[int, torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}.values())


def _held_worker(rank: int, case: Case, settings: dict[str, bool], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("smddp", init_method=f"file://{folder}/store", rank=rank, world_size=case.processes)
    smp.init({"tensor_parallel_degree": case.processes, "hybrid_shard_degree": 1, **settings})
    model = smp.transform(plain_model(case)).train()
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    parameters = {p.untyped_storage().data_ptr() for p in own}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if plain.untyped_storage().data_ptr() not in parameters:
            saved[len(saved)] = plain
        return tensor

    ids = batch(dataclasses.replace(case, processes=1), 0, 0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids=ids, use_cache=False).logits
        activations = _storages(saved)
        saved.clear()
        loss = smp.causal_lm_loss_sum(logits, ids)
    own_logits = logits.to_local() if isinstance(logits, DTensor) else logits
    held = Held(sum(p.nbytes for p in own), activations, own_logits.nbytes, _storages(saved))
    if rank == 0:
        Path(folder, "held.json").write_text(json.dumps(dataclasses.asdict(held)))
    loss.backward()
    dist.destroy_process_group()


def held(model: str, degree: int, **settings: bool) -> Held:
    """Measure in fresh processes."""
    case = Case(model, "fp32", "smp", processes=degree, threads=1, steps=1, rows=1, data_parallel=False)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_held_worker, args=(case, settings, folder), nprocs=degree, start_method="fork")
        return Held(**json.loads(Path(folder, "held.json").read_text()))


def memory_table(model: str, degrees: list[int]) -> list[str]:
    """Format a markdown table of a rank's memory at each degree, and as a fraction of one process's."""
    lines = [
        "| tensor-parallel ranks | parameters, MiB | activations, MiB | logits, MiB | saved by the loss, MiB |",
        "|---|---:|---:|---:|---:|",
    ]
    alone: Held | None = None
    for degree in degrees:
        for name, settings in (("", {}), (", gathered inputs kept", {"tp_save_gathered": True}),
                               (", without sequence parallelism", {"sequence_parallel": False})):  # fmt: skip
            if degree == 1 and settings:
                continue
            found = held(model, degree, **settings)
            alone = alone or found
            cells = [
                f"{value / 2**20:.1f} ({value / first:.2f})"
                for value, first in zip(dataclasses.astuple(found), dataclasses.astuple(alone), strict=True)
            ]
            lines.append(f"| {degree}{name} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr)
    return lines


def report(arguments: argparse.Namespace, results: dict[str, list[Result]], memory: list[str]) -> str:
    """Return the page for ``benchmarks/results``."""
    hidden, blocks, intermediate, vocabulary, length = SIZES[arguments.model]
    size = count_parameters(resolved_model(arguments.model).hf_config) / 1e6
    run = (
        f"2 processes of 1 thread, {arguments.rounds} rounds of {arguments.steps} steps after {WARMUP_STEPS} to warm up"
    )
    lines = [
        "# Tensor parallelism: speed and memory", "", *origin(f"transformers {transformers.__version__}", run),
        f"{size:.1f}M parameters: width {hidden}, {blocks} blocks, intermediate width {intermediate}, vocabulary "
        f"{vocabulary}; one sample of {length} tokens per step, fp32, AdamW, no clipping.",
        "Ratios are medians over rounds of the two speeds in one round; benchmarks/README.md describes the variants.",
    ]  # fmt: skip
    if results:
        lines += ["", "## Training step, two tensor-parallel ranks", "", *table(results, VARIANTS, COMPARED)]
    if memory:
        lines += [
            "", "## What a rank holds between forward and backward", "",
            "Distinct storages that autograd saves, without recomputation; in brackets the part of one process's.", "",
            *memory,
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Measure, then print and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", choices=[name for name in SIZES if name.startswith("llama")], default="llama108m")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--degrees", nargs="*", type=int, default=[1, 2, 4], help="of the memory table (default 1 2 4)")
    parser.add_argument("--rounds", type=int, default=5, help="times that every variant is measured (default 5)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a measurement (default 3)")
    parser.add_argument("--output", type=Path, help="write the tables here; they are printed in any case")
    arguments = parser.parse_args(argv)
    try:
        memory = memory_table(arguments.model, arguments.degrees)
        results = speeds(arguments)
    except (UserError, mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(str(error))
    publish(report(arguments, results, memory), arguments.output)


if __name__ == "__main__":
    main(sys.argv[1:])
