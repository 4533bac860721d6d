"""Search of a layout: every legal one by the closed form, those near the limit and near the best by a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from smp.config import ActivationConfig
from smp.errors import UserError
from smp.plan.layouts import Layout, differences, parts
from smp.plan.records import FITS, NO, TOP, LayoutPlan
from smp.units import GIB

MOST_TRACES = 12
_MEMORY_MARGIN = 1.3  # what the closed form may be wrong by
_TIGHT_MARGIN = 1.05  # of its error, known from layouts of the same kind
# Traces that are kept for layouts that are sure to fit, while none has.
_LAST_TRIES = 4
_MOST_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A layout with what the closed form says: bytes that a rank needs, and seconds of a step."""

    layout: Layout
    memory: int
    seconds: float

    @property
    def per_token(self) -> float:
        """Seconds for each token of a step."""
        return self.seconds / self.layout.tokens


@dataclasses.dataclass(frozen=True)
class Refused:
    """A layout that was not chosen.

    Attributes:
        reason: such as ``reserved 83.5 > 79.1 GiB``.
        over: bytes that are missing; 0 where memory is not the reason.
        per_token: seconds for each token, as far as known.
        traced: whether the trace has refused it, and not the closed form.
    """

    layout: Layout
    reason: str
    over: int
    per_token: float
    traced: bool = False


@dataclasses.dataclass(frozen=True)
class Found:
    """The result: traced layouts that fit, the fastest first, and the others, those that would be fastest first.

    Where none fits, ``plans`` is empty and ``nearest`` lacks least.
    """

    plans: list[tuple[Layout, LayoutPlan]]
    refused: list[Refused]
    nearest: LayoutPlan | None
    legal: int
    traced: int


def search(
    estimates: Sequence[Estimate],
    limit: int | None,
    trace: Callable[[list[Layout]], list[LayoutPlan | UserError]],
    *,
    top: int = TOP,
    together: int = 1,
) -> Found:
    """Trace the layouts that the closed form likes best, and order them.

    Args:
        limit: bytes of a device; None: not known, everything fits.
        trace: plans layouts, or says of each why it cannot be planned.
        top: how many that fit are looked for.
        together: layouts that are traced at once.
    """
    known = _Known(limit, top)
    # Two of the same time: the one that is smaller. A little more for offloading: it comes last.
    queue = sorted(_near(estimates, limit), key=lambda each: (each.per_token * _offloading(each), each.memory))
    while (left := MOST_TRACES - len(known.tried)) > 0 and (chosen := known.next(queue, min(together, left), left)):
        known.add(chosen, trace([each.layout for each in chosen]))
    smallest = min(estimates, key=lambda each: each.memory)
    if known.nothing_fits and all(smallest.layout is not each for each in known.tried):
        known.refused = [each for each in known.refused if each.layout is not smallest.layout]
        known.add([smallest], trace([smallest.layout]))
    return _found(estimates, limit, known.traced, known.refused)


class _Known:
    """What a search knows so far."""

    def __init__(self, limit: int | None, top: int):
        self._limit, self._top = limit, top
        self.tried: list[Layout] = []
        self.traced: list[tuple[Estimate, LayoutPlan]] = []
        self.refused: list[Refused] = []

    @property
    def fitting(self) -> list[tuple[Estimate, LayoutPlan]]:
        return [pair for pair in self.traced if pair[1].memory.verdict == FITS]

    @property
    def nothing_fits(self) -> bool:
        return all(plan.memory.verdict == NO for _, plan in self.traced)

    def add(self, chosen: list[Estimate], plans: list[LayoutPlan | UserError]) -> None:
        for each, plan in zip(chosen, plans, strict=True):
            self.tried.append(each.layout)
            if isinstance(plan, LayoutPlan):
                self.traced.append((each, plan))
            else:
                self.refused.append(Refused(each.layout, str(plan), 0, each.per_token))

    def next(self, queue: list[Estimate], count: int, left: int) -> list[Estimate]:
        """Take the next layouts to trace, of those ``left``, from the queue; none where others cannot be better."""
        limit, fitting, found = self._limit, self.fitting, list[Estimate]()
        if limit is not None and not fitting and left <= _LAST_TRIES:
            queue.sort(key=lambda each: (each.memory > limit / _MEMORY_MARGIN, each.per_token, each.memory))
        while queue and len(found) < count:
            if len(fitting) >= self._top and _is_slower(queue[0], fitting, self._top):
                break
            chosen = queue.pop(0)
            if limit is not None and (needed := _as_traced(chosen, self.traced)) > limit * _TIGHT_MARGIN:
                self.refused.append(_too_large(chosen, needed, limit, f"about {needed / GIB:.1f}"))
            else:
                found.append(chosen)
        return found


