"""A plan as JSON: the same flags give the same bytes; nothing in it depends on when or how fast it was made."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp.plan.cost import Cost
    from smp.plan.records import LayoutPlan, RankMemory

SCHEMA = 1
START = b'{\n "schema": '  # of every document, by which it is told from other files


def memory_entry(memory: RankMemory) -> dict[str, Any]:
    """Return the memory of a rank, in bytes."""
    return {
        "rank": memory.rank,
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "outside": memory.outside,
        "heap": memory.heap,
        "limit": memory.limit,
        "room": memory.headroom,
        "worst_case": memory.needed + memory.worst,
        "shared": memory.shared,
        "peak_moment": memory.peak.where,
        "at_peak": dict(memory.peak.categories),
        "own_peaks": dict(memory.own_peaks),
    }


def layout_entry(plan: LayoutPlan, cost: Cost | None = None, rates: Mapping[str, float] | None = None) -> Any:
    """Return a layout: its flags, memory, step and cost.

    Args:
        cost: of the tokens asked for.
        rates: tokens per second of a device, and model FLOPs utilisation.
    """
    return {
        "mesh": plan.mesh,
        "flags": dict(plan.flags),
        "fits": plan.memory.verdict,
        "tight": plan.memory.tight,
        "memory": memory_entry(plan.memory),
        "host": dict(plan.host),
        "disk": dict(plan.disk),
        "step": {**dataclasses.asdict(plan.step), "parts": dict(plan.step.parts)},
        "tokens": plan.tokens,
        "rates": dict(rates or {}),
        "cost": None if cost is None else dataclasses.asdict(cost),
        "method": plan.method,
        "notes": list(plan.notes),
    }


def as_text(content: Any) -> str:
    """Return JSON with a line break at its end."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def write(content: Any, path: Path) -> None:
    """Write JSON; a reader sees the old file or the complete new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(as_text(content))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
