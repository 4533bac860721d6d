"""Measures cases in a process that has imported torch: a case a line of standard input, its result a line of output."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before stand-ins take the place of operators that it lists
from torch import Tensor, nn

from benchmarks.gpu.cases import Case
from benchmarks.gpu.report import GIB

ROOT, TORCH = str(Path(__file__).resolve().parents[2]), str(Path(torch.__file__).parent)
LR, WARMUP, WATCHED = 3e-4, 3, 2
# What compiling, recomputing and peft put into the names of parameters.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "base_model.model.", "base_layer.", ".default.weight")
Found = dict[str, Any]
Step = Callable[[int], Tensor]  # from the step's number to this process's mean loss, 0-d


class Watch:
    """Counts the synchronisations of host and device, by the innermost line outside torch."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        """Count from now on."""
        self._undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = self._seen  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> None:
        """Count no more."""
        torch.cuda.set_sync_debug_mode("default")
        self._undo.close()

    def _seen(self, message: Any, *where: Any) -> None:
        if "called a synchronizing CUDA operation" not in str(message):
            return
        frames = [f for f in traceback.extract_stack()[:-1] if not f.filename.endswith("warnings.py")]
        own = [f for f in frames if not f.filename.startswith(TORCH) and not f.filename.startswith("<")]
        frame = (own or frames)[-1]
        name = frame.filename.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
        self.lines[f"{name}:{frame.lineno} `{(frame.line or '').strip()}`"] += 1


def list_kernels(step: Callable[[], Any]) -> list[str]:
    """Return the kernels of a call that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in seen.key_averages() if e.device_type.name == "CUDA"]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in kernels)
    return [f"{total / 1e3:.1f} ms of kernels"] + [
        f"{e.self_device_time_total / 1e3:8.2f} ms {e.self_device_time_total / max(total, 1):6.1%} {e.count:5d} x "
        f"{e.key[:110]}" for e in kernels[:22]
    ]  # fmt: skip


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
        losses += [step(number) for number in range(1, WARMUP)]
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        start = self.now()
        losses += [step(number) for number in range(WARMUP, WARMUP + case.steps)]
        seconds = (self.now() - start) / case.steps
        counters = torch._dynamo.utils.counters
        found: Found = {
            "seconds": seconds, "first_s": first, "losses": [float(loss) for loss in losses],
            "allocated": torch.cuda.max_memory_allocated() if self.gpu else None,
            "reserved": torch.cuda.max_memory_reserved() if self.gpu else None,
            "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if self.gpu else None,
            "flops_per_token": flops_per_token,
            "peak_flops": peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if self.gpu else None,
            "graphs": counters["stats"].get("unique_graphs", 0), "breaks": sum(counters["graph_break"].values()),
            "waits": None,
        }  # fmt: skip
        if case.watch and self.gpu:
            watch, more = Watch(), WARMUP + case.steps
            watch.start()
            for number in range(more, more + WATCHED):
                step(number)
            watch.stop()
            found["waits"] = {where: count / WATCHED for where, count in watch.lines.most_common()}
            found["kernels"] = list_kernels(lambda: step(more + WATCHED))
        return found

    def ids(self, vocabulary: int, length: int, number: int, rank: int = 0) -> Tensor:
        """Return the token ids ``(1, length)`` of a step, in memory that a GPU reads by itself."""
        ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(1000 * number + rank))
        return ids.pin_memory() if self.gpu else ids


def documents(count: int, number: int, length: int) -> dict[str, Any]:
    """Return what the data pipeline adds where documents are kept apart; their lengths differ from step to step."""
    if not count:
        return {}
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(number))[: count - 1] + 1
    bounds = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([length])])
    positions = torch.arange(length) - bounds[:-1].repeat_interleave(bounds.diff())
    longest = int(bounds.diff().max())
    return {"position_ids": positions[None], "document_bounds": bounds.int(), "longest_document": longest}


