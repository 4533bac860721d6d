"""Settings of what happens when something goes wrong."""

from __future__ import annotations

import dataclasses
from typing import Literal

from smp.config import Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultConfig(Section):
    """Numbers that are not finite, and ranks that hang."""

    nonfinite: Literal["stop", "skip"] = setting(
        "stop",
        "When the loss or the gradient norm is not finite: end the run before the update, or leave the update out.",
    )
    nonfinite_budget: int = setting(
        10, "Updates that --nonfinite skip may leave out in a run, resumed or not, before the run ends.", minimum=0
    )
    watchdog_timeout: float = setting(
        600.0,
        "Seconds a rank may stay in one phase of a step before the run ends with a report that names the rank; six "
        "times as long while starting and in a checkpoint. 0: no limit.",
        minimum=0,
        maximum=1e8,
    )
