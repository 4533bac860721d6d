"""Run cases over gloo, then over ``smddp`` in the same processes, and compare what they return.

A case is a function without arguments that every rank calls and that uses the default group; it returns tensors, or
plain values, in any nesting.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import smp.comm
from tests.distributed import GROUP_SECONDS, run_distributed

# What gloo may do for the backend. The profiler shows it even where C++ calls past the backend's own methods.
LEFT_TO_GLOO = {
    f"gloo:{name}" for name in ("send", "recv", "recvAnySource", "gather", "scatter", "reduce", "all_to_all")
}
RTOL = 1e-12
TIMEOUT = GROUP_SECONDS


def through(*operations: str) -> Callable:
    """Say what a case does through shared memory: each of ``operations`` at least once."""

    def mark(case: Any) -> Any:
        case.operations = operations
        return case

    return mark


def same(got: Any, expected: Any, what: str) -> None:
    """Equal structure and values: the bits at two ranks and of whole numbers, else to ``RTOL``, as gloo adds up in
    another order."""
    got_leaves, got_spec = pytree.tree_flatten(got)
    leaves, spec = pytree.tree_flatten(expected)
    assert got_spec == spec, f"{what}: {got_spec} instead of {spec}"
    for mine, other in zip(got_leaves, leaves, strict=True):
        if isinstance(other, torch.Tensor):
            exact = dist.get_world_size() == 2 or not other.is_floating_point()
            torch.testing.assert_close(
                mine, other, rtol=0 if exact else RTOL, atol=0 if exact else RTOL, msg=lambda m: f"{what}: {m}"
            )
        else:
            assert mine == other, f"{what}: {mine} instead of {other}"


def _compare(cases, folder: str) -> None:
    expected = [case() for case in cases]
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    limit = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("smddp", init_method=f"file://{folder}/smddp", rank=rank, world_size=size, timeout=limit)
    assert dist.get_backend() == "smddp"
    for case, other in zip(cases, expected, strict=True):
        smp.comm.reset_report()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            got = case()
        same(got, other, case.__name__)
        report = smp.comm.report()
        for operation in case.operations:
            assert report.calls(operation, "shared memory"), f"{case.__name__}: no {operation}\n{report}"
        by_gloo = {event.name for event in profiler.events() or () if event.name.startswith("gloo:")}
        assert by_gloo <= LEFT_TO_GLOO, f"{case.__name__}: {by_gloo - LEFT_TO_GLOO}\n{report}"


def compare(*cases: Callable[[], Any], world_size: int) -> None:
    """Run each case on ``world_size`` ranks over both backends; the results and the paths must be right."""
    with tempfile.TemporaryDirectory() as folder:
        run_distributed(_compare, cases, folder, world_size=world_size, timeout=TIMEOUT)
