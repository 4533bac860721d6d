"""Expert parallelism beside transformers' own, in one run: time of a step, memory of a rank, and right gradients.

    python benchmarks/experts.py --output benchmarks/results/experts.md
    python benchmarks/experts.py --processes 2 --rounds 2                  # a trial, seconds

Both train one Mixtral over all processes, sharded, the experts split over as many, a thread for each process, with
gloo; smp with smddp, too, in as many other processes that wait meanwhile. Steps of the three take turns. Ratios are
median and range over the rounds. Gradients are compared in fp64 with those of one process: 1 is right.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

import smp
from smp.local_shards import local_tensor

ROWS, LENGTH = 2, 256  # of a process
BACKENDS = ("gloo", "smddp")


def build(folder: Path) -> Any:
    """Write and return the plain model, in fp64."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", dtype=torch.float64)
    model.save_pretrained(folder)
    return model


def loss_of(model: Any, ids: torch.Tensor, divisor: float) -> torch.Tensor:
    """Sum over the tokens by ``divisor``."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / divisor


def of_transformers(folder: Path, ep: int, dtype: torch.dtype) -> Any:
    """Build a model as transformers splits it, whose gradients are means over ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    layout = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=ep)
    experts = "eager" if dtype == torch.float64 else "grouped_mm"
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, distributed_config=layout, experts_implementation=experts
    )


def of_smp(folder: Path, ep: int, dtype: torch.dtype) -> Any:
    """Build a model as smp splits it, whose gradients are sums over ranks."""
    from transformers import AutoModelForCausalLM

    smp.init({"expert_parallel_degree": ep, "sharding_strategy": "full_shard"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return smp.parallelize(model)


def factors(model: Any, plain: dict[str, torch.Tensor], ids: torch.Tensor, divisor: int) -> dict[str, float]:
    """Return the factor of gradients to those of one process, of experts and of the rest.

    Args:
        divisor: tokens that the library's loss is divided by: of all ranks for sums of gradients, of one for means.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    own = ids.chunk(world)[rank]
    loss_of(model, own, divisor).backward()
    found: dict[str, list[float]] = {"experts": [], "others": []}
    for name, parameter in model.named_parameters():
        gradient, want = parameter.grad.full_tensor(), plain[name]
        found["experts" if ".experts." in name else "others"].append(float((gradient * want).sum() / (want**2).sum()))
    return {kind: statistics.median(values) for kind, values in found.items()}


def nbytes(model: Any) -> int:
    """Bytes of a rank's parameters and gradients."""
    return sum(
        local_tensor(tensor).nbytes for p in model.parameters() for tensor in (p.detach(), p.grad) if tensor is not None
    )


def seconds(model: Any, ids: torch.Tensor) -> float:
    """Seconds of forward and backward, of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    loss_of(model, ids, ids[:, 1:].numel()).backward()
    spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    model.zero_grad()
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def join(rank: int, world: int, folder: Path, backend: str) -> None:
    """Join the group of a backend."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/{backend}", rank=rank, world_size=world,
        timeout=datetime.timedelta(minutes=2),
    )  # fmt: skip


def measure(rank: int, world: int, rounds: int, folder: str, backend: str, turns: Any, results: Any) -> None:
    """Measure on one rank of a backend; the first one tells. Processes of the backends take turns."""
    path = Path(folder)
    join(rank, world, path, backend)
    from transformers import AutoModelForCausalLM

    plain_model = AutoModelForCausalLM.from_pretrained(
        path / "model", dtype=torch.float64, experts_implementation="eager"
    )
    torch.manual_seed(3)
    ids = torch.randint(0, 512, (2 * world, 32))
    loss_of(plain_model, ids, ids[:, 1:].numel()).backward()
    plain = {name: p.grad for name, p in plain_model.named_parameters() if p.grad is not None}
    found: dict[str, Any] = {"factors": {}, "bytes": {}}
    tokens = ids[:, 1:].numel()
    makers = {"smp": (of_smp, tokens), "transformers": (of_transformers, tokens // world)}
    if backend != "gloo":
        del makers["transformers"]
    for name, (make, divisor) in makers.items():
        found["factors"][name] = factors(make(path / "model", world, torch.float64), plain, ids, divisor)
    models = {name: make(path / "model", world, torch.float32) for name, (make, _) in makers.items()}
    torch.manual_seed(rank)
    own = torch.randint(0, 512, (ROWS, LENGTH))
    found["times"] = {name: [] for name in models}
    for index in range(rounds + 1):
        for turn in sorted(BACKENDS, reverse=bool(index % 2)):
            turns.wait()
            for name in sorted(models, reverse=bool(index % 2)) if turn == backend else ():
                found["times"][name].append(seconds(models[name], own))
    for name, model in models.items():
        loss_of(model, own, 1.0).backward()
        found["bytes"][name] = nbytes(model)
    if rank == 0:
        results.put((backend, found))
    dist.barrier()
    dist.destroy_process_group()


def run(world: int, rounds: int) -> dict[str, Any]:
    """Measure all contenders over a number of processes, by name: smp over either backend, and transformers."""
    context = mp.get_context("spawn")
    results, turns = context.SimpleQueue(), context.Barrier(len(BACKENDS) * world, timeout=120)
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "model")
        running = [
            mp.spawn(measure, (world, rounds, folder, backend, turns, results), nprocs=world, join=False)
            for backend in BACKENDS
        ]
        for each in running:
            while not each.join():
                pass
        by_backend = dict(results.get() for _ in running)
    gloo, smddp = by_backend["gloo"], by_backend["smddp"]
    return {kind: gloo[kind] | {"smddp": smddp[kind]["smp"]} for kind in ("factors", "times", "bytes")}


def ratio(found: dict[str, Any], one: str, other: str) -> str:
    """Return the ratio of times: median and range over the rounds, of which the first only warms up."""
    ratios = [a / b for a, b in zip(found["times"][one][1:], found["times"][other][1:], strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def page(found: dict[int, dict[str, Any]], rounds: int, load: float) -> str:
    """Return the page; ``load`` is the machine's average before the run, of all that runs there."""
    version = importlib.metadata.version
    lines = [
        f"Mixtral, 8 experts, top 2, hidden 256, {ROWS} x {LENGTH} tokens a process, {rounds} rounds; torch "
        f"{torch.__version__}, transformers {version('transformers')}, CPU, {os.cpu_count()} cores, "
        f"load average {load:.1f} before. smp and transformers are over gloo where smddp is not named.", "",
        "| processes = ep | time, smp / transformers | time, smp over smddp / smp | parameters and gradients of a "
        "rank, smp / transformers | experts' gradients, smp | smp over smddp | transformers | others, smp "
        "| smp over smddp | transformers |",
        "|" + 10 * "---|",
    ]  # fmt: skip
    for world, one in sorted(found.items()):
        contenders = ("smp", "smddp", "transformers")
        cells = [str(world), ratio(one, "smp", "transformers"), ratio(one, "smddp", "smp")]
        cells.append(f"{one['bytes']['smp'] / one['bytes']['transformers']:.2f}")
        cells += [f"{one['factors'][name][kind]:.6f}" for kind in ("experts", "others") for name in contenders]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    found = {world: run(world, args.rounds) for world in args.processes}
    text = page(found, args.rounds, load)
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
