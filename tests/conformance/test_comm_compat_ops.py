"""Every operation and kind of group of torch.distributed gives over ``smddp`` what it gives over gloo."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.clock import HANG_SECONDS
from tests.compat import compare, through
from tests.distributed import run_distributed

LENGTH = 700  # elements that one rank gives for another


def mine(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Whole numbers that tell the rank: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, 50, shape or (LENGTH * dist.get_world_size(),), generator=generator).to(dtype)


def world() -> Any:
    return dist.group.WORLD


# --- torch.distributed


@through()
def left_to_gloo():
    rank, size = dist.get_rank(), dist.get_world_size()
    data, last = mine(), size - 1
    total = data.clone()
    dist.reduce(total, dst=last)
    collected = [torch.empty_like(data) for _ in range(size)] if rank == last else None
    dist.gather(data, collected, dst=last)
    part = torch.empty(LENGTH, dtype=data.dtype)
    dist.scatter(part, list(data.chunk(size)) if rank == last else None, src=last)
    swapped, listed = torch.empty_like(data), [torch.empty(LENGTH, dtype=data.dtype) for _ in range(size)]
    dist.all_to_all_single(swapped, data)
    given = [10 * (rank + other + 1) for other in range(size)]
    uneven = torch.empty(sum(given), dtype=data.dtype)
    dist.all_to_all_single(uneven, mine(sum(given)), given, given)
    dist.all_to_all(listed, list(data.chunk(size)))
    # What reduce leaves on the other ranks is nobody's business.
    return [total if rank == last else None, collected, part, swapped, uneven, listed]


@through()
def point_to_point():
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    received = [torch.empty(LENGTH, dtype=torch.int64) for _ in range(4)]
    data = mine(LENGTH)
    work: Any = dist.isend(data, after, tag=3)
    dist.recv(received[0], before, tag=3)
    work.wait()
    work = dist.irecv(received[1], before)
    dist.send(data + 1, after)
    work.wait()
    pair = [dist.P2POp(dist.isend, data + 2, after), dist.P2POp(dist.irecv, received[2], before)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    sender = None
    if rank == 0:
        sender = dist.recv(received[3])  # from anyone
    elif rank == 1:
        dist.send(data + 3, 0)
    return received[:3], received[3] if rank == 0 else None, sender


@through("all_gather", "reduce_scatter", "all_reduce")
def coalesced():
    size = dist.get_world_size()
    results = []
    for asynchronous in (False, True):
        totals = [mine(length) for length in (1, 20, 3000)]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for total in totals:
                dist.all_reduce(total)
        if asynchronous:
            manager.wait()
        gathered = [torch.empty(size * length, dtype=torch.int64) for length in (1, 20, 3000)]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for output in gathered:
                dist.all_gather_into_tensor(output, mine(output.numel() // size))
        if asynchronous:
            manager.wait()
        parts = [torch.empty(length, dtype=torch.int64) for length in (1, 20, 3000)]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for part in parts:
                dist.reduce_scatter_tensor(part, mine(part.numel() * size))
        if asynchronous:
            manager.wait()
        results += [totals, gathered, parts]
    return results


def test_operations():
    compare(left_to_gloo, point_to_point, coalesced, world_size=3)


# --- functional collectives, autograd, compiled graphs


@through("all_gather", "reduce_scatter", "all_reduce", "broadcast")
def functional():
    size = dist.get_world_size()
    data = mine(4 * size, 6 * size)
    given = [size] * size
    results = [
        funcol.all_reduce(data, "sum", world()),
        funcol.broadcast(data, 1, world()),
        funcol.all_gather_tensor(data, 0, world()),
        funcol.all_gather_tensor(data, 1, world()),
        funcol.reduce_scatter_tensor(data, "sum", 0, world()),
        funcol.reduce_scatter_tensor(data, "sum", 1, world()),
        funcol.all_to_all_single(data.flatten()[: size * size], given, given, world()),
        funcol.permute_tensor(data.flatten(), [(r + 1) % size for r in range(size)], world()),
        *funcol.all_reduce_coalesced([data, data + 1], "max", world()),
        *funcol.all_gather_into_tensor_coalesced([data, data + 1], world()),
        *funcol.reduce_scatter_tensor_coalesced([data, data + 1], "sum", [0, 1], world()),
    ]
    return [funcol.wait_tensor(result) for result in results]


def gradient(function, *arguments) -> list[Any]:
    size = dist.get_world_size()
    x = mine(2 * size, 3, dtype=torch.float64).requires_grad_()
    y = function(x, *arguments)
    y = y if isinstance(y, torch.Tensor) else torch.cat(list(y))
    (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    return [y.detach().clone(), x.grad]


@through("all_gather", "reduce_scatter", "all_reduce", "broadcast")
def gradients():
    """Collectives whose backward is a collective too."""
    size = dist.get_world_size()
    given = [2] * size
    return [
        gradient(funcol.all_gather_tensor_autograd, 0, world()),
        gradient(funcol.reduce_scatter_tensor_autograd, "sum", 0, world()),
        gradient(funcol.all_to_all_single_autograd, given, given, world()),
        gradient(dist_nn.all_reduce),
        gradient(dist_nn.all_gather),
        gradient(dist_nn.broadcast, 0),
        gradient(lambda x: dist_nn.reduce_scatter(torch.empty(2, 3, dtype=x.dtype), list(x.split(2)))),
    ]


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient_):
        gradient_ = gradient_.clone()
        dist.all_reduce(gradient_)
        return gradient_


@through("all_reduce")
def collective_in_backward():
    return gradient(_SumOfGradients.apply)


@through("all_gather", "reduce_scatter", "all_reduce")
def compiled_functional():
    def function(x):
        gathered = funcol.all_gather_tensor(x * 2, 0, world())
        total = funcol.all_reduce(gathered + 1, "sum", world())
        return funcol.reduce_scatter_tensor(total, "sum", 0, world()) + 1

    return torch.compile(function, backend="aot_eager", fullgraph=True)(mine(LENGTH))


@through("all_gather", "reduce_scatter", "all_reduce")
def compiled_in_place():
    size = dist.get_world_size()

    def function(x):
        gathered = torch.empty(size * x.numel(), dtype=x.dtype)
        dist.all_gather_into_tensor(gathered, x + 1)
        part = torch.empty_like(x)
        dist.reduce_scatter_tensor(part, gathered)
        dist.all_reduce(part)
        return part * 2

    return torch.compile(function, backend="aot_eager", fullgraph=True)(mine(LENGTH))


@through("all_gather", "reduce_scatter")
def compiled_layers():
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]).double()
    for layer in model:
        layer.compile(backend="aot_eager")
        fully_shard(layer)
    fully_shard(model)
    model(mine(4, 16, dtype=torch.float64)).pow(2).mean().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def test_functional_and_compiled():
    cases = (functional, gradients, collective_in_backward, compiled_functional, compiled_in_place, compiled_layers)
    compare(*cases, world_size=2)


# --- groups


def total_in(group) -> Any:
    """A sum over a group, if this rank is in it."""
    if group is None or dist.get_rank(group) < 0:
        return None
    total = mine(LENGTH)
    dist.all_reduce(total, group=group)
    return total


@through("all_reduce", "all_gather")
def groups():
    results = [total_in(dist.new_group(ranks)) for ranks in ([0, 2], [1, 3], [3, 1, 0], [2])]
    rank = dist.get_rank()
    pair = [rank, rank ^ 1] if rank % 2 == 0 else [rank ^ 1, rank]
    results.append(total_in(dist.new_group(pair, use_local_synchronization=True)))
    results.append(total_in(dist.new_subgroups(2)[0]))
    results.append(total_in(dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])[0]))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    results += [total_in(mesh[name].get_group()) for name in ("a", "b")]
    flattened = mesh._flatten("all")
    results += [total_in(flattened.get_group()), torch.tensor(mesh.get_coordinate())]
    everyone: list = [None] * 2
    dist.all_gather_object(everyone, rank, group=mesh["b"].get_group())
    return [*results, everyone]


def test_groups():
    compare(groups, world_size=4)


def _names_and_limits():
    beside, named = dist.new_group(backend="gloo"), dist.new_group(backend="cpu:smddp")
    assert [dist.get_backend(group) for group in (None, beside, named)] == ["smddp", "gloo", "cpu:smddp"]
    assert torch.equal(total_in(beside), total_in(named))
    # Only gloo's name passes torch's check; the group's own method is the inner gloo's.
    with pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier()
    world().monitored_barrier(datetime.timedelta(seconds=HANG_SECONDS))
    short = dist.new_group()
    dist.barrier(short)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), short)
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match=r"timed out after 1 s; .*rank 1 .*barrier #1"):
            dist.barrier(short)
    dist.barrier()


def test_names_and_limits():
    run_distributed(_names_and_limits, world_size=2, backend="smddp")