def flops_per_token(config: Any, resolved: Any) -> float:
    """Count the model FLOPs of a token, with those of the parameters that the flags add or freeze."""
    from smp.config import Settings
    from smp.parallel.parallelize import table_of
    from smp.train.arguments import SECTIONS
    from smp.train.flops import model_flops_per_token

    settings = Settings(tuple(getattr(config, name) for name in SECTIONS))
    return model_flops_per_token(resolved.hf_config, resolved.sequence_length, table_of(resolved, settings)).total


def layout(length: int, data_ranks: int, ranks: int) -> Found:
    """Describe which samples a step takes: losses of equal layouts are compared, and tokens are counted per rank."""
    return {"layout": f"{data_ranks} of {ranks}", "tokens": length * data_ranks / ranks}


@contextlib.contextmanager
def training(case: Case, bench: Bench) -> Iterator[tuple[nn.Module, Any, Step, Found]]:
    """Build the job's model, optimizer and step under the case's flags; also what describes them."""
    from smp.config import Settings
    from smp.data.data_pipeline import StepBatch
    from smp.environment import read_launch
    from smp.loss import shift_labels
    from smp.mesh import resolve_mesh
    from smp.models.model_config import resolve_model
    from smp.optim.optimizers import build_optimizer
    from smp.parallel import parallelize
    from smp.parallel.allocator import AllocatorConfig, use_expandable_segments
    from smp.parallel.technique import Setup
    from smp.runtime import process_group
    from smp.train.arguments import SECTIONS, parse_args
    from smp.train.step import train_step

    parallelize.initialize_ = lambda model, rules, *, seed: None  # ``fill`` does it
    config, launch = parse_args(case.words()), read_launch()
    settings = Settings(tuple(getattr(config, name) for name in SECTIONS))
    resolved = resolve_model(config.model)
    length, vocabulary = resolved.sequence_length, resolved.hf_config.vocab_size
    grows = settings[AllocatorConfig].expandable_segments is True and bench.gpu
    with process_group(config.comm, launch, bench.device, cpu_offload=config.activation.cpu_offload):
        if grows:
            use_expandable_segments()
        mesh = resolve_mesh(
            config.parallel, world_size=launch.world_size, local_world_size=launch.local_world_size, rank=launch.rank
        ).join(bench.device.type)  # fmt: skip
        model = parallelize.prepare_model(
            resolved, mesh=mesh, settings=settings, dtype=parallelize.compute_dtype(config.precision, bench.device),
            device=bench.device, seed=0, load_weights=False,
        )  # fmt: skip
        setup = Setup(resolved.family, mesh, settings)
        bench.fill(model, launch.rank)
        optimizer = build_optimizer(model, config.optim, lr=LR)

        def step(number: int) -> Tensor:
            ids = bench.ids(vocabulary, length, number, mesh.data.rank)
            rows = [{"input_ids": ids, "targets": shift_labels(ids), **documents(case.documents, number, length)}]
            result = train_step(
                model, optimizer, StepBatch(rows, torch.arange(1)), setup=setup, device=bench.device,  # type: ignore[arg-type]
                grad_clip=config.optim.grad_clip,
            )  # fmt: skip
            return result.sums[0] / (length - 1)

        about = {"flops": flops_per_token(config, resolved)}
        about |= layout(length, mesh.data.size, launch.world_size)
        try:
            yield model, optimizer, step, about
        finally:
            if grows:
                torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def step(case: Case, bench: Bench) -> Found:
    """Time the job's step."""
    with training(case, bench) as (_, _, step, about):
        found = bench.timed(case, step, about["flops"])
    return {**found, **{key: about[key] for key in ("layout", "tokens")}}


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


def measure(case: Case, bench: Bench) -> Found:
    """Measure a case; what fails is a result, too."""
    from benchmarks.gpu import others

    began, found = time.monotonic(), {"why": "", "broken": False}
    try:
        bench.clean()
        method = {"step": step, "save": save}.get(case.method) or getattr(others, case.method)
        found |= method(case, bench)
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
