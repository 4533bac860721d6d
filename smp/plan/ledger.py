"""Ledger of plans: what was predicted and what a run then measured, and a device's factor from many of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from smp.errors import UserError
from smp.json_input import read_object
from smp.units import percent

PLAN, ERROR = "plan.json", "plan_error.json"
SCHEMA = 1
STEP, MEMORY, RESERVED = "step", "memory", "reserved"


def compare(predicted: float | None, measured: float | None) -> dict[str, float | None]:
    """Return both and the error, a share of what was measured: below 0, too little was predicted."""
    known = predicted is not None and measured is not None and measured > 0
    error = predicted / measured - 1 if known and predicted is not None and measured is not None else None
    return {"predicted": predicted, "measured": measured, "error": error}


def entry(
    plan: Mapping[str, Any],
    *,
    categories: Mapping[str, int] | None,
    allocated: int | None,
    reserved: int | None,
    resident: int | None,
    step_seconds: float,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a line of the ledger.

    Args:
        plan: what :mod:`smp.plan.document` has written.
        categories: bytes of tensors at the peak, measured; None: not measured.
        allocated, reserved: of the caching allocator, at most; None on a CPU.
        resident: bytes of the process on a CPU, at most; None on a GPU.
        step_seconds: measured.
        about: device, versions and the like.
    """
    layout = plan["layouts"][0]
    memory, step = layout["memory"], layout["step"]
    tensors = sum(memory["at_peak"].values())
    found = {
        MEMORY: compare(memory["allocated"], allocated)
        if categories is None
        else compare(tensors, sum(categories.values())),
        RESERVED: compare(memory["reserved"], reserved),
        "allocated": compare(memory["allocated"], allocated),
        "process": compare(memory["allocated"] + memory["outside"] if resident else None, resident),
        STEP: compare(None if step is None else step["seconds"], step_seconds),
    }
    by_category = {
        name: compare(memory["at_peak"].get(name, 0), size)
        for name, size in (categories or {}).items()
        if size or memory["at_peak"].get(name)
    }
    return {
        "schema": SCHEMA, **about, "device_row": plan["device_row"], "mesh": layout["mesh"], "errors": found,
        "categories": by_category,
    }  # fmt: skip


def sentence(line: Mapping[str, Any]) -> str:
    """Return one line for a log: ``memory +0.0 %, reserved +3.1 %, step -4.0 %``."""
    errors = line["errors"]
    known = {name: errors[name]["error"] for name in (MEMORY, RESERVED, STEP) if errors[name]["error"] is not None}
    return ", ".join(f"{name} {percent(error)}" for name, error in known.items()) or "nothing to compare"


def read(directories: Iterable[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Read the ledger's lines under directories, in the order of their paths.

    Raises:
        UserError: a directory is missing, or a file is no line of a ledger.
    """
    found = []
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"--ledger {directory} is no directory: give one that contains run directories")
        for path in sorted(directory.rglob(ERROR)):
            try:
                line = read_object(path)
                if line.get("schema") != SCHEMA:
                    raise ValueError(f"its schema is {line.get('schema')!r} and not {SCHEMA}")
                sentence(line)
                float(line["device_row"].get("factor") or 1)
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise UserError(
                    f"{path} is no ledger of a plan ({error}): remove it, or leave its directory out"
                ) from None
            found.append((path, line))
    return found


def ratios(lines: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> list[float]:
    """Return measured over predicted seconds of the runs planned with one device's row, as if its factor were 1.

    Args:
        row: name, source and date of it.
    """
    found = []
    for line in lines:
        used, step = line["device_row"], line["errors"][STEP]
        same = all(used.get(name) == value for name, value in row.items())
        if same and step["predicted"] and step["measured"]:
            found.append(step["measured"] / step["predicted"] / float(used.get("factor") or 1))
    return found


def rows(lines: Sequence[tuple[Path, Mapping[str, Any]]]) -> list[list[str]]:
    """Return the table of a ledger: a head, a line for each run, and the median."""
    table = [["run", "device", "processes", "memory", "reserved", "step", "predicted", "measured"]]
    for path, line in lines:
        errors = line["errors"]
        seconds = [errors[STEP]["predicted"], errors[STEP]["measured"]]
        table.append(
            [
                path.parent.name, str(line["device_row"]["name"]), str(line.get("processes", "-")),
                *(percent(errors[name]["error"]) for name in (MEMORY, RESERVED, STEP)),
                *("-" if value is None else f"{value:.3g} s" for value in seconds),
            ]
        )  # fmt: skip
    medians = []
    for name in (MEMORY, RESERVED, STEP):
        errors = [line["errors"][name]["error"] for _, line in lines if line["errors"][name]["error"] is not None]
        medians.append(percent(statistics.median(map(abs, errors))).lstrip("+") if errors else "-")
    return [*table, ["median, without sign", "", "", *medians, "", ""]]
