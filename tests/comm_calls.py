"""From a case to the call of a collective and what must come out of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.comm_cases import Case, Laid, poison, reduced, values


@dataclasses.dataclass
class Call:
    """A case made ready on one rank: its tensors, and how to call it."""

    run: Callable[[dist.ProcessGroup | None, bool], Any]
    tensors: list[Laid]

    def right(self) -> bool:
        """Whether all tensors are what they must be, and nothing beside them was written."""
        return all(tensor.right() for tensor in self.tensors)


def prepare(case: Case, rank: int, members: Sequence[int], chunk: int) -> Call:
    """Make the tensors of a case.

    Args:
        case: what to call.
        rank: this process's rank in the group.
        members: the job's ranks in the group; the values and the root depend on them.
        chunk: bytes of a slot.
    """
    count = case.elements(len(members), chunk)
    counts = [count, count // 2 + 1, 5]
    if case.form == "all_gather_coalesced":
        return _all_gather_coalesced(case, rank, members, counts)
    if case.form.endswith("_coalesced"):
        single = _SINGLES[case.form.removesuffix("_coalesced")]
        return _coalesced([single(case, rank, members, n, part) for part, n in enumerate(counts)])
    return _SINGLES[case.form](case, rank, members, count, 0)


def _given(case: Case, members: Sequence[int], counts: Sequence[int], part: int) -> list[torch.Tensor]:
    """What each member gives, as it is after being laid out."""
    given = [values(case, m, n, part) for m, n in zip(members, counts, strict=True)]
    if case.layout == "expanded":
        return [g[:1].expand(len(g)).contiguous() for g in given]
    return given


def _empty(case: Case, count: int) -> Laid:
    """An output. An expanded tensor cannot be one."""
    return _lay(
        dataclasses.replace(case, plain=case.plain or case.layout == "expanded"), poison(count, case.dtype, 165)
    )


def _lay(case: Case, elements: torch.Tensor) -> Laid:
    return Laid(elements, "contiguous" if case.plain else case.layout)


def _all_gather_single(case: Case, rank: int, members: Sequence[int], count: int, part: int) -> Call:
    given = _given(case, members, [count] * len(members), part)
    output = _empty(case, count * len(members))
    if not case.own_memory:
        source = output.view[rank * count : (rank + 1) * count]
        source.copy_(given[rank])
        tensors = [output]
    else:
        laid = _lay(case, given[rank])
        source, tensors = laid.view, [output, laid]
    output.expect(torch.cat(given))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Call(lambda group, later: gather(output.view, source, group=group, async_op=later), tensors)


def _lists(case: Case, rank: int, members: Sequence[int], counts: Sequence[int], part: int) -> tuple[Any, ...]:
    """The outputs of one all_gather in the list form, its input, and all of its memory."""
    given = _given(case, members, counts, part)
    outputs = [_empty(case, n) for n in counts]
    tensors = list(outputs)
    if case.own_memory:
        tensors.append(source := _lay(case, given[rank]))
    else:
        source = outputs[rank]
        source.put(given[rank])
    for output, elements in zip(outputs, given, strict=True):
        output.expect(elements)
    return [output.view for output in outputs], source.view, tensors


def _all_gather_list(case: Case, rank: int, members: Sequence[int], count: int, part: int, step: int = 0) -> Call:
    counts = [count + step * r for r in range(len(members))]
    outputs, source, tensors = _lists(case, rank, members, counts, part)
    return Call(lambda group, later: dist.all_gather(outputs, source, group=group, async_op=later), tensors)


def _all_gather_coalesced(case: Case, rank: int, members: Sequence[int], counts: Sequence[int]) -> Call:
    parts = [_lists(case, rank, members, [n] * len(members), part) for part, n in enumerate(counts)]
    outputs, sources, tensors = zip(*parts, strict=True)
    by_rank = [list(ranks) for ranks in zip(*outputs, strict=True)]

    def run(group: dist.ProcessGroup | None, later: bool) -> Any:
        return dist.all_gather_coalesced(by_rank, list(sources), group=group, async_op=later)

    return Call(run, [tensor for part in tensors for tensor in part])


def _coalesced(calls: Sequence[Call]) -> Call:
    def run(group: dist.ProcessGroup | None, later: bool) -> Any:
        with dist._coalescing_manager(group=group, async_ops=later) as manager:
            for call in calls:
                call.run(group, later)
        return manager if later else None

    return Call(run, [tensor for call in calls for tensor in call.tensors])


def _broadcast(case: Case, rank: int, members: Sequence[int], count: int, part: int) -> Call:
    root = case.seed % len(members)
    given = _given(case, members, [count] * len(members), part)
    tensor = _lay(case, given[rank]) if rank == root else _empty(case, count)
    tensor.expect(given[root])
    return Call(lambda group, later: dist.broadcast(tensor.view, members[root], group=group, async_op=later), [tensor])


def _reduce_scatter_single(case: Case, rank: int, members: Sequence[int], count: int, part: int) -> Call:
    world = len(members)
    given = _given(case, members, [count * world] * world, part)
    expected = reduced([g[rank * count : (rank + 1) * count] for g in given], case.reduction)
    laid = _lay(case, given[rank])
    tensors = [laid]
    if not case.own_memory:
        output = laid.view[rank * count : (rank + 1) * count]
        after = given[rank].clone()
        after[rank * count : (rank + 1) * count] = expected
        laid.expect(after)
    else:
        tensors.append(out := _empty(case, count))
        out.expect(expected)
        output = out.view
    op = getattr(dist.ReduceOp, case.reduction)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return Call(lambda group, later: scatter(output, laid.view, op, group=group, async_op=later), tensors)


def _reduce_scatter_list(case: Case, rank: int, members: Sequence[int], count: int, part: int, step: int = 0) -> Call:
    world = len(members)
    counts = [count + step * r for r in range(world)]
    given = [_given(case, members, [n] * world, part + 10 * r) for r, n in enumerate(counts)]  # [to][from]
    expected = reduced(given[rank], case.reduction)
    inputs = [_lay(case, to[rank]) for to in given]
    tensors = list(inputs)
    if not case.own_memory:
        output = inputs[rank]
    else:
        tensors.append(output := _empty(case, counts[rank]))
    output.expect(expected)
    op = getattr(dist.ReduceOp, case.reduction)
    views = [laid.view for laid in inputs]
    return Call(lambda group, later: dist.reduce_scatter(output.view, views, op, group=group, async_op=later), tensors)


def _all_reduce(case: Case, rank: int, members: Sequence[int], count: int, part: int) -> Call:
    given = _given(case, members, [count] * len(members), part)
    tensor = _empty(case, count)
    tensor.put(given[rank])
    tensor.expect(reduced(given, case.reduction))
    op = getattr(dist.ReduceOp, case.reduction)
    return Call(lambda group, later: dist.all_reduce(tensor.view, op, group=group, async_op=later), [tensor])


_SINGLES: dict[str, Callable[..., Call]] = {
    "all_gather_single": _all_gather_single,
    "all_gather_list": _all_gather_list,
    "all_gather_uneven": functools.partial(_all_gather_list, step=7),
    "broadcast": _broadcast,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_list": _reduce_scatter_list,
    "reduce_scatter_uneven": functools.partial(_reduce_scatter_list, step=7),
    "all_reduce": _all_reduce,
}


def check(case: Case, group: dist.ProcessGroup | None, members: Sequence[int], chunk: int, gloo: Any = None) -> None:
    """Run a case and see that every bit is right; with ``gloo``, a group of the same ranks, that it says the same."""
    rank = members.index(dist.get_rank())
    call = prepare(case, rank, members, chunk)
    work = call.run(group, case.asynchronous)
    if case.asynchronous:
        work.wait()
    assert call.right(), f"wrong on rank {dist.get_rank()} of {members}: {case}"
    if gloo is not None and case.supported_by_gloo() and (len(members) == 2 or not case.order_matters()):
        plain = dataclasses.replace(case, plain=True)
        call = prepare(plain, rank, members, chunk)
        call.run(gloo, False)
        assert call.right(), f"gloo disagrees on rank {dist.get_rank()}: {plain}"
