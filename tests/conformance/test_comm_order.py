"""Asynchronous calls of the backend smddp: their order, who may wait, and what may be called meanwhile."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import smp.comm
from tests.clock import HANG_SECONDS
from tests.distributed import run_distributed, signal_others, wait_for

WORKS = 200


def _summed(number: int, count: int = 100) -> tuple[torch.Tensor, float]:
    """A tensor to all_reduce, and what all its elements must become."""
    world = dist.get_world_size()
    return torch.full((count,), float(number + dist.get_rank())), number * world + world * (world - 1) / 2


def _crosswise() -> None:
    """Legal with every backend: the collective must not keep its caller from the message that the peer waits for."""
    rank, world = dist.get_rank(), dist.get_world_size()
    gathered, message = torch.empty(world), torch.tensor([7.0])
    for _ in range(5):
        if rank == 0:
            work = dist.all_gather_into_tensor(gathered, torch.tensor([0.0]), async_op=True)
            for peer in range(1, world):
                dist.send(message, peer)
            work.wait()
        else:
            dist.recv(message, 0)
            dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
        assert gathered.tolist() == list(range(world)) and message.item() == 7


def _waited_in_reverse() -> None:
    calls = [_summed(number) for number in range(WORKS)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor, _ in calls]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
    assert all((tensor == expected).all() for tensor, expected in calls)


def _waited_in_other_threads() -> None:
    calls = [_summed(number) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor, _ in calls]
    threads = [threading.Thread(target=work.wait) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(work.is_completed() for work in works)
    assert all((tensor == expected).all() for tensor, expected in calls)


def _called_in_several_threads() -> None:
    """Each thread has its group; each group its order."""
    groups = [dist.new_group(backend="smddp") for _ in range(4)]
    calls = [[_summed(10 * g + n) for n in range(20)] for g in range(len(groups))]

    def use(group, tensors) -> None:
        for tensor, _ in tensors:
            dist.all_reduce(tensor, group=group)

    threads = [threading.Thread(target=use, args=pair) for pair in zip(groups, calls, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((tensor == expected).all() for tensors in calls for tensor, expected in tensors)


def _never_waited() -> None:
    """The peers' works end all the same, and a later synchronous call comes after all of them."""
    total = torch.zeros(3)
    for _ in range(50):
        dist.all_reduce(total, async_op=True)  # zero, until the next line
    one, world = torch.ones(3), dist.get_world_size()
    work = dist.broadcast(one, 0, async_op=True)
    dist.all_reduce(one)
    assert work.is_completed() and (one == world).all() and not total.any()


def _two_on_one_tensor() -> None:
    """Queued calls may depend on each other, also one of ours on one left to gloo."""
    tensor, world = torch.ones(3), dist.get_world_size()
    first = dist.all_reduce(tensor, async_op=True)
    second = dist.all_reduce(tensor, async_op=True)
    third = dist.reduce(tensor, 0, async_op=True)
    third.wait()
    assert first.is_completed() and second.is_completed()
    assert dist.get_rank() > 0 or (tensor == world**3).all()  # the others' is undefined


def _futures() -> None:
    (late, expected), (early, expected_early) = _summed(1), _summed(2)
    work = dist.all_reduce(late, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert (doubled.wait() == 2 * expected).all() and work.get_future() is future
    done = dist.all_reduce(early, async_op=True)
    done.wait()
    assert (done.get_future().wait()[0] == expected_early).all() and (done.result()[0] == expected_early).all()


def _callbacks_call_collectives() -> None:
    """As DDP's hooks do: again asynchronous and waited for, or synchronous, two deep."""
    group, world = dist.group.WORLD, dist.get_world_size()

    def again(done) -> torch.Tensor:
        return dist.all_reduce(done.value()[0], async_op=True).get_future().then(lambda f: f.value()[0]).wait()

    def at_once(done) -> torch.Tensor:
        total = done.value()
        dist.all_reduce(total, group=group)
        return total

    first = dist.all_reduce(torch.ones(5), async_op=True).get_future()
    assert (first.then(again).then(at_once).wait() == world**3).all()


def _wait_with_a_limit() -> None:
    rank = dist.get_rank()
    tensor, expected = _summed(1)
    if rank == 1:
        wait_for("limit")
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"has not ended within 0\.2 s"):
            work.wait(timedelta(seconds=0.2))
        signal_others("limit")
        work.wait(timedelta(seconds=HANG_SECONDS))
    work.wait()
    assert (tensor == expected).all()


def _all_orders() -> None:
    for function in (
        _crosswise, _waited_in_reverse, _waited_in_other_threads, _called_in_several_threads, _never_waited,
        _two_on_one_tensor, _futures, _callbacks_call_collectives, _wait_with_a_limit,
    ):  # fmt: skip
        function()
        dist.barrier()


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.smoke), 4])
def test_order(world_size):
    run_distributed(_all_orders, world_size=world_size, backend="smddp")


def _power_sgd(backend: str) -> float:
    """A communication hook whose callbacks call collectives and wait for them."""
    torch.manual_seed(0)
    group = dist.new_group(backend=backend)
    layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8))
    model = DistributedDataParallel(layers, process_group=group)
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, matrix_approximation_rank=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def _same_power_sgd() -> None:
    smp.comm.reset_report()
    ours = _power_sgd("smddp")
    assert smp.comm.report().calls("all_reduce", "shared memory") > 10
    assert ours == _power_sgd("gloo")


def test_a_hook_that_calls_collectives_from_callbacks():
    run_distributed(_same_power_sgd, world_size=2, backend="smddp")
