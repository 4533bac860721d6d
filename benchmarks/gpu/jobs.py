"""Training jobs of some steps, side by side on one GPU, and what they must have in common: is it right?"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.gpu.processes import call, environment
from benchmarks.gpu.report import Results

LEFT = "not begun, for want of time"
SECONDS = 30.0  # that a job takes: none is begun with less left
LONGEST = 110.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One command, or a second one that resumes the first."""

    name: str
    flags: str
    resumed: str = ""
    on_cpu: bool = False


@dataclasses.dataclass(frozen=True)
class Check:
    """What jobs must have in common.

    Attributes:
        test: from the jobs' run directories to what was found; raises AssertionError.
        jobs: their names.
    """

    name: str
    test: Callable[..., str]
    jobs: tuple[str, ...]


def logged(folder: Path, key: str) -> list[float]:
    """Return a metric of all steps of a run."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [float(record[key]) for record in records if "loss" in record]


def trains(folder: Path) -> str:
    """Check that a run's losses are those of a training run."""
    losses, peak = logged(folder, "loss"), logged(folder, "mem_peak_gib")[-1]
    assert len(losses) == 5 and all(math.isfinite(loss) and loss > 0 for loss in losses), losses
    return f"losses {losses[0]:.4f} to {losses[-1]:.4f}, peak {peak:.2f} GiB"


def close(one: Path, other: Path, *, tolerance: float, keys: tuple[str, ...] = ("loss", "grad_norm")) -> str:
    """Check that two runs' losses and gradient norms are within a relative tolerance."""
    worst = 0.0
    for key in keys:
        pairs = list(zip(logged(one, key), logged(other, key), strict=True))
        assert pairs, "no steps"
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in pairs))
        assert worst <= tolerance, f"{key} differs by {worst:.1e}: {pairs}"
    return f"{' and '.join(keys)} within {worst:.1e}"


def same(one: Path, other: Path) -> str:
    """Check that two runs' losses and gradient norms have the same bits."""
    for key in ("loss", "grad_norm"):
        mine, theirs = logged(one, key), logged(other, key)
        assert mine and mine == theirs, f"{key}: {mine} and {theirs}"
    return f"{len(mine)} steps, the same bits"


def same_state(one: Path, other: Path) -> str:
    """Check that two runs' steps and last checkpoints have the same bits, by ``smp diff``."""
    steps = same(one, other)
    saved = [str(next((folder / "checkpoints").glob("*-6steps"))) for folder in (one, other)]
    log = one.with_name(f"{one.name}_diff.txt")
    why = call(["-m", "smp", "diff", "--values", *saved], log, environment(gpus=0), timeout=60)
    said = log.read_text()
    assert not why, f"{why}: {said[-300:]}"
    return f"{steps}; {re.findall('values: (.*)', said)[-1]}"


def has_torchao() -> bool:
    """Return whether the optional library that quantises is here."""
    return importlib.util.find_spec("torchao") is not None


