"""Tokens per second and peak memory of a training step, beside the usual ways to write one, on CPU processes.

    python benchmarks/train_step.py --output benchmarks/results/train_step.md
    python benchmarks/train_step.py --models llama_tiny --rounds 1 --steps 2 --precision fp32     # a trial, seconds

What is compared, and how, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
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
from collections.abc import Callable, Iterable
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.pipelines.data_pipeline import StepBatch  # noqa: E402
from smp.config import ActivationConfig, ParallelConfig  # noqa: E402
from smp.delayed_init import initialize_  # noqa: E402
from smp.errors import UserError  # noqa: E402
from smp.mesh import build_mesh, resolve_degrees  # noqa: E402
from smp.models.model_config import ResolvedModel  # noqa: E402
from smp.models.registry import build_model, count_parameters, family_of, init_rule  # noqa: E402
from smp.optimizer import OptimConfig, build_optimizer  # noqa: E402
from smp.transform import model_blocks, prepare_model  # noqa: E402
from train_lib import train_step  # noqa: E402

SEED, LR, WARMUP_STEPS = 0, 3e-4, 2
OPTIM = OptimConfig()  # the job's own: AdamW, decay on matrices, clipping at 1
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  # relative; in bf16 the peers cast in other places
CPU = torch.device("cpu")

# Hidden width, blocks, intermediate width, vocabulary, tokens per sample.
SIZES = {
    "llama70m": (640, 10, 1728, 16_384, 256),
    "neox70m": (640, 10, 2560, 16_384, 256),
    "llama_tiny": (64, 2, 128, 512, 32),
    "neox_tiny": (64, 2, 256, 512, 32),
}

Step = Callable[[int], Tensor]  # from the step's number to this process's mean loss, 0-d


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement: a variant of the step on one model, in fresh processes."""

    model: str
    precision: str
    variant: str
    processes: int
    threads: int  # of each process
    steps: int
    rows: int  # samples of each process and step
    isa: str  # ceiling of oneDNN's instruction set; "" is none

    @property
    def bf16(self) -> bool:
        """Whether to compute in bfloat16."""
        return self.precision == "bf16"

    @property
    def length(self) -> int:
        """Tokens per sample."""
        return SIZES[self.model][-1]

    @property
    def tokens(self) -> int:
        """Tokens of the timed steps, over all processes."""
        return self.processes * self.rows * self.length * self.steps


@dataclasses.dataclass(frozen=True)
class Result:
    """What the processes of one case report."""

    tokens_per_second: float
    peak_mib: float  # of the largest process
    imported_mib: float  # what of it was resident before the model was built: libraries
    losses: list[float]  # of each step with the warm-up, mean over processes


def resolved_model(name: str) -> ResolvedModel:
    """The benchmark's model in the form the job plans with."""
    hidden, blocks, intermediate, vocabulary, length = SIZES[name]
    config_class = transformers.LlamaConfig if name.startswith("llama") else transformers.GPTNeoXConfig
    hf_config = config_class(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=blocks,
        num_attention_heads=hidden // 64 or 1, max_position_embeddings=length, tie_word_embeddings=False,
        use_cache=False,
    )  # fmt: skip
    return ResolvedModel(
        name=name, family=family_of(hf_config), hf_config=hf_config, sequence_length=length, weights=None,
        tokenizer_dir=None, attn_implementation="sdpa", delayed_param=True,
    )  # fmt: skip


def batch(case: Case, rank: int, step: int) -> Tensor:
    """This process's token ids ``(rows, length)``: its part of one global batch, the same in every variant."""
    generator = torch.Generator().manual_seed(1000 + step)
    total = case.rows * case.processes
    ids = torch.randint(SIZES[case.model][3], (total, case.length), generator=generator)
    return ids[rank * case.rows : (rank + 1) * case.rows]


# --- the variants -----------------------------------------------------------------------------------------------------


