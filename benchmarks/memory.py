"""Memory and time of a training step under recomputation, offloading and the loss in chunks, beside what was predicted.

    python benchmarks/memory.py --offload_dir /fast/disk --output benchmarks/results/memory.md
    python benchmarks/memory.py --model llama_tiny --offload_dir /tmp --rounds 1 --steps 1 --vocabulary 4000   # a trial

What is compared, and how, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from pages import origin, publish
from step_variants import NOT_RECOMPUTED, SIZES, Case, Variant, resolved_model, smp_step
from torch import Tensor, nn
from train_step import WARMUP_STEPS, Result, measure

from smp.config import ActivationConfig, LossConfig, Settings
from smp.errors import UserError
from smp.memory.estimate import peak_bytes
from smp.memory.shape import Workload, model_shape
from smp.memory.tracker import rss_bytes
from smp.mesh import lay_out
from smp.models.meta_model import count_parameters
from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.loss import linear_cross_entropy
from smp.parallel.offload import DiskStore, apply_activation_offload, require_directory

MIB = 2**20
CHUNKED, WHOLE = LossConfig(), LossConfig(loss_chunk_tokens=0)


def modes(directory: str) -> dict[str, tuple[ActivationConfig, LossConfig]]:
    """Name in the table -> settings."""
    recomputed = ActivationConfig()
    offloaded = functools.partial(ActivationConfig, offload_activations=True, offload_dir=directory)
    return {
        "nothing, whole logits": (NOT_RECOMPUTED, WHOLE),
        "nothing": (NOT_RECOMPUTED, CHUNKED),
        "selective": (ActivationConfig(activation_checkpointing_mode="selective"), CHUNKED),
        "every 2nd block": (ActivationConfig(activation_checkpointing_every=2), CHUNKED),
        "full, whole logits": (recomputed, WHOLE),
        "full": (recomputed, CHUNKED),
        **{f"full, offloaded, horizon {h}": (offloaded(activation_loading_horizon=h), CHUNKED) for h in (1, 2, 4)},
    }


def predicted(model: str, activation: ActivationConfig, loss: LossConfig) -> int:
    """Peak bytes of a rank, from shapes."""
    resolved = resolved_model(model)
    work = Workload(resolved.sequence_length, 1, compute_bytes=4, settings=Settings((activation, loss)))
    return peak_bytes(model_shape(resolved), lay_out(1, 2), work)


def steps_table(arguments: argparse.Namespace) -> list[str]:
    """Peak resident memory and time of each mode, two processes, fully sharded."""
    results: dict[str, list[Result]] = defaultdict(list)
    settings = modes(arguments.offload_dir)
    for number in range(arguments.rounds):
        for name, (activation, loss) in settings.items():
            step = functools.partial(smp_step, activation=activation, loss=loss)
            case = Case(arguments.model, "fp32", name, processes=2, threads=1, steps=arguments.steps, rows=1)
            results[name].append(result := measure(case, Variant(name, step, "smddp")))
            print(f"round {number + 1} {name}: {result.tokens_per_second:.0f} tokens/s, {result.peak_mib:.0f} MiB",
                  file=sys.stderr)  # fmt: skip
    reference = results["full"]
    lines = [
        "| recomputed and offloaded | peak RSS, MiB | predicted, MiB | off by | time of a step, of full's |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, found in results.items():
        peak, wanted = statistics.median(r.peak_mib for r in found), predicted(arguments.model, *settings[name]) / MIB
        slower = statistics.median(
            one.tokens_per_second / two.tokens_per_second for one, two in zip(reference, found, strict=True)
        )
        lines.append(f"| {name} | {peak:.0f} | {wanted:.0f} | {wanted / peak - 1:+.0%} | {slower:.2f} |")
    lines += [
        "",
        "The prediction counts tensors and a fresh process. Resident memory is more: the C library keeps freed blocks "
        "of up to 32 MiB, which fit the next tensor badly; see docs/memory.md.",
    ]
    return lines


class _Block(nn.Module):
    """Small parameters, large activations."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.out(F.silu(self.into(self.norm(hidden_states))))


def _kept(pipe, layers: int, directory: str | None) -> None:
    torch.set_num_threads(1)
    blocks = [_Block(256) for _ in range(layers)]
    apply_activation_checkpointing(blocks)
    if directory is not None:
        apply_activation_offload(blocks, DiskStore(Path(directory)), horizon=2)
    hidden = torch.randn(1, 65_536, 256, requires_grad=True)  # 64 MiB, freed to the system at once
    for block in blocks[:2]:
        block(hidden)  # warms up
    gc.collect()
    before = rss_bytes()
    out = hidden
    for block in blocks:
        out = block(out)
    pipe.send(rss_bytes() - before)
    del out


