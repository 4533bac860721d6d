"""Does it fit: the refusal, what is auto, the advice, the dry run, `smp plan` and `smp launch` give one answer."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import smp.cli.plan
from smp.errors import Problems, UserError
from smp.memory.estimate import estimate_memory, memory_table, processes_that_fit
from smp.memory.shape import model_shape
from smp.models.model_config import ModelConfig, resolve_model
from smp.plan import request
from smp.plan.closed_time import estimate
from smp.plan.question import Question
from smp.runtime import Launch
from smp.train import checked_job
from smp.train import job as jobs
from smp.train.arguments import parse_args
from smp.units import GIB

MODELS = ("llama7b", "llama3_8b")
DEVICES = (("h100", 80.0), ("h100", 79.1), ("a100_40gb", 39.4), ("h100", 24.0), ("h200", 140.0))
LAYOUTS = (
    ["--sharding_strategy", "full_shard", "--tensor_parallel_degree", "1", "--train_batch_size", "4"],
    ["--hybrid_shard_degree", "2", "--tensor_parallel_degree", "2", "--train_batch_size", "2"],
    ["--sharding_strategy", "full_shard", "--tensor_parallel_degree", "4", "--train_batch_size", "16"],
)
REST = ["--activation_checkpointing_mode", "selective", "--offload_activations", "0", "--context_parallel_degree", "1"]


def answers(words, row, resolved, monkeypatch):
    """What each of them says of a job on a host of eight such devices."""
    limit, found, asked = int(row.memory * GIB), {}, []
    config = parse_args(words)
    job = checked_job.make_job(config, Launch(0, 8, 0, 8), torch.device("cuda"), resolved, Problems())
    try:
        jobs.refuse_too_large(job, limit)
        found["refusal"] = True
    except UserError:
        found["refusal"] = False
    monkeypatch.setattr(jobs, "CHOOSERS", [lambda situation: iter(asked.append(situation.fits()) or ())])
    jobs.choose_settings(job, limit, batch=jobs.planned_batch(config, job.mesh))
    found["auto"] = asked == [True]
    shape, work = jobs.sizes(job)
    found["dry run"] = " headroom " in memory_table(estimate_memory(shape, job.mesh, work), limit)
    if job.mesh.replicas.size == 1:
        enough = processes_that_fit(shape, job.mesh, work, limit)
        found["advice"] = enough is not None and enough <= 8
    asked_for = request.read_request(words, row, nodes=1, local=8)
    (layout,) = asked_for.layouts()
    found["search"] = estimate(asked_for.shape, layout, row, local=8).memory <= limit
    _, answered = request.find(Question(words, row, nodes=1, local=8), request.closed_plans)
    found["plan"] = bool(answered.plans)
    monkeypatch.setattr(smp.cli.plan, "find", functools.partial(request.find, planner=request.closed_plans))
    try:
        smp.cli.plan.best(words, row, nodes=1, local=8)
        found["launch"] = True
    except UserError:
        found["launch"] = False
    return found


@pytest.mark.parametrize("model", [MODELS[0], pytest.param(MODELS[1], marks=pytest.mark.full)])
def test_all_give_the_same_answer(model, monkeypatch):
    resolved = resolve_model(ModelConfig(model=model), here=False)
    shape = model_shape(resolved)
    for module in (checked_job, request):  # once
        monkeypatch.setattr(module, "resolve_model", lambda config, here: resolved)
    for module in (jobs, request):
        monkeypatch.setattr(module, "shape_of", lambda resolved, settings: shape)
    monkeypatch.setattr(jobs, "check_host_memory", lambda needed, available: None)
    seen = set()
    for (name, memory), layout in itertools.product(DEVICES, LAYOUTS):
        row = smp.cli.plan.device_of(name, 8, memory_gib=memory)
        found = answers(["--model", model, "--use_synthetic_data", "1", *layout, *REST], row, resolved, monkeypatch)
        assert len(set(found.values())) == 1, (name, memory, layout, found)
        seen |= set(found.values())
    assert seen == {True, False}
