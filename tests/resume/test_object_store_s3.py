"""A script's checkpoints on a real S3 server, which is slow, fails and is away."""

from __future__ import annotations

import functools
import pathlib
import shutil
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint import object_store
from smp.checkpoint.checkpointer import Checkpointer
from smp.errors import RunError
from tests.distributed import run_distributed
from tests.s3 import PART, Fault, nth, proxy, s3, s3_port, share, small_parts  # noqa: F401  fixtures

pytestmark = pytest.mark.full


def of(url: str, staging: str) -> tuple[nn.Module, Checkpointer]:
    torch.manual_seed(0)
    model = nn.Linear(128, 128)  # more than two parts
    assert 2 * PART < 4 * 128 * 128
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, Checkpointer(url, model, optimizer, staging=staging)


def _rounds(url: str, folder: str) -> None:
    small_parts()
    object_store.FIRST_PAUSE, object_store.ATTEMPTS = 0.01, 8
    model, checkpoints = of(url, f"{folder}/one")
    for step in (1, 2, 3):
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoints.save(step, {"epoch": step}, wait=False)
        checkpoints.finish()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/one")
    dist.barrier()
    model, checkpoints = of(url, f"{folder}/two")
    found = checkpoints.load()
    assert (found.step, found.extra) == (3, {"epoch": 3}) and bool((model.weight == 3).all())
    with pytest.raises(RunError, match=r"checkpoints cannot be uploaded: s3://nobucket/run/.* bucket does not exist"):
        of("s3://nobucket/run", f"{folder}/three")[1].save(1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_saved_is_loaded_from_a_server_that_fails_often(tmp_path, s3, proxy, world_size):  # noqa: F811
    proxy.rules = [
        share(0.15, Fault(status=503), seed=1),
        share(0.05, Fault(cut="middle"), seed=2, matches=lambda r: r.kind in ("put", "part")),
        share(0.05, Fault(cut="answering"), seed=3, matches=lambda r: r.kind == "get"),
    ]
    run_distributed(_rounds, f"{s3.url}/run", str(tmp_path), world_size=world_size)
    folders = {key.split("/")[1] for key in s3.keys("run")}
    assert folders == {"model-2steps", "model-3steps", "model.writer.json"}
    assert any(request.status == 503 for request in proxy.requests)


def _away(url: str, folder: str) -> None:
    object_store.FIRST_PAUSE, object_store.ATTEMPTS = 0.01, 2
    _, checkpoints = of(url, f"{folder}/here")
    checkpoints.save(1)
    checkpoints.finish()
    pathlib.Path(folder, "away").touch()
    checkpoints.save(2)
    with pytest.raises(RunError, match=r"model-2steps could not be uploaded to s3://.*: rank 0: .*It is kept in "):
        checkpoints.finish()


def test_a_server_that_is_away_ends_the_wait(tmp_path, s3, proxy):  # noqa: F811
    proxy.rules = [lambda r: Fault(cut="before") if (tmp_path / "away").exists() else None]
    run_distributed(_away, f"{s3.url}/run", str(tmp_path), world_size=1)
    assert "run/model-1steps/manifest.json" in s3.keys("run") and not s3.keys("run/model-2steps")


def _held(url: str, folder: str) -> None:
    _, checkpoints = of(url, f"{folder}/here")
    for step in (1, 2, 3):
        checkpoints.save(step)  # while the first is held
    pathlib.Path(folder, "saved").touch()
    checkpoints.finish()


def test_saving_does_not_wait_for_the_server(tmp_path, s3, proxy):  # noqa: F811
    held = Fault(cut="applied", hold=threading.Event())
    proxy.rules = [nth(0, lambda r: r.kind == "put" and r.key.endswith(".safetensors"), held)]
    job = functools.partial(run_distributed, _held, f"{s3.url}/run", str(tmp_path), world_size=1)
    thread = threading.Thread(target=job)
    thread.start()
    try:
        assert held.reached.wait(300)
        while not (tmp_path / "saved").exists() and thread.is_alive():
            thread.join(0.1)
        assert (tmp_path / "saved").exists() and not [k for k in s3.keys("run") if k.endswith("manifest.json")]
    finally:
        held.hold.set()
        thread.join()
    assert "run/model-3steps/manifest.json" in s3.keys("run") and not s3.keys("run/model-2steps")
