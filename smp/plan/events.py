"""What a traced step consists of: places, storages, changes of their bytes, operations and collectives."""

from __future__ import annotations

from typing import NamedTuple

from smp.memory.profile import _Storage
from smp.plan.records import Exchange, Operation, TensorShape

BEGIN, FORWARD, BACKWARD, UPDATE = "begin", "forward", "backward", "update"


class Place(NamedTuple):
    """A part of the step: its micro-batch, phase, and the block or None."""

    microbatch: int
    phase: str
    block: int | None
    part: str = ""  # between blocks: "embedding", "head", ...


class Birth(NamedTuple):
    """A storage: where it was first allocated, after how many others there, its category and stream."""

    place: Place
    rank: int
    storage: _Storage
    stream: str


class Change(NamedTuple):
    """A change of a storage's bytes."""

    place: Place
    birth: int  # index of the storage in ``Trace.births``
    delta: int


class Trace(NamedTuple):
    """What a rank's step allocates and does.

    Attributes:
        blocks: of the traced model.
        births, changes: of storages; those that exist before the step come first in both.
        owners: of those, the block of each, or None.
        events: operations and collectives by place, in the order of the places.
        shared: bytes that the ranks of a host share for their collectives, besides.
        parameters: this rank's, of one block in the middle.
        groups: of each axis with more than one rank: ranks, and those of them on this rank's host.
    """

    blocks: int
    births: list[Birth]
    changes: list[Change]
    owners: list[int | None]
    events: dict[Place, list[Operation | Exchange]]
    shared: int
    groups: dict[str, tuple[int, int]]
    parameters: tuple[TensorShape, ...]