def smp_step(case: Case, rank: int) -> Step:
    """The job's own parts, put together as ``train_lib.run`` does."""
    parallel = ParallelConfig(sharding_strategy="full_shard")
    degrees = resolve_degrees(parallel, world_size=case.processes, local_world_size=case.processes)
    model = prepare_model(
        resolved_model(case.model),
        mesh=build_mesh(degrees, "cpu"),
        parallel=parallel,
        activation=ActivationConfig(activation_checkpointing=False),
        dtype=torch.bfloat16 if case.bf16 else torch.float32,
        device=CPU,
        seed=SEED,
        load_weights=False,
    )
    _require_fsdp2(model, case)
    optimizer = build_optimizer(model, OPTIM, lr=LR)

    def step(number: int) -> Tensor:
        ids = batch(case, rank, number)
        rows = StepBatch([{"input_ids": ids, "labels": ids}], torch.arange(len(ids)))
        result = train_step(model, optimizer, rows, device=CPU, grad_clip=OPTIM.grad_clip)
        return result.loss_sum / (result.tokens / case.processes)

    return step


def fsdp2_step(case: Case, rank: int, *, fused: bool) -> Step:
    """The loop of torch's FSDP2 tutorial: each block and the root sharded, the defaults otherwise."""
    model, family = _plain_model(case), resolved_model(case.model).family
    policy = _fsdp2_policy(case)
    for block in model_blocks(model, family):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    _require_fsdp2(model, case)
    return _plain_loop(case, rank, model, _adamw(model.parameters(), fused=fused))


def accelerate_step(case: Case, rank: int) -> Step:
    """Accelerate's prepare, backward and clipping, with its FSDP2 plug-in."""
    # Without it Accelerate makes a CPU run DDP, even when given the plug-in.
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True, cpu_offload=False,
        cpu_ram_efficient_loading=False, mixed_precision_policy=_fsdp2_policy(case),
    )  # fmt: skip
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16" if case.bf16 else "no", fsdp_plugin=plugin)
    model = _plain_model(case)
    model, optimizer = accelerator.prepare(model, _adamw(model.parameters(), fused=True))
    _require_fsdp2(model, case)
    return _plain_loop(case, rank, model, optimizer, backward=accelerator.backward, clip=accelerator.clip_grad_norm_)


def one_process_step(case: Case, rank: int) -> Step:
    """The plain Hugging Face model, all cores as threads of one process; bf16 is autocast's."""
    model = _plain_model(case)
    return _plain_loop(case, rank, model, _adamw(model.parameters(), fused=True))


def floor_step(case: Case, rank: int) -> Step:
    """No exchange: forward and backward of the whole model, AdamW on this process's part of it, without clipping."""
    model = _plain_model(case)
    parameters = list(model.parameters())
    # The rows that FSDP2 would leave to this rank, in fp32. In fp32 they are views: no copy in either direction.
    parts = [p.detach().chunk(case.processes)[rank].float() for p in parameters]
    if case.bf16:
        model.to(torch.bfloat16)
    working = [p.detach().chunk(case.processes)[rank] for p in parameters]
    optimizer = _adamw(parts, fused=True)

    def step(number: int) -> Tensor:
        ids = batch(case, rank, number)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        for parameter, part in zip(parameters, parts, strict=True):
            part.grad = parameter.grad.chunk(case.processes)[rank].to(part.dtype)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        if case.bf16:
            torch._foreach_copy_(working, parts)
        return loss.detach()

    return step


def _plain_model(case: Case) -> nn.Module:
    """The whole Hugging Face model, with the values that the job gives its shards."""
    resolved = resolved_model(case.model)
    model = build_model(resolved.hf_config, attn_implementation=resolved.attn_implementation)
    rule = functools.partial(init_rule, hf_config=resolved.hf_config)
    initialize_(model, lambda module, name: rule(module, name).as_tuple(), seed=SEED)
    return model.train()


