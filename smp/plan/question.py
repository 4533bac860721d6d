"""What ``smp plan`` is asked; plain data, which goes to the process that plans. Imported without torch."""

from __future__ import annotations

import dataclasses

from smp.plan.devices import DeviceRow
from smp.plan.records import TOP


@dataclasses.dataclass(frozen=True)
class Question:
    """What a plan is asked for.

    Attributes:
        argv: the job's flags.
        nodes, local: hosts, and devices of each.
        global_tokens: of a step over all ranks, such as ``4Mi``; None: as the flags say.
        top: layouts that fit to look for.
        searches: vary the layout, as far as the flags leave it open.
        exact: trace all blocks of the best one, and its last rank, too.
    """

    argv: list[str]
    row: DeviceRow
    nodes: int
    local: int
    global_tokens: str | None = None
    top: int = TOP
    searches: bool = True
    exact: bool = False
