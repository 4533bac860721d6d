"""A step as it is planned, in a process of its own, and as it is: bytes by category."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers.models.gpt_neox.modeling_gpt_neox
import transformers.models.llama.modeling_llama
import transformers.models.mistral.modeling_mistral  # noqa: F401  imported before the ranks are forked

from smp.data.data_pipeline import StepBatch
from smp.data.packing import Collator, Row
from smp.errors import Problems
from smp.faults.agreement import count
from smp.loss import shift_labels
from smp.memory.categories import CATEGORIES, OTHER
from smp.memory.profile import MemoryProfile, profile_memory
from smp.models.model_config import resolve_model
from smp.optim.optimizers import build_optimizer
from smp.parallel.microbatch import Microbatch
from smp.parallel.parallelize import prepare_model
from smp.plan.shim import python_with
from smp.runtime import Launch
from smp.train.arguments import parse_args
from smp.train.checked_job import make_job
from smp.train.job import Job
from smp.train.preference import loss_of
from smp.train.step import train_step
from tests.distributed import run_distributed

ROOT = pathlib.Path(__file__).parent.parent
CPU = torch.device("cpu")
CAPABILITY = (9, 0)  # of a planned GPU


def job_of(words: list[str], world: int, rank: int, device: torch.device = CPU) -> Job:
    config = parse_args(["--use_synthetic_data", "1", *words])
    return make_job(config, Launch(rank, world, rank, world), device, resolve_model(config.model), Problems())


def _batch(job: Job) -> StepBatch:
    size, length = job.config.run.train_batch_size, job.model.sequence_length
    preference = job.config.preference

    def microbatch() -> Microbatch:
        rows_of_sample = preference.rows_of_sample(job.config.data.pack)
        ids = torch.randint(0, job.model.hf_config.vocab_size, (size * rows_of_sample, length))
        if preference.dpo and rows_of_sample == 1:  # a pair a row, of answers of equal length
            documents = np.array([length // 2, length - length // 2])
            rows = [Row(row.numpy(), None, None, documents) for row in ids]
            found = Collator(sequence_length=length, pad_token_id=0, document_end=0)(rows)
        else:
            found = {"input_ids": ids, "targets": shift_labels(ids)}
        if preference.keeps_reference(job.config.lora):
            found["reference"] = torch.zeros(size, 2)
        return {**found, "sample_ids": torch.arange(size).repeat_interleave(rows_of_sample)}

    count = job.config.run.gradient_accumulation_steps
    return StepBatch([microbatch() for _ in range(count)], torch.arange(size * count))


def _summary(profile: MemoryProfile, others: int) -> dict[str, Any]:
    """The bytes at the peak, and each category's own highest; without ``others``, which were there before the job."""
    now, most = collections.Counter(), dict.fromkeys(CATEGORIES, 0)
    for _, storage, delta in profile._log:
        now[storage.category] += delta
        most[storage.category] = max(most[storage.category], now[storage.category])
    peak = profile.peak()
    most[OTHER] -= others
    at_peak = {**peak.categories, OTHER: peak.categories[OTHER] - others}
    return {"total": peak.total - others, "at_peak": at_peak, "own_peaks": most}


def _measure(words: list[str], folder: str) -> None:
    torch.manual_seed(dist.get_rank())
    others = MemoryProfile(torch.nn.Module(), None, CPU).latest().total  # of tests that this process was forked from
    job = job_of(words, dist.get_world_size(), dist.get_rank())
    mesh, config = job.mesh.join("cpu"), job.config
    setup = dataclasses.replace(job.setup, mesh=mesh)
    model = prepare_model(
        job.model, mesh=mesh, settings=job.setup.settings, dtype=job.dtype, device=CPU, seed=1, load_weights=False
    )
    optimizer = build_optimizer(model, config.optim, lr=1e-4)
    count(CPU, stop=False)  # as a job's ranks do at every step
    summaries = []
    for step in range(5):
        batch = _batch(job)

        def run(record, batch=batch) -> None:
            train_step(
                model, optimizer, batch, setup=setup, device=CPU, grad_clip=1.0,
                record=record, objective=loss_of(setup),
            )  # fmt: skip

        if step < 2:
            run(lambda tag: None)
            continue
        with profile_memory(model, optimizer) as profile:
            run(profile.mark)
        summaries.append(_summary(profile, others))
    # Gloo's thread may hold a tensor a moment longer than the wait for it lasts: beside other work, a step has more.
    least = min(summaries, key=lambda summary: summary["total"])
    pathlib.Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(least))


def measured(words: list[str], world: int, backend: str, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return the summary of each rank's least step of three, after two that are not looked at."""
    run_distributed(_measure, words, str(folder), world_size=world, backend=backend)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def planned(requests: list[dict[str, Any]], *, shim: pathlib.Path | None = None) -> list[dict[str, Any]]:
    """Plan steps, each in a fork: of this process, and for GPUs of another, which has the shim.

    Args:
        requests: of each ``words``, ``world``, ``rank`` and ``backend``; of :mod:`tests.plan_traps` ``where``:
            conditions, and ``without``: a stand-in to undo.
        shim: to plan for GPUs, whose answers have ``reserved`` bytes, too.
    """
    if shim is None:
        return _planned(requests, CPU)
    program = python_with(shim, "tests.planned")
    done = subprocess.run(program, input=json.dumps(requests), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def _plan(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Plan a step, in a process that ends then."""
    from smp.plan import world
    from smp.plan.allocator import reserved_bytes
    from smp.plan.blocks import Repeat, whole_step
    from smp.plan.memory import account
    from smp.plan.trace import trace_step, untraced_bytes
    from tests.plan_traps import WHERE, WITHOUT  # before anything is replaced

    world.prepare(device.type, CAPABILITY, 8, 80 << 30)
    for condition in request.get("where", ()):
        WHERE[condition]()
    if "without" in request:
        WITHOUT[request["without"]]()
    job = job_of(request["words"], request["world"], request["rank"], device)
    with world.fake_group(request["world"], request["rank"], request["world"], request["backend"]):
        trace = trace_step(job, CAPABILITY if device.type == "cuda" else None)
    step = whole_step(trace, Repeat(trace.blocks, trace.blocks, 1, 1))
    found = account(step, shared=trace.shared, waiting=untraced_bytes(job) if device.type == "cpu" else None)
    answer = {"total": found.peak.total, "at_peak": dict(found.peak.categories), "own_peaks": dict(found.own_peaks)}
    return answer if device.type == "cpu" else {**answer, "reserved": reserved_bytes(step)}


def _planned(requests: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    import tests.plan_traps  # noqa: F401
    from smp.processes import in_child

    return [in_child(functools.partial(_plan, request, device)) for request in requests]


if __name__ == "__main__":
    print(json.dumps(_planned(json.load(sys.stdin), torch.device("cuda"))))
