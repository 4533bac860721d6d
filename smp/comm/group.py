"""The process group ``smddp``: one of torch's, with collectives of our own in front of gloo and NCCL.

A Python ``ProcessGroup`` replaces the whole group, so it registers the inner backends on itself: whatever is not
overridden here is dispatched to them by the base class. What is overridden calls them through a plain group: the base
class would dispatch a call made in a closure to the override again. torch 2.13 calls ``all_gather_single`` and the
like, older versions ``_allgather_base``; both names are bound.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BarrierOptions, BroadcastOptions, ReduceScatterOptions
from torch.distributed import ProcessGroup, ReduceOp

from smp.comm import report
from smp.comm.arena import SIGNATURE_BYTES, LastOperation, Mismatch, sign
from smp.comm.connect import Collectives, Connection, join
from smp.comm.order import DoneWork, Order, QueuedWork
from smp.comm.reduction import Reduction, reduction_name, supported
from smp.comm.tensors import Output, check_list, check_single, flat, nbytes, plain_cpu

_DONE = DoneWork()
_SIGNATURES_KEPT = 4096

Run = Callable[[Collectives, bytes], None]


class SmddpGroup(ProcessGroup):
    """A group of backend ``smddp``; made by ``init_process_group`` and ``new_group``.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        pg_options: ``ProcessGroupNCCL.Options`` for the inner NCCL backend, or None.
    """

    def __init__(self, options: Any, pg_options: Any = None):
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._rank, self._size, self._pid = rank, size, os.getpid()
        self._store, self._seconds = options.store, options.timeout.total_seconds()
        self.label = str(options.group_id)
        self._register_inner(options, pg_options)
        self._join = join(options)
        self._connection: Connection | None = None
        self._order = Order(f"smddp-{self.label}")
        self._number = 0  # collectives so far
        self._broken: BaseException | None = None
        self._signatures: dict[tuple[Any, ...], bytes] = {}
        weakref.finalize(self, self._order.stop, join=False)
        report.watch(self)

    def _register_inner(self, options: Any, pg_options: Any) -> None:
        rank, size = self._rank, self._size
        self._plain = ProcessGroup(self._store, rank, size)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", self._store), rank, size, timeout=options.timeout)
        for group in (self, self._plain):
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl_options = pg_options or dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = options.timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", self._store), rank, size, nccl_options)
            for group in (self, self._plain):
                group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)

    # --- what torch asks of a group

    def getBackendName(self) -> str:
        return "smddp"

    def get_group_store(self) -> dist.Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        super().set_timeout(timeout)

    def shutdown(self) -> None:
        """Finish what is queued and let go of the shared memory."""
        self._order.stop(join=True)
        self._connection = None
        self._broken = self._broken or RuntimeError(f"smddp: group {self.label} has been destroyed")
        super().shutdown()

    def abort(self) -> None:
        """Let the peers know that this rank is gone, without waiting for anything."""
        self._fail(RuntimeError("the group was aborted"))
        super().abort()

    def last_operations(self) -> list[LastOperation]:
        """The latest collective of every rank of this group on this host."""
        connection = self._connection
        if connection is None or connection.arena is None:
            return []
        return [connection.arena.last_operation(r) for r in range(connection.arena.size)]

    @property
    def connection(self) -> Connection:
        """The group's shared memory, made at the first use: a collective call."""
        if self._connection is None:
            self._connection = self._join(timedelta(seconds=self._seconds))
        return self._connection

    # --- running one

    def launch(
        self, operation: str, size: int, key: tuple[Any, ...], run: Run, inner: Callable[[], Any], *,
        tensors: Sequence[torch.Tensor] = (), opts: Any = None,
    ) -> Any:  # fmt: skip
        """Run or queue one collective of ours.

        Args:
            operation: its name.
            size: bytes, for the report.
            key: what all ranks must have in common.
            run: the collective, given the means and the signature.
            inner: the same by the inner backend, for a group that cannot share memory.
            tensors: the result.
            opts: torch's options; ``asyncOp`` and ``timeout`` are read.
        """
        if self._broken is not None:
            raise dist.DistBackendError(f"smddp: group {self.label} cannot be used any more: {self._broken}")
        if self._pid != os.getpid():
            raise dist.DistBackendError(f"smddp: group {self.label} belongs to process {self._pid}, which was forked")
        connection = self._connection
        if connection is not None and connection.collectives is None and self._order.idle:
            report.count(operation, size, "gloo", connection.why)
            return inner()
        timeout = opts.timeout.total_seconds() if opts is not None and opts.timeout.total_seconds() > 0 else 0.0

        def collective() -> None:
            self._perform(operation, size, key, run, inner, timeout)

        # C++ callers (functional collectives, DDP) leave asyncOp at its default, true.
        if opts is None or opts.asyncOp:
            return self._order.submit(collective, tensors)
        self._order.run(collective)
        return _DONE

    def _perform(
        self, operation: str, size: int, key: tuple[Any, ...], run: Run, inner: Callable[[], Any], timeout: float
    ) -> None:
        span = report.record(operation, size)
        if span is not None:
            span.__enter__()
        try:
            connection = self._connection or self.connection
            if connection.collectives is None:
                report.count(operation, size, "gloo", connection.why)
                inner().wait()
                return
            self._number += 1
            connection.start(operation, self._number, size, timeout or self._seconds)
            run(connection.collectives, self._signatures.get(key) or self._sign(key))
            connection.end()
            report.count(operation, size, connection.path)
        except Mismatch:
            raise  # on every rank, at the same place: the group goes on
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            if span is not None:
                span.__exit__(None, None, None)

    def _sign(self, key: tuple[Any, ...]) -> bytes:
        if len(self._signatures) >= _SIGNATURES_KEPT:
            self._signatures.clear()
        signature = self._signatures[key] = sign(" ".join(str(part) for part in key if part is not None))
        assert len(signature) == SIGNATURE_BYTES
        return signature

    def _fail(self, error: BaseException) -> None:
        self._broken = self._broken or error
        if self._connection is not None and self._connection.arena is not None:
            self._connection.arena.fail(f"{type(error).__name__}: {error}")

    def _refuse(self, operation: str, problem: str, opts: Any) -> Any:
        """Raise for wrong arguments, on the other ranks too: they would wait for this one."""

        def run(collectives: Collectives, signature: bytes) -> None:
            collectives.agree(signature)

        def nothing() -> Any:
            return _DONE

        if self._size > 1:
            work = self.launch(operation, 0, (operation, "with wrong arguments:", problem), run, nothing, opts=opts)
            work.wait()
        raise ValueError(f"smddp: {operation}: {problem}")

    def _inner(self, operation: str, tensors: Sequence[torch.Tensor], why: str, call: Callable[[], Any]) -> Any:
        """Hand a collective to the inner backend, after those of ours that are queued."""
        size = sum(nbytes(t) for t in tensors)
        path = "nccl" if any(t.device.type == "cuda" for t in tensors) else "gloo"

        def collective() -> None:
            report.count(operation, size, path, why)
            call().wait()

        if not self._order.idle:
            return self._order.submit(collective, tensors)
        report.count(operation, size, path, why)
        return call()

    # --- all_gather

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        base = _either(self._plain, "all_gather_single", "_allgather_base")
        arguments = (output, input) if opts is None else (output, input, opts)
        if not plain_cpu((output, input)):
            return self._elsewhere("all_gather", (output, input), lambda: base(*arguments))
        if problem := check_single(output, input, self._size, "output", "input"):
            return self._refuse("all_gather", problem, opts)

        def run(collectives: Collectives, signature: bytes) -> None:
            out, source = Output(output, keep=False), flat(input)
            part, start = nbytes(source), out.flat.data_ptr()
            places = [start + r * part for r in range(self._size)]
            collectives.all_gather(signature, source.data_ptr(), [part] * self._size, places)
            out.finish()

        key = ("all_gather", input.dtype, input.numel())
        return self.launch("all_gather", nbytes(input), key, run, lambda: base(*arguments), tensors=[output], opts=opts)

    _allgather_base = all_gather_single

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        if isinstance(input_tensors, torch.Tensor):
            output_tensors, input_tensors, opts = [output_tensors], [input_tensors], None
        outputs, source = output_tensors[0], input_tensors[0]
        base, arguments = self._plain.allgather, (output_tensors, input_tensors, *(() if opts is None else (opts,)))
        if len(input_tensors) != 1 or not plain_cpu((*outputs, source)):
            return self._elsewhere("all_gather", (*outputs, source), lambda: base(*arguments))
        if problem := check_list(outputs, source, self._size, self._rank, "the output list"):
            return self._refuse("all_gather", problem, opts)
        sizes = tuple(t.numel() for t in outputs)

        def run(collectives: Collectives, signature: bytes) -> None:
            outs, mine = [Output(t, keep=False) for t in outputs], flat(source)
            places = [out.flat.data_ptr() for out in outs]
            collectives.all_gather(signature, mine.data_ptr(), [nbytes(t) for t in outputs], places)
            for out in outs:
                out.finish()

        # Equal sizes are written as one number, as all_gather_single does: the two may meet.
        key = ("all_gather", source.dtype, sizes[0] if len(set(sizes)) == 1 else sizes)
        return self.launch("all_gather", nbytes(source), key, run, lambda: base(*arguments), tensors=outputs, opts=opts)

    def all_gather_single_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        return self._each([(o, i, opts) for o, i in zip(output_lists, input_list, strict=True)], self.all_gather_single)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        # output_lists[rank][i] is of input i.
        calls = [([[ranks[i] for ranks in output_lists]], [source], opts) for i, source in enumerate(input_list)]
        return self._each(calls, self.allgather)

    # --- reduce_scatter

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        base = _either(self._plain, "reduce_scatter_single", "_reduce_scatter_base")
        opts = opts or ReduceScatterOptions()
        name = reduction_name(opts.reduceOp)
        if not plain_cpu((output, input)) or not supported(name, input.dtype):
            return self._elsewhere("reduce_scatter", (output, input), lambda: base(output, input, opts), name)
        if problem := check_single(input, output, self._size, "input", "output"):
            return self._refuse("reduce_scatter", problem, opts)

        def run(collectives: Collectives, signature: bytes) -> None:
            parts = list(flat(input).view(self._size, output.numel()))
            self._reduce_scatter(collectives, signature, parts, Output(output, keep=False), name)

        key = ("reduce_scatter", name, input.dtype, output.numel())
        return self.launch(
            "reduce_scatter", nbytes(output), key, run, lambda: base(output, input, opts), tensors=[output], opts=opts
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors, opts = [output_tensors], [input_tensors], _reduce_scatter_options(opts)
        output, inputs = output_tensors[0], input_tensors[0]
        opts = opts or ReduceScatterOptions()
        name, base = reduction_name(opts.reduceOp), self._plain.reduce_scatter

        def inner() -> Any:
            return base(output_tensors, input_tensors, opts)

        if len(output_tensors) != 1 or not plain_cpu((*inputs, output)) or not supported(name, output.dtype):
            return self._elsewhere("reduce_scatter", (*inputs, output), inner, name)
        if problem := check_list(inputs, output, self._size, self._rank, "the input list"):
            return self._refuse("reduce_scatter", problem, opts)
        sizes = tuple(t.numel() for t in inputs)

        def run(collectives: Collectives, signature: bytes) -> None:
            self._reduce_scatter(collectives, signature, [flat(t) for t in inputs], Output(output, keep=False), name)

        key = ("reduce_scatter", name, output.dtype, sizes[0] if len(set(sizes)) == 1 else sizes)
        return self.launch("reduce_scatter", nbytes(output), key, run, inner, tensors=[output], opts=opts)

    def _reduce_scatter(
        self, collectives: Collectives, signature: bytes, parts: list[torch.Tensor], out: Output, name: str
    ) -> None:
        reduction = Reduction(name, self._size)
        collectives.reduce_scatter(signature, parts, out.flat, reduction)
        reduction.finish(out.flat)
        out.finish()

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        calls = [(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return self._each(calls, self.reduce_scatter_single)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- all_reduce, broadcast, barrier

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if opts is None or not hasattr(opts, "reduceOp"):
            opts = _all_reduce_options(opts)
        tensor, base = tensors[0], self._plain.allreduce
        name = reduction_name(opts.reduceOp)
        if len(tensors) != 1 or not plain_cpu(tensors) or not supported(name, tensor.dtype):
            return self._elsewhere("all_reduce", tensors, lambda: base(tensors, opts), name)

        def run(collectives: Collectives, signature: bytes) -> None:
            out, reduction = Output(tensor, keep=True), Reduction(name, self._size)
            collectives.all_reduce(signature, out.flat, reduction)
            reduction.finish(out.flat)
            out.finish()

        key = ("all_reduce", name, tensor.dtype, tensor.numel())
        return self.launch(
            "all_reduce", nbytes(tensor), key, run, lambda: base(tensors, opts), tensors=tensors, opts=opts
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._each([([t], opts) for t in tensors], self.allreduce)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if not hasattr(opts, "rootRank"):
            opts = _broadcast_options(opts)
        tensor, base, root = tensors[0], self._plain.broadcast, opts.rootRank
        if len(tensors) != 1 or not plain_cpu(tensors):
            return self._elsewhere("broadcast", tensors, lambda: base(tensors, opts))

        def run(collectives: Collectives, signature: bytes) -> None:
            out = Output(tensor, keep=self._rank == root)
            collectives.broadcast(signature, out.flat.data_ptr(), nbytes(tensor), root)
            if self._rank != root:
                out.finish()

        key = ("broadcast", tensor.dtype, tensor.numel(), f"from {root}")
        return self.launch(
            "broadcast", nbytes(tensor), key, run, lambda: base(tensors, opts), tensors=tensors, opts=opts
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        base = self._plain.barrier
        opts = opts if hasattr(opts, "device_ids") else BarrierOptions()
        if torch.device("cuda") in self._device_types:
            # NCCL's also waits for this GPU's stream.
            return self._inner("barrier", (), "of GPUs", lambda: base(opts))
        return self.launch("barrier", 0, ("barrier",), lambda c, s: c.barrier(s), lambda: base(opts), opts=opts)

    # --- by the inner backends

    def _elsewhere(
        self, operation: str, tensors: Sequence[torch.Tensor], call: Callable[[], Any], reduction: str | None = None
    ) -> Any:
        """A collective of ours whose tensors are not for shared memory. All ranks come here, or none."""
        devices = {t.device.type for t in tensors}
        if devices != {"cpu"}:
            why = f"{'/'.join(sorted(devices))} tensors"
        elif plain_cpu(tensors):
            why = f"{reduction} of {tensors[0].dtype}" if reduction else "several tensors at once"
        else:
            why = "not plain dense tensors"
        return self._inner(operation, tensors, why, call)

    def _each(self, calls: Sequence[tuple[Any, ...]], method: Callable[..., Any]) -> Any:
        """Several collectives as one work. The last ends last, as all run in order."""
        works = [method(*call) for call in calls]
        if not works or all(isinstance(work, DoneWork) for work in works):
            return _DONE

        def wait() -> None:
            for work in works:
                work.wait()

        tensors = [tensor for work in works if isinstance(work, QueuedWork) for tensor in work.result()]
        return self._order.submit(wait, tensors)

    def reduce(self, tensors: Any, *arguments: Any) -> Any:
        base = self._plain.reduce
        return self._inner("reduce", _listed(tensors), "left to it", lambda: base(tensors, *arguments))

    def gather(self, outputs: Any, inputs: Any, *arguments: Any) -> Any:
        base = self._plain.gather
        return self._inner("gather", _listed(inputs), "left to it", lambda: base(outputs, inputs, *arguments))

    def scatter(self, outputs: Any, inputs: Any, *arguments: Any) -> Any:
        base = self._plain.scatter
        return self._inner("scatter", _listed(outputs), "left to it", lambda: base(outputs, inputs, *arguments))

    def alltoall(self, outputs: Any, inputs: Any, *arguments: Any) -> Any:
        base = self._plain.alltoall
        return self._inner("all_to_all", _listed(inputs), "left to it", lambda: base(outputs, inputs, *arguments))

    def all_to_all_single(self, output: Any, input: Any, *arguments: Any) -> Any:
        base = _either(self._plain, "all_to_all_single", "alltoall_base")
        return self._inner("all_to_all", [input], "left to it", lambda: base(output, input, *arguments))

    alltoall_base = all_to_all_single

    def send(self, tensors: Any, *arguments: Any) -> Any:
        report.count("send", nbytes(tensors[0]), _device_path(tensors[0]), "left to it")
        return super().send(tensors, *arguments)

    def recv(self, tensors: Any, *arguments: Any) -> Any:
        report.count("recv", nbytes(tensors[0]), _device_path(tensors[0]), "left to it")
        return super().recv(tensors, *arguments)


def _device_path(tensor: torch.Tensor) -> str:
    return "nccl" if tensor.device.type == "cuda" else "gloo"


def _listed(tensors: Any) -> Sequence[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _either(group: ProcessGroup, name: str, older: str) -> Callable[..., Any]:
    """torch 2.13's method, or what it was called before."""
    return getattr(group, name if hasattr(group, name) else older)


def _all_reduce_options(op: Any) -> Any:
    opts = AllreduceOptions()
    if op is not None:
        opts.reduceOp = op if isinstance(op, ReduceOp) else ReduceOp(op)
    opts.asyncOp = False
    return opts


def _reduce_scatter_options(op: Any) -> Any:
    opts = ReduceScatterOptions()
    if op is not None:
        opts.reduceOp = op if isinstance(op, ReduceOp) else ReduceOp(op)
    return opts


def _broadcast_options(root: Any) -> Any:
    opts = BroadcastOptions()
    opts.rootRank = root or 0
    return opts


def create(options: Any, pg_options: Any = None) -> SmddpGroup:
    """Make a group: what torch calls for ``backend="smddp"``."""
    return SmddpGroup(options, pg_options)
