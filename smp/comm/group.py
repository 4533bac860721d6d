"""The process group ``smddp``: one of torch's, with smp's collectives in front of gloo and NCCL.

torch 2.13 calls ``all_gather_single`` and the like, older versions ``_allgather_base``; both names are bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, BarrierOptions, BroadcastOptions, ReduceScatterOptions
from torch.distributed import ProcessGroup, ReduceOp

from smp.comm.base_group import BaseGroup
from smp.comm.connect import Collectives
from smp.comm.reduction import Reduction, reduction_name, supported
from smp.comm.tensors import (
    Output,
    check_list,
    check_outputs,
    check_single,
    dense,
    flat,
    nbytes,
    overlap,
    plain_cpu,
    plain_gpu,
)


def either(group: ProcessGroup, name: str, older: str = "") -> Callable[..., Any]:
    """Return torch 2.13's method, or the one by the older name."""
    return getattr(group, name if hasattr(group, name) else older)


def _options(kind: Callable[[], Any], op: Any) -> Any:
    """Return the options of a call that gives only its reduction."""
    opts = kind()
    if op is not None:
        opts.reduceOp = op if isinstance(op, ReduceOp) else ReduceOp(op)
    return opts


def _left(operation: str, name: str, older: str = "", *, given: int = 0) -> Callable[..., Any]:
    """Make a method that leaves a collective to the inner backend; argument number ``given`` is counted."""

    def method(self: BaseGroup, *arguments: Any) -> Any:
        base, tensors = either(self._plain, name, older), arguments[given]
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return self._inner(operation, tensors, "left to it", lambda: base(*arguments))

    return method


