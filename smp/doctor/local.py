"""All ranks on this machine: one process starts them, watches them and reports."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from smp.doctor.checks import CHECKS
from smp.doctor.compare import Report, diagnose
from smp.doctor.findings import Diagnosis
from smp.doctor.room import Check, Request
from smp.doctor.worker import Worker, wait_for_news
from smp.runtime import Launch

_POLL_SECONDS = 0.2


@contextlib.contextmanager
def serving(workers: Sequence[Worker], listener: socket.socket) -> Iterator[Any]:
    """Start the workers, then serve their store on a socket that listens already: in this order a fork has no thread
    to lose."""
    port = listener.getsockname()[1]
    for worker in workers:
        worker.start()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield PrefixStore("smp/doctor/0", store)
    finally:
        for worker in workers:
            worker.stop()


def report_of(worker: Worker, host: str) -> Report:
    """What a worker has said so far."""
    state = worker.ended or ("done" if worker.done else "runs")
    return Report(
        worker.launch.rank, worker.launch.local_rank, host, worker.pid, list(worker.findings),
        dict(worker.measurements), state, worker.done, bool(worker.ended),
    )  # fmt: skip


def examine_here(request: Request, processes: int, checks: Sequence[Check] = CHECKS) -> Diagnosis:
    """Run all checks in ``processes`` processes of this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()[:2]
    launches = [Launch(rank, processes, rank, processes) for rank in range(processes)]
    workers = [Worker(request, launch, checks, address) for launch in launches]
    told = False
    with serving(workers, listener) as store:
        while not all(worker.done for worker in workers):
            wait_for_news(workers, _POLL_SECONDS)
            for worker in workers:
                worker.poll()
            if not told and any(worker.ended for worker in workers):
                store.set("lost", "1")
                told = True
    return diagnose([report_of(worker, socket.gethostname()) for worker in workers])


def examine_alone(request: Request, checks: Sequence[Check] = CHECKS) -> Diagnosis:
    """Run the checks that need no other rank, where the launcher's words contradict each other."""
    return diagnose([own_report(request, Launch(), checks)])


def own_report(request: Request, launch: Launch, checks: Sequence[Check]) -> Report:
    """What this process finds by itself: the checks that need no other rank."""
    worker = Worker(request, launch, [check for check in checks if check.scope != "job"])
    worker.start()
    try:
        while not worker.done:
            wait_for_news([worker], _POLL_SECONDS)
            worker.poll()
    finally:
        worker.stop()
    return report_of(worker, socket.gethostname())