def jobs() -> list[Job]:
    """Return all jobs; what most others are compared with first."""
    # In fp32 and without what a GPU chooses by itself, so that each job differs from "llama" by what it names.
    plain = "--bf16 0 --max_steps 3 --compile 0 --activation_checkpointing_mode full --expandable_segments 0"
    llama, neox = f"--model llama_tiny {plain}", f"--model gpt_neox_tiny {plain}"
    bf16 = "--model llama_tiny --max_steps 5"
    # Dropout draws, and the eager kernels add in one order.
    resumed = "--model llama_tiny --lr_decay_iters 8 --attn_pdrop 0.1 --attn_implementation eager --checkpoint_freq 2"
    asynchronous = "--model llama_tiny --lr_decay_iters 8 --checkpoint_type async_sharded --checkpoint_freq 2"
    documents = "--document_mask 1 --tokenizer_name_or_dir data/sample/tokenizer --vocab_size 64"
    packed = f"--model llama_tiny --max_steps 3 {documents}"
    pairs = (
        f"{llama} --lora_rank 8 --dpo 1 --use_synthetic_data 0 --dataset_type chat --max_context_width 128 "
        f"--training_dir data/sample/preferences.jsonl --tokenizer_name_or_dir data/sample/tokenizer "
        f"--chat_template data/sample/chat_template.jinja"
    )
    wide = f"{llama} --hidden_width 128 --num_heads 4 --num_key_value_heads 4 --llama_intermediate_size 384"
    selective = "--activation_checkpointing_mode selective"
    again = "--max_steps 6 --resume_from_checkpoint latest"
    return [
        Job("bf16", bf16),
        Job("chosen", "--model llama_tiny --bf16 0 --max_steps 3"),
        Job("llama", llama),
        Job("llama, CPU", llama, on_cpu=True),
        Job("neox", neox),
        Job("neox, CPU", neox, on_cpu=True),
        Job("uninterrupted", f"{resumed} --max_steps 6"),
        Job("resumed", f"{resumed} --max_steps 4", f"{resumed} {again}"),
        Job("uninterrupted, async", f"{asynchronous} --max_steps 6"),
        Job("resumed, async", f"{asynchronous} --max_steps 4", f"{asynchronous} {again}"),
        Job("compiled", f"{llama} --compile 1 {selective}"),
        Job("selective", f"{llama} {selective}"),
        Job("cpu_offload", f"{llama} --cpu_offload 1"),
        Job("offloaded", f"{llama} --offload_activations 1"),
        Job("tp 1, cp 1", f"{llama} --tensor_parallel_degree 1 --context_parallel_degree 1"),
        Job("smddp", f"{llama} --distributed_backend smddp"),
        Job("no_shard", f"{llama} --sharding_strategy no_shard"),
        Job("expandable", f"{llama} --expandable_segments 1"),
        Job("sdpa", f"{bf16} --attn_implementation sdpa"),
        Job("fused", f"{bf16} --attn_implementation fused"),
        Job("accumulated", f"{bf16} --gradient_accumulation_steps 2"),
        Job("documents", f"{packed} --bf16 0 --compile 0"),
        Job("documents, CPU", f"{packed} --bf16 0", on_cpu=True),
        Job("documents, compiled", f"{packed} --bf16 0 --compile 1"),
        Job("documents, bf16", f"{packed} --attn_implementation sdpa"),
        Job("documents, fused", f"{packed} --attn_implementation fused"),
        Job("adapters", f"{llama} --lora_rank 8"),
        Job("adapters, CPU", f"{llama} --lora_rank 8", on_cpu=True),
        Job("adapters, bf16", f"{bf16} --lora_rank 8"),
        Job("preferences", pairs),
        Job("preferences, CPU", pairs, on_cpu=True),
        *([] if not has_torchao() else [
            Job("4 bits", f"{wide} --lora_rank 8 --qlora 1"),
            Job("4 bits, CPU", f"{wide} --lora_rank 8 --qlora 1", on_cpu=True),
            Job("4 bits, bf16", f"{wide} --bf16 1 --lora_rank 8 --qlora 1 --max_steps 5"),
            Job("4 bits, compiled", f"{wide} --lora_rank 8 --qlora 1 --compile 1"),
        ]),
    ]  # fmt: skip


