"""Speed and memory of attention over the ranks of a sequence, beside DeepSpeed Ulysses in the same model.

    python benchmarks/context_parallel.py --output benchmarks/results/context_parallel.md
    python benchmarks/context_parallel.py --lengths 512 --processes 2 --rounds 2                  # a trial, seconds

What is compared, and how, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import transformers
from pages import Bystanders, origin, publish
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import smp.comm  # noqa: F401  the backend smddp
from smp.config import ParallelConfig
from smp.loss import shift_labels
from smp.mesh import Mesh, Role, resolve_mesh
from smp.parallel.context.batch import shard_batch
from smp.parallel.context.layout import split_columns
from smp.parallel.context.technique import split_sequences

CONFIG = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 1 << 17, "use_cache": False,
}  # fmt: skip
TOLERANCE = 1e-4  # relative, of every parameter's gradient, to one process's; fp32


class Variant(NamedTuple):
    """A way to attend: its name in the tables, the exchange (None: DeepSpeed's), and the backend of its group."""

    name: str
    exchange: str | None
    backend: str


PEER = "deepspeed"
VARIANTS = {
    PEER: Variant("DeepSpeed Ulysses over gloo", None, "gloo"),
    "all_gather": Variant("smp, all_gather, over gloo", "all_gather", "gloo"),
    "p2p": Variant("smp, p2p, over gloo", "p2p", "gloo"),
    "all_to_all": Variant("smp, all_to_all, over gloo", "all_to_all", "gloo"),
    "all_gather_smddp": Variant("smp, all_gather, over smddp", "all_gather", "smddp"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement in fresh processes, in which all variants take turns."""

    length: int
    processes: int
    rounds: int
    variants: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """What the processes of one case report.

    Attributes:
        seconds: of each variant and round, of the slowest process.
        kept: bytes that autograd holds between forward and backward, of each variant, on rank 0.
        alone: the same bytes of one process with the whole sequence.
        difference: the largest of a parameter's gradient from one process's, relative, of each variant.
        leaks: positions of a second document whose logits change with a token of the first, of each variant, all ranks.
    """

    seconds: dict[str, list[float]]
    kept: dict[str, int]
    alone: int
    difference: dict[str, float]
    leaks: dict[str, int]


Step = Callable[[], None]  # forward and backward, which adds to the gradients
Cut = Callable[[dict[str, Tensor]], dict[str, Any]]  # of a batch, the arguments of a rank's model


def _plain_model() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, attn_implementation="sdpa"))  # type: ignore[call-arg]


def _batch(length: int) -> dict[str, Tensor]:
    ids = torch.randint(CONFIG["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def _step(model: nn.Module, inputs: dict[str, Any], length: int) -> Step:
    """Return a step; all variants have the same loss, which is the part of the whole sequence's mean."""
    labels = inputs.pop("shift_labels")
    inputs.pop("labels", None)

    def step() -> None:
        logits = model(**inputs).logits
        (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (length - 1)).backward()

    return step


def _whole(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of the plain model, which has the whole sequence."""
    return {"input_ids": batch["input_ids"], "shift_labels": shift_labels(batch["labels"])}


def _deepspeed(case: Case, rank: int) -> tuple[nn.Module, Cut]:
    """Build DeepSpeed's recipe for Hugging Face models: consecutive tokens, its attention in place of ``sdpa``."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = _plain_model()
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=case.processes,
        micro_batch_size=1, seq_length=case.length, seq_length_is_variable=False,
    )  # fmt: skip
    ((first, last),) = split_columns(case.length, case.processes, balanced=False).ranges[rank]

    def cut(batch: dict[str, Tensor]) -> dict[str, Any]:
        whole = {"position_ids": torch.arange(case.length)[None], **batch}
        if "labels" in batch:
            whole["shift_labels"] = shift_labels(batch["labels"])
        return {name: whole[name][:, first:last] for name in ("input_ids", "position_ids", "shift_labels")}

    return model, cut


def _smp(exchange: str, mesh: Mesh) -> tuple[nn.Module, Cut]:
    model = _plain_model()
    split_sequences(model, exchange)
    return model, functools.partial(shard_batch, mesh=mesh)


def _leaks(model: nn.Module, cut: Cut, length: int) -> int:
    """Count the positions of a second document in a row whose logits change with a token of the first."""
    first, ids = length // 3, _batch(length)["input_ids"]
    positions = torch.cat([torch.arange(first), torch.arange(length - first)])[None]
    second = (torch.arange(length) >= first).long()[None]  # goes the labels' way, to tell where a position is
    other = ids.clone()
    other[0, 3] = (other[0, 3] + 1) % CONFIG["vocab_size"]
    logits = []
    for each in (ids, other):
        inputs = cut({"input_ids": each, "position_ids": positions, "shift_labels": second})
        held = inputs.pop("shift_labels") == 1
        inputs.pop("labels", None)
        with torch.no_grad():
            logits.append(model(**inputs).logits)
    count = (logits[0] != logits[1]).any(-1)[held].sum()
    dist.all_reduce(count)
    return int(count)


def _kept(model: nn.Module, step: Step) -> int:
    """Take a step, and return the bytes of the distinct storages that are saved for backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Held until backward: a storage is counted once, and its address is no other's meanwhile.
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(t.untyped_storage().nbytes() for address, t in found.items() if address not in parameters)


def _gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def _worker(rank: int, case: Case, folder: str, barrier: Any) -> None:
    """One process: build every variant, compare its gradients, take turns, and write what was seen."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.processes)
    parallel = ParallelConfig(context_parallel_degree=case.processes, sharding_strategy="full_shard")
    mesh = resolve_mesh(parallel, world_size=case.processes, local_world_size=case.processes, rank=rank).join("cpu")
    shared = Role(case.processes, rank, dist.new_group(backend="smddp"))
    meshes = {"gloo": mesh, "smddp": dataclasses.replace(mesh, roles={**mesh.roles, "cp": shared})}
    model = _plain_model()  # before DeepSpeed replaces `sdpa`
    step = _step(model, _whole(_batch(case.length)), case.length)
    alone = _kept(model, step)
    wanted = _gradients(model)
    steps: dict[str, Step] = {}
    kept, difference, leaks = {}, {}, {}
    for name in case.variants:
        _, exchange, backend = VARIANTS[name]
        model, cut = _smp(exchange, meshes[backend]) if exchange else _deepspeed(case, rank)
        steps[name] = _step(model, cut(_batch(case.length)), case.length)
        leaks[name] = _leaks(model, cut, case.length)
        kept[name] = _kept(model, steps[name])
        found = _gradients(model)
        for gradient in found:
            dist.all_reduce(gradient)
        pairs = zip(found, wanted, strict=True)
        difference[name] = max(float((one - two).norm() / two.norm()) for one, two in pairs)
    seconds: dict[str, list[float]] = {name: [] for name in case.variants}
    for number in range(case.rounds):
        turn = number % len(case.variants)
        for name in case.variants[turn:] + case.variants[:turn]:
            barrier.wait()
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
        if rank == 0:
            shown = ", ".join(f"{name} {times[-1]:.2f}" for name, times in seconds.items())
            print(f"{case.length} x{case.processes} [round {number + 1} of {case.rounds}] s: {shown}", file=sys.stderr)
    report = Result(seconds, kept, alone, difference, leaks)
    Path(folder, f"{rank}.json").write_text(json.dumps(dataclasses.asdict(report)))
    barrier.wait()
    os._exit(0)  # DeepSpeed's groups do not end with the process group


def measure(case: Case) -> Result:
    """Run one case in fresh processes, forked from this one, which has imported the libraries.

    Raises:
        ValueError: a variant has other gradients: it does not do the same work.
    """
    barrier = multiprocessing.get_context("fork").Barrier(case.processes)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_worker, args=(case, folder, barrier), nprocs=case.processes, start_method="fork")
        reports = [Result(**json.loads(Path(folder, f"{rank}.json").read_text())) for rank in range(case.processes)]
    first = reports[0]
    for name, found in first.difference.items():
        if not found <= TOLERANCE:
            raise ValueError(f"{VARIANTS[name].name}: gradients differ by {found:.1e} from one process's")
    slowest = {
        name: [max(times) for times in zip(*(r.seconds[name] for r in reports), strict=True)] for name in first.seconds
    }
    return dataclasses.replace(first, seconds=slowest)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the order statistics that hold the median in 95 % of cases, or the range where there are too few."""
    ordered, count = sorted(values), len(values)
    # Values left out on either side, and how often the median is further out than that.
    outside = [2 * sum(math.comb(count, k) for k in range(left + 1)) / 2**count for left in range(count)]
    left = max(0, sum(often <= 0.05 for often in outside) - 1)
    return ordered[left], ordered[-1 - left]


def _ratio(result: Result, name: str, other: str) -> str:
    """Format the speed of a variant over another's: the median of the rounds' ratios, and its interval."""
    if name == other or other not in result.seconds:
        return "-"
    ratios = [two / one for one, two in zip(result.seconds[name], result.seconds[other], strict=True)]
    low, high = interval(ratios)
    return f"**{statistics.median(ratios):.3f}** ({low:.3f}-{high:.3f})"


def table(result: Result, length: int) -> list[str]:
    """Format a markdown table of one case's variants."""
    second = length - length // 3
    lines = [
        "| variant | seconds, median | min-max | speed over DeepSpeed's | over its own over gloo | "
        f"kept for backward, MiB (of one process's) | gradients differ by | leaks, of {second} |",
        "|---|---:|---:|---|---|---:|---:|---:|",
    ]
    for name, times in result.seconds.items():
        kept = f"{result.kept[name] / 2**20:.1f} ({result.kept[name] / result.alone:.3f})"
        own = _ratio(result, name, name.removesuffix("_smddp"))
        lines.append(
            f"| {VARIANTS[name].name} | {statistics.median(times):.3f} | {min(times):.3f}-{max(times):.3f} | "
            f"{_ratio(result, name, PEER)} | {own} | {kept} | {result.difference[name]:.0e} | {result.leaks[name]} |"
        )
    return lines


def report(results: dict[tuple[int, int], Result], arguments: argparse.Namespace, remarks: list[str]) -> str:
    """Return the page for ``benchmarks/results``."""
    packages = ("transformers", *(["deepspeed"] if PEER in arguments.variants else []))
    versions = [f"{package} {importlib.metadata.version(package)}" for package in packages]
    lines = [
        "# Context parallelism: speed and memory", "",
        *origin(*versions, f"processes of one thread, {arguments.rounds} rounds"),
        "Forward and backward of a Hugging Face Llama of 2 blocks, width 256, 8 heads, 4 of keys and values, one",
        "sequence, fp32; every variant has its model and its tokens, and the same loss. Variants take turns",
        "within each round, step by step; the slowest process counts. Ratios are of the speeds in one round: the",
        "median of the rounds, in brackets its 95 % interval by order statistics (with fewer than 6 rounds the",
        "range). Kept: distinct storages that autograd saves, logits and what the loss saves among them,",
        "parameters not. Gradients are beside one process's, of all parameters the worst, relative; beyond",
        f"{TOLERANCE:g} this page would not be. Leaks: of a row of two documents, told apart by `position_ids`,",
        "positions of the second whose logits change with one token of the first.",
        *remarks,
    ]  # fmt: skip
    for (length, processes), result in results.items():
        lines += ["", f"## {length} tokens, {processes} processes", "", *table(result, length)]
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384], help="tokens (default 4096 16384)")
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4], help="ranks of a sequence (default 2 4)")
    parser.add_argument("--rounds", type=int, default=9, help="turns that every variant takes (default 9)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--output", type=Path, help="write the page here; it is printed in any case")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or min(arguments.processes) < 2:
        parser.error("--rounds must be at least 1 and --processes at least 2")
    return arguments


def main(argv: list[str]) -> None:
    """Measure, and print and write the page after each case."""
    arguments = parse(argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if PEER in arguments.variants:
        import deepspeed.runtime.sequence_parallel.ulysses_sp  # noqa: F401  before the processes are forked
    bystanders, results = Bystanders(), {}
    for processes in arguments.processes:
        for length in arguments.lengths:
            case = Case(length, processes, arguments.rounds, tuple(arguments.variants))
            results[length, processes] = measure(case)
            # Each time, as a long sequence takes long: a run that is cut off leaves the page of what it has measured.
            publish(report(results, arguments, [bystanders.describe()]), arguments.output)


if __name__ == "__main__":
    main(sys.argv[1:])
