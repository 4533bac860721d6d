"""The collectives of backend smddp: every bit as computed by hand, and as gloo has it."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist

import smp.comm
from smp.comm import futex
from tests.comm_calls import check
from tests.comm_cases import DIMENSIONS, REDUCED, Case, all_cases, covering_cases
from tests.comm_traffic import Traffic
from tests.distributed import run_distributed

SMALL = 4 * 16384  # scratch memory with slots so small that a few KiB take many rounds
DEFAULT = 4 * 2**20


@pytest.fixture
def scratch(monkeypatch):
    """Set the scratch memory of the ranks to come."""
    return lambda nbytes: monkeypatch.setenv("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", str(nbytes))


def without_kernel(rank: int) -> None:
    """Rounds in Python."""
    os.environ["SMP_COMM_KERNEL"] = "0"


def kernel_on_odd(rank: int) -> None:
    """Rounds in C on every other rank: the two must be the same protocol."""
    os.environ["SMP_COMM_KERNEL"] = str(rank % 2)


def _all_right(cases: list[Case], chunk: int) -> None:
    gloo, members = dist.new_group(backend="gloo"), list(range(dist.get_world_size()))
    smp.comm.reset_report()
    for case in cases:
        check(case, None, members, chunk, gloo)
    by_gloo = [key for key in smp.comm.report() if key.path != "shared memory"]
    assert by_gloo == []
    assert smp.comm.report().calls(path="shared memory") >= len(cases)


@pytest.mark.parametrize("world_size, every", [(2, 1), (3, 2), (8, 8)])
@pytest.mark.full
def test_pairs_of_everything(scratch, world_size, every):
    scratch(SMALL)
    run_distributed(_all_right, covering_cases(world_size)[::every], SMALL // 4, world_size=world_size, backend="smddp")


@pytest.mark.full
def test_default_chunk(scratch):
    scratch(DEFAULT)
    cases = [c for c in covering_cases(0) if "chunk" in str(c.size) or "piece" in str(c.size)]
    run_distributed(_all_right, cases[::3], DEFAULT // 4, world_size=2, backend="smddp")


@pytest.mark.slow
@pytest.mark.parametrize("world_size, every", [(2, 1), (3, 1), (4, 1), (8, 5)])
def test_everything(scratch, world_size, every):
    """Each form with each dtype, reduction and size; each with each layout, in place and asynchronous."""
    scratch(SMALL)
    fixed = {"layout": "contiguous", "in_place": False, "asynchronous": False, "whole": True}
    cases = [*all_cases(**fixed), *all_cases(size="chunk+1", whole=False, reduction="SUM")]
    run_distributed(_all_right, cases[::every], SMALL // 4, world_size=world_size, backend="smddp")


@pytest.mark.slow
def test_every_pair_with_the_default_chunk(scratch):
    scratch(DEFAULT)
    run_distributed(_all_right, covering_cases(5), DEFAULT // 4, world_size=4, backend="smddp")


@pytest.mark.slow
def test_256_mib():
    size = 2**26 + 3
    cases = [Case(form, torch.float32, size=size) for form in ("all_gather_single", "all_reduce", "broadcast")]
    cases += [Case(form, size=size // 2) for form in ("reduce_scatter_single", "all_gather_uneven")]
    run_distributed(_all_right, cases, DEFAULT // 4, world_size=2, backend="smddp")


# --- one at a time


def _roots(chunk: int) -> None:
    members = list(range(dist.get_world_size()))
    for root, size in itertools.product(members, ("0", "1", "page", "chunk+1", "chunks")):
        check(Case("broadcast", size=size, seed=root), None, members, chunk)


def _objects() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * (7000 * rank), "nested": [None, (rank, 1.5)]}
    everyone: list = [None] * world
    dist.all_gather_object(everyone, mine)
    assert everyone == [{"rank": r, "text": "x" * (7000 * r), "nested": [None, (r, 1.5)]} for r in range(world)]
    for root in range(world):
        objects = [mine, rank] if rank == root else [None, None]
        dist.broadcast_object_list(objects, src=root)
        assert objects == [everyone[root], root]


def _barrier() -> None:
    store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    for k in range(20):
        store.add(f"arrived{k}", 1)
        if (rank + k) % 2:
            dist.barrier()
        else:
            dist.barrier(async_op=True).wait()
        assert store.add(f"arrived{k}", 0) == world


def _zero_dimensions() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    number = torch.tensor(float(rank))
    dist.all_reduce(number)
    assert number.shape == () and number == world * (world - 1) / 2
    numbers = [torch.empty(()) for _ in range(world)]
    dist.all_gather(numbers, torch.tensor(float(rank)))
    assert [n.item() for n in numbers] == list(range(world))
    square = torch.full((2, 0, 3), 1.0)
    dist.all_reduce(square)
    assert square.shape == (2, 0, 3)


def _same_order_every_time() -> None:
    """Large and small numbers, whose sum depends on the order: from the first rank to the last, wherever it is done."""
    world, count = dist.get_world_size(), 40_000
    parts = [torch.tensor([1e8, 1.0, -1e8, 3.0])[r % 4] * torch.rand(count, generator=_generator(r)) for r in range(8)]
    expected = sum(parts[1:world], start=parts[0])
    mine = parts[dist.get_rank()]
    for length in (7, 4000, count):
        for _ in range(3):
            total = mine[:length].clone()
            dist.all_reduce(total)
            assert torch.equal(total, expected[:length])
    if world > 2:
        assert not torch.equal(expected, sum(parts[: world - 1], start=parts[world - 1])), "the order should matter"


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _overlaps() -> None:
    """An input that overlaps the output, neither in its own place nor in a peer's."""
    rank, world, count = dist.get_rank(), dist.get_world_size(), 10_000
    for start in (0, 1, 7, count - 1, count + 5, 2 * count - 3):
        if start + count > count * world + 5:
            continue
        memory = torch.arange(float(count * world + 5)) + 1e5 * rank
        source = memory[start : start + count]
        expected = torch.cat([torch.arange(float(start), start + count) + 1e5 * r for r in range(world)])
        dist.all_gather_into_tensor(memory[: count * world], source)
        assert torch.equal(memory[: count * world], expected), start
        memory = torch.arange(float(count * world + 5)) + rank
        expected = world * torch.arange(float(rank * count), (rank + 1) * count) + world * (world - 1) / 2
        output = memory[start : start + count]
        dist.reduce_scatter_tensor(output, memory[: count * world])
        assert torch.equal(output, expected), start


