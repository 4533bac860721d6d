"""Dispatch modes, such as torch's ``CommDebugMode``, see over ``smddp`` what they see over gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import smp.comm
from smp.comm.fsdp import use_shared_buffers
from tests.compat import compare, through
from tests.conformance.test_comm_autograd import calls
from tests.distributed import run_distributed


def counted(function: Callable[[], Any]) -> str:
    """The collectives that ``function`` is seen to call."""
    with CommDebugMode() as mode:
        function()
    return str(sorted((str(op), count) for op, count in mode.get_comm_counts().items()))


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


@through("all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier")
def each_operation():
    """One by one, and behind others that are still queued."""
    dist.barrier()  # the group's first call joins it, by whatever backend
    group, found = dist.group.WORLD, {}
    for later in (False, True):
        for name, (_, call) in calls(6, group, later).items():
            found[f"{name} {later}"] = counted(lambda call=call: _wait(call()))

    def queued() -> None:
        works = [call() for _, call in calls(6, group, True).values()]
        dist.barrier()
        for work in works:
            _wait(work)

    return [found, counted(queued)]


@through("all_gather", "reduce_scatter", "all_reduce", "broadcast")
def functional():
    data, group = torch.ones(2 * dist.get_world_size()), dist.group.WORLD

    def call() -> None:
        results = [
            funcol.all_reduce(data, "sum", group),
            funcol.all_gather_tensor(data, 0, group),
            funcol.reduce_scatter_tensor(data, "sum", 0, group),
            funcol.broadcast(data, 1, group),
            funcol.all_to_all_single(data, None, None, group),
            *funcol.all_reduce_coalesced([data, data + 1], "max", group),
            *funcol.all_gather_into_tensor_coalesced([data, data + 1], group),
        ]
        for result in results:
            funcol.wait_tensor(result)

    return counted(call)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])


def _step(model: nn.Module) -> None:
    model(torch.ones(4, 8)).pow(2).mean().backward()


def _steps(model: nn.Module) -> list[str]:
    _step(model)
    return [counted(lambda: _step(model)) for _ in range(2)]


@through("all_gather", "reduce_scatter")
def sharded():
    model: Any = blocks()
    for block in model:
        fully_shard(block)
    return _steps(fully_shard(model))


@through()
def shared_buffers():
    """Over gloo the same without them."""
    model: Any = blocks()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    used = use_shared_buffers(model)
    assert used == (4 if dist.get_backend() == "smddp" else 0)
    found = _steps(model)
    assert smp.comm.report().calls("all_gather", "shared buffer") >= used
    return found


@through("all_reduce")
def replicated():
    return _steps(DistributedDataParallel(blocks()))


@through("all_gather", "reduce_scatter")
def first_fsdp():
    return _steps(FullyShardedDataParallel(blocks(), use_orig_params=True, device_id=torch.device("cpu")))


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_counts_are_gloos():
    compare(each_operation, functional, sharded, shared_buffers, replicated, first_fsdp, world_size=2)


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def _on_one_rank() -> None:
    """Only rank 0 looks. It sees each collective, not how it is done, and whatever goes wrong does so as ever."""
    rank, size, data = dist.get_rank(), dist.get_world_size(), torch.ones(4, 4)
    outer, inner = _Seen(), _Seen()
    with outer if rank == 0 else contextlib.nullcontext(), inner if rank == 0 else contextlib.nullcontext():
        dist.all_reduce(data[:, 1], dist.ReduceOp.AVG)
        work = dist.all_reduce(data[0], async_op=True)
        dist.barrier()
        assert work.wait() and work.is_completed()
        with pytest.raises(dist.DistBackendError, match="do not do the same"):
            dist.broadcast(data[0], rank)
        with pytest.raises(ValueError, match="must have 2"):
            dist.all_gather_into_tensor(data[0], data[1])
    everything = [op for op in outer.ops if op.startswith("c10d")]
    assert outer.ops == inner.ops and {*outer.ops} - {*everything} <= {"aten.select.int", "aten.empty.memory_format"}
    wanted = ["allreduce_", "allreduce_", "barrier", "broadcast_"] if rank == 0 else []
    assert everything == [f"c10d.{name}.default" for name in wanted], everything
    assert torch._C._len_torch_dispatch_stack() == 0
    dist.all_reduce(data[1])
    assert (data[0] == size).all() and (data[1] == size).all()


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_modes_of_one_rank():
    run_distributed(_on_one_rank, world_size=2, backend="smddp", timeout=30)