class SmddpGroup(BaseGroup):
    """A group of backend ``smddp``; made by ``init_process_group`` and ``new_group``."""

    # --- all_gather

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        base = either(self._plain, "all_gather_single", "_allgather_base")
        arguments = (output, input) if opts is None else (output, input, opts)
        problem = check_single(output, input, self._size, "output", "input") or check_outputs((output,))
        if not plain_cpu((output, input)):
            if problem is None and plain_gpu((output, input)):
                return self._gather_on_gpu(output, input, lambda: base(*arguments), opts)
            return self._elsewhere("all_gather", (input, output), lambda: base(*arguments))
        if problem:
            return self._refuse("all_gather", problem, opts)

        def run(collectives: Collectives, signature: bytes) -> None:
            out, source = Output(output, keep=False), dense(input)
            start = out.memory.data_ptr()
            addresses = [start + r * part for r in range(self._size)]
            if overlap(source, out.memory) and source.data_ptr() != addresses[self._rank]:
                source = source.clone()
            collectives.all_gather(signature, source.data_ptr(), [part] * self._size, addresses)
            out.finish()

        part = nbytes(input)
        key = ("all_gather", input.dtype, input.numel())
        return self.launch("all_gather", part, key, run, lambda: base(*arguments), tensors=[output], opts=opts)

    _allgather_base = all_gather_single

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:  # type: ignore[override]
        if isinstance(input_tensors, torch.Tensor):
            output_tensors, input_tensors, opts = [output_tensors], [input_tensors], None
        outputs, source = output_tensors[0], input_tensors[0]
        base, arguments = self._plain.allgather, (output_tensors, input_tensors, *(() if opts is None else (opts,)))
        if len(input_tensors) != 1 or not plain_cpu((*outputs, source)):
            return self._elsewhere("all_gather", (*outputs, source), lambda: base(*arguments))
        problem = check_list(outputs, source, self._size, self._rank, "the output list") or check_outputs(outputs)
        if problem:
            return self._refuse("all_gather", problem, opts)
        sizes = tuple(t.numel() for t in outputs)

        def run(collectives: Collectives, signature: bytes) -> None:
            outs, mine = [Output(t, keep=False) for t in outputs], dense(source)
            addresses = [out.memory.data_ptr() for out in outs]
            if any(overlap(mine, out.memory) for r, out in enumerate(outs) if r != self._rank):
                mine = mine.clone()
            collectives.all_gather(signature, mine.data_ptr(), [nbytes(t) for t in outputs], addresses)
            for out in outs:
                out.finish()

        # Equal sizes are written as one number, as all_gather_single does: the two may meet.
        key = ("all_gather", source.dtype, sizes[0] if len(set(sizes)) == 1 else sizes)
        return self.launch("all_gather", nbytes(source), key, run, lambda: base(*arguments), tensors=outputs, opts=opts)

    def all_gather_single_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        base = either(self._plain, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        calls = [(o, i, opts) for o, i in zip(output_lists, input_list, strict=True)]
        return self._each("all_gather", input_list, self.all_gather_single, calls, base, output_lists, input_list, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        # output_lists[rank][i] is of input i.
        calls = [([[ranks[i] for ranks in output_lists]], [source], opts) for i, source in enumerate(input_list)]
        base = self._plain.allgather_coalesced
        return self._each("all_gather", input_list, self.allgather, calls, base, output_lists, input_list, opts)

    # --- reduce_scatter

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        base = either(self._plain, "reduce_scatter_single", "_reduce_scatter_base")
        opts = opts or ReduceScatterOptions()
        name = reduction_name(opts.reduceOp)
        problem = check_single(input, output, self._size, "input", "output") or check_outputs((output,))
        if not plain_cpu((output, input)) or not supported(name, input.dtype):
            return self._elsewhere("reduce_scatter", (output, input), lambda: base(output, input, opts), name)
        if problem:
            return self._refuse("reduce_scatter", problem, opts)

        def run(collectives: Collectives, signature: bytes) -> None:
            parts = list(flat(input).view(self._size, output.numel()).unbind())
            self._reduce_scatter(collectives, signature, parts, Output(output, keep=False), name)

        key = ("reduce_scatter", name, input.dtype, output.numel())
        return self.launch(
            "reduce_scatter", nbytes(output), key, run, lambda: base(output, input, opts), tensors=[output], opts=opts
        )

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:  # type: ignore[override]
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors, opts = (
                [output_tensors],
                [input_tensors],
                _options(ReduceScatterOptions, opts),
            )
        output, inputs = output_tensors[0], input_tensors[0]
        opts = opts or ReduceScatterOptions()
        name, base = reduction_name(opts.reduceOp), self._plain.reduce_scatter

        def inner() -> Any:
            return base(output_tensors, input_tensors, opts)

        if len(output_tensors) != 1 or not plain_cpu((*inputs, output)) or not supported(name, output.dtype):
            return self._elsewhere("reduce_scatter", (*inputs, output), inner, name)
        problem = check_list(inputs, output, self._size, self._rank, "the input list") or check_outputs((output,))
        if problem:
            return self._refuse("reduce_scatter", problem, opts)
        sizes = tuple(t.numel() for t in inputs)

        def run(collectives: Collectives, signature: bytes) -> None:
            self._reduce_scatter(collectives, signature, [flat(t) for t in inputs], Output(output, keep=False), name)

        key = ("reduce_scatter", name, output.dtype, sizes[0] if len(set(sizes)) == 1 else sizes)
        return self.launch("reduce_scatter", nbytes(output), key, run, inner, tensors=[output], opts=opts)

    def _reduce_scatter(
        self, collectives: Collectives, signature: bytes, parts: list[torch.Tensor], out: Output, name: str
    ) -> None:
        reduction, elements = Reduction(name, self._size), out.flat
        own = parts[self._rank].data_ptr() == elements.data_ptr()
        if any(overlap(elements, part) for r, part in enumerate(parts) if not (own and r == self._rank)):
            parts = [part.clone() for part in parts]
        collectives.reduce_scatter(signature, parts, elements, reduction)
        reduction.finish(elements)
        out.finish()

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        base = either(self._plain, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
        calls = [(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return self._each("reduce_scatter", inputs, self.reduce_scatter_single, calls, base, outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # --- all_reduce, broadcast, barrier

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:  # type: ignore[override]
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if opts is None or not hasattr(opts, "reduceOp"):
            opts = _options(AllreduceOptions, opts)
        tensor, base = tensors[0], self._plain.allreduce
        name = reduction_name(opts.reduceOp)
        if len(tensors) != 1 or not plain_cpu(tensors) or not supported(name, tensor.dtype):
            return self._elsewhere("all_reduce", tensors, lambda: base(tensors, opts), name)
        if problem := check_outputs(tensors):
            return self._refuse("all_reduce", problem, opts)

        def run(collectives: Collectives, signature: bytes) -> None:
            out, reduction = Output(tensor, keep=True), Reduction(name, self._size)
            elements = out.flat
            collectives.all_reduce(signature, elements, reduction)
            reduction.finish(elements)
            out.finish()

        key = ("all_reduce", name, tensor.dtype, tensor.numel())
        return self.launch(
            "all_reduce", nbytes(tensor), key, run, lambda: base(tensors, opts), tensors=tensors, opts=opts
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        calls = [([t], opts) for t in tensors]
        return self._each("all_reduce", tensors, self.allreduce, calls, self._plain.allreduce_coalesced, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:  # type: ignore[override]
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if not hasattr(opts, "rootRank"):
            root, opts = opts or 0, BroadcastOptions()
            opts.rootRank = root
        tensor, base, root = tensors[0], self._plain.broadcast, opts.rootRank
        if len(tensors) != 1 or not plain_cpu(tensors):
            return self._elsewhere("broadcast", tensors, lambda: base(tensors, opts))
        if self._rank != root and (problem := check_outputs(tensors)):
            return self._refuse("broadcast", problem, opts)

        def run(collectives: Collectives, signature: bytes) -> None:
            out = Output(tensor, keep=self._rank == root)
            collectives.broadcast(signature, out.memory.data_ptr(), nbytes(tensor), root)
            if self._rank != root:
                out.finish()

        key = ("broadcast", tensor.dtype, tensor.numel(), f"from {root}")
        return self.launch(
            "broadcast", nbytes(tensor), key, run, lambda: base(tensors, opts), tensors=tensors, opts=opts
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:  # type: ignore[override]
        base = self._plain.barrier
        opts = opts if hasattr(opts, "device_ids") else BarrierOptions()
        if self.has_nccl:
            # NCCL's also waits for this GPU's stream. By the options' device the inner group chooses its backend.
            if opts.device is None or opts.device.type == "cpu":
                opts.device = torch.device("cuda", torch.cuda.current_device())
            return self._inner("barrier", (), "of GPUs", lambda: base(opts))
        return self.launch("barrier", 0, ("barrier",), lambda c, s: c.agree(s), lambda: base(opts), opts=opts)

    # --- left to the inner backends

    reduce = _left("reduce", "reduce")
    gather = _left("gather", "gather", given=1)
    scatter = _left("scatter", "scatter")
    alltoall = _left("all_to_all", "alltoall", given=1)
    all_to_all_single = alltoall_base = _left("all_to_all", "all_to_all_single", "alltoall_base", given=1)

    def send(self, tensors: Any, *arguments: Any) -> Any:
        self._count("send", tensors)
        return super().send(tensors, *arguments)

    def recv(self, tensors: Any, *arguments: Any) -> Any:
        self._count("recv", tensors)
        return super().recv(tensors, *arguments)


def create(options: Any, pg_options: Any = None) -> SmddpGroup:
    """Make a group: what torch calls for ``backend="smddp"``."""
    return SmddpGroup(options, pg_options)
