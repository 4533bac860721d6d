"""Records of a plan: memory of a rank, how long a step takes; plain data that goes to JSON. Imported without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from smp.errors import UserError
from smp.units import scaled

FITS, FLUSH, NO = "fits", "flush", "no"
TOP = 3  # layouts that are looked for
# Less headroom than this share of the limit is called tight.
TIGHT = 0.05


@dataclasses.dataclass(frozen=True)
class Moment:
    """The bytes of a rank by category at one moment; ``where`` names the moment."""

    where: str
    categories: Mapping[str, int]

    @property
    def total(self) -> int:
        """Sum of the categories."""
        return sum(self.categories.values())


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Memory of one rank's device over a step.

    Attributes:
        rank: which was planned; of all distinct ranks the one that needs most.
        peak: the moment of the highest sum.
        own_peaks: the highest bytes of each category.
        reserved: bytes of the caching allocator's segments; None on a CPU.
        outside: bytes outside the allocator: context and communicators; on a CPU the process without a model,
            and at most what ``heap`` says.
        limit: bytes of the device; None if it is not known.
        shared: of the peak, bytes that the ranks of a host share (counted once a host).
        heap: at most so many bytes a process on CPUs holds beyond its tensors at the peak: free blocks of the C
            library's heap.
        worst: bytes more than ``needed`` where all tokens are sent to the experts of this rank.
        timeline: total bytes after each change of the step, thinned; for drawing.
    """

    rank: int
    peak: Moment
    own_peaks: Mapping[str, int]
    reserved: int | None
    outside: int
    limit: int | None
    shared: int = 0
    heap: int = 0
    worst: int = 0
    timeline: Sequence[tuple[str, Mapping[str, int]]] = ()

    @property
    def allocated(self) -> int:
        """Bytes of tensors, and inside of kernels, at the peak."""
        return self.peak.total

    @property
    def needed(self) -> int:
        """Bytes that the device must have for no flush: reserved ones, or else allocated ones, and those outside."""
        return max(self.reserved or 0, self.allocated) + self.outside

    @property
    def headroom(self) -> int | None:
        """Bytes of the limit that remain; negative: that are missing."""
        return None if self.limit is None else self.limit - self.needed

    @property
    def verdict(self) -> str:
        """``fits``; ``flush``: allocated bytes fit but reserved ones do not; or ``no``."""
        if self.limit is None or self.needed <= self.limit:
            return FITS
        return FLUSH if self.reserved is not None and self.allocated + self.outside <= self.limit else NO

    @property
    def tight(self) -> bool:
        """Whether it fits with less than 5 % of the limit to spare."""
        return self.headroom is not None and self.limit is not None and 0 <= self.headroom < TIGHT * self.limit


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and where they go.

    Attributes:
        low, high: its range.
        parts: seconds by part, such as ``compute``, ``exposed gathers``, ``optimizer``.
        inside, between: bytes that a rank sends inside a host and between hosts.
        source: how the device's speed is known, for a person.
    """

    seconds: float
    low: float
    high: float
    parts: Mapping[str, float]
    inside: int
    between: int
    source: str


@dataclasses.dataclass(frozen=True)
class LayoutPlan:
    """The plan of one layout.

    Attributes:
        flags: the settings that make this layout, by name.
        mesh: degrees as the log says them.
        memory: of the rank that needs most.
        host: host memory of a rank by category.
        disk: bytes by use: ``checkpoint``, ``kept checkpoints``, ``offloaded activations``.
        tokens: of a step over all ranks.
        method: ``blocks`` (few blocks traced) or ``exact`` (all blocks traced).
        chosen: values of the settings that were ``auto``.
    """

    mesh: str
    memory: RankMemory
    step: StepTime
    tokens: int
    method: str
    notes: Sequence[str] = ()
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    host: Mapping[str, int] = dataclasses.field(default_factory=dict)
    disk: Mapping[str, int] = dataclasses.field(default_factory=dict)
    chosen: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def parse_count(name: str, text: str) -> int:
    """Return the number of ``4Mi``, ``1T``, ``300B`` or ``1.5e12``.

    Raises:
        UserError: it is no such number, or below 1.
    """
    count = scaled(text, "KMBT", exponents=True)
    if count < 1:
        raise UserError(f"{name} takes a number of tokens such as 4Mi, 300B or 1T, got {text!r}")
    return count
