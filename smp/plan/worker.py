"""The process that plans: what it replaces in torch and transformers, and its fake GPUs, stay in it."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from smp.errors import UserError
from smp.plan.devices import DeviceRow
from smp.plan.fork import in_child
from smp.plan.records import LayoutPlan
from smp.plan.shim import build_shim, python_with
from smp.runtime import environment_with

_MODULE = "smp.plan.worker"


class Worker:
    """Plans layouts in one process, started at the first and ended with the ``with`` block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # what a process that has died did not read
                        pipe.close()

    def start(self, device: DeviceRow) -> subprocess.Popen[bytes]:
        """Start the process, unless it runs; it imports what it needs while the caller goes on."""
        self._process = self._process or _start(device)
        return self._process

    def plan(
        self, words: Sequence[str], *, nodes: int, local: int, device: DeviceRow, exact: bool = False
    ) -> LayoutPlan:
        """Plan one layout; see :func:`smp.plan.plan.plan_layout`. All calls have devices of one kind.

        Raises:
            UserError: the flags, or the layout, are not legal; or there is no compiler for a plan of GPUs.
        """
        process = self.start(device)
        request = {"words": list(words), "nodes": nodes, "local": local, "row": device, "exact": exact}
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise UserError(
                f"the planning process has ended with status {process.wait()}: see its output above"
            ) from None
        if isinstance(answer, LayoutPlan):
            return answer
        raise UserError(answer)


def _start(device: DeviceRow) -> subprocess.Popen[bytes]:
    command = python_with(build_shim(), _MODULE) if device.is_gpu else [sys.executable, "-m", _MODULE]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    # Ctrl-C is for the command, which then ends this process.
    deaf = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment_with(hidden), preexec_fn=deaf
    )


def serve() -> None:
    """Answer requests on the standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not be taken for an answer
    from smp.plan.plan import plan_layout, warm_up

    with contextlib.suppress(EOFError):
        while True:
            request = pickle.load(sys.stdin.buffer)
            words, row = request.pop("words"), request.pop("row")
            try:
                warm_up(words)
                answer: LayoutPlan | str = in_child(functools.partial(plan_layout, words, row=row, **request))
            except UserError as error:
                answer = str(error)
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    serve()
