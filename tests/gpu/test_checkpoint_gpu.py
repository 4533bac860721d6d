"""Checkpoints from a GPU: pinned copies, the state of their step, generators, and cheap standstill."""

from __future__ import annotations

import pathlib
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint.background import HostCopies
from smp.checkpoint.checkpointer import Checkpointer
from smp.checkpoint.manifest import Manifest, problems_of_files, read_manifest
from smp.checkpoint.restore import restore
from smp.checkpoint.shards import snapshot_of
from smp.checkpoint.state import state_tensors
from smp.checkpoint.storage import Storage
from smp.config import ParallelConfig
from smp.mesh import resolve_mesh
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def mesh():
    # Objects are exchanged on the host: over NCCL, every exchange would synchronise the device.
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield resolve_mesh(ParallelConfig(), world_size=1, local_world_size=1).join("cuda")
    dist.destroy_process_group()


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.1), nn.Linear(512, 512)).cuda()
    optimizer = build_optimizer(model, OptimConfig(), lr=1e-2)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(8, 512, device="cuda")).square().sum().backward()
    optimizer.step()


def describe() -> Manifest:
    return Manifest(
        step=1, world_size=1, degrees={"tp": 1}, model={"name": "m", "config": {}},
        run={"progress": {"step": 1, "samples": 8, "tokens": 8}},
    )  # fmt: skip


def state(model, optimizer) -> list[torch.Tensor]:
    moments = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return [t.detach().clone() for t in [*model.parameters(), *moments]]


def check(path, expected, mesh):
    manifest = read_manifest(path)
    assert problems_of_files(path, manifest, content=True) == []
    assert "rng.cuda.00000" in manifest.tensors
    model = nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.1), nn.Linear(512, 512)).cuda()
    optimizer = build_optimizer(model, OptimConfig(), lr=1e-2)
    restore(path, manifest, model, optimizer, seed="0")
    assert all(torch.equal(a, b) for a, b in zip(state(model, optimizer), expected, strict=True))
    return model, optimizer


def test_saved_and_loaded_with_its_generator(mesh, tmp_path):
    model, optimizer = trained()
    path = Checkpointer(Storage(tmp_path), model, optimizer, name="m").write(describe(), wait=True, verify=True)
    again = check(path, state(model, optimizer), mesh)
    step(*again)
    restored = state(*again)
    check(path, state(model, optimizer), mesh)  # the generator as it was
    step(model, optimizer)  # draws the same masks
    assert all(torch.equal(a, b) for a, b in zip(state(model, optimizer), restored, strict=True))


def test_an_asynchronous_copy_is_of_its_moment(mesh, tmp_path):
    model, optimizer = trained()
    copies, expected = HostCopies(), state(model, optimizer)
    checkpointer = Checkpointer(Storage(tmp_path), model, optimizer, name="m", copies=copies)
    checkpointer.write(describe(), wait=False, verify=True)
    for _ in range(5):  # the first update waits for the copy
        step(model, optimizer)
    checkpointer.finish()
    check(tmp_path / "m-1steps", expected, mesh)
    snapshot = snapshot_of(state_tensors(model, optimizer), everything=False)
    one, two = copies(snapshot.pieces), copies(snapshot.pieces)
    assert [p.tensor.data_ptr() for p in one] == [p.tensor.data_ptr() for p in two]
    on_gpu = [piece for piece in one if not piece.name.startswith("rng.")]
    assert on_gpu and all(piece.tensor.is_pinned() for piece in on_gpu)


def test_the_host_waits_for_no_copy_and_the_first_save_allocates_nothing(mesh):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:  # a disk may outlast the device's sleep
        save_behind_a_busy_device(mesh, pathlib.Path(memory))


def save_behind_a_busy_device(mesh, directory):
    model, optimizer = trained()
    optimizer.state.clear()  # as before the first step
    copies = HostCopies()
    checkpointer = Checkpointer(Storage(directory), model, optimizer, name="m", copies=copies)
    checkpointer.reserve()
    reserved = {name: buffer.data_ptr() for name, buffer in copies._buffers.items()}
    step(model, optimizer)
    expected = state(model, optimizer)
    step_done = torch.cuda.Event()
    torch.cuda._sleep(2 * 10**9)
    step_done.record()
    checkpointer.write(describe(), wait=False, verify=True)
    step(model, optimizer)  # its update is queued behind the copy
    assert not step_done.query()  # the device has not begun yet
    checkpointer.finish()
    check(directory / "m-1steps", expected, mesh)
    assert {name: buffer.data_ptr() for name, buffer in copies._buffers.items()} == reserved
    tensors = [buffer for name, buffer in copies._buffers.items() if not name.startswith("rng.")]
    assert tensors and all(buffer.is_pinned() for buffer in tensors)
