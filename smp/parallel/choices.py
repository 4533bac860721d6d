"""Settings that are ``auto``: chosen once, by all ranks alike, when the group runs and its memory is known."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from smp.config import Settings, flag_text

# Turns on the defaults on GPUs that no GPU has yet shown to be right and faster: tests/gpu and benchmarks/gpu_step.py.
SHOWN_ON_GPU = False


class Choice(NamedTuple):
    """A value for a setting that is ``auto``, and why, for the log."""

    name: str
    value: Any
    reason: str


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a choice depends on, the same on all ranks.

    Attributes:
        hf_config: of the model.
        settings: as chosen so far.
        device_type: ``cpu`` or ``cuda``.
        accumulation: micro-batches of a step.
        fits: tells whether the job's predicted peak fits into every rank's memory with other settings, by name.
    """

    hf_config: Any
    settings: Settings
    device_type: str
    accumulation: int
    fits: Callable[..., bool]


Chooser = Callable[[Situation], Iterator[Choice]]


def choose(settings: Settings, situation: Situation, choosers: list[Chooser]) -> list[Choice]:
    """Return values for the settings that are ``auto``, in the order of ``choosers``; later ones see earlier ones'.

    On a CPU nothing is chosen: every setting has its plain value.
    """
    found: list[Choice] = []
    if situation.device_type == "cpu":
        return found
    plain = settings.undecided()
    for chooser in choosers:
        values = {choice.name: choice.value for choice in found}
        fits = functools.partial(situation.fits, **values)
        for choice in chooser(dataclasses.replace(situation, settings=settings.changed(**values), fits=fits)):
            if choice.name in plain:
                found.append(choice if SHOWN_ON_GPU else _unshown(choice, plain[choice.name]))
    return found


def _unshown(choice: Choice, plain: Any) -> Choice:
    name, value, reason = choice
    if value == plain:
        return choice
    return Choice(name, plain, f"not yet measured on a GPU; --{name} {flag_text(value)}: {reason}")
