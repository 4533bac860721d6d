"""The process that plans: what it replaces in torch and transformers, and its fake GPUs, stay in it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from smp.environment import malloc
from smp.errors import UserError
from smp.plan.devices import DeviceRow
from smp.plan.fork import end_with_parent, in_child
from smp.plan.records import LayoutPlan
from smp.plan.shim import build_shim, python_with
from smp.runtime import environment_with

_MODULE = "smp.plan.worker"


class Worker:
    """Plans layouts in one process, started at the first and ended with the ``with`` block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: Connection | None = None
        self._answers: Connection | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._requests, self._answers, self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def start(self, device: DeviceRow) -> subprocess.Popen[bytes]:
        """Start the process, unless it runs; it imports what it needs while the caller continues."""
        if self._process is None:
            self._process = _start(device)
            assert self._process.stdin is not None and self._process.stdout is not None
            self._requests = Connection(os.dup(self._process.stdin.fileno()), readable=False)
            self._answers = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        return self._process

    def plan(
        self, argv: Sequence[str], *, nodes: int, local: int, device: DeviceRow, exact: bool = False
    ) -> LayoutPlan:
        """Plan one layout; see :func:`smp.plan.plan.plan_layout`. All calls have devices of one kind.

        Raises:
            UserError: the flags, or the layout, are not legal; or there is no compiler for a plan of GPUs.
        """
        process = self.start(device)
        request = {"argv": list(argv), "nodes": nodes, "local": local, "row": device, "exact": exact}
        assert self._requests is not None and self._answers is not None
        try:
            self._requests.send(request)
            answer = self._answers.recv()
        except (EOFError, OSError):
            raise UserError(
                f"the planning process has ended with status {process.wait()}: see its output above"
            ) from None
        if isinstance(answer, LayoutPlan):
            return answer
        raise UserError(answer)


def _start(device: DeviceRow) -> subprocess.Popen[bytes]:
    command = python_with(build_shim(), _MODULE) if device.is_gpu else [sys.executable, "-m", _MODULE]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if not device.is_gpu:
        hidden |= malloc.tunables()  # as the launcher sets the job's
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment_with(hidden), preexec_fn=_begin
    )


def _begin() -> None:
    """Leave Ctrl-C to the command, with which this process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def serve() -> None:
    """Answer requests on the standard input until it ends."""
    requests, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # whatever prints must not be taken for an answer
    from smp.plan.plan import plan_layout, warm_up

    with contextlib.suppress(EOFError):
        while True:
            request = requests.recv()
            argv, row = request.pop("argv"), request.pop("row")
            try:
                warm_up(argv)
                answer: LayoutPlan | str = in_child(functools.partial(plan_layout, argv, row=row, **request))
            except UserError as error:
                answer = str(error)
            answers.send(answer)


if __name__ == "__main__":
    serve()
