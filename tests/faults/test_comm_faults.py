"""What goes wrong on one rank of the backend smddp is told on every rank, by name."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import threading

import pytest
import torch
import torch.distributed as dist

import smp.comm
from smp.comm import arena, segment
from smp.comm.peers import Peers
from tests.clock import Clock, SharedClock, wait_until
from tests.distributed import GROUP_SECONDS, Outcome, run_distributed, run_ranks, signal_others, wait_for

LATE = f"{GROUP_SECONDS:g} s"


def _failure(function) -> str:
    """What is raised."""
    try:
        function()
    except dist.DistBackendError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def _told(outcomes: list[Outcome], ranks: list[int]) -> list[str]:
    """What these ranks returned; they must have ended well."""
    assert all(outcomes[r].status == 0 and not outcomes[r].error for r in ranks), outcomes
    return [outcomes[r].result for r in ranks]


def _ones(count: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


# --- a rank that does not come


def _absent(folder: str) -> str:
    clock = SharedClock(pathlib.Path(folder, "clock"), pace=GROUP_SECONDS / 4)
    arena.time = clock
    dist.all_reduce(_ones())
    dist.barrier()
    if dist.get_rank() == 2:

        def both_wait() -> bool:
            [seen] = smp.comm.last_operations().values()
            return all(each.rank == 2 or (each.number == 3 and not each.ended) for each in seen)

        wait_until(both_wait)
        clock.run()
        wait_for("told0", "told1")
        return ""
    return _told_twice(lambda: dist.all_gather_into_tensor(torch.empty(3000), torch.ones(1000)))


def _told_twice(function) -> str:
    failure = _failure(function)
    assert "cannot be used any more" in _failure(lambda: dist.barrier())
    signal_others(f"told{dist.get_rank()}")
    dist.destroy_process_group()
    return failure


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_a_rank_that_never_comes_is_named_with_its_last_operation(tmp_path):
    for message in _told(run_ranks(_absent, str(tmp_path), world_size=3), [0, 1]):
        said = rf"all_gather #3 of group \w+: timed out after {LATE}; .*rank 2 \(pid \d+\): barrier #2"
        assert re.search(said, message)
        assert "finished" in message and "rank 0" not in message and "rank 1" not in message


def _absent_from_the_first() -> str:
    if dist.get_rank() == 2:
        wait_for("told0", "told1")
        return ""
    clock, wait = Clock(), segment._wait

    def waits(store, keys, *arguments) -> None:
        if len(keys) == dist.get_world_size():  # for the answers of all; those of ranks 0 and 1 have been given
            signal_others(f"answered{dist.get_rank()}")
            wait_for("answered0", "answered1")
            clock.pace = GROUP_SECONDS / 4
        wait(store, keys, *arguments)

    segment.time, segment._wait = clock, waits
    return _told_twice(lambda: dist.all_gather_into_tensor(torch.empty(3000), torch.ones(1000)))


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_a_rank_that_never_uses_the_group_is_named():
    for message in _told(run_ranks(_absent_from_the_first, world_size=3), [0, 1]):
        said = rf"rank 2 \(pid \d+\) has not come to the group's first collective within .*{LATE}"
        assert re.search(said, message)


# --- a rank that dies


def _dies_idle() -> str:
    dist.all_reduce(_ones())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _failure(lambda: dist.all_reduce(_ones(50_000)))


def _dies_busy() -> str:
    large = torch.ones(8 * 2**20)
    dist.all_reduce(large)
    if dist.get_rank() == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def forever() -> None:
        while True:
            dist.all_reduce(large)

    return _failure(forever)


def _dies_asynchronously() -> str:
    dist.all_reduce(_ones())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.all_reduce(_ones(), async_op=True) for _ in range(3)]
    failures = [_failure(work.wait) for work in works]
    assert all(work.exception() is not None and not work.is_success() for work in works)
    with pytest.raises(Exception, match="rank 1"):
        works[0].get_future().wait()
    return failures[-1]


@pytest.mark.parametrize("how", [_dies_idle, _dies_busy, _dies_asynchronously])
@pytest.mark.smoke
def test_a_rank_that_dies_is_named_at_once(how):
    outcomes = run_ranks(how, world_size=3)
    assert outcomes[1].status == -signal.SIGKILL
    for message in _told(outcomes, [0, 2]):
        # Who waits for a rank that has failed for that reason is told the same.
        assert re.search(r"rank 1 \(pid \d+\) died; its last operation was all_reduce #\d+", message), message


def _dies_before_the_first_use() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _failure(lambda: dist.all_reduce(_ones()))


def test_a_rank_that_dies_before_the_first_use_is_named():
    [message] = _told(run_ranks(_dies_before_the_first_use, world_size=2), [0])
    assert re.search(r"rank 1 \(pid \d+\) died before the group's first collective", message)


def _fails_in_a_collective() -> str:
    dist.all_reduce(_ones())
    if dist.get_rank() == 1:

        def broken(*arguments: object) -> None:
            raise MemoryError("no memory left")

        dist.group.WORLD.connection.collectives.all_reduce = broken
        with contextlib.suppress(MemoryError):
            dist.all_reduce(_ones())
        wait_for("told0", "told2")
        return ""
    failure = _failure(lambda: dist.all_reduce(_ones()))
    signal_others(f"told{dist.get_rank()}")
    return failure


def test_a_rank_that_fails_inside_a_collective_tells_the_others_why():
    for message in _told(run_ranks(_fails_in_a_collective, world_size=3), [0, 2]):
        assert re.search(r"rank 1 \(pid \d+\) has failed: MemoryError: no memory left", message)


def test_several_threads_may_ask_whether_a_peer_lives():
    """Groups are watched by their own threads, and share what they know of a process."""
    process = subprocess.Popen(["sleep", "3600"])
    answers: list[bool] = []

    def ask() -> None:
        peers = Peers([os.getpid(), process.pid], [0, 1], 0)
        answers.extend(peers.died(1) for _ in range(5000))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 20_000 and not any(answers)
    process.kill()  # and not waited for: a zombie has ended too
    peers = Peers([os.getpid(), process.pid], [0, 1], 0)
    wait_until(lambda: peers.died(1))
    process.wait()
    assert peers.died(1) and Peers([os.getpid(), process.pid], [0, 1], 0).died(1) and not peers.died(0)


# --- a rank that is stopped


def _pids() -> list[int]:
    pids: list = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def _stopped() -> str:
    pid = _pids()[1]
    if dist.get_rank() == 1:
        wait_for("never")  # it is stopped here, and continues only to end
    os.kill(pid, signal.SIGSTOP)
    arena.time = Clock(pace=GROUP_SECONDS / 4)
    try:
        return _failure(lambda: dist.broadcast(_ones(), 1))
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_stopped_rank_is_named_by_the_timeout():
    [message] = _told(run_ranks(_stopped, world_size=2), [0])
    said = rf"timed out after {LATE}; not there, with their last operation: rank 1 \(pid \d+\): all_g"
    assert re.search(said, message)


def _paused() -> None:
    pid, large = _pids()[1], torch.ones(2**20)
    done, looks, watch = threading.Event(), [], arena.Arena._watch

    def note(*arguments):
        looks.append(None)
        return watch(*arguments)

    def pause() -> None:
        for _ in range(2):
            os.kill(pid, signal.SIGSTOP)
            before = len(looks)
            wait_until(lambda before=before: len(looks) > before + 5)  # rank 0 waits for it
            os.kill(pid, signal.SIGCONT)
        done.set()

    if dist.get_rank() == 0:
        arena.Arena._watch = note
        threading.Thread(target=pause).start()
    # Every rank leaves after the same number, and later than the last pause.
    last = torch.zeros(1)
    while not last.item():
        large.fill_(1)
        dist.all_reduce(large)
        assert (large == 2).all()
        last.fill_(done.is_set())
        dist.broadcast(last, 0)


def test_a_rank_that_pauses_changes_nothing():
    _told(run_ranks(_paused, world_size=2), [0, 1])


# --- ranks that do not do the same


def _differently(*calls):
    """Rank 1 makes the second call, the others the first."""
    return calls[1 if dist.get_rank() == 1 else 0]


MISMATCHES = {
    "size": (
        lambda: dist.all_reduce(_ones(5)), lambda: dist.all_reduce(_ones(6)),
        "rank(s) 0, 2: all_reduce SUM torch.float32 5; rank(s) 1: all_reduce SUM torch.float32 6",
    ),
    "large size": (
        lambda: dist.all_reduce(_ones(500_000)), lambda: dist.all_reduce(_ones(1)),
        "rank(s) 0, 2: all_reduce SUM torch.float32 500000; rank(s) 1: all_reduce SUM torch.float32 1",
    ),
    "none at all": (
        lambda: dist.all_reduce(_ones(0)), lambda: dist.all_reduce(_ones(1)),
        "rank(s) 0, 2: all_reduce SUM torch.float32 0; rank(s) 1: all_reduce SUM torch.float32 1",
    ),
    "dtype of the same width": (
        lambda: dist.all_gather_into_tensor(_ones(6), _ones(2)),
        lambda: dist.all_gather_into_tensor(_ones(6, torch.int32), _ones(2, torch.int32)),
        "rank(s) 0, 2: all_gather torch.float32 2; rank(s) 1: all_gather torch.int32 2",
    ),
    "root": (
        lambda: dist.broadcast(_ones(), 0), lambda: dist.broadcast(_ones(), 2),
        "rank(s) 0, 2: broadcast torch.float32 3 from 0; rank(s) 1: broadcast torch.float32 3 from 2",
    ),
    "reduction": (
        lambda: dist.reduce_scatter_tensor(_ones(1), _ones(3)),
        lambda: dist.reduce_scatter_tensor(_ones(1), _ones(3), dist.ReduceOp.MAX),
        "rank(s) 0, 2: reduce_scatter SUM torch.float32 1; rank(s) 1: reduce_scatter MAX torch.float32 1",
    ),
    "operation": (
        lambda: dist.barrier(), lambda: dist.broadcast(_ones(), 0),
        "rank(s) 0, 2: barrier; rank(s) 1: broadcast torch.float32 3 from 0",
    ),
    "list of other sizes": (
        lambda: dist.all_gather([_ones(1), _ones(2), _ones(4)], _ones([1, 2, 4][dist.get_rank()])),
        lambda: dist.all_gather([_ones(1), _ones(2), _ones(3)], _ones(2)),
        "rank(s) 0, 2: all_gather torch.float32 (1, 2, 4); rank(s) 1: all_gather torch.float32 (1, 2, 3)",
    ),
    "output of the wrong size": (
        lambda: dist.all_gather_into_tensor(_ones(6), _ones(2)),
        lambda: dist.all_gather_into_tensor(_ones(5), _ones(2)),
        "all_gather torch.float32 2; rank(s) 1: all_gather with wrong arguments: output (5,) has 5 elements, input",
    ),
    "output of another dtype": (
        lambda: dist.reduce_scatter_tensor(_ones(1), _ones(3)),
        lambda: dist.reduce_scatter_tensor(_ones(1, torch.float64), _ones(3)),
        "rank(s) 1: reduce_scatter with wrong arguments: input is torch.float32, output torch.float64",
    ),
    "list too short": (
        lambda: dist.all_gather([_ones() for _ in range(3)], _ones()),
        lambda: dist.all_gather([_ones() for _ in range(2)], _ones()),
        "rank(s) 1: all_gather with wrong arguments: the output list has 2 tensors: give one for each of the 3 ranks",
    ),
    "list with a wrong own place": (
        lambda: dist.reduce_scatter(_ones(), [_ones() for _ in range(3)]),
        lambda: dist.reduce_scatter(_ones(), [_ones(), _ones(4), _ones()]),
        "rank(s) 1: reduce_scatter with wrong arguments: the input list[1] has 4 elements, the other tensor 3",
    ),
    "expanded output": (
        lambda: dist.all_reduce(_ones(4)), lambda: dist.all_reduce(_ones(1).expand(4)),
        "rank(s) 0, 2: all_reduce SUM torch.float32 4; rank(s) 1: all_reduce with wrong arguments: the output (4,) is",
    ),
}  # fmt: skip


def _refused_everywhere() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for name, (usual, other, said) in MISMATCHES.items():
        message = _failure(_differently(usual, other))
        assert "do not do the same" in message and said in message, f"{name}: {message}"
        total = torch.full((10_000,), rank + 1.0)
        dist.all_reduce(total)
        assert (total == world * (world + 1) / 2).all(), name


def _refused_asynchronously() -> None:
    """The works that follow the refused one are done."""
    wrong, right = _ones(4 if dist.get_rank() == 1 else 5), _ones(5)
    works = [dist.all_reduce(t, async_op=True) for t in (wrong, right)]
    assert "all_reduce SUM torch.float32 4" in _failure(works[0].wait)
    works[1].wait()
    assert (right == dist.get_world_size()).all() and (wrong == 1).all()
    assert isinstance(works[0].exception(), dist.DistBackendError) and works[1].exception() is None
    with pytest.raises(Exception, match="do not do the same"):
        works[0].get_future().wait()

    def second_differs() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(right)
            dist.all_reduce(wrong)

    assert "do not do the same" in _failure(second_differs)


def _refused_by_all_alike() -> None:
    """The same wrong arguments everywhere are a plain ValueError."""
    with pytest.raises(ValueError, match=r"all_gather: output \(5,\) has 5 elements, input \(2,\) has 2: .* 3 \(ranks"):
        dist.all_gather_into_tensor(_ones(5), _ones(2))
    with pytest.raises(ValueError, match="is expanded"):
        dist.broadcast(_ones(1).expand(4), 0) if dist.get_rank() else dist.broadcast(_ones(1).expand(4), 1)


def _all_refusals() -> None:
    _refused_everywhere()
    _refused_asynchronously()
    _refused_by_all_alike()
    dist.barrier()


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_different_calls_are_refused_on_every_rank_and_the_group_goes_on():
    run_distributed(_all_refusals, world_size=3, backend="smddp")
