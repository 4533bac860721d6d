"""Report a failure once: the rank that fails first prints the cause, the others a line that names it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from smp.comm.wire import Unreachable, unreachable
from smp.errors import PeerError, RankError, RunError, UserError, first_line
from smp.faults.members import ANSWER_SECONDS, Members, within
from smp.faults.watchdog import Watchdog
from smp.runtime import launcher_serves_store

_FAILED = "failed"
_END_SECONDS = 10.0
_SURVIVOR_SECONDS = 2.0


def _said(answer: bytes | None) -> tuple[int, int] | None:
    """Parse the rank that failed first and its exit status; None if there is none."""
    if not answer:
        return None
    rank, status = json.loads(answer)
    return int(rank), int(status)


def _claim(members: Members, rank: int, status: int) -> tuple[int, int] | None:
    """Register this rank as failed, and return the first that did; None if the store does not answer."""
    mine = json.dumps([rank, status])
    return _said(within(ANSWER_SECONDS, lambda: members.connection().compare_set(_FAILED, "", mine)))


def _failed_before(members: Members) -> tuple[int, int] | None:
    """Return the first rank registered as failed, if there is one and the store answers."""

    def ask() -> bytes:
        store = members.connection()
        return store.get(_FAILED) if store.check([_FAILED]) else b""

    return _said(within(ANSWER_SECONDS, ask))


def _by_peer(watchdog: Watchdog, rank: int, error: Exception) -> PeerError | None:
    """Return the error to raise where another rank's end caused ``error``; None if it is this rank's."""
    assert watchdog.members is not None
    members, activity = watchdog.members, watchdog.activity
    in_collective = isinstance(error, RuntimeError) and not isinstance(error, RunError)
    dead = watchdog.dead(0.0) if in_collective else []
    # Its process is looked for first: a store that is gone answers with a page of C++ frames.
    gone = any(member.rank == 0 for member in dead) and not launcher_serves_store()
    # Said by a rank of this host that has ended since, too.
    lost = unreachable(error) if in_collective else None
    if lost is not None:
        # The launcher that serves the store is where rank 0 is.
        gone = any(member.rank == 0 for member in members.of_host(lost.rank))
    first = None if gone else _failed_before(members)
    if lost is not None and first is None:
        first = None if gone else _claim(members, rank, 1)
        if first is None or first[0] == rank:
            return PeerError(_of_another_host(watchdog, rank, lost, error), status=1)
    if in_collective and first is None:
        dead = dead or watchdog.dead(0.3)
        if dead:
            return PeerError(watchdog.lost(dead), status=1)
    first = first or _claim(members, rank, 1)
    if first is None:
        return PeerError(f"rank {rank}: lost the process that serves the job's store in {activity}", status=1)
    if first[0] == rank:
        return None
    if isinstance(error, RunError):  # found by all ranks together
        return PeerError("", status=first[1])
    what = "" if in_collective else f"; here: {type(error).__name__}: {first_line(error)}"
    return PeerError(
        f"rank {rank}: ended in {activity}, as rank {first[0]} has failed and said why{what}", status=first[1]
    )


def _of_another_host(watchdog: Watchdog, rank: int, lost: Unreachable, error: Exception) -> str:
    """Describe the loss of a rank on another host."""
    assert watchdog.members is not None
    host = watchdog.members.of_host(lost.rank)
    ranks = f"on that host: rank{'s' if len(host) > 1 else ''} {', '.join(str(member.rank) for member in host)}"
    who = watchdog.members.members[lost.rank]
    if lost.silent:
        return (
            f"rank {rank}: no answer from {who} in {watchdog.activity}: it hangs, or its host or the network is gone "
            f"({first_line(error)}); {ranks}"
        )
    return (
        f"rank {rank}: lost {who} in {watchdog.activity}: the connection is broken, as where a process or its host has "
        f"ended; {ranks}"
    )


@contextlib.contextmanager
def failing_together(watchdog: Watchdog, rank: int) -> Iterator[None]:
    """Propagate an error of this rank to the others, and end with theirs.

    Raises:
        PeerError: instead of what followed from another rank's failure.
    """
    try:
        yield
    except RankError:
        watchdog.leave(2, _END_SECONDS)
        if watchdog.members is not None:
            _claim(watchdog.members, rank, 2)
        raise
    except UserError:  # found by every rank alike
        watchdog.leave(2, _END_SECONDS)
        raise
    except Exception as error:
        if watchdog.members is None:
            raise
        theirs = _by_peer(watchdog, rank, error)
        if theirs is not None:
            watchdog.leave(theirs.status, _SURVIVOR_SECONDS, str(theirs))
            raise theirs from error
        where = f"rank {rank} failed in {watchdog.activity}"
        watchdog.leave(1, _END_SECONDS, f"error: {where}: {type(error).__name__}: {first_line(error)}")
        raise
