"""What a traced step consists of: phases, storages, changes of their bytes."""

from __future__ import annotations

from typing import NamedTuple

from smp.memory.profile import _Storage

BEGIN, FORWARD, BACKWARD, UPDATE = "begin", "forward", "backward", "update"
REFERENCE = "forward of the reference"  # without gradients, before that of the policy, of pairs of answers


class StepPhase(NamedTuple):
    """A part of the step: its micro-batch, phase, and the block or None."""

    microbatch: int
    phase: str
    block: int | None
    part: str = ""  # between blocks: "embedding", "head", ...


class Allocation(NamedTuple):
    """A storage: where it was first allocated, after how many others at that point, its category and stream."""

    point: StepPhase
    rank: int
    storage: _Storage
    stream: str


class AllocationEvent(NamedTuple):
    """A change of a storage's bytes."""

    point: StepPhase
    allocation: int  # index of the storage in ``Trace.allocations``
    delta: int


class Trace(NamedTuple):
    """What a rank's step allocates.

    Attributes:
        blocks: of the traced model.
        allocations, changes: of storages; those that exist before the step come first in both.
        owners: of those, the block of each, or None.
        shared: bytes that the ranks of a host share for their collectives, besides.
    """

    blocks: int
    allocations: list[Allocation]
    changes: list[AllocationEvent]
    owners: list[int | None]
    shared: int