def checks() -> list[Check]:
    """Return all checks."""
    near = functools.partial(close, tolerance=1e-4)
    near_bf16 = functools.partial(close, tolerance=1e-2, keys=("loss",))
    return [
        Check("a bf16 job trains", trains, ("bf16",)),
        Check("Llama in fp32: a CPU's numbers", near, ("llama", "llama, CPU")),
        Check("GPT-NeoX in fp32: a CPU's numbers", near, ("neox", "neox, CPU")),
        Check("a resumed run is the uninterrupted one", same_state, ("resumed", "uninterrupted")),
        Check("... from an asynchronous checkpoint", same_state, ("resumed, async", "uninterrupted, async")),
        Check("what a GPU chooses by itself: near eager", near, ("chosen", "llama")),
        Check("compiled, selective: near eager", near, ("compiled", "llama")),
        Check("selective: the bits of full", same, ("selective", "llama")),
        Check("cpu_offload: near without", near, ("cpu_offload", "llama")),
        Check("activations offloaded: the same bits", same, ("offloaded", "llama")),
        Check("tp 1 and cp 1: the same bits", same, ("tp 1, cp 1", "llama")),
        Check("smddp at one rank: the same bits", same, ("smddp", "llama")),
        Check("no_shard at one rank: the same bits", same, ("no_shard", "llama")),
        Check("expandable segments: the same bits", same, ("expandable", "llama")),
        Check("fused attention: near sdpa in bf16", near_bf16, ("fused", "sdpa")),
        Check("accumulation trains", trains, ("accumulated",)),
        Check("documents in fp32: a CPU's numbers", near, ("documents", "documents, CPU")),
        Check("documents, compiled: near eager", near, ("documents, compiled", "documents")),
        Check("documents by lengths: near masks in bf16", near_bf16, ("documents, fused", "documents, bf16")),
        Check("adapters in fp32: a CPU's numbers", near, ("adapters", "adapters, CPU")),
        Check("adapters beside a bf16 base train", trains, ("adapters, bf16",)),
        Check("preferences in fp32: a CPU's numbers", near, ("preferences", "preferences, CPU")),
        *([] if not has_torchao() else [
            Check("a base in 4 bits, in fp32: a CPU's numbers", near, ("4 bits", "4 bits, CPU")),
            Check("adapters beside a base in 4 bits train in bf16", trains, ("4 bits, bf16",)),
            Check("a base in 4 bits, compiled: near eager", near, ("4 bits, compiled", "4 bits")),
        ]),
    ]  # fmt: skip


class Runner:
    """Runs jobs side by side, and each check as soon as its jobs have ended."""

    def __init__(self, results: Results, arguments: argparse.Namespace, work: Path, deadline: float):
        self._results, self._arguments, self._work, self._deadline = results, arguments, work, deadline

    def _folder(self, name: str) -> Path:
        return self._work / re.sub(r"\W+", "_", name)

    def _run(self, job: Job) -> str:
        """Run a job's commands; return why it failed, or an empty string."""
        folder, start, why = self._folder(job.name), time.monotonic(), ""
        log = folder.with_suffix(".txt")
        stand_in = ["-m", "tests.cuda_path.host_job", str(self._arguments.stand_in)]
        module = stand_in if self._arguments.stand_in and not job.on_cpu else ["-m", "smp.train"]
        common = ["--use_synthetic_data", "1", "--logging_freq", "1", "--save_final_model", "0"]
        common += ["--output_dir", str(folder)]
        for flags in filter(None, (job.flags, job.resumed)):
            left = self._deadline - time.monotonic()
            if left < SECONDS:
                self._results.add("left", f"job: {job.name}")
                return LEFT
            env = environment(gpus=0 if job.on_cpu else 1, threads=2)
            if why := call([*module, *common, *flags.split()], log, env, min(LONGEST, left)):
                break
        said = log.read_text(errors="replace") if why else ""
        self._results.add("job", f"job: {job.name}", why, said, took=round(time.monotonic() - start, 1))
        return why

    def _check(self, check: Check, ended: dict[str, str]) -> None:
        reasons = [f"{name}: {ended[name]}" for name in check.jobs if ended[name]]
        if any(ended[name] == LEFT for name in check.jobs):
            self._results.add("left", check.name)
            return
        found, why = "", "; ".join(reasons)
        if not why:
            try:
                found = check.test(*(self._folder(name) for name in check.jobs))
            except Exception as error:
                why = f"{type(error).__name__}: {error}"[:400]
        self._results.add("check", check.name, why, found=found)

    def run(self, wanted: list[Check]) -> None:
        """Run the jobs of these checks, and the checks."""
        left, ended = list(wanted), {}
        needed = {name for check in wanted for name in check.jobs}
        with ThreadPoolExecutor(self._arguments.side_by_side) as pool:
            running = {pool.submit(self._run, job): job.name for job in jobs() if job.name in needed}
            for future in as_completed(running):
                error = future.exception()
                ended[running[future]] = f"{type(error).__name__}: {error}" if error else future.result()
                for check in [each for each in left if set(each.jobs) <= ended.keys()]:
                    left.remove(check)
                    self._check(check, ended)
