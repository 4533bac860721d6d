"""Groups of the backend smddp come and go, in processes that do too, and leave nothing behind."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pathlib
import platform
import resource
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import smp.comm
from smp.comm import futex, segment
from tests.clock import Clock, wait_until
from tests.comm_calls import check
from tests.comm_cases import Case
from tests.distributed import run_distributed, run_ranks, signal_others, wait_for
from tests.ports import free_port


def _works(group=None) -> None:
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    assert (total == dist.get_world_size(group)).all()


# --- the first exchange


def _waits_for_a_late_rank(port: int) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("smddp", store=store, rank=rank, world_size=2)
    if rank:
        wait_for("looked")
    else:
        looks = itertools.count()

        class Looking(Clock):
            def sleep(self, seconds: float) -> None:
                time.sleep(seconds)
                if next(looks) == 20:
                    signal_others("looked")

        segment.time = Looking()
    _works()


def test_waiting_for_a_late_rank_is_silent(capfd):
    """torch's store warns of every wait that it is told to break off."""
    run_distributed(_waits_for_a_late_rank, free_port(), world_size=2, backend="smddp")
    assert "waitForInput" not in capfd.readouterr().err


# --- many groups


def _size() -> tuple[int, int, int]:
    """KiB of resident memory, open descriptors, mapped pieces."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024
    return resident, len(os.listdir("/proc/self/fd")), maps.count("memfd:smddp")


def _many_groups(count: int) -> None:
    for number in range(-30, count):
        if number == 0:
            dist.barrier()
            before = _size()
        group = dist.new_group(backend="smddp")
        _works(group)
        if number % 3 == 0:  # these have a worker thread
            dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
        dist.destroy_process_group(group)
        del group
    dist.barrier()
    after = _size()
    assert after[0] - before[0] < 4096, (before, after)  # a group's slots alone are 8 MiB, if they are touched
    assert after[1] - before[1] < 8, (before, after)  # gloo closes its sockets a little later
    assert after[2] == before[2] == 1, (before, after)


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_groups_that_are_destroyed_leave_nothing(count):
    run_distributed(_many_groups, count, world_size=2, backend="smddp")


def _unused_groups() -> None:
    """Only a group that is used has shared memory, and only the pages that are."""
    before = _size()
    groups = [dist.new_group(backend="smddp") for _ in range(30)]
    assert _size()[2] == before[2] == 0
    for group in groups:
        _works(group)
    after = _size()
    assert after[2] == 30 and after[0] - before[0] < 30 * 1024, (before, after)


def test_groups_cost_nothing_until_they_are_used():
    run_distributed(_unused_groups, world_size=2, backend="smddp")


# --- again in one process


def _start_again(folder: str, port: int) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    for number in range(5):
        method = f"file://{folder}/store{number}" if number % 2 else f"tcp://127.0.0.1:{port}"
        backend = "smddp" if number % 2 else "cpu:smddp"
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=2)
        smp.comm.reset_report()
        group = dist.new_group(backend="smddp")
        _works()
        _works(group)
        assert smp.comm.report().calls("all_reduce", "shared memory") == 2
        with pytest.raises(RuntimeError, match="do not do the same"):
            dist.broadcast(torch.ones(1), rank)
        dist.destroy_process_group()
    dist.init_process_group("smddp", init_method=f"file://{folder}/last", rank=rank, world_size=2)


@pytest.mark.smoke
def test_destroyed_and_started_again(tmp_path):
    run_distributed(_start_again, str(tmp_path), free_port(), world_size=2, backend="smddp")


def _used_after_destruction() -> None:
    group = dist.new_group(backend="smddp")
    _works(group)
    dist.destroy_process_group(group)
    with pytest.raises(dist.DistBackendError, match=r"cannot be used any more: .* has been destroyed"):
        group.allreduce([torch.ones(1)])
    _works()


def test_a_destroyed_group_says_so():
    run_distributed(_used_after_destruction, world_size=2, backend="smddp")


# --- processes


def _leave_with_work_in_flight() -> None:
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    for form in ("all_gather_single", "all_gather_list", "all_reduce", "broadcast", "reduce_scatter_single"):
        check(Case(form, size=1000), None, [0, 1], 4096)
    _works(dist.new_group([0, 1]))
    assert smp.comm.report().calls(path="shared memory") == 6
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), async_op=True)  # nobody comes
        wait_until(lambda: any(not own.ended for own, *_ in smp.comm.last_operations().values()))


@pytest.mark.slow
def test_spawned_processes_at_the_debug_level_detail_may_end_with_work_in_flight(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    ended = run_ranks(_leave_with_work_in_flight, world_size=2, start_method="spawn")
    assert [(outcome.status, outcome.error) for outcome in ended] == [(0, "")] * 2, ended


class _Nosy(Dataset):
    """Rows that tell what happens to a collective in the process that makes them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, str]:
        calls = [
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.all_reduce(torch.ones(1), async_op=True),
            lambda: dist.reduce(torch.ones(1), 0),
            lambda: dist.send(torch.ones(1), 1 - dist.get_rank()),
        ]
        try:
            calls[index % 4]()
        except dist.DistBackendError as error:
            return index, str(error)
        return index, "nothing was raised"


def _train_with_workers() -> None:
    dist.all_reduce(torch.ones(1), async_op=True)  # the worker thread is not in the forked processes
    _works()
    seen = []
    for indices, messages in DataLoader(_Nosy(), batch_size=3, num_workers=2):
        assert all(f"belongs to process {os.getpid()}, which was forked" in m for m in messages), messages
        seen += indices.tolist()
        _works()
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    assert seen == list(range(12))


