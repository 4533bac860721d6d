"""The process that plans: what its forks replace in torch and transformers, and their fake GPUs, stay in it."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from smp.environment import environment_with, malloc
from smp.environment.threads import available_cores
from smp.errors import UserError
from smp.log import is_terminal
from smp.plan.devices import DeviceRow
from smp.plan.shim import build_shim, python_with
from smp.processes import end_with_parent

if TYPE_CHECKING:
    from smp.plan.question import Question
    from smp.plan.request import Request
    from smp.plan.search import Found

_MODULE = "smp.plan.worker"
_AT_ONCE = 2  # layouts, each of a gigabyte or two
CLEAR = "\r\x1b[K"  # a terminal's line of progress
# What the classes of an answer take.
_OF_ANSWERS = ("smp.plan.request", "transformers.configuration_utils")


@contextlib.contextmanager
def worker(row: DeviceRow) -> Iterator[Callable[..., Any]]:
    """Start a process that plans for a device; yields a function that calls one of :func:`serve`'s in it, by name.

    It ends with the ``with`` block. The function raises UserError where the called one does or the process has ended.

    Raises:
        UserError: there is no compiler for a plan of GPUs.
    """
    process = _start(row)
    assert process.stdin is not None and process.stdout is not None
    requests = Connection(os.dup(process.stdin.fileno()), readable=False)
    answers = Connection(os.dup(process.stdout.fileno()), writable=False)
    process.stdin.close()
    process.stdout.close()

    def ask(name: str, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(OSError):  # it has ended, as is seen below
            requests.send((name, args, kwargs))
        for module in _OF_ANSWERS:  # while it plans
            importlib.import_module(module)
        try:
            answer = answers.recv()
        except (EOFError, OSError):
            raise UserError(
                f"the planning process has ended with status {process.wait()}: see its output above"
            ) from None
        if isinstance(answer, UserError):
            raise answer
        return answer

    try:
        yield ask
    finally:
        process.kill()
        process.wait()
        answers.close()
        requests.close()


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


def find(question: Question) -> tuple[Request, Found]:
    """Answer a request by traces; see :func:`smp.plan.request.find`. A terminal shows which layouts are traced."""
    from smp.plan.plan import plan_layouts
    from smp.plan.request import find

    count, shown = 0, is_terminal(sys.stderr)

    def tell(text: str) -> None:
        nonlocal count
        count += 1
        if shown:
            width = shutil.get_terminal_size().columns - 1
            print(f"{CLEAR}{f'planning layout {count}: {text}'[:width]}", end="", file=sys.stderr, flush=True)

    together = min(available_cores(), _AT_ONCE)
    return find(question, plan_layouts, together=together, tell=tell)


def serve() -> None:
    """Answer requests on the standard input until it ends."""
    requests, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # whatever prints must not be taken for an answer
    from smp.plan.plan import plan_layouts

    calls: dict[str, Callable[..., Any]] = {"find": find, "plan_layouts": plan_layouts}
    with contextlib.suppress(EOFError):
        while True:
            name, args, kwargs = requests.recv()
            call = calls[name]
            try:
                answer = call(*args, **kwargs)
            except UserError as error:
                answer = error
            except Exception as error:
                said = f"no layout could be planned ({type(error).__name__}: {error})"
                answer = UserError(f"{said}: this is a defect in smp, please report it")
            answers.send(answer)


if __name__ == "__main__":
    serve()
