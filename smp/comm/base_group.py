"""Common path of all collectives of the backend: inner backends, order, agreement, counting, failing.

A Python ``ProcessGroup`` replaces the whole group, so it registers the inner backends on itself: whatever is not
overridden is dispatched to them by the base class. What is overridden calls them through a plain group: the base class
would dispatch a call made in a closure to the override again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from smp.comm import cuda, modes, report
from smp.comm.arena import LastOperation, Mismatch, sign
from smp.comm.connect import Collectives, Connection, join
from smp.comm.tensors import nbytes, plain_cpu
from smp.comm.work_queue import DONE, DoneWork, QueuedWork, WorkQueue

_SIGNATURES_KEPT = 4096

Run = Callable[[Collectives, bytes], None]


def _path(tensors: Sequence[torch.Tensor]) -> str:
    """Return the inner backend for these tensors."""
    return "nccl" if any(t.is_cuda for t in tensors) else "gloo"


class BaseGroup(ProcessGroup):
    """A group with inner backends, shared memory, and one order for all its collectives.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        pg_options: ``ProcessGroupNCCL.Options`` for the inner NCCL backend, or None.
    """

    def __init__(self, options: Any, pg_options: Any = None):
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg] # the bound form of a subclass takes no store
        self._rank, self._size, self._pid = rank, size, os.getpid()
        self._store = options.store
        self.label = str(options.group_id)
        self._register_inner(options, pg_options)
        self._join = join(options)
        self._connection: Connection | None = None
        self._queue = WorkQueue(f"smddp-{self.label}")
        self._number = 0  # collectives so far
        self._broken: BaseException | None = None
        self._gpu: cuda.GpuCollectives | None = None
        self._coalescing = False
        self._signatures: dict[tuple[Any, ...], bytes] = {}
        weakref.finalize(self, self._queue.stop, join=False)
        report.watch(self)

    def _register_inner(self, options: Any, pg_options: Any) -> None:
        rank, size = self._rank, self._size
        self._plain = ProcessGroup(self._store, rank, size)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", self._store), rank, size, timeout=options.timeout)
        self._limits = gloo.options  # torch's ways to set a group's timeout all write it here
        for group in (self, self._plain):
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        if self.has_nccl:
            nccl_options = pg_options or dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = options.timeout
            # As torch does: NCCL registers its communicator for symmetric memory under the name, and guesses a rank's
            # GPU from its global rank.
            nccl_options.group_name = self.label
            nccl_options.global_ranks_in_group = list(options.global_ranks_in_group)
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", self._store), rank, size, nccl_options)
            for group in (self, self._plain):
                group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)

    # --- what torch asks of a group

    def getBackendName(self) -> str:
        return "smddp"

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def seconds(self) -> float:
        """Timeout of a collective."""
        return self._limits._timeout.total_seconds()

    def shutdown(self) -> None:
        """Finish what is queued and let go of the shared memory."""
        self._queue.stop(join=True)
        self._connection = self._gpu = None
        self._broken = self._broken or RuntimeError(f"smddp: group {self.label} has been destroyed")
        super().shutdown()

    def abort(self) -> None:
        """Let the peers know that this rank is gone, without waiting for anything."""
        self.fail(RuntimeError("the group was aborted"))
        super().abort()

    def last_operations(self) -> list[LastOperation]:
        """Return the latest collective of every rank of this group on this host."""
        connection = self._connection
        if connection is None or connection.arena is None:
            return []
        return [connection.arena.last_operation(r) for r in range(connection.arena.size)]

    @property
    def gpu_bytes(self) -> int:
        """Bytes of this rank's GPU that the group keeps."""
        return 0 if self._gpu is None else self._gpu.nbytes

    def connect(self) -> Connection:
        """Make the group's shared memory now, in the order of its collectives."""
        self._queue.run(lambda: self.connection)
        return self.connection

    @property
    def connection(self) -> Connection:
        """The group's shared memory, made at the first use: a collective call."""
        if self._connection is None:
            self._connection = self._join(timedelta(seconds=self.seconds))
        return self._connection

    def gpu(self, device: torch.device) -> cuda.GpuCollectives:
        """Return the group's collectives of GPU tensors, made at the first call, which is collective."""
        if self._gpu is None:
            limits, gloo = self._limits, self._plain._get_backend(torch.device("cpu"))
            with self.failing():
                self._gpu = cuda.GpuCollectives(
                    self.connect(), self._rank, device, gloo=gloo, seconds=lambda: limits._timeout.total_seconds()
                )
        return self._gpu

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = True
        super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        self._coalescing = False
        return super()._end_coalescing(device)

    # --- running one

    def launch(
        self, operation: str, size: int, key: tuple[Any, ...], run: Run, inner: Callable[[], Any], *,
        tensors: Sequence[torch.Tensor] = (), opts: Any = None, async_op: bool | None = None, path: str = "",
    ) -> Any:  # fmt: skip
        """Run or queue one collective of ours.

        Args:
            size: bytes, for the report.
            key: what all ranks must have in common.
            run: the collective, given the means and the signature.
            inner: the same by the inner backend, for a group that cannot share memory, and for dispatch modes.
            tensors: the result.
            opts: torch's options; ``asyncOp`` and ``timeout`` are read.
            async_op: overrides that of ``opts``.
            path: for the report, if it is not the group's usual one.
        """
        self._check_usable()
        if modes.active():
            again = functools.partial(self.launch, operation, size, key, run, inner)
            return modes.shown(inner, lambda: again(tensors=tensors, opts=opts, async_op=async_op, path=path))
        connection = self._connection
        if connection is not None and connection.collectives is None and self._queue.idle:
            report.count(operation, size, "gloo", connection.why)
            return inner()
        span = report.record(operation, size)
        if span is not None:
            span.__enter__()  # here, whichever thread ends it: a profiler looks at the threads that it was started in

        def collective() -> None:
            try:
                self._perform(operation, size, key, run, inner, opts, path)
            finally:
                if span is not None:
                    span.__exit__(None, None, None)

        if async_op is None:
            # C++ callers (functional collectives, DDP) leave asyncOp at its default, true.
            async_op = opts is None or opts.asyncOp
        if async_op:
            return self._queue.submit(collective, tensors)
        self._queue.run(collective)
        return DONE

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise dist.DistBackendError(f"smddp: group {self.label} belongs to process {self._pid}, which was forked")
        if self._broken is not None:
            raise dist.DistBackendError(f"smddp: group {self.label} cannot be used any more: {self._broken}")

    def _perform(
        self, operation: str, size: int, key: tuple[Any, ...], run: Run, inner: Callable[[], Any], opts: Any,
        path: str,
    ) -> None:  # fmt: skip
        try:
            connection = self._connection or self.connection
            if connection.collectives is None:
                report.count(operation, size, "gloo", connection.why)
                inner().wait()
                return
            self._number += 1
            # Unset is a negative time.
            own = opts.timeout.total_seconds() if opts is not None else 0.0
            connection.start(operation, self._number, size, own if own > 0 else self.seconds)
            # In this mode every tensor can be written, outside it one made in it cannot; threads are outside.
            with torch.inference_mode():
                run(connection.collectives, self._signatures.get(key) or self._sign(key))
            connection.end()
            report.count(operation, size, path or connection.path)
        except Mismatch:
            raise  # on every rank, at the same call: the group goes on
        except BaseException as error:
            self.fail(error)
            raise

    def _sign(self, key: tuple[Any, ...]) -> bytes:
        if len(self._signatures) >= _SIGNATURES_KEPT:
            self._signatures.clear()
        signature = self._signatures[key] = sign(" ".join(str(part) for part in key if part is not None))
        return signature

    def fail(self, error: BaseException) -> None:
        """Give the group up: this rank's next call raises, and the peers that wait for it are told."""
        self._broken = self._broken or error
        if self._connection is not None:
            self._connection.fail(f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Give the group up if what is done here fails."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def _refuse(self, operation: str, problem: str, opts: Any) -> Any:
        """Raise for wrong arguments, on the other ranks too: they would wait for this one."""

        def run(collectives: Collectives, signature: bytes) -> None:
            collectives.agree(signature)

        def nothing() -> Any:
            return DONE

        if self._size > 1:
            key = (operation, "with wrong arguments:", problem)
            modes.hidden(lambda: self.launch(operation, 0, key, run, nothing, opts=opts).wait())
        raise ValueError(f"smddp: {operation}: {problem}")

    def _count(self, operation: str, tensors: Sequence[torch.Tensor]) -> None:
        """Count a message that the base class sends or receives."""
        self._check_usable()
        report.count(operation, nbytes(tensors[0]), _path(tensors), "left to it")

    def _inner(self, operation: str, tensors: Sequence[torch.Tensor], why: str, call: Callable[[], Any]) -> Any:
        """Hand a collective to the inner backend, after those of ours that are queued."""
        self._check_usable()
        size = sum(nbytes(t) for t in tensors)
        path = _path(tensors)

        def collective() -> None:
            report.count(operation, size, path, why)
            call().wait()

        # NCCL's must be called in this thread: it waits for the thread's current stream.
        if path == "gloo" and not self._queue.idle:
            submit = functools.partial(self._queue.submit, collective, tensors)
            return modes.shown(call, submit) if modes.active() else submit()
        report.count(operation, size, path, why)
        return call()

    def _gather_on_gpu(self, output: torch.Tensor, source: torch.Tensor, call: Callable[[], Any], opts: Any) -> Any:
        """Gather tensors on GPUs by copy engine, or let NCCL do it by ``call``."""
        size = nbytes(source)
        self._check_usable()
        gpu = self.gpu(source.device)
        if why := gpu.why_not(source, coalescing=self._coalescing):
            return self._inner("all_gather", (source, output), why, call)
        start = functools.partial(gpu.all_gather, output, source, async_op=opts is None or opts.asyncOp)
        with report.record("all_gather", size) or contextlib.nullcontext():
            work = modes.shown(call, start) if modes.active() else start()
        report.count("all_gather", size, cuda.PATH)
        return work

    # --- by the inner backends

    def _elsewhere(
        self, operation: str, tensors: Sequence[torch.Tensor], call: Callable[[], Any], reduction: str | None = None
    ) -> Any:
        """Hand over a collective of ours whose tensors are not for shared memory. All ranks come here, or none."""
        devices = {t.device.type for t in tensors}
        if devices != {"cpu"}:
            why = f"{'/'.join(sorted(devices))} tensors"
        elif plain_cpu(tensors):
            why = f"{reduction} of {tensors[0].dtype}" if reduction else "several tensors at once"
        else:
            why = "not plain dense tensors"
        return self._inner(operation, tensors, why, call)

    def _each(
        self, operation: str, tensors: Sequence[torch.Tensor], method: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]], inner: Callable[..., Any], *arguments: Any,
    ) -> Any:  # fmt: skip
        """Run several collectives as one work, which ends with the last of them, as all run in order.

        Args:
            tensors: one of each call, all on one device.
            calls: the arguments of each.
            inner: all at once by the inner backend, for tensors on GPUs and for dispatch modes.
            arguments: of ``inner``; None is left out.
        """
        at_once = functools.partial(inner, *(a for a in arguments if a is not None))
        if any(t.is_cuda for t in tensors):
            return self._inner(operation, tensors, "in a coalesced batch", at_once)
        if modes.active():
            again = functools.partial(self._each, operation, tensors, method, calls, inner)
            return modes.shown(at_once, again)
        works = [method(*call) for call in calls]
        if all(isinstance(work, DoneWork) for work in works):
            return DONE

        def wait() -> None:
            for work in works:
                work.wait()

        return self._queue.submit(wait, [t for work in works if isinstance(work, QueuedWork) for t in work.result()])
