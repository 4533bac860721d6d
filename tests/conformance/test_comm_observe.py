"""What can be seen of the backend smddp: in torch's profiler, in the report, and while a collective hangs."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import smp.comm
from smp.comm import arena
from smp.comm.report import Count, Key
from smp.units import readable
from tests.clock import Clock, wait_until
from tests.distributed import run_distributed, run_ranks, signal_others, wait_for


def _profiled() -> None:
    world = dist.get_world_size()
    dist.all_reduce(torch.ones(3), async_op=True).wait()  # the worker thread is there before the profiler
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_gather_into_tensor(torch.empty(1024 * world), torch.ones(1024))
        for _ in range(2):
            dist.reduce_scatter_tensor(torch.empty(1536 * 256), torch.ones(1536 * 256 * world))
        work = dist.all_reduce(torch.ones(3), async_op=True)
        wait_until(work.is_completed)  # by its worker thread, which no profiler was started in
        dist.broadcast(torch.ones(0), 0)
        dist.barrier()
    calls = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("smddp:")}
    assert calls == {
        "smddp:all_gather 4.0 KiB": 1,
        "smddp:reduce_scatter 1.5 MiB": 2,
        "smddp:all_reduce 12 B": 1,
        "smddp:broadcast 0 B": 1,
        "smddp:barrier 0 B": 1,
    }


def _reported() -> None:
    world = dist.get_world_size()
    smp.comm.reset_report()
    for count in (1024, 1025, 2048):
        dist.all_gather_into_tensor(torch.empty(count * world), torch.ones(count))
    dist.reduce_scatter_tensor(torch.empty(10), torch.ones(10 * world))
    dist.all_reduce(torch.ones(0), async_op=True).wait()
    dist.reduce(torch.ones(2), 0)
    table = smp.comm.report()
    assert table == {
        Key("all_gather", 4096, "shared memory", ""): Count(1, 4096),
        Key("all_gather", 8192, "shared memory", ""): Count(2, 4100 + 8192),
        Key("reduce_scatter", 64, "shared memory", ""): Count(1, 40),
        Key("all_reduce", 0, "shared memory", ""): Count(1, 0),
        Key("reduce", 8, "gloo", "left to it"): Count(1, 8),
    }
    assert table.calls() == 6 and table.calls("all_gather") == 3 and table.calls(path="gloo") == 1
    lines = str(table).splitlines()
    assert lines[0].split() == ["operation", "up", "to", "calls", "bytes", "path", "why"] and len(lines) == 6
    assert lines[2].split() == ["all_gather", "8.0", "KiB", "2", "12.0", "KiB", "shared", "memory"]
    smp.comm.reset_report()
    assert smp.comm.report() == {}


def _mismatches_are_not_counted() -> None:
    smp.comm.reset_report()
    with pytest.raises(dist.DistBackendError):
        dist.broadcast(torch.ones(1), dist.get_rank())
    assert smp.comm.report().calls() == 0


def _all_seen() -> None:
    _profiled()
    _reported()
    _mismatches_are_not_counted()


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.smoke
def test_the_profiler_and_the_report():
    run_distributed(_all_seen, world_size=2, backend="smddp")


def _hangs() -> list:
    rank, clock = dist.get_rank(), Clock()
    arena.time = clock
    group = dist.new_group([0, 1], backend="smddp")
    dist.barrier()
    if rank == 1:
        dist.all_reduce(torch.ones(10), group=group)
        wait_for("seen")
        dist.all_gather_into_tensor(torch.empty(200), torch.ones(100), group=group)
        return []
    seen: list = []

    def hanging() -> list:
        every = smp.comm.last_operations().items()
        return [pair for pair in every if pair[1][0].operation == "all_gather" and pair[1][1].ended]

    def look() -> None:
        wait_until(hanging)
        [(label, operations)] = hanging()
        clock.now += 0.3
        seen.append([label, *map(str, smp.comm.last_operations()[label])])
        seen.append(list(operations[0][:4]))
        signal_others("seen")

    watcher = threading.Thread(target=look)
    watcher.start()
    dist.all_reduce(torch.ones(10), group=group)
    dist.all_gather_into_tensor(torch.empty(200), torch.ones(100), group=group)
    watcher.join()
    ended = smp.comm.last_operations()[seen[0][0]]
    assert all(operation.ended >= operation.started > 0 for operation in ended[:1])
    return seen


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_the_last_operations_show_who_is_missing():
    mine, missing = run_ranks(_hangs, world_size=2)
    assert mine.status == missing.status == 0 and not mine.error + missing.error, (mine, missing)
    [label, own, other], fields = mine.result
    assert own.startswith("all_gather #2 (400 bytes), running for 0.3 s") and label
    assert other.startswith("all_reduce #1 (40 bytes), finished 0.3 s ago")
    assert fields == [0, "all_gather", 2, 400]


def test_sizes_are_readable():
    sizes = (0, 1023, 1024, 1536, 2**20, 3 * 2**30, 2**50)
    assert [readable(n) for n in sizes] == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "3.0 GiB", "1024.0 TiB"]
