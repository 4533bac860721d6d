"""A collective is no change in autograd's eyes: what was saved for the backward stays usable, as over gloo and NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.test_comm_hosts import run_on_hosts

SIZES = (6, 60_000)  # what hosts exchange in a meeting, and what they do not
# gloo counts some of its own: these are left to it.
LEFT_TO_GLOO = ("reduce", "gather", "scatter", "all_to_all", "all_to_all_single", "send and recv")
Calls = dict[str, tuple[list[torch.Tensor], Callable[[], Any]]]


def calls(n: int, group: Any, later: bool) -> Calls:
    """For each operation, of n elements a rank, its tensors and its call."""
    rank, size = dist.get_rank(), dist.get_world_size()
    how: Any = {"group": group, "async_op": later}
    one, whole, other = torch.ones(n), torch.ones(n * size), torch.ones(n * size)
    parts, rows = ([*torch.ones(n * size).chunk(size)] for _ in range(2))
    small, large = [torch.ones(n), torch.ones(2)], [torch.ones(n * size), torch.ones(2 * size)]
    at_root = {"gather_list": parts} if rank == 0 else {}
    from_root = {"scatter_list": parts} if rank == 0 else {}

    def together(method: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        with dist._coalescing_manager(group=group, async_ops=later) as manager:
            for pair in zip(outputs, inputs, strict=True):
                method(*pair, group=group)
        return manager if later else None

    def round_trip() -> None:
        work: Any = dist.isend(whole[:n], (rank + 1) % size, group=group)
        dist.recv(one, (rank - 1) % size, group=group)
        work.wait()

    given: Calls = {
        "all_reduce_coalesced": (small, lambda: dist.all_reduce_coalesced(small, **how)),
        "broadcast": ([one], lambda: dist.broadcast(one, 1, **how)),
        "all_gather_single": ([one, whole], lambda: dist.all_gather_into_tensor(whole, one, **how)),
        "all_gather in place": ([whole], lambda: dist.all_gather_into_tensor(whole, whole.chunk(size)[rank], **how)),
        "all_gather": ([one, *parts], lambda: dist.all_gather(parts, one, **how)),
        "reduce_scatter_single": ([one, whole], lambda: dist.reduce_scatter_tensor(one, whole, **how)),
        "reduce_scatter in place": (
            [whole], lambda: dist.reduce_scatter_tensor(whole.chunk(size)[rank], whole, **how),
        ),
        "reduce_scatter": ([one, *parts], lambda: dist.reduce_scatter(one, parts, **how)),
        "coalesced gathers": ([*large, *small], lambda: together(dist.all_gather_into_tensor, large, small)),
        "coalesced scatters": ([*large, *small], lambda: together(dist.reduce_scatter_tensor, small, large)),
        "reduce": ([one], lambda: dist.reduce(one, 0, **how)),
        "gather": ([one, *parts], lambda: dist.gather(one, **at_root, **how)),
        "scatter": ([one, *parts], lambda: dist.scatter(one, **from_root, **how)),
        "all_to_all": ([*parts, *rows], lambda: dist.all_to_all(parts, rows, **how)),
        "all_to_all_single": ([whole, other], lambda: dist.all_to_all_single(whole, other, **how)),
        "send and recv": ([one, whole], round_trip),
    }  # fmt: skip
    for name in ("SUM", "AVG", "MAX"):
        op = getattr(dist.ReduceOp, name)
        given[f"all_reduce {name}"] = [one], lambda op=op: dist.all_reduce(one, op, **how)  # type: ignore[misc]
    return given


def _changes(n: int, group: Any, later: bool) -> dict[str, list[int]]:
    """How often autograd takes each call's tensors for changed."""
    found = {}
    for name, (tensors, call) in calls(n, group, later).items():
        before = [t._version for t in tensors]
        work = call()
        if work is not None:
            work.wait()
        found[name] = [t._version - count for t, count in zip(tensors, before, strict=True)]
    return found


def _versions() -> None:
    gloo = dist.new_group(backend="gloo")
    for n in SIZES:
        for later in (False, True):
            ours, theirs = _changes(n, None, later), _changes(n, gloo, later)
            for name, counts in ours.items():
                assert counts == (theirs[name] if name in LEFT_TO_GLOO else [0] * len(counts)), (name, n, later)


def _backwards() -> None:
    """Gradients through what a collective has written to, of functions that saved their result; views, too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = (torch.arange(2.0 * size).view(2, size) + rank - 1).requires_grad_()
    for function in (torch.relu, torch.sigmoid, torch.norm):
        for call in (
            lambda y, later: dist.all_reduce(y, async_op=later),
            lambda y, later: dist.all_reduce(y.T, dist.ReduceOp.AVG, async_op=later),
            lambda y, later: dist.broadcast(y.T, 1, async_op=later),
            lambda y, later: dist.reduce_scatter_tensor(y.view(-1)[::size], torch.ones(size * 2), async_op=later),
            lambda y, later: dist.all_gather(list(y.chunk(size, dim=-1)), torch.ones(2, 1), async_op=later),
        ):
            for later in (False, True):
                y = function(x)
                y = y.expand(2, size).clone() if y.dim() == 0 else y
                work = call(y, later)
                if work is not None:
                    work.wait()
                assert y._version == 0
                [gradient] = torch.autograd.grad(y.sum(), x)
                assert gradient.isfinite().all()
    y = torch.relu(x)
    dist.all_reduce(y)
    [gradient] = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, (y.detach() > 0).to(x.dtype))  # of what is in y now, as over gloo


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize(
    ("layout", "function"),
    [
        ("aa", _versions),
        ("aa", _backwards),
        pytest.param("abc", _versions, marks=pytest.mark.full),
        ("aabb", _backwards),
    ],
)
@pytest.mark.smoke
def test_collectives_change_nothing_for_autograd(layout, function):
    run_on_hosts(function, layout=layout)
