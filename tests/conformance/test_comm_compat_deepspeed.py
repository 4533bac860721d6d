"""DeepSpeed's ZeRO-3 over ``smddp``. DeepSpeed is no package of the project: where it is missing, this is skipped."""

from __future__ import annotations

import importlib.util
import os
import pathlib

import pytest
import torch
import torch.distributed as dist

import smp.comm
from tests.conformance.test_comm_compat import batch, build
from tests.distributed import run_distributed

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def _zero3(folder: str, backend: str, starts_itself: bool) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    rank, size = dist.get_rank(), dist.get_world_size()
    if starts_itself:
        dist.destroy_process_group()
        method = f"file://{folder}/deepspeed"
        deepspeed.init_distributed(
            dist_backend=backend, auto_mpi_discovery=False, init_method=method, rank=rank, world_size=size
        )
    assert dist.get_backend() == backend
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    model = build().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(3):
        loss = engine(batch(step).float()).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    torch.save(torch.stack(losses), f"{folder}/{backend}{rank}{starts_itself}")
    if backend == "smddp":
        report = smp.comm.report()
        for operation in ("all_gather", "reduce_scatter"):
            assert report.calls(operation, "shared memory"), report


@pytest.mark.slow
@pytest.mark.parametrize("starts_itself", [False, True])
def test_zero3(tmp_path, starts_itself):
    for backend in ("gloo", "smddp"):
        folder = tmp_path / backend
        folder.mkdir()
        run_distributed(_zero3, str(folder), backend, starts_itself, world_size=2, backend=backend)
    for rank in range(2):
        gloo, ours = (
            torch.load(pathlib.Path(tmp_path, backend, f"{backend}{rank}{starts_itself}"))
            for backend in ("gloo", "smddp")
        )
        assert torch.equal(gloo, ours) and gloo.isfinite().all()
