"""Measures cases in a process that has imported torch: a case a line of standard input, its result a line of output."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before stand-ins take the place of operators that it lists
from torch import Tensor, nn

from benchmarks.gpu.cases import Case
from benchmarks.gpu.report import GIB

LR, WARMUP = 3e-4, 3
# Of kernels, by what their names have.
GROUPS = {
    "attention": r"sdpa|flash|fmha|attention",
    "products": r"nvjet|gemm|cutlass|xmma|scaled_mm|splitk",
    "optimizer and norm": r"multi_tensor|fusedopt|adam",
    "copies": r"memcpy|memset|copy|chunk_cat|catarray",
    "compiled": r"triton",
    "the rest": r"",
}
# What compiling, recomputing and peft put into the names of parameters.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "base_model.model.", "base_layer.", ".default.weight")
Found = dict[str, Any]
Step = Callable[[int], Tensor]  # from the step's number to this process's mean loss, 0-d


def list_kernels(step: Callable[[], Any]) -> list[str]:
    """Return the kernels of a call in groups: the time of each group, and of all its kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return grouped([
        (e.key, e.self_device_time_total / 1e3, e.count) for e in seen.key_averages() if e.device_type.name == "CUDA"
    ])  # fmt: skip


def grouped(kernels: list[tuple[str, float, int]]) -> list[str]:
    """Format kernels, given by name, milliseconds and number of calls, by group, the longest first."""
    by_group: dict[str, list[tuple[str, float, int]]] = {}
    for kernel in sorted(kernels, key=lambda each: -each[1]):
        group = next(name for name, pattern in GROUPS.items() if re.search(pattern, kernel[0], re.IGNORECASE))
        by_group.setdefault(group, []).append(kernel)
    total = sum(each[1] for each in kernels)
    lines = [f"{total:8.2f} ms of kernels"]
    for group, those in sorted(by_group.items(), key=lambda pair: -sum(each[1] for each in pair[1])):
        spent = sum(each[1] for each in those)
        lines.append(f"{spent:8.2f} ms {spent / max(total, 1e-9):6.1%} {group}")
        lines += [f"{seconds:12.2f} ms {count:5d} x {name[:110]}" for name, seconds, count in those]
    return lines


