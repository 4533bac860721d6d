"""The GPU path among processes, without a GPU: rendezvous, leases, the way through a group, ``fully_shard``."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import smp.comm
from smp.comm import base_group, symmetric
from smp.comm import group as smddp_group
from smp.comm.buffer_pool import BufferPool, control_bytes
from smp.comm.cuda import SymmetricAllGather
from smp.comm.symmetric import Block, Memory, SymmetricBuffers
from smp.comm.work_queue import DONE
from tests.distributed import run_distributed
from tests.fake_gpu import FakeStream, FakeTorch, gpus, host_tensor

PATH = "symmetric memory"
# torch 2.13's names, or the older ones.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- the rendezvous


def _allocations(fails):
    rank, group, device = dist.get_rank(), dist.group.WORLD, torch.device("cuda", 0)
    gloo = group._get_backend(torch.device("cpu"))
    memory = Memory(group.get_group_store(), rank, [0, 1], device, gloo=gloo, timeout=timedelta(seconds=3))
    # The ranks have taken part in unequal numbers of exchanges before.
    with mock.patch.object(symmetric, "_torch", FakeTorch(5 * rank)), mock.patch("torch.cuda.synchronize"):
        for nbytes in (64, 128):
            block, why = memory.allocate(nbytes)
            assert (block.nbytes, why) == (nbytes, "")
            block.memory.fill_(rank + 1)
            block.barrier(2.0)
            assert block.part(1 - rank, 8, 4).tolist() == [2 - rank] * 4
    with (
        mock.patch.object(symmetric, "_torch", FakeTorch(9, fails if rank else "")),
        mock.patch("torch.cuda.synchronize"),
    ):
        block, why = memory.allocate(64)
    assert block is None
    if fails == "memory":
        assert why == "out of memory"
    else:  # the other rank waited in vain, which is the first problem; all have the same
        whys = [None, None]
        dist.all_gather_object(whys, why)
        assert whys[0] == whys[1] and why


@pytest.mark.parametrize("fails", ["memory", "rendezvous"])
def test_blocks_are_agreed_on(fails):
    run_distributed(_allocations, fails, world_size=2)


# --- leases


class FakeMemory:
    def __init__(self, limit: int):
        self.limit, self.blocks = limit, []

    def allocate(self, nbytes):
        if nbytes > self.limit:
            return None, "out of memory"
        self.blocks.append(Block(torch.zeros(nbytes, dtype=torch.uint8), None))
        return self.blocks[-1], ""


def _leases():
    connection, waits = dist.group.WORLD.connect(), []
    segment, _ = connection.share("test", control_bytes(2) + 2**20, 30)
    memory, stream = FakeMemory(2**18), FakeStream("first", waits)
    with (
        mock.patch.object(symmetric, "_tensor", host_tensor),
        mock.patch("torch.cuda.current_stream", lambda device: stream),
    ):
        buffers = SymmetricBuffers(BufferPool(segment, connection.peers), memory, lambda: 30.0, poison=True)
        first = buffers.lease(1000, torch.float32)
        assert (first.dtype, first.shape, first.device.type) == (torch.float32, (1000,), "cpu")
        assert buffers.find(first) is memory.blocks[0] and memory.blocks[0].nbytes == 4096
        assert bool(first.isnan().all()) and buffers.find(first[1:]) is None
        second = buffers.lease(1000, torch.float32)
        assert buffers.find(second) is memory.blocks[1]
        view = first[1:]
        del first
        third = buffers.lease(1000, torch.float32)  # the view holds the first
        assert buffers.find(third) is memory.blocks[2]
        if dist.get_rank() == 0:
            del view
        fourth = buffers.lease(1000, torch.float32)  # and the other rank's view does
        assert buffers.find(fourth) is memory.blocks[3]
        if dist.get_rank() == 1:
            del view
        dist.barrier()
        assert waits == []
        stream = FakeStream("other", waits)
        again = buffers.lease(500, torch.float64)
        assert buffers.find(again) is memory.blocks[0] and waits == ["other waits for first"]
        assert buffers.lease(2**17, torch.float32) is None  # more than the GPU has
        assert buffers.lease(2**20, torch.float32) is None  # more than the limit
        assert buffers.lease(0, torch.float32) is None
        assert len(memory.blocks) == 4


def test_leases_are_the_same_on_all_ranks():
    run_distributed(_leases, world_size=2, backend="smddp")


# --- the way there


class FakeGpu:
    """A group's collectives on GPUs, of which only the calls are seen."""

    nbytes = 0

    def __init__(self):
        self.why, self.calls = "", []

    def why_not(self, tensor, *, coalescing):
        self.calls.append((tensor.numel(), coalescing))
        return self.why

    def all_gather(self, output, source, *, async_op):
        self.calls.append((output.numel(), source.numel()))
        return DONE


