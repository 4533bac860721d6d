"""From a step of few blocks to a step of any number.

Blocks in the middle of a model allocate the same bytes in the same order. So a step of many blocks is written down from
a traced one of few: a block in the middle stands for all that are added, and what it frees of a neighbour's is freed of
that neighbour's copy. The result is the whole sequence of allocations, not only their sum: peak, categories at the
peak, timeline and the simulated allocator all follow from it. What is not equal in the traced blocks is refused, and
the caller traces all blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from smp.plan.events import BACKWARD, FORWARD, REFERENCE, UPDATE, StepPhase, Trace

_ORDER = (REFERENCE, FORWARD, BACKWARD)  # of a micro-batch


class UnequalBlocksError(Exception):
    """The traced blocks differ where they should not: trace all."""


class Step(NamedTuple):
    """The storages of a step, and every change of their bytes in order.

    Attributes:
        categories, streams: of each storage.
        initial: how many of them exist before the step.
        changes: point, storage, change in bytes.
    """

    categories: list[str]
    streams: list[str]
    initial: int
    changes: list[tuple[StepPhase, int, int]]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """Which traced block stands for a block of the full model.

    Attributes:
        traced, wanted: numbers of blocks.
        period: blocks after which they repeat.
        margin: blocks at both ends that stand for themselves.
    """

    traced: int
    wanted: int
    period: int
    margin: int

    def template(self, block: int) -> int:
        """Return the traced block for a block of the full model."""
        if self.wanted == self.traced or block < self.margin:
            return block
        if block >= self.wanted - self.margin:
            return block - self.wanted + self.traced
        return self.margin + (block - self.margin) % self.period

    @functools.cached_property
    def copies(self) -> dict[int, list[int]]:
        """Return the blocks of the full model that each traced block stands for."""
        found: dict[int, list[int]] = {template: [] for template in range(self.traced)}
        for block in range(self.wanted):
            found[self.template(block)].append(block)
        return found


def blocks_to_trace(wanted: int, *, period: int, margin: int) -> int:
    """Return how many blocks to trace: both margins, a period, and what is left over of full periods; at most all."""
    inner = wanted - 2 * margin
    few = 2 * margin + period + inner % period if inner > 0 else wanted
    return min(wanted, few)


def _first_sizes(trace: Trace) -> list[int]:
    sizes = [0] * len(trace.allocations)
    seen = set()
    for _, number, delta in trace.changes:
        if number not in seen:
            seen.add(number)
            sizes[number] = delta
    return sizes


def _points(trace: Trace, repeated: Repeat) -> Iterator[tuple[StepPhase, StepPhase]]:
    """Yield the points of the full step in their order, each with the traced one that stands for it."""
    seen = dict.fromkeys(change.point for change in trace.changes)
    groups: list[list[StepPhase]] = []
    for point in sorted(seen, key=_in_a_step):  # the blocks of one forward or one backward are one group
        same = groups and groups[-1][0].block is not None and point.block is not None
        if same and groups[-1][0][:2] == point[:2]:
            groups[-1].append(point)
        else:
            groups.append([point])
    for group in groups:
        if group[0].block is None or repeated.wanted == repeated.traced:
            yield from ((point, point) for point in group)
            continue
        by_block = {point.block: point for point in group}
        count = range(repeated.wanted)
        for block in reversed(count) if group[0].phase == BACKWARD else count:
            template = by_block[repeated.template(block)]
            yield template._replace(block=block), template


def _in_a_step(point: StepPhase) -> tuple[int, int, int]:
    """Return the sorting key of a point."""
    if point.phase == UPDATE:
        return (1 << 30, 0, 0)
    if point.phase not in _ORDER:
        return (-1, 0, 0)
    forward = point.phase != BACKWARD
    between = {"embedding": -1 if forward else 1 << 30, "head": 1 << 30 if forward else -(1 << 30)}
    inside = between[point.part] if point.block is None else point.block if forward else -point.block
    return (point.microbatch, _ORDER.index(point.phase), inside)


class _Births:
    """What each point of the trace allocates, to compare a block's with that of the block that stands for it."""

    def __init__(self, trace: Trace):
        sizes = _first_sizes(trace)
        initial, ranks = len(trace.owners), _ranks(trace)
        self._made: dict[tuple[StepPhase, int], tuple[str, int, str]] = {}
        self._owned: dict[tuple[int | None, int], tuple[str, int, str]] = {}
        for number, allocation in enumerate(trace.allocations):
            what = (allocation.storage.category, sizes[number], allocation.stream)
            if number < initial:
                self._owned[trace.owners[number], ranks[number]] = what
            else:
                self._made[allocation.point, allocation.rank] = what

    def compare(self, point: StepPhase, index: int, template: int) -> None:
        """Compare an allocation with that of the same index in a template's phase."""
        if self._made.get((point, index)) != self._made.get((point._replace(block=template), index)):
            raise UnequalBlocksError(f"blocks {point.block} and {template} differ in {point.phase}")

    def compare_owned(self, owner: int, rank: int, template: int) -> None:
        """Compare a parameter's or state's bytes with those of a template."""
        if self._owned.get((owner, rank)) != self._owned.get((template, rank)):
            raise UnequalBlocksError(f"blocks {owner} and {template} have other states")


