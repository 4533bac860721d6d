"""A rank's checks in a process of their own: what hangs or dies there is told, and the next checks go on."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from smp.doctor.findings import Finding
from smp.doctor.room import Check, Request, Room
from smp.errors import ConfigError, UserError
from smp.runtime import Launch

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 5.0  # from a worker's end to that of its pipe


class Worker:
    """The checks of one rank, run one after the other in a forked process.

    A check of the rank alone that outlives its time, or kills its process, is left out in the next process. One of the
    whole job ends this rank's part: the others have lost it.

    Attributes:
        findings: so far.
        measurements: of this rank, by name.
        at: the check that runs and since when (monotonic), or None.
        done: whether there is nothing more to come.
        ended: how a part of the whole job ended before its time; empty if it did not.
    """

    def __init__(
        self, request: Request, launch: Launch, checks: Sequence[Check], address: tuple[str, int] | None = None
    ):
        self.findings: list[Finding] = []
        self.measurements: dict[str, Any] = {}
        self.at: tuple[Check, float] | None = None
        self.done, self.ended = False, ""
        self.launch, self._request, self._address = launch, request, address
        self._left = [check for check in checks if check.concerns(launch)]
        self.pid, self._pipe, self._buffer = 0, -1, b""

    def start(self) -> None:
        """Start, or start again, with the checks that are left."""
        if not self._left:
            self.done = True
            return
        self._pipe, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():  # Python's of a fork with threads: the store's is all there is
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _work(self._request, self.launch, self._left, write, self._address)
        os.close(write)
        os.set_blocking(self._pipe, False)
        self._buffer = b""

    def poll(self) -> None:
        """Hear what the worker says, and act on its end and on time that is over; waits for nothing."""
        if self.done:
            return
        closed = self._hear()
        if closed:
            self._end()
        elif self.at is not None and time.monotonic() - self.at[1] > self._limit(self.at[0]):
            check = self.at[0]
            os.kill(self.pid, signal.SIGKILL)
            self._end(f"did not end within {self._limit(check):g} s")

    def stop(self) -> None:
        """End the worker at once; what it has said so far stays."""
        if not self.done and self.pid:
            self._hear()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._wait()
        self.done = True

    def interrupt(self, why: str) -> None:
        """End the worker at once, and say so: what was left was not looked at."""
        self.stop()
        if self.at is None and not self._left:
            return
        check = self.at[0] if self.at is not None else self._left[0]
        self.ended = why
        message = f"{why}: this check and those after it were not done; see which process failed first"
        self.findings.append(Finding(check.name, "problem", message, (self.launch.rank,)))

    @property
    def descriptor(self) -> int:
        """What becomes readable when there is news."""
        return self._pipe

    def _limit(self, check: Check) -> float:
        return self._request.timeout * check.share

    def _hear(self) -> bool:
        """Take in what has been said; whether the pipe is closed."""
        while True:
            try:
                data = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                return False
            if not data:
                return True
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, said: dict[str, Any]) -> None:
        if "finding" in said:
            check, status, message, data = said["finding"]
            self.findings.append(Finding(check, status, message, (self.launch.rank,), data))
        elif "measurement" in said:
            name, value = said["measurement"]
            self.measurements[name] = value
        elif "begin" in said:
            self.at = (next(check for check in self._left if check.name == said["begin"]), time.monotonic())
        elif "end" in said:
            self._left = [check for check in self._left if check.name != said["end"]]
            self.at = None
        elif "stop" in said:
            self._left, self.at, self.ended = [], None, said["stop"]

    def _wait(self) -> int:
        """The worker's wait status; its pipe is closed, or it has been killed."""
        os.close(self._pipe)
        for killed in (False, True):
            if killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            end = time.monotonic() + _GRACE_SECONDS
            while time.monotonic() < end:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return status
                time.sleep(0.01)
        return signal.SIGKILL  # it is in a call to a disk or a device that does not answer, and dies only after that

    def _end(self, why: str = "") -> None:
        """The worker is gone, or is killed: note how, and go on with what is left."""
        status = self._wait()
        if self.at is None and not self._left:
            self.done = True
            return
        why = why or _described(status)
        check = self.at[0] if self.at is not None else self._left[0]
        self.findings.append(
            Finding(
                check.name,
                "problem",
                f"the check's process (pid {self.pid}) {why}: a training process would too, see what it does there",
                (self.launch.rank,),
                {"pid": self.pid},
            )
        )
        self.at = None
        if check.scope == "job":
            self._left, self.done, self.ended = [], True, f"{why} in check {check.name!r}"
            return
        self._left = self._left[self._left.index(check) + 1 :]
        self.start()


def _described(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with status {os.WEXITSTATUS(status)}"


def wait_for_news(workers: Sequence[Worker], seconds: float) -> None:
    """Return when a worker has news, or after ``seconds``."""
    descriptors = [worker.descriptor for worker in workers if not worker.done]
    if descriptors:
        poll = select.poll()  # not select(): a job may hold more than 1024 descriptors
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
    else:
        time.sleep(seconds)


# --- the forked process


def _work(
    request: Request, launch: Launch, checks: Sequence[Check], pipe: int, address: tuple[str, int] | None
) -> NoReturn:
    """Run the checks and leave."""
    status = 1
    try:
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(2, 1)  # the standard output is the report's alone
        logging.getLogger("smp").addHandler(logging.NullHandler())
        logging.getLogger("smp").propagate = False
        torch.set_num_threads(1)
        lock = threading.Lock()

        def send(said: dict[str, Any]) -> None:
            data = json.dumps(said, default=str).encode() + b"\n"
            with lock:
                while data:
                    data = data[os.write(pipe, data) :]

        room = Room(request, launch, send, address)
        for check in checks:
            room.check = check.name
            send({"begin": check.name})
            if not _run(check, room):
                send({"stop": f"failed in check {check.name!r}"})
                break
            send({"end": check.name})
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def _run(check: Check, room: Room) -> bool:
    """Run one check; whether the next one can follow."""
    try:
        check.run(room)
        return True
    except ConfigError as error:
        for sentence in error.problems:
            room.problem(sentence)
    except UserError as error:
        room.problem(str(error))
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        place = _last_place(error)
        room.problem(f"stopped by {type(error).__name__}: {first}", place=place)
    return check.scope != "job"


def _last_place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
