"""Processes that this one starts: workers of a fork server, calls in a fork, and how all of them end with it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.util import get_temp_dir
from typing import Any

from smp.errors import UserError

LONGEST_TMPDIR = 107 - len("/pymp-abcdefgh/listener-abcdefgh")  # with which the address of a socket is not too long
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that has started it ends, however it does; Linux alone has it."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_worker_with_job(_worker: int = 0) -> None:
    """End a worker process as soon as the process that started it has ended, even by SIGKILL.

    A worker's own parent is the fork server, which waits for its workers. Signals that ask the job to stop are ignored:
    the starting process acts on them.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def worker_context(module: str) -> ForkServerContext:
    """Return the context of worker processes, whose server imports ``module``, and torch with it, once for all.

    Not fork, which may deadlock on the threads of gloo, NCCL and tokenizers.
    """
    if len(tempfile.gettempdir()) > LONGEST_TMPDIR:
        kept, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            get_temp_dir()  # of the sockets, made once in a process and removed at its end
        finally:
            tempfile.tempdir = kept
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def in_child(call: Callable[[], Any]) -> Any:
    """Return the result of a call made in a fork of this process: torch keeps caches of meshes and of shapes.

    Raises:
        UserError: the call raised it, or has failed.
    """
    (answer,) = in_children([call])
    if isinstance(answer, UserError):
        raise answer
    return answer


def in_children(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what :func:`in_child` returns, or the error that it raises, of calls that are made at once."""
    return [_result(*child) for child in [_fork(call) for call in calls]]


def _fork(call: Callable[[], Any]) -> tuple[int, Connection]:
    reading, writing = Pipe(duplex=False)
    if (child := os.fork()) == 0:
        end_with_parent()
        gc.freeze()  # objects from before the fork are not looked through at each collection
        _answer(call, writing)
    writing.close()
    return child, reading


def _result(child: int, reading: Connection) -> Any:
    answer = None
    with reading, contextlib.suppress(EOFError, OSError):
        answer = reading.recv()
    _, status = os.waitpid(child, 0)
    if answer is None:
        return UserError(f"the process that planned this layout has ended with status {status}: see its output above")
    done, result = answer
    return result if done else UserError(result)


def _answer(call: Callable[[], Any], writing: Connection) -> None:
    """Send the result of a call, or the sentence of its failure, and end this process."""
    try:
        try:
            answer: tuple[bool, Any] = (True, call())
        except UserError as error:
            answer = (False, str(error))
        except BaseException as error:
            traceback.print_exc()
            said = (
                f"this layout could not be planned ({type(error).__name__}): this is a defect in smp, please report it"
            )
            answer = (False, said)
        writing.send(answer)
    finally:
        os._exit(0)
