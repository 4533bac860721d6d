"""What a call leaves: ``results.jsonl``, ``summary.md`` and ``failures.txt``, each written anew after every result."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GIB = 2**30
Result = dict[str, Any]
FILES = ("results.jsonl", "summary.md", "failures.txt")


class Results:
    """The results of this call, after those that it goes on from."""

    def __init__(self, folder: Path, earlier: list[Result]):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._lock, self._began = folder, threading.Lock(), time.monotonic()
        self.all = list(earlier)
        (folder / "failures.txt").touch()
        (folder / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in earlier))

    def add(self, kind: str, name: str, why: str = "", log: str = "", **found: Any) -> None:
        """Write a result; one with a reason has failed, and the end of its log is kept."""
        at = round(time.monotonic() - self._began, 1)
        result = {"at": at, "kind": kind, "name": name, "ok": not why, "why": why, **found}
        with self._lock:
            self.all.append(result)
            with (self._folder / "results.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")
            if why:
                with (self._folder / "failures.txt").open("a") as file:
                    file.write(f"===== {name}: {why}\n{log[-6000:]}\n\n")
            (self._folder / "summary.md").write_text(page(self.all))
            print(f"[{at:5.0f} s] {line(result)}", flush=True)


def line(result: Result) -> str:
    """Return one line about a result."""
    if result["kind"] == "left":
        return f"not begun, for want of time: {result['name']}"
    if result["kind"] == "absent":
        return f"not here: {result['name']}, which needs {result['missing']}"
    if not result["ok"]:
        return f"FAILED {result['name']}: {result['why']}"[:300]
    if "seconds" in result:
        return f"{result['name']}: {result['seconds'] * 1e3:.1f} ms"
    found = result.get("found")
    return f"ok {result['name']}{f': {found}' if isinstance(found, str) else ''}"


def read(file: Path) -> list[Result]:
    """Return an earlier call's results; the last line may be cut off."""
    return [json.loads(each) for each in file.read_text().splitlines() if each.endswith("}")]


def succeeded(results: Iterable[Result]) -> set[str]:
    """Return the names of what need not be measured again."""
    return {each["name"] for each in results if each["ok"] and each["kind"] not in ("left", "absent")}