def _ways():
    group, gpu, left = dist.group.WORLD, FakeGpu(), []
    names = ["all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base"]
    names += ["all_gather_single_coalesced", "allgather_into_tensor_coalesced"]
    group._gpu = gpu
    with FakeTensorMode(), mock.patch.object(smddp_group, "plain_gpu", lambda tensors: True):
        one, other = torch.empty(8, device="cuda"), torch.empty(8, device="cuda")
        with CommDebugMode() as counted:
            ALL_GATHER(one, other)
        assert counted.get_total_counts() == 1
        group._plain = SimpleNamespace(**{name: lambda *_, n=name: left.append(n) for name in names})
        assert gpu.calls == [(8, False), (8, 8)]
        assert smp.comm.report().calls(path="symmetric memory") == 1 and not left
        gpu.why, gpu.calls = "too small", []
        group._coalescing = True
        # Not even with something of the CPU's in the queue may another thread make the call.
        with mock.patch.object(type(group._queue), "idle", False):
            ALL_GATHER(one, other)
            REDUCE_SCATTER(one, other)
        assert gpu.calls == [(8, True)] and len(left) == 2
        with mock.patch.object(base_group.modes, "active", int):  # the fake tensors' own mode is one
            assert group.allgather_into_tensor_coalesced([one], [other]) is None  # as NCCL gave no work
        with pytest.raises(ValueError, match="output"):  # of a wrong size: NCCL says so
            group._plain.all_gather_single = mock.Mock(side_effect=ValueError("output tensor size"))
            ALL_GATHER(torch.empty(9, device="cuda"), other)
    assert {key.why for key in smp.comm.report() if key.path == "nccl"} == {
        "too small", "cuda tensors", "in a coalesced batch"
    }  # fmt: skip


@pytest.mark.smoke
def test_ways():
    run_distributed(_ways, world_size=1, backend="smddp")


def _broken_group():
    with (
        mock.patch.object(base_group.cuda, "GpuCollectives", mock.Mock(side_effect=dist.DistBackendError("not there"))),
        FakeTensorMode(),
        mock.patch.object(smddp_group, "plain_gpu", lambda tensors: True),
    ):
        one = torch.empty(8, device="cuda")
        with pytest.raises(dist.DistBackendError, match="not there"):
            ALL_GATHER(one, one)
        with pytest.raises(dist.DistBackendError, match="cannot be used any more: not there"):
            ALL_GATHER(one, one)


def test_a_failed_beginning_ends_the_group():
    run_distributed(_broken_group, world_size=1, backend="smddp")


# --- all of it


def values(rank: int, turn: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return (torch.randn(numel, generator=generator) * 8).to(dtype)


def _collectives():
    size, rank, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    numbers = [0, 1, 1000, 70_000]  # the last in several chunks
    # Ranks are in unequal numbers of groups, and have been before.
    pair = dist.new_group([0, 1], backend="smddp")
    with gpus(first=3 * rank):
        if rank < 2:
            output = torch.empty(2000)
            ALL_GATHER(output, values(rank, 5, 1000, torch.float32), group=pair)
            assert torch.equal(output, torch.cat([values(r, 5, 1000, torch.float32) for r in range(2)]))
        assert world.gpu(torch.device("cpu")).share_buffers() == ""
        for turn, (numel, dtype) in enumerate(itertools.product(numbers, [torch.float32, torch.bfloat16])):
            expected = torch.cat([values(r, turn, numel, dtype) for r in range(size)])
            output = torch.empty(size * numel, dtype=dtype)
            work = ALL_GATHER(output, values(rank, turn, numel, dtype), async_op=turn % 2 == 0)
            assert work is None or work.wait()
            comm = SymmetricAllGather(world)
            shared = comm.allocate((size * numel,), dtype=dtype, device=torch.device("cpu"))
            part = shared.view(size, numel)[rank].copy_(values(rank, turn, numel, dtype))
            comm(shared, part, world)
            assert torch.equal(output, expected) and torch.equal(shared, expected)
        report = smp.comm.report()
        assert report.calls("all_gather", PATH) == report.calls("all_gather") == 2 * 8 + (rank < 2)


@pytest.fixture
def knobs(monkeypatch):
    monkeypatch.setenv("SMP_SYMMETRIC_WORKSPACE_BYTES", str(2**17))
    monkeypatch.setenv("SMP_SYMMETRIC_MINIMUM_BYTES", "0")


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives(world_size, knobs):
    run_distributed(_collectives, world_size=world_size, backend="smddp")


def _unlike():
    os.environ["SMP_SYMMETRIC_MINIMUM_BYTES"] = os.environ["RANK"]
    group = dist.new_group([0, 1], backend="smddp")
    with gpus():
        own = group.gpu(torch.device("cpu"))
        assert own.unavailable == own.share_buffers() == "the ranks' SMP_SYMMETRIC_ or SMDDP_ settings differ"


def test_settings_that_differ():
    run_distributed(_unlike, world_size=2, backend="smddp")


def _losses(model, rows, share):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        batches = [torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + row)) for row in rows]
        loss = sum(model(batch).square().mean() for batch in batches) * share
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)))


def _fully_shard(unshard_async):
    size, rank, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    expected = _losses(_model(), range(size), 1 / size)
    model = _model()
    with gpus(first=rank):
        own = world.gpu(torch.device("cpu"))
        assert own.share_buffers() == ""
        for module in (*model, model):
            fully_shard(module, mesh=dist.device_mesh.DeviceMesh.from_group(world, "cpu"))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(SymmetricAllGather(world))
        model._set_unshard_async_op(unshard_async)
        mine = torch.tensor(_losses(model, [rank], 1 / size))
    dist.all_reduce(mine)
    torch.testing.assert_close(mine.tolist(), expected, rtol=1e-5, atol=0)
    report = smp.comm.report()
    assert report.calls("all_gather", PATH) == 4 * 2 * 3
    assert len(own.buffers._blocks) <= 6  # each is used again
    held = 2**17 + sum(block.nbytes for block in own.buffers._blocks.values())
    assert report.gpu_bytes == held and f"statistics: {held / 1024:.1f} KiB" in str(report)


@pytest.mark.parametrize("unshard_async", [False, True])
def test_fully_shard(unshard_async, knobs):
    run_distributed(_fully_shard, unshard_async, world_size=2, backend="smddp")
