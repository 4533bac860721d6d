"""Settings that are ``auto``: chosen once, by all ranks alike, when the group runs and its memory is known."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from smp.config import Settings, flag_text
from smp.mesh import Mesh, lay_out

# Settings whose choice was shown to be right and faster, or smaller, each with the result that shows it, of
# benchmarks/results/gpu/2026-11-28-h200.md. The others keep their plain value.
GPU_DEFAULTS: dict[str, str] = {
    "activation_checkpointing": "the same bits",
    "activation_checkpointing_mode": "the bits of full; a step of 4 blocks in 0.94 of the time, with equal memory",
    "activation_checkpointing_every": "the same bits",
    "attn_implementation": "documents in 0.79 of the time of a mask, losses within 2e-5; one document as before",
    "compile": "compiled, selective: 0.90 of eager's time, losses within 8.2e-5; in fp32, with all of these, 1e-6",
    "expandable_segments": "the same bits; 6 blocks: 43.2 GiB reserved, not 44.8, in the same time",
    "loss_chunk_tokens": "0.98 of the time, losses within 3.1e-5",
}
_NEEDS_SEVERAL = {"tp_overlap", "cp_comm_type", "reshard_between_microbatches"}  # nothing to show on one GPU


class Choice(NamedTuple):
    """A value for a setting that is ``auto``, and why, for the log."""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"--{self.name} {flag_text(self.value)} ({self.reason})"


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a choice depends on, the same on all ranks.

    Attributes:
        settings: as chosen so far.
        device_type: ``cpu`` or ``cuda``.
        accumulation: micro-batches of a step.
        fits: tells whether the job's predicted peak fits into every rank's memory with these settings, and with
            others that are given by name.
    """

    hf_config: Any
    settings: Settings
    device_type: str
    accumulation: int
    fits: Callable[..., bool]
    mesh: Mesh = lay_out()  # frozen


Chooser = Callable[[Situation], Iterator[Choice]]


def choose(settings: Settings, situation: Situation, choosers: list[Chooser]) -> list[Choice]:
    """Return values for the settings that are ``auto``, in the order of ``choosers``; later ones see earlier ones'.

    The first choice of a setting stays.

    On a CPU no choice is made: every setting has its plain value.
    """
    found: list[Choice] = []
    if situation.device_type == "cpu":
        return found
    plain = settings.undecided()
    for chooser in choosers:
        values = {choice.name: choice.value for choice in found}
        fits = functools.partial(situation.fits, **values)
        for choice in chooser(dataclasses.replace(situation, settings=settings.changed(**values), fits=fits)):
            if choice.name in plain and choice.name not in values:
                found.append(choice if choice.name in GPU_DEFAULTS else _unshown(choice, plain[choice.name]))
    return found


def agree_on_choices(settings: Settings, mine: list[Choice]) -> list[Choice]:
    """Return the choices that all ranks have made, and the plain value where they differ; collective.

    Hosts may differ in what is installed.
    """
    everyone: list[list[Choice]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    agreed, plain = [], settings.undecided()
    for name in dict.fromkeys(choice.name for theirs in everyone for choice in theirs):
        missing = Choice(name, plain[name], "not chosen")
        found = [next((choice for choice in theirs if choice.name == name), missing) for theirs in everyone]
        other = next((rank for rank, choice in enumerate(found) if choice.value != found[0].value), None)
        reasons = "" if other is None else f"rank 0: {found[0].reason}; rank {other}: {found[other].reason}"
        agreed.append(Choice(name, plain[name], reasons) if reasons else found[dist.get_rank()])
    return agreed


def missing_tools() -> str:
    """Return which of the compilers that ``torch.compile`` needs on a GPU are not found, or nothing."""
    missing = []
    if torch.version.cuda or torch.version.hip:  # else the job is planned for another machine
        missing = [] if importlib.util.find_spec("triton") else ["triton"]
        if shutil.which("cc") is None and shutil.which("gcc") is None:
            missing.append("a C compiler")
    return f"{' and '.join(missing)} not found" if missing else ""


def _unshown(choice: Choice, plain: Any) -> Choice:
    name, value, reason = choice
    if value == plain:
        return choice
    where = "several GPUs" if name in _NEEDS_SEVERAL else "a GPU"
    return Choice(name, plain, f"not yet measured on {where}; --{name} {flag_text(value)}: {reason}")
