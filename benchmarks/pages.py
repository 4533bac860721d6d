"""What the result pages of the benchmarks have in common."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from pathlib import Path

import torch


def origin(*versions: str) -> list[str]:
    """Date, machine, versions and command line, as markdown.

    Args:
        versions: of what was measured besides torch, and the circumstances.
    """
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = models[0].partition(":")[2].strip() if models else "unknown processor"
    machine = f"{len(os.sched_getaffinity(0))}-core {platform.machine().replace('_', '-')} machine ({processor})"
    return [
        f"{datetime.date.today()}, {machine}, torch {torch.__version__}, {', '.join(versions)}.",
        "", f"    python {shlex.join(sys.argv)}", "",
    ]  # fmt: skip


class Bystanders:
    """How much of the machine was busy with something else, which shows whether a measurement can be trusted.

    To be made before the processes that are measured are started.
    """

    def __init__(self) -> None:
        self._before = self._ticks()

    @staticmethod
    def _ticks() -> tuple[int, float, int, float]:
        """All ticks of all cores; those in programs; those the hypervisor took; those of this process's children."""
        user, nice, system, idle, wait, irq, soft_irq, stolen, *_ = map(int, _first_line("/proc/stat").split()[1:])
        times = os.times()
        children = (times.children_user + times.children_system) * os.sysconf("SC_CLK_TCK")
        programs = user + nice + system
        return programs + idle + wait + irq + soft_irq + stolen, programs, stolen, children

    def describe(self) -> str:
        """One sentence, when the processes have ended."""
        total, programs, stolen, children = (now - then for now, then in zip(self._ticks(), self._before, strict=True))
        others = max(0.0, programs - children) / total
        return (
            f"Meanwhile other programs took {others:.0%} of the cores' time, and the hypervisor {stolen / total:.0%}."
        )


def _first_line(path: str) -> str:
    return Path(path).read_text().partition("\n")[0]


def publish(text: str, path: Path | None) -> None:
    """Print a page, and write it if a path is given."""
    print(text)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
