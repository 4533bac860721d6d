"""Training jobs of some steps, side by side on one GPU, and what they must have in common: is it right?"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.gpu.processes import call, environment
from benchmarks.gpu.report import Results

LEFT, ABSENT = "not begun, for want of time", "needs "
SECONDS = 30.0  # that a job takes: none is begun with less left
LONGEST = 110.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One command, or a second one that resumes the first."""

    name: str
    flags: str
    resumed: str = ""
    on_cpu: bool = False
    needs: str = ""  # a package


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


def jobs() -> list[Job]:
    """Return all jobs; what most others are compared with first."""
    # In fp32 and without what a GPU chooses by itself, so that each job differs from "llama" by what it names.
    plain = "--bf16 0 --max_steps 3 --compile 0 --activation_checkpointing_mode full --expandable_segments 0"
    llama = f"--model llama_tiny {plain}"
    asynchronous = "--model llama_tiny --lr_decay_iters 8 --checkpoint_type async_sharded --checkpoint_freq 2"
    wide = f"{llama} --hidden_width 128 --num_heads 4 --num_key_value_heads 4 --llama_intermediate_size 384"
    bits, compiled = f"{wide} --lora_rank 8 --qlora 1", "--compile 1"
    again = "--max_steps 6 --resume_from_checkpoint latest"
    return [
        Job("llama", llama),
        Job("llama, CPU", llama, on_cpu=True),
        Job("chosen", "--model llama_tiny --bf16 0 --max_steps 3"),
        Job("bf16 moments", f"{llama} --optimizer_state_dtype bf16"),
        Job("bf16 moments, CPU", f"{llama} --optimizer_state_dtype bf16", on_cpu=True),
        Job("adapters", f"{llama} --lora_rank 8"),
        Job("adapters, compiled", f"{llama} --lora_rank 8 {compiled}"),
        Job("uninterrupted, async", f"{asynchronous} --max_steps 6"),
        Job("resumed, async", f"{asynchronous} --max_steps 4", f"{asynchronous} {again}"),
        Job("4 bits", bits, needs="torchao"),
        Job("4 bits, compiled", f"{bits} {compiled}", needs="torchao"),
    ]


def checks() -> list[Check]:
    """Return all checks."""
    near = functools.partial(close, tolerance=1e-4)
    return [
        Check("Llama in fp32: a CPU's numbers", near, ("llama", "llama, CPU")),
        Check("what a GPU chooses by itself: near eager", near, ("chosen", "llama")),
        Check("bf16 moments: a CPU's numbers", near, ("bf16 moments", "bf16 moments, CPU")),
        Check("adapters, compiled: near eager", near, ("adapters, compiled", "adapters")),
        Check(
            "an asynchronous checkpoint: the uninterrupted run", same_state, ("resumed, async", "uninterrupted, async")
        ),
        Check("a base in 4 bits, compiled: near eager", near, ("4 bits, compiled", "4 bits")),
    ]


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
        if job.needs and importlib.util.find_spec(job.needs) is None:
            return ABSENT + job.needs
        for flags in filter(None, (job.flags, job.resumed)):
            left = self._deadline - time.monotonic()
            if left < SECONDS:
                self._results.add("left", f"job: {job.name}")
                return LEFT
            env = environment(gpus=0 if job.on_cpu else 1, threads=2)
            longest = left if self._arguments.tiny else min(LONGEST, left)
            if why := call([*module, *common, *flags.split()], log, env, longest):
                break
        said = log.read_text(errors="replace") if why else ""
        self._results.add("job", f"job: {job.name}", why, said, took=round(time.monotonic() - start, 1))
        return why

    def _check(self, check: Check, ended: dict[str, str]) -> None:
        reasons = [f"{name}: {ended[name]}" for name in check.jobs if ended[name]]
        if any(ended[name] == LEFT for name in check.jobs):
            self._results.add("left", check.name)
            return
        if absent := [ended[name] for name in check.jobs if ended[name].startswith(ABSENT)]:
            self._results.add("absent", check.name, missing=absent[0].removeprefix(ABSENT))
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
