"""Run a rank's checks, and send its report to the supervisor after each finding."""

from __future__ import annotations

import contextlib
import logging
import os
import pkgutil
import signal
import sys
import threading
from multiprocessing.connection import Connection

import torch

from smp.doctor.check import CheckContext


def main() -> None:
    """Run the checks that the supervisor names through the pipe whose descriptor is the argument."""
    pipe = Connection(int(sys.argv[1]))
    request, launch, checks, names, report = pipe.recv()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the supervisor ends this process
    threading.Thread(target=_end_with_supervisor, args=(pipe,), daemon=True).start()
    logging.getLogger("smp").addHandler(logging.NullHandler())
    logging.getLogger("smp").propagate = False
    torch.set_num_threads(1)
    ctx = CheckContext(request, launch, report, lambda: pipe.send(report))
    by_name = {check.name: check for check in pkgutil.resolve_name(checks)}
    for name in names:
        report.check = name
        pipe.send(report)
        if not by_name[name].run(ctx):
            report.state = f"failed in check {name!r}"
            break
    else:
        report.check, report.state = "", "done"
    pipe.send(report)
    os._exit(0)  # a group that was not left in good order would be waited for


def _end_with_supervisor(pipe: Connection) -> None:
    """End this process when the supervisor's end of the pipe is closed, as by its death."""
    with contextlib.suppress(OSError, EOFError):
        pipe.recv()
    os._exit(1)


if __name__ == "__main__":
    main()