def kept(layers: int, directory: str | None) -> int:
    """Resident bytes that a forward of many layers leaves, in a fresh process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_kept, args=(there, layers, directory))
    process.start()
    there.close()  # so that a child that fails ends the wait
    found = here.recv()
    process.join()
    return found


def layers_table(directory: str) -> list[str]:
    """Measure the memory that a forward leaves on the device, by number of layers."""
    lines = [
        "| layers | recomputed, MiB | and offloaded, horizon 2, MiB |",
        "|---:|---:|---:|",
    ]
    for layers in (6, 12, 24):
        lines.append(f"| {layers} | {kept(layers, None) / MIB:.0f} | {kept(layers, directory) / MIB:.0f} |")
    return lines


def _plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Hugging Face's: the whole logits, in fp32."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def _naive_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum the loss in a loop over chunks that leaves the rest to autograd."""
    parts = zip(hidden[:, :-1].flatten(0, 1).split(1024), labels[:, 1:].flatten().split(1024), strict=True)
    return torch.stack([F.cross_entropy(F.linear(h, weight).float(), y, reduction="sum") for h, y in parts]).sum()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "Hugging Face's": _plain_loss,
    "a loop over chunks": _naive_loss,
    "linear_cross_entropy": linear_cross_entropy,
}


def _loss_main(pipe, name: str, vocabulary: int) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    hidden = torch.randn(1, 2048, 1024, requires_grad=True)
    weight = (torch.randn(vocabulary, 1024) * 0.02).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, 2048))
    LOSSES[name](hidden[:, :64], weight, labels[:, :64]).backward()
    hidden.grad = weight.grad = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    loss = LOSSES[name](hidden, weight, labels)
    loss.backward()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    pipe.send((float(loss), seconds, peak))


def losses_table(vocabulary: int, rounds: int) -> list[str]:
    """Memory and time of forward and backward of head and loss."""
    context = multiprocessing.get_context("fork")
    found: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for _ in range(rounds):
        for name in LOSSES:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_loss_main, args=(there, name, vocabulary))
            process.start()
            there.close()
            found[name].append(here.recv())
            process.join()
    plain = found["Hugging Face's"]
    lines = [
        "| loss | added peak RSS, MiB | time, of Hugging Face's | value, relative difference |",
        "|---|---:|---:|---:|",
    ]
    for name, results in found.items():
        times = statistics.median(one[1] / other[1] for one, other in zip(results, plain, strict=True))
        peak = statistics.median(result[2] for result in results) / MIB
        lines.append(f"| {name} | {peak:.0f} | {times:.2f} | {abs(results[0][0] / plain[0][0] - 1):.1e} |")
    return lines


def main(argv: list[str]) -> None:
    """Measure, then print and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", choices=[name for name in SIZES if name.startswith("llama")], default="llama108m_2k")
    parser.add_argument("--offload_dir", required=True, help="directory on a fast disk")
    parser.add_argument("--vocabulary", type=int, default=128_000, help="of the table of losses (default 128000)")
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is measured (default 3)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a measurement (default 2)")
    parser.add_argument("--output", type=Path, help="write the tables here; they are printed in any case")
    arguments = parser.parse_args(argv)
    try:
        require_directory(Path(arguments.offload_dir))
    except UserError as error:
        sys.exit(str(error))
    hidden, blocks, intermediate, vocabulary, length = SIZES[arguments.model]
    size = count_parameters(resolved_model(arguments.model).hf_config) / 1e6
    losses = losses_table(arguments.vocabulary, arguments.rounds)
    layers = layers_table(arguments.offload_dir)
    steps = steps_table(arguments)
    run = f"2 processes of 1 thread, {arguments.rounds} round(s) of {arguments.steps} step(s) after {WARMUP_STEPS}"
    lines = [
        "# Memory of activations and loss", "", *origin(run), "Medians over rounds.", "",
        "## A training step", "",
        f"{size:.1f}M parameters: width {hidden}, {blocks} blocks, intermediate width {intermediate}, vocabulary "
        f"{vocabulary}; one sample of {length} tokens for each process, fp32, fully sharded, over smddp. Predicted "
        f"from shapes by `smp.memory.estimate`, before.", "", *steps, "",
        "## What a forward leaves on the device", "",
        "Blocks of width 256 on 65536 tokens: 64 MiB of input each. Resident memory, offloaded to disk.", "", *layers,
        "",
        "## Head and loss", "",
        f"2048 tokens, width 1024, vocabulary {arguments.vocabulary}, fp32; forward and backward in one process of 2 "
        f"threads.", "", *losses,
    ]  # fmt: skip
    publish("\n".join(lines) + "\n", arguments.output)


if __name__ == "__main__":
    main(sys.argv[1:])