@contextlib.contextmanager
def clocks(bench: Bench) -> Iterator[Found]:
    """Sample the GPU's clock and power beside what is timed; they are found when it ends."""
    found: Found = {"sm_mhz": None, "watts": None}
    if not bench.gpu or not shutil.which("nvidia-smi"):
        yield found
        return
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "200"]
    asked += ["-i", f"GPU-{torch.cuda.get_device_properties(bench.device).uuid}"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as sampler:
        try:
            yield found
        finally:
            sampler.terminate()
            said = sampler.communicate()[0]
            pairs = re.findall(r"^([\d.]+), ([\d.]+)$", said, re.MULTILINE)
            for key, values in zip(found, zip(*pairs, strict=True), strict=bool(pairs)):
                found[key] = sum(map(float, values)) / len(values)


@dataclasses.dataclass
class Bench:
    """The device, and how a step is timed on it.

    Attributes:
        stand_in: the device says that it is a GPU, and is none.
    """

    device: torch.device
    stand_in: bool = False

    @property
    def gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.device.type == "cuda" and not self.stand_in

    def now(self) -> float:
        """Wait for the device; return the time."""
        if self.gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(self, call: Callable[[], Any], times: int = 5) -> float:
        """Return the seconds of a call, after one to warm up."""
        call()
        start = self.now()
        for _ in range(times):
            call()
        return (self.now() - start) / times

    def clean(self) -> None:
        """Forget what the measurement before has compiled and allocated."""
        gc.collect()
        if not self.stand_in:
            torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        if self.gpu:
            torch.cuda.empty_cache()

    def fill(self, model: nn.Module, rank: int = 0) -> None:
        """Give parameters values that depend on their names, drawn on the GPU: the host takes minutes for 1.9e9."""
        from torch.distributed.tensor import DTensor

        drawn_on = self.device if self.gpu else torch.device("cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                for wrapper in WRAPPERS:
                    name = name.replace(wrapper, "")
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                if parameter.ndim < 2:
                    local.fill_(0.0 if name.endswith("bias") else 1.0)
                    continue
                generator = torch.Generator(drawn_on).manual_seed(zlib.crc32(f"{name} {rank}".encode()))
                local.copy_(torch.empty(local.shape, device=drawn_on).normal_(0.0, 0.02, generator=generator))
        model.train()

    def timed(self, case: Case, step: Step, flops_per_token: float) -> Found:
        """Warm up, time steps without a wait between them, and look closer at some more."""
        from smp.plan.devices import peak_flops

        start = self.now()
        losses = [step(0)]
        first = self.now() - start
        with clocks(self) as sampled:
            losses += [step(number) for number in range(1, WARMUP)]
            if self.gpu:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.reset_accumulated_memory_stats()
            start = self.now()
            losses += [step(number) for number in range(WARMUP, WARMUP + case.steps)]
            seconds = (self.now() - start) / case.steps
        counters = torch._dynamo.utils.counters
        found: Found = {
            "seconds": seconds, "first_s": first, "losses": [float(loss) for loss in losses],
            "allocated": torch.cuda.max_memory_allocated() if self.gpu else None,
            "reserved": torch.cuda.max_memory_reserved() if self.gpu else None,
            "flushes": torch.cuda.memory_stats().get("num_alloc_retries", 0) if self.gpu else None,
            "flops_per_token": flops_per_token,
            "peak_flops": peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if self.gpu else None,
            "graphs": counters["stats"].get("unique_graphs", 0), "breaks": sum(counters["graph_break"].values()),
            **sampled,
        }  # fmt: skip
        if case.kernels and self.gpu:
            found["kernels"] = list_kernels(lambda: step(WARMUP + case.steps))
        return found

    def ids(self, vocabulary: int, size: tuple[int, int], number: int, rank: int = 0) -> Tensor:
        """Return the token ids of a micro-batch, in memory that a GPU reads by itself."""
        ids = torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(1000 * number + rank))
        return ids.pin_memory() if self.gpu else ids


def flops_per_token(job: Any) -> float:
    """Count the model FLOPs of a token, with those of the parameters that the flags add or freeze."""
    from smp.train.flops import model_flops_per_token

    return model_flops_per_token(job.model.hf_config, job.model.sequence_length, job.table).total


def layout(case: Case, length: int, data_ranks: int, ranks: int) -> Found:
    """Describe which samples a step takes: losses of equal layouts are compared, and tokens are counted per rank."""
    tokens = case.accumulation * case.batch * length
    samples = f"{case.accumulation} x {case.batch} x {length}"
    return {"layout": f"{case.model}, {samples}, {data_ranks} of {ranks}", "tokens": tokens * data_ranks / ranks}


@contextlib.contextmanager
def training(case: Case, bench: Bench) -> Iterator[tuple[nn.Module, Any, Step, Found]]:
    """Build the job's model, optimizer and step under the case's flags, and what a job chooses; and what they are."""
    from smp.data.data_pipeline import StepBatch
    from smp.environment import read_launch
    from smp.errors import Problems
    from smp.loss import shift_labels
    from smp.memory.limits import available_memory
    from smp.models.model_config import resolve_model
    from smp.optim.optimizers import build_optimizer
    from smp.parallel import parallelize
    from smp.parallel.allocator import AllocatorConfig, use_expandable_segments
    from smp.runtime import process_group
    from smp.train.arguments import parse_args
    from smp.train.checked_job import make_job
    from smp.train.job import choose_settings, planned_batch
    from smp.train.step import train_step

    parallelize.initialize_ = lambda model, rules, *, seed: None  # ``fill`` does it
    config, launch = parse_args(case.words()), read_launch()
    job = make_job(config, launch, bench.device, resolve_model(config.model), Problems())
    length, vocabulary = job.model.sequence_length, job.model.hf_config.vocab_size
    if bench.gpu:
        available = available_memory(bench.device, launch.local_world_size)
        job.choices.extend(choose_settings(job, available, batch=planned_batch(config, job.mesh)))
    grows = job.settings[AllocatorConfig].expandable_segments is True and bench.gpu
    with process_group(config.comm, launch, bench.device, cpu_offload=config.activation.cpu_offload):
        if grows:
            use_expandable_segments()
        mesh = job.mesh.join(bench.device.type)
        model = parallelize.prepare_model(
            job.model, mesh=mesh, settings=job.settings, dtype=job.dtype, device=bench.device, seed=0,
            load_weights=False,
        )  # fmt: skip
        setup = dataclasses.replace(job.setup, mesh=mesh)
        bench.fill(model, launch.rank)
        optimizer = build_optimizer(model, config.optim, lr=LR)

        def row(number: int) -> dict[str, Tensor]:
            ids = bench.ids(vocabulary, (case.batch, length), number, mesh.data.rank)
            return {"input_ids": ids, "targets": shift_labels(ids)}

        def step(number: int) -> Tensor:
            rows = [row(number * case.accumulation + each) for each in range(case.accumulation)]
            result = train_step(
                model, optimizer, StepBatch(rows, torch.arange(case.batch * len(rows))), setup=setup,  # type: ignore[arg-type]
                device=bench.device, grad_clip=config.optim.grad_clip,
            )  # fmt: skip
            return result.sums[0] / (case.accumulation * case.batch * (length - 1))

        about = {"flops": flops_per_token(job), "chosen": "; ".join(map(str, job.choices))}
        about |= layout(case, length, mesh.data.size, launch.world_size)
        try:
            yield model, optimizer, step, about
        finally:
            if grows:
                torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def step(case: Case, bench: Bench) -> Found:
    """Time the job's step."""
    with training(case, bench) as (_, _, step, about):
        found = bench.timed(case, step, about["flops"])
    return {**found, **{key: about[key] for key in ("layout", "tokens", "chosen")}}


def save(case: Case, bench: Bench) -> Found:
    """Time two asynchronous saves: how long training stands still, and how long they take."""
    from smp.checkpoint.checkpointer import Checkpointer

    with training(case, bench) as (model, optimizer, step, _), tempfile.TemporaryDirectory() as folder:
        alone = bench.seconds(lambda: step(0))
        size = sum(parameter.numel() for parameter in model.parameters()) * 12 / GIB
        saver, found = Checkpointer(folder, model, optimizer, keep=1), {"a step": f"{alone:.3f} s"}
        for number, name in enumerate((f"first save, {size:.1f} GiB", "second save"), 1):
            start = bench.now()
            saver.save(number, wait=False)
            step(number)  # its update waits for the copy
            stall = bench.now() - start - alone
            saver.finish()
            found[name] = f"{stall:.3f} s of standstill, {time.perf_counter() - start:.2f} s in all"
    return {"found": found}


def missing(case: Case) -> str:
    """Return the packages and flags that a case needs and that are not here."""
    from smp.train.arguments import FLAGS

    def is_here(name: str) -> bool:
        return name[2:] in FLAGS if name.startswith("--") else importlib.util.find_spec(name) is not None

    return ", ".join(name for name in case.needs.split() if not is_here(name))


def measure(case: Case, bench: Bench) -> Found:
    """Measure a case; what fails is a result, too."""
    from benchmarks.gpu import fp8, others

    began, found = time.monotonic(), {"why": "", "broken": False, "missing": missing(case)}
    if found["missing"]:
        return found
    try:
        bench.clean()
        methods = {"step": step, "save": save, "parts": others.parts, "fp8": fp8.fp8}
        found |= methods[case.method](case, bench)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        found["why"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:240]}"
    if found["why"]:
        found["broken"] = not _usable(bench)
    return {**found, "took": round(time.monotonic() - began, 1)}


