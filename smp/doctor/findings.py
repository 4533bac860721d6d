"""What the checks say, and how it is shown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from smp.log import redact

Status = Literal["ok", "warning", "problem"]
STATUSES: tuple[Status, ...] = ("ok", "warning", "problem")
FORMAT = 1  # of the JSON object; raised when a reader of the old one would go wrong


@dataclasses.dataclass(frozen=True)
class Finding:
    """One sentence.

    Attributes:
        check: what was looked at.
        status: ``warning``: the job runs, but slower or less safely; ``problem``: it will not start or not last.
        message: what, got, and what to do.
        ranks: those that say so.
        data: the numbers behind it.
    """

    check: str
    status: Status
    message: str
    ranks: tuple[int, ...] = ()
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """As the JSON object holds it, without secrets and without what would steer a terminal."""
        return {
            "check": self.check,
            "status": self.status,
            "message": plain(self.message),
            "ranks": list(self.ranks),
            "data": _plain_values(dict(self.data)),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Finding:
        """The inverse of :meth:`as_json`."""
        return cls(found["check"], found["status"], found["message"], tuple(found["ranks"]), found["data"])


def plain(text: str) -> str:
    """One line without control characters and secrets."""
    return "".join(c if c.isprintable() else " " for c in redact(text))


def _plain_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_values(inner) for inner in value]
    return plain(value) if isinstance(value, str) else value


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of several ranks that say the same as one, in the order of their first appearance."""
    found: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.check, finding.status, finding.message)
        if key in found:
            ranks = tuple(sorted({*found[key].ranks, *finding.ranks}))
            finding = dataclasses.replace(found[key], ranks=ranks)
        found[key] = finding
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All that was found in a job.

    Attributes:
        ranks: for each rank its host and how its part ended.
        findings: merged, in the order of the checks.
        measurements: by name.
    """

    ranks: Sequence[Mapping[str, Any]]
    findings: Sequence[Finding]
    measurements: Mapping[str, Any]

    @property
    def exit_status(self) -> int:
        """1 if there is a problem, else 0."""
        return int(any(finding.status == "problem" for finding in self.findings))

    def as_json(self) -> str:
        """One object on one line."""
        found = {
            "version": FORMAT,
            "ranks": [dict(rank) for rank in self.ranks],
            "findings": [finding.as_json() for finding in self.findings],
            "measurements": _plain_values(dict(self.measurements)),
        }
        return json.dumps(found, allow_nan=False)

    def as_text(self) -> str:
        """Lines for people: findings, measurements in a table, and the sum of it."""
        hosts = len({rank["host"] for rank in self.ranks})
        size = len(self.ranks)
        lines = [f"smp doctor: {counted(size, 'process', 'processes')} on {counted(hosts, 'host')}"]
        width = max((len(finding.check) for finding in self.findings), default=0)
        for finding in self.findings:
            who = _who(finding.ranks, size)
            lines.append(f"  {finding.status:<7}  {finding.check:<{width}}  {who}{plain(finding.message)}")
        if table := _exchange_table(self.measurements.get("exchange") or []):
            lines += ["", table]
        number = {status: sum(f.status == status for f in self.findings) for status in STATUSES}
        verdict = f"{number['ok']} ok, {counted(number['warning'], 'warning')}, {counted(number['problem'], 'problem')}"
        return "\n".join([*lines, "", verdict])


def counted(number: int, one: str, several: str = "") -> str:
    """``1 host``, ``2 hosts``."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def _who(ranks: Sequence[int], size: int) -> str:
    """The ranks a finding is of, where that is not all or the first."""
    if len(ranks) == size or not ranks or tuple(ranks) == (0,):
        return ""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}: "


def _exchange_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Times and bandwidths of the collectives: a line for each, a column for each size."""
    if not rows:
        return ""
    sizes = sorted({row["bytes"] for row in rows})
    by_place = {(row["operation"], row["bytes"]): row for row in rows}
    table = [["", *(readable_size(size) for size in sizes)]]
    for operation in dict.fromkeys(row["operation"] for row in rows):
        cells = [by_place.get((operation, size)) for size in sizes]
        table.append([operation, *("" if row is None else _speed(row) for row in cells)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def _speed(row: Mapping[str, Any]) -> str:
    seconds = row["seconds"]
    time = f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
    return f"{time}, {row['gib_per_second']:.2g} GiB/s" if row["bytes"] >= 1 << 20 else time


def readable_size(nbytes: int) -> str:
    """``64 KiB``: a size that is a power of two, without decimals."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):g} {unit}"
    return f"{nbytes} B"