def newest(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the last result of each name, by kind; what was not begun counts only where nothing else is known."""
    found: dict[str, Result] = {}
    for each in results:
        if each["kind"] not in ("left", "absent") or each["name"] not in found:
            found.pop(each["name"], None)  # it comes last
            found[each["name"]] = each
    kinds: dict[str, list[Result]] = {}
    for each in found.values():
        kinds.setdefault(each["kind"], []).append(each)
    return kinds


def table(header: str, rows: Iterable[Iterable[Any]]) -> list[str]:
    """Format a table of Markdown."""
    columns = header.count("|") + 1
    lines = [" | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in row) for row in rows]
    return ["", f"| {header} |", "|---" * columns + "|", *(f"| {each} |" for each in lines)] if lines else []


def page(results: list[Result]) -> str:
    """Return the summary."""
    kinds = newest(results)
    lines = ["# One GPU"]
    for each in kinds.get("environment", []):
        facts = {**each["facts"], **({"failed": each["why"]} if each["why"] else {})}
        lines += ["", *(f"- {name}: {value}" for name, value in facts.items())]
    failed = [each for found in kinds.values() for each in found if not each["ok"]]
    names = "; ".join(each["name"] for each in failed)
    lines += ["", f"Failed (failures.txt has the output): {names}." if names else "Nothing failed."]
    if left := kinds.get("left"):
        lines += ["", f"Not begun, for want of time: {'; '.join(each['name'] for each in left)}."]
    if absent := kinds.get("absent"):
        needs = "; ".join(f"{each['name']} (needs {each['missing']})" for each in absent)
        lines += ["", f"Not here: {needs}."]
    shown = ((e["name"], f"ok: {e['found']}" if e["ok"] else f"FAILED: {e['why']}") for e in kinds.get("check", []))
    found = table("check | result", shown)
    lines += ["", "## Right or wrong", *found] if found else []
    steps = kinds.get("step", [])
    if steps:
        lines += ["", "## A step", *steps_table(steps, {each["of"]: each for each in kinds.get("plan", [])})]
        for title, found in (
            ("In turns", turns_table(steps)),
            ("A block: what the larger model takes longer", blocks_table(steps)),
        ):
            lines += ["", f"### {title}", *found] if found else []
    for each in [*steps, *kinds.get("measure", [])]:
        lines += details(each)
    tests = [(e["name"], "ok" if e["ok"] else "FAILED", e["found"], e["why"]) for e in kinds.get("tests", [])]
    lines += ["", "## tests/gpu", *table("file | result | tests | why", tests)] if tests else []
    return "\n".join(lines) + "\n"


def details(each: Result) -> list[str]:
    """Format what a measurement found beside its seconds."""
    lines: list[str] = []
    if each.get("chosen"):
        lines += ["", f"Chosen for {each['name']}: {each['chosen']}."]
    if each.get("kernels"):
        lines += ["", f"### Kernels: {each['name']}", "", "```", *each["kernels"], "```"]
    if each.get("found"):
        lines += ["", f"### {each['name']}", "", *(f"- {name}: {value}" for name, value in each["found"].items())]
    return lines


def number(value: float | None, form: str = ".1f") -> str:
    """Format a number that may be unknown."""
    return "-" if value is None else format(value, form)


def _ratio(value: float | None, other: float | None, form: str = ".3f") -> str:
    return format(value / other, form) if value and other else "-"


def _drift(each: Result, steps: list[Result]) -> str:
    """Return how far the losses are from the first measurement's of the same values and samples."""
    alike = [e for e in steps if e["ok"] and all(e[key] == each[key] for key in ("layers", "layout"))]
    pairs = zip(each["losses"], alike[0]["losses"], strict=False)
    return f"{max(abs(one - two) / max(abs(two), 1e-9) for one, two in pairs):.1e}"


def steps_table(steps: list[Result], plans: dict[str, Result]) -> list[str]:
    """Format a line for each measurement of a step, beside what ``smp plan`` says."""
    header = (
        "what | ms | planned | tokens/s per GPU | MFU | allocated, GiB | / planned | reserved, GiB | / planned | "
        "flushes | SM MHz | W | first step, s | graphs | breaks | loss off"
    )
    rows: list[list[str]] = []
    for each in steps:
        plan = plans.get(each["name"], {})
        if not each["ok"]:
            rows.append([each["name"], f"failed: {each['why'][:120]}", *["-"] * 14])
            continue
        memory = []
        for key in ("allocated", "reserved"):
            memory += [number(each[key] and each[key] / GIB, ".2f"), _ratio(each[key], plan.get(key))]
        speed = each["tokens"] / each["seconds"]
        rows.append([
            each["name"], f"{each['seconds'] * 1e3:.1f}", number(plan.get("seconds") and plan["seconds"] * 1e3),
            f"{speed:.0f}", _ratio(speed * each["flops_per_token"], each["peak_flops"]), *memory,
            number(each["flushes"], "d"), number(each["sm_mhz"], ".0f"), number(each["watts"], ".0f"),
            f"{each['first_s']:.1f}", each["graphs"], each["breaks"], _drift(each, steps),
        ])  # fmt: skip
    return table(header, rows)


def turns_table(steps: list[Result]) -> list[str]:
    """Format the spread of what was measured several times, in turns with others."""
    found: dict[tuple[str, int], list[Result]] = {}
    for each in steps:
        if each["ok"] and each["turn"]:
            found.setdefault((each["what"], each["layers"]), []).append(each)
    rows = []
    for (what, layers), those in found.items():
        times = [each["seconds"] * 1e3 for each in those]
        clocks = ", ".join(number(each["sm_mhz"], ".0f") for each in those)
        row = [
            f"{what}, {layers} layers",
            len(times),
            f"{sum(times) / len(times):.1f}",
            f"{min(times):.1f} to {max(times):.1f}",
        ]
        rows.append([*row, clocks])
    return table("what | turns | mean, ms | range | SM MHz", rows)


def blocks_table(steps: list[Result]) -> list[str]:
    """Format the time of a block; the rest of a step is embedding, head, loss and update."""
    by_what: dict[str, list[Result]] = {}
    for each in sorted((each for each in steps if each["ok"]), key=lambda each: each["layers"]):
        by_what.setdefault(each["what"], []).append(each)
    rows = []
    for what, (few, *_, many) in ((what, of) for what, of in by_what.items() if len(of) > 1):
        if more := many["layers"] - few["layers"]:
            block = (many["seconds"] - few["seconds"]) / more
            flops = (many["flops_per_token"] - few["flops_per_token"]) / more * few["tokens"]
            rest = few["seconds"] - few["layers"] * block
            layers = f"{few['layers']} and {many['layers']}"
            rows.append(
                [what, layers, f"{block * 1e3:.2f}", _ratio(flops / block, few["peak_flops"]), f"{rest * 1e3:.1f}"]
            )
    return table("what | layers | a block, ms | its MFU | rest of the step, ms", rows)
