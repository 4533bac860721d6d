"""What the plan refuses that no single rank can see."""

from __future__ import annotations

import pathlib
import types

import pytest
import torch.distributed as dist

from smp.errors import UserError
from smp.train.settling import require_agreement
from smp.train_state import TrainState
from tests.distributed import run_distributed


def plan(**change):
    values = {
        "resume": pathlib.Path("/runs/a/m-10steps"),
        "state": TrainState(10, 40, 99),
        "global_batch_size": 4,
        "max_steps": 20,
        "train_data": types.SimpleNamespace(fingerprint="data"),
        "validation_data": None,
        "config": types.SimpleNamespace(flat=lambda: {"lr": 1.0}),
    }
    return types.SimpleNamespace(**{**values, **change})


def _check():
    require_agreement(plan())
    # The same checkpoint seen under another mount point is the same.
    require_agreement(plan(resume=pathlib.Path(f"/host{dist.get_rank()}/m-10steps")))
    differences = {
        r"the start .*None.* there": {"resume": None, "state": TrainState()},
        "the training data": {"train_data": types.SimpleNamespace(fingerprint="other")},
        "the settings": {"config": types.SimpleNamespace(flat=lambda: {"lr": 2.0})},
    }
    for sentence, change in differences.items():
        with pytest.raises(UserError, match=f"rank 1 disagrees with rank 0 on {sentence}"):
            require_agreement(plan(**(change if dist.get_rank() == 1 else {})))


def test_ranks_that_would_start_elsewhere_are_stopped():
    run_distributed(_check, world_size=3)
