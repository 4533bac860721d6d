"""The bytes of a planned step: at the peak, by category, and over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from smp.memory.categories import CATEGORIES, COMMUNICATION
from smp.plan.blocks import Step
from smp.plan.events import StepPhase
from smp.plan.records import Moment

POINTS = 400  # of a timeline


class Account(NamedTuple):
    """Bytes of a step by category.

    Attributes:
        peak: the moment of the highest sum.
        own_peaks: the highest bytes of each category.
        timeline: where, and bytes by category, thinned; the peak is in it.
    """

    peak: Moment
    own_peaks: dict[str, int]
    timeline: list[tuple[str, dict[str, int]]]


def said(point: StepPhase) -> str:
    """Name a point of the step."""
    where = {"": "", "head": " of the head and the loss", "embedding": " of the embedding"}[point.part]
    block = "" if point.block is None else f" of block {point.block}"
    later = f", micro-batch {point.microbatch + 1}" if point.microbatch else ""
    return f"{point.phase}{block}{where}{later}"


def account(step: Step, *, shared: int = 0, waiting: Mapping[str, int] | None = None) -> Account:
    """Add up a step.

    Args:
        shared: bytes of memory that a host's ranks share for their collectives, mapped throughout.
        waiting: bytes by category of batches that exist throughout, besides those traced.
    """
    number = {category: index for index, category in enumerate(CATEGORIES)}
    kinds = [number[category] for category in step.categories]
    now = [0] * len(CATEGORIES)
    for category, size in {**(waiting or {}), COMMUNICATION: shared}.items():
        now[number[category]] = size
    most, total = list(now), sum(now)
    peak = highest = (total, step.changes[0][0], list(now))
    stride = max(1, (len(step.changes) - step.initial) // POINTS)
    points: list[tuple[int, StepPhase, list[int]]] = []
    for index, (point, storage, delta) in enumerate(step.changes):
        kind = kinds[storage]
        now[kind] += delta
        total += delta
        most[kind] = max(most[kind], now[kind])
        begins = index >= step.initial and (index - step.initial) % stride == 0
        if begins or total > highest[0]:
            highest = (total, point, list(now))
            if begins:
                points.append(highest)
            elif points:
                points[-1] = highest
            if total > peak[0]:
                peak = highest

    def entry(point: StepPhase, sizes: list[int]) -> tuple[str, dict[str, int]]:
        return said(point), dict(zip(CATEGORIES, sizes, strict=True))

    timeline = [entry(*point[1:]) for point in points]
    return Account(Moment(*entry(*peak[1:])), dict(zip(CATEGORIES, most, strict=True)), timeline)
