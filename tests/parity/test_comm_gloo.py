"""The direct collectives give what torch's give."""

import pytest
import torch
import torch.distributed as dist

from smp.comm.gloo import DirectAllGather, DirectReduceScatter
from tests.distributed import run_distributed


def _check(sizes):
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    for size in sizes:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            mine = torch.randn(size, generator=generator).to(dtype)
            expected, got = torch.empty(world * size, dtype=dtype), torch.full((world * size,), 7.0, dtype=dtype)
            dist.all_gather_into_tensor(expected, mine)
            assert DirectAllGather()(got, mine, group) is None
            assert torch.equal(got, expected), (size, dtype)
            in_place = torch.empty_like(expected)
            in_place[rank * size : (rank + 1) * size] = mine
            DirectAllGather()(in_place, in_place[rank * size : (rank + 1) * size], group, async_op=True).wait()
            assert torch.equal(in_place, expected)

            whole = torch.randn(world * size, generator=generator).to(dtype)
            everyone = [torch.empty_like(whole) for _ in range(world)]
            dist.all_gather(everyone, whole)
            total = torch.zeros(size, dtype=dtype)
            for other in everyone:  # in rank order
                total = total + other.view(world, size)[rank]
            result = torch.empty(size, dtype=dtype)
            DirectReduceScatter()(result, whole, group, dist.ReduceOp.SUM)
            assert torch.equal(result, total), (size, dtype)


@pytest.mark.parametrize("world_size", [1, 3])
def test_bits(world_size):
    run_distributed(_check, [0, 1, 1023, 300_001], world_size=world_size)


def _check_op():
    with pytest.raises(ValueError, match=r"adds, got .*AVG"):
        DirectReduceScatter()(torch.zeros(1), torch.zeros(1), dist.group.WORLD, dist.ReduceOp.AVG)
    allocated = DirectAllGather().allocate((3,), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert allocated.shape == (3,) and allocated.dtype == torch.bfloat16


def test_only_sums():
    run_distributed(_check_op, world_size=1)