def _plain_loop(
    case: Case,
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    backward: Callable[[Tensor], None] = Tensor.backward,
    clip: Callable[..., Tensor] = torch.nn.utils.clip_grad_norm_,
) -> Step:
    """The loop most people write, with Hugging Face's own loss."""
    autocast = case.bf16 and not isinstance(model, FSDPModule)

    def step(number: int) -> Tensor:
        ids = batch(case, rank, number)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        backward(loss)
        clip(model.parameters(), OPTIM.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _adamw(parameters: Iterable[Tensor], *, fused: bool) -> torch.optim.AdamW:
    """The job's groups and settings: weight decay on matrices only."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # None and not False: torch then chooses its default implementation.
    return torch.optim.AdamW(groups, lr=LR, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.adam_eps, fused=fused or None)


def _fsdp2_policy(case: Case) -> MixedPrecisionPolicy:
    if case.bf16:
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def _require_fsdp2(model: nn.Module, case: Case) -> None:
    blocks = model_blocks(model, resolved_model(case.model).family) if isinstance(model, FSDPModule) else [model]
    if not all(isinstance(module, FSDPModule) for module in blocks):
        raise UserError(
            f"{case.variant}: the model is {type(model).__name__}, not sharded by FSDP2: nothing to compare"
        )


VARIANTS: dict[str, tuple[str, Callable[[Case, int], Step]]] = {
    "smp": ("smp", smp_step),
    "fsdp2": ("plain FSDP2 loop, AdamW", functools.partial(fsdp2_step, fused=False)),
    "fsdp2_fused": ("plain FSDP2 loop, fused AdamW", functools.partial(fsdp2_step, fused=True)),
    "accelerate": ("Accelerate, FSDP2, fused AdamW", accelerate_step),
    "one_process": ("one process, all cores as threads", one_process_step),
    "floor": ("floor: no exchange", floor_step),
}
SHARDED = ("smp", "fsdp2", "fsdp2_fused", "accelerate")


# --- measuring --------------------------------------------------------------------------------------------------------


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
        if process.exitcode == 0:
            return isa
        reason = signal.Signals(-process.exitcode).name if process.exitcode < 0 else f"status {process.exitcode}"
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


def run(arguments: argparse.Namespace) -> tuple[dict[tuple[str, str], dict[str, list[Result]]], list[str]]:
    """All rounds of all variants, in turn; the results of each (model, precision), and remarks."""
    isa = usable_isa() if "bf16" in arguments.precision else ""
    notes = []
    if isa is None:
        notes.append("bf16 is left out: a bf16 matrix product kills the process with every instruction set tried.")
    elif isa:
        notes.append(f"bf16 under ONEDNN_MAX_CPU_ISA={isa}: without it a bf16 matrix product kills the process.")
    precisions = [p for p in arguments.precision if not (p == "bf16" and isa is None)]
    pairs = [(model, precision) for model in arguments.models for precision in precisions]
    results: dict[tuple[str, str], dict[str, list[Result]]] = {pair: defaultdict(list) for pair in pairs}
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


# --- the report -------------------------------------------------------------------------------------------------------


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


def report(
    results: dict[tuple[str, str], dict[str, list[Result]]], arguments: argparse.Namespace, notes: list[str]
) -> str:
    """The page for ``benchmarks/results``."""
    cores = len(os.sched_getaffinity(0))
    lines = [
        "# One training step: speed and memory", "",
        f"{datetime.date.today()}, {cores}-core {platform.machine().replace('_', '-')} machine, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, accelerate {accelerate.__version__}; {arguments.processes} processes of "
        f"{arguments.threads} thread(s); {arguments.rounds} rounds of {arguments.steps} steps after {WARMUP_STEPS} to warm up.",
        "", f"    python {shlex.join(sys.argv)}", "",
        "Ratios are medians over rounds of the two speeds in one round. Variants and rules: benchmarks/README.md.", *notes,
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
