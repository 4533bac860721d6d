"""Shared buffers of ``fully_shard``: never given out while somebody holds them, the same numbers, one copy per host."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import smp.comm
from smp.comm import buffer_pool, fsdp
from smp.comm.fsdp import SharedAllGather, SharedReduceScatter, use_shared_buffers
from tests.clock import HANG_SECONDS
from tests.distributed import run_distributed, run_ranks, signal_others, wait_for

WIDTH, BLOCKS = 40, 3


def pool():
    return fsdp._pool(dist.group.WORLD)


def allocate(numel: int, dtype=torch.float32) -> torch.Tensor:
    return SharedAllGather(dist.group.WORLD).allocate((numel,), dtype=dtype, device=torch.device("cpu"))


def gather(numel: int, value: float, dtype=torch.float32, **kwargs):
    """One gather of ``value + rank``; the buffer and what the call returns."""
    comm, size, rank = SharedAllGather(dist.group.WORLD), dist.get_world_size(), dist.get_rank()
    output = comm.allocate((numel * size,), dtype=dtype, device=torch.device("cpu"))
    part = output.view(size, numel)[rank]
    part.fill_(value + rank)
    return output, comm(output, part, dist.group.WORLD, **kwargs)


def expect(output: torch.Tensor, value: float) -> None:
    size = dist.get_world_size()
    wanted = (torch.arange(size) + value).to(output.dtype).repeat_interleave(len(output) // size)
    assert torch.equal(output, wanted), (output, wanted)


def _gathers(dtype):
    for number, numel in enumerate([1, 7, 1000, 1024, 1, 300_001, 7]):
        output, work = gather(numel, number, dtype)
        expect(output, number)
        assert work is None
        output, work = gather(numel, number + 1, dtype, async_op=True)
        assert work.wait()
        expect(output, number + 1)
    assert smp.comm.report().calls("all_gather", "shared buffer") == 14


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_gathers(world_size, dtype):
    run_distributed(_gathers, dtype, world_size=world_size, backend="smddp")


def _scatters(dtype):
    size, rank = dist.get_world_size(), dist.get_rank()
    comm, cpu = SharedReduceScatter(dist.group.WORLD), torch.device("cpu")
    for numel in [1, 5, 1000, 200_003]:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            inputs = [
                torch.randn(numel * size, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)
            ]
            source = comm.allocate((numel * size,), dtype=dtype, device=cpu)
            source.copy_(inputs[rank])
            output = comm.allocate((numel,), dtype=dtype, device=cpu)
            assert comm(output, source, dist.group.WORLD, op) is None
            expected = torch.add(*(i.view(size, -1)[rank] for i in inputs[:2]))
            for other in inputs[2:]:
                expected += other.view(size, -1)[rank]
            if op == dist.ReduceOp.AVG:
                expected /= size
            assert torch.equal(output, expected)
            assert pool().offset(source) is not None and pool().offset(output) is None
    assert smp.comm.report().calls("reduce_scatter", "shared buffer") == 8


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_reduce_scatters_add_in_rank_order(world_size, dtype):
    run_distributed(_scatters, dtype, world_size=world_size, backend="smddp")


def _held_by_one():
    """Only rank 1 keeps the first buffer, as a view of a view: nobody may be given its memory."""
    output, _ = gather(1000, 5)
    first = output.data_ptr()
    kept = output.view(-1)[3:].view(-1) if dist.get_rank() == 1 else None
    del output
    for number in range(6):
        output, _ = gather(1000, number)
        assert output.data_ptr() != first
        if kept is not None:
            assert kept[0] == 5
    del kept, output
    gc.collect()
    dist.barrier()
    output, _ = gather(1000, 0)
    assert output.data_ptr() == first, "the least recently used buffer is free again"


@pytest.mark.full
def test_a_buffer_that_one_rank_holds_is_not_reused():
    run_distributed(_held_by_one, world_size=3, backend="smddp")


def _stale():
    output, _ = gather(64, 1)
    address = output.data_ptr()
    del output
    dist.barrier()
    again = allocate(128)
    assert again.data_ptr() == address
    dist.barrier()  # before this rank's part is written
    assert torch.isnan(again).all()


def test_tests_would_see_a_read_of_stale_memory():
    run_distributed(_stale, world_size=2, backend="smddp")


def _bounded():
    held = [gather(1000, number)[0] for number in range(6)]
    inside = [pool().offset(output) is not None for output in held]
    assert inside == [True] * 4 + [False] * 2, inside
    for number, output in enumerate(held):
        expect(output, number)
    assert smp.comm.report().calls("all_gather", "shared memory") == 2
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, inside)
    assert all(other == inside for other in everyone)


def test_beyond_the_limit_buffers_are_private_on_all_ranks(monkeypatch):
    # 8000 bytes each, in whole pages.
    monkeypatch.setenv("SMDDP_AG_SORT_BUFFER_SIZE_BYTES", str(4 * 8192))
    run_distributed(_bounded, world_size=2, backend="smddp")


def test_no_limit_no_shared_buffers(monkeypatch):
    monkeypatch.setenv("SMDDP_AG_SORT_BUFFER_SIZE_BYTES", "0")
    run_distributed(_unshared, world_size=2, backend="smddp")


def _unshared():
    output, _ = gather(10, 3)
    expect(output, 3)
    assert smp.comm.report().calls("all_gather", "shared memory") == 1


def _build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 7))


def _losses(*, shared: bool, unshard_async: bool = False, reduce_dtype=None, steps: int = 8) -> list[torch.Tensor]:
    model = _build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype) if reduce_dtype else None
    kwargs = {"mp_policy": policy} if policy else {}
    for block in model:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    if shared:
        assert use_shared_buffers(model) == BLOCKS + 2
    if unshard_async:
        model._set_unshard_async_op(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
        loss = model(torch.randn(5, WIDTH, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _same_numbers(cases):
    for case in cases:
        before = smp.comm.report()
        plain, shared = _losses(shared=False, **case), _losses(shared=True, **case)
        assert all(torch.equal(a, b) for a, b in zip(plain, shared, strict=True)), case
        assert smp.comm.report().calls(path="shared buffer") > before.calls(path="shared buffer"), case


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.full
def test_fully_shard_computes_the_same(world_size):
    cases = [{}, {"unshard_async": True}, {"reduce_dtype": torch.float32}]
    run_distributed(_same_numbers, cases, world_size=world_size, backend="smddp")


def _memory():
    model = _build()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    use_shared_buffers(model)
    for _ in range(12):
        model(torch.ones(2, WIDTH)).sum().backward()
    gathered = max(sum(p.numel() for p in block.parameters()) * 4 for block in model)
    if dist.get_rank() == 0:
        # A gathered unit or two for all ranks, and the gradients of each rank: not another for every step.
        nbytes = sum(buffer.capacity for buffer in pool().buffers._buffers)
        assert nbytes <= 4 * gathered * (1 + dist.get_world_size())


def test_buffers_do_not_grow(monkeypatch):
    # A rank may be late by any time on a busy machine, and then gets another buffer.
    monkeypatch.setattr(buffer_pool, "_PATIENCE", HANG_SECONDS)
    run_distributed(_memory, world_size=2, backend="smddp")


def _late_rank():
    held = allocate(100)
    if dist.get_rank() == 1:
        time.sleep(0.3)
    del held
    allocate(100)
    if dist.get_rank() == 0:
        assert len(pool().buffers._buffers) == 1


def test_a_late_rank_is_waited_for(monkeypatch):
    monkeypatch.setattr(buffer_pool, "_PATIENCE", HANG_SECONDS)
    run_distributed(_late_rank, world_size=2, backend="smddp")


def _different_sizes():
    try:
        allocate(100 + dist.get_rank())
    except dist.DistBackendError as error:
        return str(error)
    if dist.get_rank() == 0:
        try:
            dist.barrier()
        except dist.DistBackendError as error:
            return str(error)
    return "nothing"


def test_different_requests_are_named():
    first, second = run_ranks(_different_sizes, world_size=2)
    assert "asks for a shared buffer of 404 bytes, rank 0" in second.result, second
    assert "rank 1" in first.result and "404 bytes" in first.result, first


def _first_rank_dies():
    if dist.get_rank() == 0:
        wait_for("ready")
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
    signal_others("ready")
    try:
        for _ in range(3):
            gather(10, 0)
    except dist.DistBackendError as error:
        return str(error)
    return "nothing"


def test_death_of_the_deciding_rank_is_noticed():
    _, second = run_ranks(_first_rank_dies, world_size=2)
    assert "rank 0" in second.result and "died" in second.result, second


def _other_groups():
    single = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = fully_shard(nn.Linear(4, 4))
    assert use_shared_buffers(model, single) == 0
    assert use_shared_buffers(model, dist.new_group(backend="gloo")) == 0
    dist.barrier()  # a rank that ends now closes connections that another is still making
    assert use_shared_buffers(model) == 1


def test_only_groups_of_the_backend_share():
    run_distributed(_other_groups, world_size=2, backend="smddp")
