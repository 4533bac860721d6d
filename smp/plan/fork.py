"""A call in a fork of this process, and processes that end with the one that has started them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from smp.errors import UserError

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that has started it ends, however it does; Linux alone has it."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