def test_forked_data_workers_leave_the_groups_alone():
    run_distributed(_train_with_workers, world_size=2, backend="smddp")


def _memory_name() -> str:
    """What only the mapping of the group's memory has in its line of ``/proc/<pid>/maps``: device and inode."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    [name] = {" ".join(line.split()[3:]) for line in lines if "memfd:smddp" in line}
    return name


def _killed(folder: str) -> None:
    _works()
    pathlib.Path(folder, f"memory{dist.get_rank()}").write_text(_memory_name())
    pathlib.Path(folder, f"shm{dist.get_rank()}").write_text("\n".join(os.listdir("/dev/shm")))
    dist.barrier()
    dist.all_reduce(torch.ones(2**20), async_op=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _mapped_anywhere(name: str) -> list[str]:
    found = []
    for maps in pathlib.Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it may have ended
            if name in " ".join(maps.read_text().split()):
                found.append(str(maps))
    return found


def test_killed_processes_leave_nothing(tmp_path):
    before = set(os.listdir("/dev/shm"))
    outcomes = run_ranks(_killed, str(tmp_path), world_size=2)
    assert [outcome.status for outcome in outcomes] == [-signal.SIGKILL] * 2
    names = {(tmp_path / f"memory{rank}").read_text() for rank in range(2)}
    assert len(names) == 1 and "memfd:smddp" in next(iter(names)), names
    assert _mapped_anywhere(next(iter(names))) == []
    for rank in range(2):  # while it lived, too
        assert set((tmp_path / f"shm{rank}").read_text().split("\n")) - {""} <= before


def _wait_for_a_late_rank() -> float:
    _works()
    rank, sleeps, sleep = dist.get_rank(), itertools.count(), futex.wait

    def counted(*arguments: int) -> None:
        sleep(*arguments)
        if next(sleeps) == 40:
            signal_others(f"asleep{rank}")

    if rank == 0:
        wait_for(*[f"asleep{other}" for other in range(1, dist.get_world_size())])
    else:
        futex.wait = counted
    start = resource.getrusage(resource.RUSAGE_SELF)
    work = dist.all_reduce(torch.ones(3), async_op=True)  # its worker waits, and so does this thread
    dist.barrier()
    work.wait()
    end = resource.getrusage(resource.RUSAGE_SELF)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def test_waiting_burns_no_core():
    outcomes = run_ranks(_wait_for_a_late_rank, world_size=8)
    assert all(outcome.result is not None and outcome.result < 0.15 for outcome in outcomes), outcomes


# --- the arena


def _go_round() -> None:
    """The counters of the rounds have 32 bits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    _works()
    signal_others(f"quiet{rank}")
    wait_for(*[f"quiet{r}" for r in range(world)])
    arena, start = dist.group.WORLD.connection.arena, 2**32 - 20
    arena._words[arena._counter[rank]] = start
    arena._seen, arena.round = [start] * world, start
    signal_others(f"set{rank}")
    wait_for(*[f"set{r}" for r in range(world)])
    chunk = arena.layout.slot_bytes
    for seed, form in enumerate(("all_gather_single", "all_reduce", "broadcast", "reduce_scatter_single") * 4):
        check(Case(form, size="chunks", seed=seed), None, list(range(world)), chunk)
    assert arena.round > 2**32 + 20
    with pytest.raises(RuntimeError, match="do not do the same"):
        dist.broadcast(torch.ones(1), rank)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_round_counter_goes_round(monkeypatch, world_size):
    monkeypatch.setenv("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", str(4 * 16384))
    run_distributed(_go_round, world_size=world_size, backend="smddp")


def _not_opened(*arguments: object) -> tuple[None, str]:
    return None, "the shared memory cannot be opened (a test)"


def _no_descriptor_left(*arguments: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _without_shared_memory(how: str, why: str) -> None:
    rank = dist.get_rank()
    if how == "open" and rank == 1:
        segment._open = _not_opened
    elif how == "make" and rank == 0:
        os.memfd_create = _no_descriptor_left
    elif how == "processor" and rank == 2:
        platform.machine = lambda: "aarch64"
    smp.comm.reset_report()
    before = len(os.listdir("/proc/self/fd"))
    for form in ("all_gather_single", "all_gather_list", "all_reduce", "broadcast", "reduce_scatter_single"):
        for asynchronous in (False, True):
            check(Case(form, size=1000, asynchronous=asynchronous), None, [0, 1, 2], 4096)
    dist.barrier()
    keys = list(smp.comm.report())
    assert keys and all(key.path == "gloo" and why in key.why for key in keys), str(smp.comm.report())
    assert smp.comm.last_operations() == {}
    assert len(os.listdir("/proc/self/fd")) <= before + 6  # gloo's connections


@pytest.mark.parametrize(
    "how, why",
    [
        ("open", "the shared memory cannot be opened (a test)"),
        ("make", "of shared memory could not be made ([Errno 24] Too many open files)"),
        ("processor", "aarch64 does not keep the order of stores"),
    ],
)
def test_without_shared_memory_on_one_rank_all_use_gloo(how, why):
    run_distributed(_without_shared_memory, how, why, world_size=3, backend="smddp")


def test_memory_of_another_process_is_not_taken():
    """A process of the same number in another pid namespace has other memory under that descriptor."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 8192)
    mapped, why = segment._open(os.getpid(), descriptor, 8192, "0" * segment.NONCE_BYTES)
    assert mapped is None and "is not the one that offered" in why
    os.close(descriptor)
    mapped, why = segment._open(os.getpid(), descriptor, 8192, "0" * segment.NONCE_BYTES)
    assert mapped is None and "cannot be opened" in why
