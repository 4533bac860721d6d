"""Watch the ranks' child processes, and bring their reports together on rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import pkgutil
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from torch.distributed import PrefixStore, Store, TCPStore

from smp.doctor.check import Check, Request
from smp.doctor.network import STORE
from smp.doctor.report import Diagnosis, Finding, Report, diagnose
from smp.errors import RankError
from smp.runtime import Launch, environment_with, open_store

CHECKS = "smp.doctor.checks:CHECKS"
_POLL_SECONDS = 0.05
_IMPORT_SECONDS = 60.0  # for a child's own start, beside --timeout
_GRACE_SECONDS = 5.0  # from the end of a child's output to its own
_SILENT_SECONDS = 15.0  # without a sign of life, after which a rank is lost
_LAST_SECONDS = 3.0  # to hear what the others have found, once this process has been told to end


class Worker:
    """The checks of one rank, run one after the other in a child process.

    A check of the rank alone that outlives its time, or ends its process, is left out in the next process. One of the
    whole job ends this rank's part: the others have lost it.

    Args:
        request: what is looked at.
        launch: the rank's place.
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
        """Start, or start again, with the checks that are left."""
        self.report.check = self._left[0].name if self._left else ""
        if not self._left:
            self.report.state = "done"
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "smp.doctor"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment, encoding="utf-8", errors="replace",
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self.report.pid = self._process.pid
        asked = {
            "arguments": self._request.arguments, "timeout": self._request.timeout, "full": self._request.full,
            "launch": dataclasses.asdict(self._launch), "checks": self._checks,
            "names": [check.name for check in self._left],
        }  # fmt: skip
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its output will tell
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()  # and left open: its end tells the child that this process has ended
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(self._process.stdout, self._said), daemon=True).start()
        self._since = time.monotonic() + _IMPORT_SECONDS

    def poll(self) -> None:
        """Take in what the child has said, and act on its end and on time that is over; waits for nothing."""
        while self.report.state == "runs" and not self._said.empty():
            line = self._said.get()
            if line.endswith("\n"):
                self._take(json.loads(line))
            else:
                self._fail(self._how_it_ended())
                return
        if self.report.state == "runs":
            limit = self._request.timeout * self._left[0].share
            if time.monotonic() - self._since > limit:
                self._fail(f"did not end within {limit:g} s")

    def stop(self, why: str = "") -> None:
        """End the child at once; ``why`` is said where checks are left."""
        if self.report.state == "runs":
            self.poll()
        if self.report.state == "runs":
            self._process.kill()
            self.report.fail(f"{why}: this check and those after it were not done; see which process failed first")

    def _take(self, said: dict[str, Any]) -> None:
        if "finding" in said:
            check, status, message, data = said["finding"]
            self.report.findings.append(Finding(check, status, message, (self.report.rank,), data))
        elif "measurement" in said:
            name, value = said["measurement"]
            self.report.measurements[name] = value
        elif "ready" in said:
            self._since = time.monotonic()
        elif said["end"]:
            del self._left[0]
            self._since = time.monotonic()
            self.report.check = self._left[0].name if self._left else ""
            if not self._left:
                self.report.state = "done"
        else:
            self.report.state = f"failed in check {self.report.check!r}"

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "has closed its output"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def _fail(self, how: str) -> None:
        """Say how the child's check failed, and go on with those that are left where they can do without it."""
        self._process.kill()  # one in a call to a disk or a device that does not answer is not waited for
        check, pid = self._left.pop(0), self._process.pid
        message = f"the check's process (pid {pid}) {how}: a training process would too, see what it does there"
        self.report.fail(message, pid=pid)
        self.report.state = f"{how} in check {check.name!r}"
        if check.scope != "job":
            self.report.state = "runs"
            self._start()


def _listen(output: IO[str], said: queue.SimpleQueue[str]) -> None:
    """Hand on a child's lines; an empty one, or one that was cut off, is the last."""
    for line in output:
        said.put(line)
    said.put("")


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
    base = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(base.port)}
    launches = [Launch(rank, processes, rank, processes) for rank in range(processes)]
    store = PrefixStore("attempt0", base)  # as open_store names it in the children
    workers = [Worker(request, launch, checks, address) for launch in launches]
    reports = [worker.report for worker in workers]
    with _watched(workers):
        while any(report.state == "runs" for report in reports):
            for worker in workers:
                worker.poll()
            if any(report.failed for report in reports):
                _tell_lost(store, launches[0])
            time.sleep(_POLL_SECONDS)
    return diagnose(reports, _names(checks))


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
        self._seen = {rank: ("", time.monotonic()) for rank in range(size)}  # what a rank says, and since when

    def publish(self, report: Report) -> None:
        """Put up what a rank has to say where that is new, and a sign of life once a second."""
        said = f"{time.monotonic():.0f} {report.as_json()}"
        if said != self._published:
            self._store.set(f"report{report.rank}", said)
            self._published = said

    def read(self) -> list[Report]:
        """Every rank's report; one that has not come or does not answer any more has failed, with a finding."""
        return [self._read(rank) for rank in self._seen]

    def _read(self, rank: int) -> Report:
        now, key = time.monotonic(), f"report{rank}"
        before, since = self._seen[rank]
        said = self._store.get(key).decode() if self._store.check([key]) else ""
        since = now if said != before else since
        self._seen[rank] = said, since
        if not said:
            report = Report(rank)
            if now - since > self._patience:
                report.fail(f"rank {rank} has not come within {self._patience:.0f} s: see whether it was started")
            return report
        report = Report.from_json(said.partition(" ")[2])
        if report.state == "runs" and now - since > _SILENT_SECONDS:
            lose(report, f"has not answered for {_SILENT_SECONDS:.0f} s")
        return report


def lose(report: Report, what: str) -> None:
    """Note that a rank's own process is gone."""
    who = f"rank {report.rank}" + (f" (host {report.host}, pid {report.pid})" if report.pid else "")
    where = f" in check {report.check!r}" if report.check else ""
    report.fail(f"{who} {what}{where}: see whether it was killed, for memory first, and whether its host lives")


def _tell_lost(store: Store, launch: Launch) -> None:
    """Tell those who wait at the start that not all will come."""
    PrefixStore(f"{STORE}/{launch.restart}", store).set("lost", "1")


@contextlib.contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """Set by SIGTERM, which the launcher sends when another rank has failed."""
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
