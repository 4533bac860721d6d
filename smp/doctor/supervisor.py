"""Run the ranks' checks, each with a time limit, and bring the ranks' reports together."""

from __future__ import annotations

import contextlib
import copy
import datetime
import logging
import multiprocessing
import multiprocessing.connection
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from smp.doctor.check import Check, CheckContext, Request
from smp.doctor.network import STORE
from smp.doctor.report import Diagnosis, Report, diagnose
from smp.doctor.system import set_variables
from smp.errors import RankError, first_line
from smp.runtime import Launch, open_store

CHECKS = "smp.doctor.checks:CHECKS"
_POLL_SECONDS = 0.05
_LAST_SECONDS = 1.0  # to hear what the others have found, once the launcher ends this process


class _ToldToEnd(BaseException):
    """The launcher ends the job: another rank has failed."""


class Board:
    """The reports of all ranks in the job's store."""

    def __init__(self, store: Store, launch: Launch):
        self._store, self._size = PrefixStore(f"{STORE}/{launch.restart}", store), launch.world_size

    def publish(self, report: Report) -> None:
        """Set a rank's report; where the rank has failed, also tell those who wait for it at the start."""
        self._store.set(f"report{report.rank}", report.as_json())
        if report.failed:
            self._store.set("lost", "1")

    def read(self) -> list[Report]:
        """Return every rank's report, an empty one of a rank that has not come."""
        keys = [f"report{rank}" for rank in range(self._size)]
        return [
            Report.from_json(self._store.get(key).decode()) if self._store.check([key]) else Report(rank)
            for rank, key in enumerate(keys)
        ]

    def wait(self, seconds: float) -> list[Report]:
        """Return every rank's report as soon as all that have come have ended, or after ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            reports = self.read()
            if not any(each.pid and each.state == "runs" for each in reports) or time.monotonic() > end:
                return reports
            time.sleep(_POLL_SECONDS)


def run_checks(request: Request, launch: Launch, checks: Sequence[Check], report: Report, board: Board) -> None:
    """Run a rank's checks one after the other, each in a thread: one that outlives its time is left behind.

    A check of all ranks that fails ends this rank's part: the others have lost it.
    """
    logging.getLogger("smp").addHandler(logging.NullHandler())
    logging.getLogger("smp").propagate = False
    torch.set_num_threads(1)
    ctx = CheckContext(request, launch, report)
    for check in checks:
        if check.scope == "host" and launch.local_rank:
            continue
        report.check = check.name
        board.publish(report)
        goes_on: list[bool] = []
        thread = threading.Thread(target=_run, args=(check, ctx, goes_on), daemon=True)
        limit = request.timeout * check.share
        thread.start()
        thread.join(limit)
        if thread.is_alive():
            behind, ctx = ctx, CheckContext(request, launch, report)
            behind.report = copy.deepcopy(report)  # what it still finds is not the next check's
            ctx.problem(f"did not end within {limit:g} s: a training process would hang, too; see what it does there")
            goes_on = [check.scope != "job"]
        if goes_on != [True]:
            report.state = f"failed in check {check.name!r}"
            break
    else:
        report.check, report.state = "", "done"
    board.publish(report)


def _run(check: Check, ctx: CheckContext, goes_on: list[bool]) -> None:
    if check.scope == "job" and ctx.device.type == "cuda":
        torch.cuda.set_device(ctx.device)  # the current one is per thread
    goes_on.append(check.run(ctx))


# --- processes of this machine


def _child(request: Request, launch: Launch, checks: str, variables: Mapping[str, str]) -> None:
    """Run the checks of one rank, which ends with its parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends this process
    os.dup2(2, 1)
    set_variables(variables)
    store, _ = open_store(launch, datetime.timedelta(seconds=request.timeout))
    run_checks(request, launch, pkgutil.resolve_name(checks), Report.of(launch), Board(store, launch))
    os._exit(0)  # a check left behind, or a group that was not left in good order, would be waited for


def _end_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def examine_here(request: Request, processes: int, checks: str = CHECKS) -> Diagnosis:
    """Run all checks in ``processes`` processes of this machine."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    launches = [Launch(rank, processes, rank, processes) for rank in range(processes)]
    board = Board(PrefixStore("attempt0", store), launches[0])  # as open_store names it in the children
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_child, args=(request, each, checks, variables)) for each in launches]
    try:
        for child in children:
            child.start()
        running: dict[Any, int] = {child.sentinel: rank for rank, child in enumerate(children)}
        while running:
            for sentinel in multiprocessing.connection.wait(list(running)):
                rank = running.pop(sentinel)
                children[rank].join()
                _note_end(board, rank, children[rank].exitcode or 0)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
    return diagnose(board.read(), _names(checks))


def _note_end(board: Board, rank: int, status: int) -> None:
    """Add to the report of a process that has ended before its time how it did."""
    report = board.read()[rank]
    if report.state == "runs":
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        report.fail(f"the check's process (pid {report.pid}) {how}: a training process would, too")
        board.publish(report)


def _names(checks: str) -> list[str]:
    return [check.name for check in pkgutil.resolve_name(checks)]


# --- ranks of a launcher's job


@contextlib.contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Send what the checks print to standard error: the diagnosis alone goes to standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _told_to_end() -> Iterator[None]:
    """Raise where the main thread waits when SIGTERM comes, which a launcher sends when another rank has failed."""

    def end(*unused: object) -> None:
        raise _ToldToEnd

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _lose(report: Report) -> None:
    """Add to the report of a rank that has not ended that it is lost."""
    if report.pid:
        who = f"rank {report.rank} (host {report.host}, pid {report.pid})"
        report.fail(f"{who} has not ended: see whether it was killed, for memory first, and whether its host lives")
    else:
        report.fail(f"rank {report.rank} has not come: see whether it was started")


def examine_rank(request: Request, launch: Launch, checks: str = CHECKS) -> Diagnosis | None:
    """Run this rank's checks, and on rank 0 wait for all.

    Returns:
        On rank 0 the diagnosis of the job, elsewhere None.

    Raises:
        RankError: the others cannot be reached, or not any more.
    """
    store, where = open_store(launch, datetime.timedelta(seconds=request.timeout))
    board, report = Board(store, launch), Report.of(launch)
    try:
        try:
            with _printing_to_stderr(), _told_to_end():
                run_checks(request, launch, pkgutil.resolve_name(checks), report, board)
                reports = [] if launch.rank else board.wait(request.timeout)
        except _ToldToEnd:
            if report.state == "runs":
                report.fail("was told to end by its launcher: see which process failed first")
            board.publish(report)
            reports = [] if launch.rank else board.wait(_LAST_SECONDS)
    except RuntimeError as error:
        raise RankError(
            f"rank {launch.rank} has lost the job's store at {where} ({first_line(error)}): see why the process that "
            f"serves it has ended"
        ) from None
    for each in reports:
        if each.state == "runs":
            _lose(each)
    return None if launch.rank else diagnose(reports, _names(checks))
