"""Watch the ranks' child processes, and bring their reports together on rank 0."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from torch.distributed import PrefixStore, Store, TCPStore

from smp.doctor.check import Check, Request
from smp.doctor.network import STORE
from smp.doctor.report import Diagnosis, Report, diagnose
from smp.errors import RankError
from smp.runtime import Launch, environment_with, open_store

CHECKS = "smp.doctor.checks:CHECKS"
_POLL_SECONDS = 0.05
_IMPORT_SECONDS = 60.0  # for a child's own start, beside --timeout
_GRACE_SECONDS = 5.0  # from the end of a child's pipe to its own
_SILENT_SECONDS = 15.0  # without a sign of life, after which a rank is lost
_LAST_SECONDS = 3.0  # to hear what the others have found, once this process has been told to end


class Worker:
    """The checks of one rank, run one after the other in a child process.

    A check of the rank alone that outlives its time, or ends its process, is left out in the next process. One of the
    whole job ends this rank's part: the others have lost it.

    Args:
        request: what to examine.
        launch: the rank and its job's size.
        checks: where the checks are, as ``module:name``.
        environment: changes of the child's environment.
    """

    def __init__(self, request: Request, launch: Launch, checks: str, environment: Mapping[str, str]):
        self.report = Report(launch.rank, launch.local_rank, socket.gethostname())
        self._request, self._launch, self._checks = request, launch, checks
        # The store is served by a supervisor or the launcher, never by a child.
        self._environment = environment_with({**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"})
        self._left: list[Check] = [
            check for check in pkgutil.resolve_name(checks) if check.scope != "host" or launch.local_rank == 0
        ]
        self._start()

    def _start(self) -> None:
        """Start a child for the checks that are left; the report goes on from where it is."""
        if not self._left:
            self.report.check, self.report.state = "", "done"
            return
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "smp.doctor", str(descriptor)],
                pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=2, env=self._environment,
            )  # fmt: skip
        names = [check.name for check in self._left]
        self.report.check, self.report.pid = names[0], self._process.pid
        with contextlib.suppress(BrokenPipeError):  # it has ended, as the next poll finds
            self._pipe.send((self._request, self._launch, self._checks, names, self.report))
        self._since = time.monotonic() + _IMPORT_SECONDS

    def poll(self) -> None:
        """Take the child's latest report, and act on its end and on time that is over; wait for nothing."""
        while self.report.state == "runs" and self._pipe.poll():
            try:
                self.report = self._pipe.recv()
            except (EOFError, OSError):
                self._fail(self._how_it_ended())
                return
            self._since = time.monotonic()
            while self._left and self._left[0].name != self.report.check:
                del self._left[0]
        if self.report.state == "runs":
            limit = self._request.timeout * self._left[0].share
            if time.monotonic() - self._since > limit:
                self._fail(f"did not end within {limit:g} s")

    def stop(self, why: str = "") -> None:
        """End the child at once; ``why`` goes into the report where checks are left."""
        if self.report.state == "runs":
            self.poll()
        if self.report.state == "runs":
            self._process.kill()
            self.report.fail(f"{why}: this check and those after it were not done; see which process failed first")

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "has closed its pipe"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def _fail(self, how: str) -> None:
        """Report how the child's check failed, and go on with those that are left where they can do without it."""
        self._process.kill()  # one in a call to a disk or a device that does not answer is not waited for
        check, pid = self._left.pop(0), self._process.pid
        message = f"the check's process (pid {pid}) {how}: a training process would too, see what it does there"
        self.report.fail(message, pid=pid)
        self.report.state = f"{how} in check {check.name!r}"
        if check.scope != "job":
            self.report.state = "runs"
            self._start()


@contextlib.contextmanager
def _watched(workers: Sequence[Worker]) -> Iterator[None]:
    """Leave no child behind."""
    try:
        yield
    finally:
        for worker in workers:
            worker.stop("was interrupted")


def _names(checks: str) -> list[str]:
    return [check.name for check in pkgutil.resolve_name(checks)]


