"""Warnings when a GPU's allocator flushes its cache, with a GPU's counters played."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import smp
from smp.memory import warnings as memory_warnings
from smp.memory.warnings import warn_of_cache_flushes
from tests.distributed import run_distributed
from tests.reference import build_reference


@pytest.fixture
def lines():
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    memory_warnings.logger.addHandler(handler)
    yield found
    memory_warnings.logger.removeHandler(handler)


@pytest.fixture
def counters(monkeypatch):
    """What the allocator of GPU 1 counts; empty, as torch gives it, before the GPU is first used."""
    found: dict[str, int] = {}
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: asked.append(device) or dict(found))
    yield found
    assert set(asked) <= {torch.device("cuda", 1)}


def test_each_flush_is_said_once(lines, counters):
    model = nn.Linear(2, 2)
    warn_of_cache_flushes(model, "cuda")
    model(torch.zeros(2))
    counters |= {"num_alloc_retries": 0, "num_ooms": 0}
    model(torch.zeros(2))
    assert lines == []
    counters["num_alloc_retries"] = 3
    model(torch.zeros(2))
    model(torch.zeros(2))
    assert len(lines) == 1
    assert lines[0].startswith(
        "cuda:1 was short of memory since the last forward: flushes of its allocator's cache, which stall it: 3 (3 "
        "in all); failed allocations: 0."
    )
    assert "--hybrid_shard_degree" in lines[0] and "docs/memory.md" in lines[0]
    counters |= {"num_alloc_retries": 5, "num_ooms": 1}
    model(torch.zeros(2))
    assert len(lines) == 2 and ": 2 (5 in all); failed allocations: 1." in lines[1]


def test_what_was_before_and_what_does_not_train_is_not_said(lines, counters):
    counters["num_alloc_retries"] = 7  # by what the program did before
    model = nn.Linear(2, 2)
    warn_of_cache_flushes(model, "cuda")
    model(torch.zeros(2))
    counters["num_alloc_retries"] = 8
    model.eval()(torch.zeros(2))
    assert lines == []
    model.train()(torch.zeros(2))
    assert len(lines) == 1 and ": 1 (8 in all)" in lines[0]
    counters["num_alloc_retries"] = 0  # torch.cuda.reset_accumulated_memory_stats
    model(torch.zeros(2))
    assert len(lines) == 1


def test_a_cpu_has_nothing_to_watch(lines, counters):
    model = nn.Linear(2, 2)
    warn_of_cache_flushes(model, "cpu")
    counters["num_alloc_retries"] = 3
    model(torch.zeros(2))
    assert lines == [] and not model._forward_pre_hooks


def _configured():
    """What :func:`smp.parallelize` watches in a user's script."""
    with pytest.MonkeyPatch.context() as patch:
        watched = []
        patch.setattr("smp.parallel.sharding.warn_of_cache_flushes", lambda model, device_type: watched.append(model))
        for config, expected in (({}, 1), ({"fsdp_cache_flush_warnings": False}, 0)):
            watched.clear()
            smp.init({"hybrid_shard_degree": 1, **config})
            model = smp.parallelize(build_reference("llama_gqa", torch.float32))
            assert len(watched) == expected and all(one is model for one in watched)


def test_the_key_of_smp_v2():
    run_distributed(_configured, world_size=1)