def _near(estimates: Sequence[Estimate], limit: int | None) -> Iterable[Estimate]:
    """Return the layouts that may fit by the closed form; the smallest one where all are too large."""
    near = [each for each in estimates if limit is None or each.memory <= _MEMORY_MARGIN * limit]
    return near or sorted(estimates, key=lambda each: each.memory)[:1]


def _as_traced(chosen: Estimate, traced: list[tuple[Estimate, LayoutPlan]]) -> int:
    """Return the bytes that a layout needs, by the closed form and by its error where the same is saved."""
    kind = _saving(chosen.layout)
    ratios = [plan.memory.needed / max(each.memory, 1) for each, plan in traced if _saving(each.layout) == kind]
    return int(chosen.memory * min(ratios, default=0.0))


def _saving(layout: Layout) -> tuple[str, str]:
    words = parts(layout)
    return words["recomputation"], words["offloading"]


def _is_slower(chosen: Estimate, fitting: list[tuple[Estimate, LayoutPlan]], top: int) -> bool:
    """Return whether a layout, and all after it, cannot be among the ``top``."""
    return chosen.per_token > sorted(_per_token(plan) for _, plan in fitting)[:top][-1]


def _per_token(plan: LayoutPlan) -> float:
    return plan.step.seconds / plan.tokens


def _too_large(estimate: Estimate, needed: int, limit: int, shown: str) -> Refused:
    reason = f"{shown} > {limit / GIB:.1f} GiB"
    return Refused(estimate.layout, reason, max(needed - limit, 0), estimate.per_token)


def _found(
    estimates: Sequence[Estimate],
    limit: int | None,
    traced: list[tuple[Estimate, LayoutPlan]],
    refused: list[Refused],
) -> Found:
    """Order what was traced, and add what the closed form has refused."""
    verdicts = {plan.memory.verdict for _, plan in traced}
    # Where nothing fits well, what fits with a stalling allocator is better than nothing.
    accepted = FITS if FITS in verdicts or not verdicts - {NO} else min(verdicts - {NO, FITS})
    plans = []
    for estimate, plan in traced:
        memory = plan.memory
        if memory.verdict == accepted:
            plans.append((estimate, plan))
        elif limit is not None:
            stalls = memory.verdict != NO
            size = max(memory.reserved or 0, memory.allocated) if stalls else memory.allocated
            available = limit - memory.outside
            said = f"{'reserved' if stalls else 'allocated'} {size / GIB:.1f}"
            over = max(size - available, 0)
            reason = f"{said} > {available / GIB:.1f} GiB"
            if memory.outside:
                reason += f" ({limit / GIB:.1f} - {memory.outside / GIB:.1f} outside)"
            refused.append(Refused(estimate.layout, reason, over, _per_token(plan), traced=True))
    if limit is not None:
        known = {id(estimate) for estimate, _ in traced}
        refused += [
            _too_large(each, each.memory, limit, f"about {each.memory / GIB:.1f}")
            for each in estimates
            if each.memory > _MEMORY_MARGIN * limit and id(each) not in known
        ]
    best = min((_per_token(plan) for _, plan in plans), default=1.0)
    plans.sort(key=lambda pair: _order(pair[0], pair[1], best))
    nearest = min((plan for _, plan in traced), key=lambda plan: plan.memory.needed, default=None)
    refused.sort(key=lambda each: each.per_token)
    chosen = [(estimate.layout, plan) for estimate, plan in plans]
    return Found(chosen, refused, None if chosen else nearest, len(estimates), len(traced))


def _offloading(each: Estimate) -> float:
    return 1.05 if each.layout.work.settings[ActivationConfig].offload_activations else 1.0


def _order(estimate: Estimate, plan: LayoutPlan, best: float) -> tuple[float, bool, int]:
    """Return the sorting key: time to a hundredth of the best, then no offloading, then headroom."""
    offloads = estimate.layout.work.settings[ActivationConfig].offload_activations
    return (round(_per_token(plan) / best, 2), offloads, -(plan.memory.headroom or 0))


def instructive(found: Found) -> list[Refused]:
    """Return the refused layouts worth showing: traced ones, and those that differ in one thing from the best.

    Of a kind, the one that lacks least.
    """
    shown: dict[Any, Refused] = {}
    best = found.plans[0][0] if found.plans else None
    for refused in found.refused:
        changes = [] if best is None else [name for name, _ in differences(refused.layout, best)]
        if refused.traced:
            kind: Any = (refused.layout.mesh.tp.size, *_saving(refused.layout))
        elif best is None or len(changes) == 1:
            kind = changes[0] if changes else refused.layout.mesh.tp.size
        else:  # a change of two things teaches less than one of them
            continue
        known = shown.get(kind)
        if known is None or 0 < refused.over < known.over:
            shown[kind] = refused
    return sorted(shown.values(), key=lambda each: (not each.traced, each.per_token))[:_MOST_SHOWN]