def _usable(bench: Bench) -> bool:
    """Return whether this process can measure on after a failure."""
    try:
        gc.collect()
        bench.now()  # raises, once the device has seen an illegal access
        return not torch.distributed.is_initialized()
    except Exception:
        return False


def choose(stand_in: str | None) -> Bench:
    """Return the device to measure on: this rank's GPU, the stand-in of the tests, or the CPU."""
    if stand_in:
        from smp import runtime
        from smp.plan import fake_cuda
        from tests.cuda_path import host_group, host_job

        fake_cuda.install(devices=1)
        host_group.register()
        host_job.let_storages_resize()
        host_job.let_flash_attention_run()
        runtime.choose_backend = lambda comm, device: host_group.NAME
        return Bench(torch.device("cuda", 0), stand_in=True)
    if not torch.cuda.is_available():
        return Bench(torch.device("cpu"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return Bench(device)


def main(argv: list[str]) -> None:
    """Measure the cases of standard input, one after the other; or the one that is given, as one of several ranks."""
    if argv[:1] == ["--case"]:
        found = measure(Case(**json.loads(argv[1])), choose(None))
        if os.environ["RANK"] == "0":
            Path(argv[2]).write_text(json.dumps(found))
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes into the log
    bench = choose(argv[0] if argv else None)
    for asked in sys.stdin:
        found = measure(Case(**json.loads(asked)), bench)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
