"""One rank of a job that a launcher has started: reports go through the job's store to rank 0, which shows them."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from smp.comm.topology import this_member
from smp.doctor.checks import CHECKS
from smp.doctor.compare import Report, diagnose
from smp.doctor.findings import Diagnosis, Finding
from smp.doctor.local import own_report, report_of
from smp.doctor.room import Check, Request
from smp.doctor.worker import Worker, wait_for_news
from smp.environment import rendezvous
from smp.errors import UserError
from smp.faults.peers import process_state
from smp.runtime import Launch, launcher_serves_store

_POLL_SECONDS = 0.2
_SILENT_SECONDS = 15.0  # without a sign of life, after which a rank is lost
_LAST_SECONDS = 3.0  # to hear what the others have found, once this process has been told to end


class _Asked:
    """Whether the launcher has told this process to end, as it does when another one has failed."""

    def __init__(self) -> None:
        self.yes = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[_Asked]:
        def note(*_: Any) -> None:
            self.yes = True

        previous = signal.signal(signal.SIGTERM, note)
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, previous)


def _open(launch: Launch, address: tuple[str, int], seconds: float) -> Store:
    """The job's store: the launcher's, or rank 0's own.

    Raises:
        UserError: it cannot be reached, or not be served.
    """
    host, port = address
    serves = launch.rank == 0 and not launcher_serves_store()
    try:
        base = TCPStore(
            host, port, is_master=serves, timeout=datetime.timedelta(seconds=seconds), wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0].partition(" Exception raised from")[0]
        what = "cannot serve" if serves else "does not reach"
        raise UserError(
            f"rank {launch.rank} {what} the job's store at {host}:{port} ({reason}): see that rank 0 was started, and "
            f"that MASTER_ADDR and MASTER_PORT are the same for all processes and free on its host"
        ) from None
    return PrefixStore(f"smp/doctor/{launch.restart}", base)


class Board:
    """The reports of all ranks in the store.

    Args:
        store: the job's.
        size: ranks.
        patience: seconds in which a rank must have come.
    """

    def __init__(self, store: Store, size: int, patience: float):
        self._store, self._size, self._patience = store, size, patience
        self._identity, self._host = this_member().host, socket.gethostname()
        self._started = time.monotonic()
        self._beat, self._published = 0, 0.0
        self._known: tuple[Any, ...] = ()  # of the worker, when it was published last
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: its latest beat, and when it was new
        self._told = False

    def publish(self, worker: Worker, *, now: bool = False) -> None:
        """Put up what a worker has said when there is news, and a sign of life once a second; ``now``: in any case."""
        known = (len(worker.findings), len(worker.measurements), worker.at)
        if not now and known == self._known and time.monotonic() - self._published < 1:
            return
        self._known = known
        self._beat, self._published = self._beat + 1, time.monotonic()
        report = report_of(worker, self._host)
        said = {
            "beat": self._beat, "identity": self._identity, "supervisor": os.getpid(),
            "host": report.host, "pid": report.pid, "local_rank": report.local_rank, "state": report.state,
            "done": report.done, "failed": report.failed, "measurements": report.measurements,
            "findings": [finding.as_json() for finding in report.findings],
            "at": worker.at[0].name if worker.at else "",
        }  # fmt: skip
        self._store.set(f"report{worker.launch.rank}", json.dumps(said, default=str))

    def read(self) -> list[Report]:
        """Every rank's report; one that has not come or does not answer any more is done, with a finding."""
        return [self._read(rank) for rank in range(self._size)]

    def tell_lost(self) -> None:
        """Tell those who wait for the others that not all will come."""
        if not self._told:
            self._store.set("lost", "1")
            self._told = True

    def _read(self, rank: int) -> Report:
        key, now = f"report{rank}", time.monotonic()
        if not self._store.check([key]):
            report = Report(rank)
            if now - self._started > self._patience:
                self._lose(report, "start", f"has not come within {self._patience:.0f} s: see whether it was started")
            return report
        said = json.loads(self._store.get(key))
        findings = [Finding.from_json(each) for each in said["findings"]]
        report = Report(
            rank, said["local_rank"], said["host"], said["pid"], findings, said["measurements"], said["state"],
            said["done"], said["failed"],
        )  # fmt: skip
        beat, since = self._heard.get(rank, (0, now))
        if said["beat"] != beat:
            beat, since = said["beat"], now
        self._heard[rank] = beat, since
        if report.done:
            return report
        where = f" in check {said['at']!r}" if said["at"] else ""
        is_here = said["identity"] == self._identity
        if is_here and process_state(said["supervisor"]) == "its process has ended":
            self._lose(report, said["at"], f"has ended{where}: see why it was killed, memory first")
        elif now - since > _SILENT_SECONDS:
            what = f"does not answer since {now - since:.0f} s{where}"
            self._lose(report, said["at"], f"{what}: see whether its host lives")
        return report

    @staticmethod
    def _lose(report: Report, check: str, what: str) -> None:
        who = f"rank {report.rank}" + (f" (host {report.host}, pid {report.pid})" if report.pid else "")
        report.findings.append(Finding(check or "start", "problem", f"{who} {what}", (report.rank,)))
        report.state, report.done, report.failed = what.partition(":")[0], True, True


def examine_rank(request: Request, launch: Launch, checks: Sequence[Check] = CHECKS) -> Diagnosis | None:
    """Run this rank's checks, and on rank 0 wait for all.

    Returns:
        On rank 0 the diagnosis of the job, elsewhere None; where this rank has no connection to the others, its own.
    """
    try:
        address = rendezvous(launch)
    except UserError as error:
        return _on_its_own(request, launch, checks, str(error))
    worker = Worker(request, launch, checks, address)
    with _Asked().listening() as asked:
        worker.start()  # before the store, which starts a thread where it is served
        try:
            board = Board(_open(launch, address, request.timeout), launch.world_size, request.timeout)
            return _with_others(worker, board, asked)
        except UserError as error:
            worker.stop()
            return _on_its_own(request, launch, checks, str(error))
        finally:
            worker.stop()


def _with_others(worker: Worker, board: Board, asked: _Asked) -> Diagnosis | None:
    """Publish, and on rank 0 collect, until all is known.

    Raises:
        UserError: the store is gone.
    """
    rank = worker.launch.rank
    try:
        board.publish(worker)
        while not worker.done and not asked.yes:
            wait_for_news([worker], _POLL_SECONDS)
            worker.poll()
            board.publish(worker)
            if rank == 0 and any(report.failed for report in board.read()):
                board.tell_lost()
        if asked.yes and not worker.done:
            worker.interrupt("was told to end by its launcher")
        board.publish(worker, now=True)
        if rank:
            return None
        last = time.monotonic()
        reports = board.read()
        while not all(report.done for report in reports):
            if any(report.failed for report in reports):
                board.tell_lost()
            if asked.yes and time.monotonic() - last > _LAST_SECONDS:
                break
            board.publish(worker)
            time.sleep(_POLL_SECONDS)
            reports = board.read()
    except RuntimeError as error:
        first = (str(error).splitlines() or [""])[0]
        raise UserError(f"rank {rank} has lost the job's store ({first}): see why rank 0's process has ended") from None
    return diagnose(reports)


def _on_its_own(request: Request, launch: Launch, checks: Sequence[Check], why: str) -> Diagnosis:
    """This rank's own findings, where it cannot tell them to the others."""
    lost = Finding("start", "problem", why, (launch.rank,))
    return diagnose([own_report(request, launch, checks)], [lost])