def examine_here(request: Request, processes: int, checks: str = CHECKS) -> Diagnosis:
    """Run all checks in ``processes`` processes of this machine."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    launches = [Launch(rank, processes, rank, processes) for rank in range(processes)]
    workers = [Worker(request, launch, checks, address) for launch in launches]
    with _watched(workers):
        while any(worker.report.state == "runs" for worker in workers):
            for worker in workers:
                worker.poll()
            if any(worker.report.failed for worker in workers):
                _tell_lost(PrefixStore("attempt0", store), launches[0])  # as open_store names it in the children
            time.sleep(_POLL_SECONDS)
    return diagnose([worker.report for worker in workers], _names(checks))


# --- ranks of a launcher's job


class Board:
    """The reports of all ranks in the job's store.

    Args:
        store: the job's.
        size: ranks.
        patience: seconds in which a rank must have come.
    """

    def __init__(self, store: Store, size: int, patience: float):
        self._store, self._patience = store, patience
        self._published = ""
        self._seen = {rank: ("", time.monotonic()) for rank in range(size)}  # a rank's latest text, and since when

    def publish(self, report: Report) -> None:
        """Set a rank's report where it has changed, and once a second as a sign of life."""
        text = f"{time.monotonic():.0f} {report.as_json()}"
        if text != self._published:
            self._store.set(f"report{report.rank}", text)
            self._published = text

    def read(self) -> list[Report]:
        """Return every rank's report; one that has not come or no longer answers has failed, with a finding."""
        return [self._read(rank) for rank in self._seen]

    def _read(self, rank: int) -> Report:
        key = f"report{rank}"
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        if text != self._seen[rank][0]:
            self._seen[rank] = text, time.monotonic()
        silence = time.monotonic() - self._seen[rank][1]
        report = Report.from_json(text.partition(" ")[2]) if text else Report(rank)
        if not text and silence > self._patience:
            report.fail(f"rank {rank} has not come within {self._patience:.0f} s: see whether it was started")
        if text and report.state == "runs" and silence > _SILENT_SECONDS:
            lose(report, f"has not answered for {_SILENT_SECONDS:.0f} s")
        return report


def lose(report: Report, what: str) -> None:
    """Add to a report that the rank's own process is gone."""
    who = f"rank {report.rank}" + (f" (host {report.host}, pid {report.pid})" if report.pid else "")
    where = f" in check {report.check!r}" if report.check else ""
    report.fail(f"{who} {what}{where}: see whether it was killed, for memory first, and whether its host lives")


def _tell_lost(store: Store, launch: Launch) -> None:
    """Tell those who wait at the start that not all will come."""
    PrefixStore(f"{STORE}/{launch.restart}", store).set("lost", "1")


@contextlib.contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM sets, which the launcher sends when another rank has failed."""
    told = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, previous)


def examine_rank(request: Request, launch: Launch, checks: str = CHECKS) -> Diagnosis | None:
    """Run this rank's checks, and on rank 0 wait for all.

    Returns:
        On rank 0 the diagnosis of the job, elsewhere None.

    Raises:
        RankError: the others cannot be reached, or not any more.
    """
    store, where = open_store(launch, datetime.timedelta(seconds=request.timeout))
    board = Board(PrefixStore(f"{STORE}/{launch.restart}", store), launch.world_size, request.timeout)
    worker = Worker(request, launch, checks, {})
    last = float("inf")
    with _told_to_end() as told, _watched([worker]):
        try:
            while True:
                worker.poll()
                if told.is_set() and last == float("inf"):
                    worker.stop("was told to end by its launcher")
                    last = time.monotonic() + _LAST_SECONDS
                board.publish(worker.report)
                reports = [worker.report] if launch.rank else board.read()
                if launch.rank == 0 and any(report.failed for report in reports):
                    _tell_lost(store, launch)
                left = [report for report in reports if report.state == "runs"]
                if not left or time.monotonic() > last:
                    break
                time.sleep(_POLL_SECONDS)
        except RuntimeError as error:
            first = (str(error).splitlines() or [""])[0]
            raise RankError(
                f"rank {launch.rank} has lost the job's store at {where} ({first}): see why the process that serves it "
                f"has ended"
            ) from None
    if launch.rank:
        return None
    for report in left:
        lose(report, "had not finished when the launcher ended the job")
    return diagnose(reports, _names(checks))