def _slow_readers(chunk: int) -> None:
    """A slot is not filled again while somebody still reads it, however far the others could be."""
    rank, world = dist.get_rank(), dist.get_world_size()
    copy = futex.copy

    def slow_copy(*arguments: int) -> None:
        time.sleep(0.003)
        copy(*arguments)

    for slow, form in itertools.product(range(world), ("broadcast", "all_gather_single", "reduce_scatter_single")):
        futex.copy = slow_copy if rank == slow else copy
        check(Case(form, size=6 * chunk // 4 + 5, seed=slow + 1), None, list(range(world)), chunk)
    futex.copy = copy


def _one_at_a_time(chunk: int) -> None:
    for function in (_objects, _barrier, _zero_dimensions, _same_order_every_time, _overlaps):
        function()
    _roots(chunk)
    _slow_readers(chunk)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("world_size, prepare", [(1, None), (3, None), (2, without_kernel), (3, kernel_on_odd)])
def test_one_at_a_time(scratch, world_size, prepare):
    scratch(SMALL)
    run_distributed(_one_at_a_time, SMALL // 4, world_size=world_size, backend="smddp", prepare=prepare)


# --- several groups, several calls in flight


def _traffic(seed: int, steps: int) -> None:
    traffic = Traffic(seed, (0, 1, 3, 500, 2047, 9000), life=40)
    for _ in range(steps):
        traffic.step()
    traffic.finish()


@pytest.mark.parametrize("world_size, prepare", [pytest.param(4, None, marks=pytest.mark.full), (3, kernel_on_odd)])
def test_traffic(scratch, world_size, prepare):
    scratch(SMALL)
    run_distributed(_traffic, world_size, 300, world_size=world_size, backend="smddp", prepare=prepare)


@pytest.mark.slow
def test_much_traffic(scratch):
    scratch(SMALL)
    run_distributed(_traffic, 7, 5000, world_size=8, backend="smddp")


def test_the_cases_cover_every_pair():
    cases = covering_cases(2)
    free = {"size": "0", "asynchronous": False, "whole": False}  # these go with everything
    for name, other in itertools.combinations(DIMENSIONS, 2):
        met = {(getattr(c, name), getattr(c, other)) for c in cases}
        for pair in itertools.product(DIMENSIONS[name], DIMENSIONS[other]):
            fixed = {**free, name: pair[0], other: pair[1]}
            assert pair in met or next(all_cases(**fixed), None) is None, fixed
    assert {c.reduction for c in cases} == set(REDUCED)
