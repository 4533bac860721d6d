"""Works, and the order in which a group runs its collectives.

All collectives of a group run in the order of the calls, one at a time. A synchronous one runs in the calling thread.
An asynchronous one is queued: a worker thread takes it, or the thread that waits for it does, whoever is first. So the
caller may go on to another collective first, and one that waits at once pays for no change of thread.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from smp.comm import modes


class _Work(Work):
    """Common part of works.

    Args:
        tensors: what the collective writes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = ()):
        super().__init__()
        self._tensors = list(tensors)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()


class DoneWork(_Work):
    """The work of a collective that ended before its call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future:
        future: Future = Future()
        future.set_result(self._tensors)
        return future


DONE = DoneWork()


class QueuedWork(_Work):
    """The work of a collective that may not have begun."""

    def __init__(self, queue: WorkQueue, run: Callable[[], None], tensors: Sequence[torch.Tensor]):
        super().__init__(tensors)
        self._queue, self._run = queue, run
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._future: Future | None = None
        self._lock = threading.Lock()

    def execute(self) -> None:
        """Run the collective. Only the queue calls this."""
        try:
            # Its call was shown; which thread comes to run it is chance.
            modes.hidden(self._run) if modes.active() else self._run()
        except BaseException as error:  # whoever waits is told; the worker must live for the next
            self._error = error
        del self._run  # and with it what the call holds
        with self._lock:
            self._done.set()
            future = self._future
        if future is not None:
            # In a separate thread: callbacks may call collectives and wait for them, and this one holds the turn.
            threading.Thread(target=self._complete, args=(future,), daemon=True).start()

    def _complete(self, future: Future) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        # torch's own calls pass 0 for "no limit of yours".
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._done.is_set():
            if seconds <= 0:
                self._queue.help(self._done)
            elif not self._done.wait(seconds):  # to help could take longer
                raise RuntimeError(f"smddp: the operation has not ended within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> Future:
        with self._lock:
            if self._future is None:
                self._future = Future()
                if not self._done.is_set():
                    return self._future
            else:
                return self._future
        self._complete(self._future)
        return self._future


class GpuWork(_Work):
    """An asynchronous collective: whoever waits lets its current stream wait."""

    def __init__(self, stream: torch.cuda.Stream, tensors: Sequence[torch.Tensor]):
        super().__init__(tensors)
        self._stream, self._event = stream, stream.record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._event.query()

    def get_future(self) -> Future:
        future: Future = Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):  # its callbacks wait for this stream
            future.set_result(self._tensors)
        return future


class WorkQueue:
    """A group's collectives, one at a time and in the order of their calls.

    Args:
        name: of the worker thread.
    """

    def __init__(self, name: str):
        self._name = name
        self._turn = threading.Lock()  # held while a collective runs
        self._waiting: collections.deque[QueuedWork] = collections.deque()
        self._wake = threading.Semaphore(0)
        self._worker: threading.Thread | None = None
        self._stopped = False

    def run(self, collective: Callable[[], Any]) -> None:
        """Run a synchronous collective now, after those that wait."""
        with self._turn:
            while self._waiting:
                self._waiting.popleft().execute()
            collective()

    def submit(self, collective: Callable[[], None], tensors: Sequence[torch.Tensor]) -> QueuedWork:
        """Queue an asynchronous one."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._worker.start()
        work = QueuedWork(self, collective, tensors)
        self._waiting.append(work)
        self._wake.release()
        return work

    @property
    def idle(self) -> bool:
        """True if no collective waits or runs."""
        return not self._waiting and not self._turn.locked()

    def help(self, done: threading.Event) -> None:
        """Run what waits until ``done``, or until another thread has set it."""
        with self._turn:
            while not done.is_set() and self._waiting:
                self._waiting.popleft().execute()

    def stop(self, *, join: bool) -> None:
        """Run what waits, then let the worker end; with ``join``, wait for that."""
        if self._worker is not None and not self._stopped:
            self._stopped = True
            self._wake.release()
            if join and threading.current_thread() is not self._worker:
                self._worker.join()

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            with self._turn:
                if self._waiting:
                    self._waiting.popleft().execute()
                elif self._stopped:
                    return
