"""What the plan refuses that no single rank can see."""

from __future__ import annotations

import dataclasses
import pathlib
import types

import pytest
import torch.distributed as dist

from smp.errors import UserError
from smp.optim.config import OptimConfig
from smp.train.on_resume import _change_of_data
from smp.train.start import require_agreement
from smp.train.state import Start, TrainState
from tests.distributed import run_distributed

CHECKPOINT = pathlib.Path("/runs/a/m-10steps")
START = Start(CHECKPOINT, None, TrainState(10, 40, 99), global_batch_size=4, max_steps=20)


def config_of(**flags):
    return types.SimpleNamespace(flat=lambda: flags, optim=OptimConfig())


def plan(**change):
    values = {
        "train_data": types.SimpleNamespace(fingerprint="data", digest="rows"),
        "validation_data": None,
        "config": config_of(lr=1.0),
    }
    return types.SimpleNamespace(**{**values, **change})


def _check():
    require_agreement(plan(), START)
    # The same checkpoint seen under another mount point is the same.
    elsewhere = pathlib.Path(f"/host{dist.get_rank()}/m-10steps")
    require_agreement(plan(), dataclasses.replace(START, checkpoint=elsewhere))
    fresh = dataclasses.replace(START, checkpoint=None, progress=TrainState())
    differences = {
        r"the start .*None.* there": (plan(), fresh),
        "the global batch": (plan(), dataclasses.replace(START, global_batch_size=8)),
        "the training data": (plan(train_data=types.SimpleNamespace(fingerprint="other", digest="rows")), START),
        "the rows of the training data": (
            plan(train_data=types.SimpleNamespace(fingerprint="data", digest="x")),
            START,
        ),
        "--lr: 2.0 there, 1.0 here": (
            plan(config=types.SimpleNamespace(flat=lambda: {"lr": 2.0}, optim=OptimConfig())),
            START,
        ),
    }
    for sentence, other in differences.items():
        with pytest.raises(UserError, match=f"rank 1 disagrees with rank 0 on {sentence}"):
            require_agreement(*(other if dist.get_rank() == 1 else (plan(), START)))


def test_a_resume_tells_rows_that_have_changed():
    """In files of the same names and sizes; checkpoints of earlier versions say nothing of rows."""
    assert _change_of_data({"data": "data", "rows": "rows"}, plan()) == _change_of_data({"data": "data"}, plan()) == ""
    change = _change_of_data({"data": "data", "rows": "others"}, plan())
    assert change == "the rows of the data or their order, in files of the same names and sizes"
    assert _change_of_data({"data": "others", "rows": "others"}, plan()) == "the data"


def test_ranks_that_would_start_elsewhere_are_stopped():
    run_distributed(_check, world_size=3)
