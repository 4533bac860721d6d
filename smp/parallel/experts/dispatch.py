"""Tokens to the ranks of their experts, and back.

What decides where a row goes, and what sends it, is a custom operation, so that activation checkpointing can save its
result: which experts a token has at any mode, as a rank that decided otherwise than in its forward would wait for rows
that nobody sends, and rows where it saves reductions. ``topk`` is not saved: routers normalise its result in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from smp.parallel.tensor.group import library

library.define("chosen_experts(Tensor index) -> Tensor")
library.define("sum_for_choice(Tensor sums, str group) -> Tensor")
library.define("exchange_counts(Tensor counts, str group, int size) -> Tensor")
library.define("exchange_rows(Tensor rows, int[] send, int[] receive, str group) -> Tensor")


def _resolve(group: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]


def _exchange_counts(counts: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Return, of ``(ranks x experts of a rank,)`` counts of each rank, those for this rank's experts, by sender."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=_resolve(group))
    return received


def _sum_for_choice(sums: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sums over the ranks of a group, by which experts are then chosen."""
    total = sums.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_resolve(group))
    return total


def _exchange_rows(rows: torch.Tensor, send: list[int], receive: list[int], group: str) -> torch.Tensor:
    found = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), receive, send, group=_resolve(group))
    return found


library.impl("chosen_experts", torch.clone, "CompositeExplicitAutograd")
library.impl("sum_for_choice", _sum_for_choice, "CompositeExplicitAutograd")
library.impl("exchange_counts", _exchange_counts, "CompositeExplicitAutograd")
library.impl("exchange_rows", _exchange_rows, "CompositeExplicitAutograd")
torch.library.register_fake("smp::chosen_experts", torch.empty_like, lib=library)
torch.library.register_fake("smp::sum_for_choice", lambda sums, group: torch.empty_like(sums), lib=library)
torch.library.register_fake("smp::exchange_counts", lambda counts, group, size: torch.empty_like(counts), lib=library)
torch.library.register_fake(
    "smp::exchange_rows", lambda rows, send, receive, group: rows.new_empty(sum(receive), *rows.shape[1:]), lib=library
)


def _keep_counts(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.counts = inputs


def _send_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    send, receive, group = ctx.counts
    return torch.ops.smp.exchange_rows(gradient, receive, send, group), None, None, None


torch.library.register_autograd("smp::exchange_rows", _send_back, setup_context=_keep_counts, lib=library)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the permutation that undoes another one, ``(n,)``."""
    positions = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, positions)


class Sorted(NamedTuple):
    """Rows sorted by expert.

    Attributes:
        order: ``(tokens x top_k,)``: of the pairs of a token and an expert, in the order of the rows.
        counts: ``(experts,)``, int64: rows of each expert.
    """

    order: torch.Tensor
    counts: torch.Tensor


def sort_by_expert(index: torch.Tensor, experts: int) -> Sorted:
    """Sort tokens by expert, those of one expert in the order of the tokens, whatever the device.

    Args:
        index: ``(tokens, top_k)``, the experts of each token.
        experts: number of experts.
    """
    flat = index.reshape(-1)
    return Sorted(torch.argsort(flat, stable=True), count(flat, experts))


def count(numbers: torch.Tensor, most: int, ones: torch.Tensor | None = None) -> torch.Tensor:
    """Count how often each number below ``most`` occurs, ``(most,)`` int64; its shape waits for no values.

    Args:
        ones: ``(numbers,)`` int64, 0 for those that are not counted; None: all are.
    """
    zeros = torch.zeros(most, dtype=torch.int64, device=numbers.device)
    return zeros.scatter_add_(0, numbers, torch.ones_like(numbers) if ones is None else ones)


def evenly(total: int, parts: int) -> list[int]:
    """Return a total in parts that differ by one at most: counts of tensors without values, while a step is planned."""
    return [total * (part + 1) // parts - total * part // parts for part in range(parts)]


def read_counts(by_expert: Sorted) -> list[int]:
    """Read the rows of each expert on the host."""
    if isinstance(by_expert.counts, FakeTensor):
        return evenly(len(by_expert.order), len(by_expert.counts))
    return by_expert.counts.tolist()


class Exchanged(NamedTuple):
    """How rows were sent: what brings them back.

    Attributes:
        send, receive: rows to and from each rank of the group.
        order: of the received rows, by expert.
        counts: rows of each of this rank's experts.
        group: name of the process group.
    """

    send: list[int]
    receive: list[int]
    order: torch.Tensor
    counts: list[int]
    group: str


def send_to_experts(
    rows: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, Exchanged]:
    """Send rows to the ranks of their experts; returns what this rank has got, sorted by its experts.

    The counts are read on the host, once.

    Args:
        rows: ``(tokens x top_k, hidden)``, sorted by expert.
        counts: ``(experts,)``, rows of each expert.
    """
    size, name = group.size(), group.group_name
    theirs = torch.ops.smp.exchange_counts(counts, name, size).view(size, -1)
    local = theirs.shape[1]
    if isinstance(counts, FakeTensor):
        send = evenly(len(rows), size)
        received = [evenly(number, local) for number in send]
    else:
        numbers = torch.cat([counts.view(size, local).sum(1), theirs.reshape(-1)]).tolist()
        send, received = numbers[:size], [numbers[size + local * rank :][:local] for rank in range(size)]
    receive = [sum(each) for each in received]
    found = torch.ops.smp.exchange_rows(rows, send, receive, name)
    experts = torch.arange(local, device=rows.device).repeat(size)
    order = torch.argsort(experts.repeat_interleave(theirs.reshape(-1), output_size=sum(receive)), stable=True)
    counted = [sum(each) for each in zip(*received, strict=True)]
    return found[order], Exchanged(send, receive, order, counted, name)


def send_back(rows: torch.Tensor, how: Exchanged) -> torch.Tensor:
    """Return the results of rows to the ranks that sent them, in the order in which they did."""
    return torch.ops.smp.exchange_rows(rows[inverse(how.order)], how.receive, how.send, how.group)