class _Writer:
    """Writes down the step of the whole model."""

    def __init__(self, trace: Trace, repeated: Repeat):
        self.trace, self.repeated = trace, repeated
        self.initial, self.begin = len(trace.owners), trace.allocations[0].point
        self.categories: list[str] = []
        self.streams: list[str] = []
        self.changes: list[tuple[StepPhase, int, int]] = []
        self._ranks, self._allocations = _ranks(trace), _Births(trace)
        # A storage of the whole step, by where it is made, and the block of the whole model that it belongs to.
        self._numbers: dict[tuple[StepPhase, int, int | None], int] = {}

    def change(self, point: StepPhase, traced: int, block: int | None, delta: int) -> None:
        """Write a change of the storage that stands, in a block of the whole model, for a traced one."""
        allocation, before = self.trace.allocations[traced], traced < self.initial
        index = self._ranks[traced] if before else allocation.rank
        owner = self.trace.owners[traced] if before else allocation.point.block
        if block is not None and owner is not None:
            if not 0 <= block < self.repeated.wanted:
                raise UnequalBlocksError(f"block {point.block} frees what block {block} would have made")
            if (other := self.repeated.template(block)) != owner:
                if before:
                    self._allocations.compare_owned(owner, index, other)
                else:
                    self._allocations.compare(allocation.point, index, other)
        key = (self.begin if before else allocation.point._replace(block=block), index, block)
        if key not in self._numbers:
            self._numbers[key] = len(self.categories)
            self.categories.append(allocation.storage.category)
            self.streams.append(allocation.stream)
        self.changes.append((point, self._numbers[key], delta))

    def blocks(self, point: StepPhase, template: StepPhase, traced: int) -> list[int | None]:
        """Return the blocks of the whole model whose storages a change at ``point`` is of."""
        owner = self.trace.owners[traced] if traced < self.initial else self.trace.allocations[traced].point.block
        if owner is None:
            return [None]
        if point.phase == UPDATE:
            return [*self.repeated.copies[owner]]  # of every block at once
        if point.block is None or template.block is None:  # of the blocks next to it: the last ones or the first ones
            return [owner + self.repeated.wanted - self.repeated.traced if point.part == "head" else owner]
        return [point.block + owner - template.block]


def whole_step(trace: Trace, repeated: Repeat) -> Step:
    """Write down the storages and changes of the step of the full model.

    Raises:
        UnequalBlocksError: a block is not what the block that stands for it is.
    """
    writer = _Writer(trace, repeated)
    sizes = _first_sizes(trace)
    for traced, owner in enumerate(trace.owners):
        for block in [None] if owner is None else repeated.copies[owner]:
            writer.change(writer.begin, traced, block, sizes[traced])
    initial = len(writer.categories)
    by_phase: dict[StepPhase, list[tuple[int, int]]] = {}
    for point, traced, delta in trace.changes[writer.initial :]:
        by_phase.setdefault(point, []).append((traced, delta))
    for point, template in _points(trace, repeated):
        for traced, delta in by_phase.get(template, ()):
            for block in writer.blocks(point, template, traced):
                writer.change(point, traced, block, delta)
    step = Step(writer.categories, writer.streams, initial, writer.changes)
    _check_balance(step)
    return step


def _check_balance(step: Step) -> None:
    """Refuse a step that frees more than it has made."""
    sizes = [0] * len(step.categories)
    for point, number, delta in step.changes:
        sizes[number] += delta
        if sizes[number] < 0:
            raise UnequalBlocksError(f"{point.phase} of block {point.block} frees what nothing has made")


def _ranks(trace: Trace) -> list[int]:
    """Return of each storage that exists before the step which it is of its block's, in order."""
    counts: dict[int | None, int] = {}
    ranks = []
    for owner in trace.owners:
        ranks.append(counts.get(owner, 0))
        counts[owner] = ranks[-1] + 1
    return ranks
