"""What a traced step consists of: places, storages, changes of their bytes."""

from __future__ import annotations

from typing import NamedTuple

from smp.memory.profile import _Storage

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
    """What a rank's step allocates.

    Attributes:
        blocks: of the traced model.
        births, changes: of storages; those that exist before the step come first in both.
        owners: of those, the block of each, or None.
        shared: bytes that the ranks of a host share for their collectives, besides.
    """

    blocks: int
    births: list[Birth]
    changes: list[Change]
    owners: list[int | None]
    shared: int
