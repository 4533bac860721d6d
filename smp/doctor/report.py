"""Findings and reports of ranks, their comparison, and the diagnosis as text and JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from smp.log import redact
from smp.runtime import Launch

Status = Literal["ok", "warning", "problem"]
# Measured once for the whole job, by rank 0.
_OF_THE_JOB = ("start_seconds", "paths", "exchange", "clock_offsets_seconds")
STATUSES: tuple[Status, ...] = ("ok", "warning", "problem")
FORMAT = 2  # of the JSON object; raised when a reader of the old one would go wrong


@dataclasses.dataclass(frozen=True)
class Finding:
    """One sentence of a check.

    Attributes:
        status: ``warning``: the job runs, but slower or less safely; ``problem``: it will not start or not last.
        message: what, got, and what to do.
        data: the numbers behind it.
    """

    check: str
    status: Status
    message: str
    ranks: tuple[int, ...] = ()
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def plain(text: str) -> str:
    """Return a text as one line without control characters and secrets."""
    return "".join(c if c.isprintable() else " " for c in redact(text))


def _plain_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_values(inner) for inner in value]
    return plain(value) if isinstance(value, str) else value


@dataclasses.dataclass
class Report:
    """The state of a rank's checks.

    Attributes:
        rank, local_rank, host, pid: of its process; 0 before it has come.
        state: ``runs``, ``done``, or how it ended before its time.
        check: the one that runs.
    """

    rank: int
    local_rank: int = 0
    host: str = "?"
    pid: int = 0
    state: str = "runs"
    check: str = ""
    findings: list[Finding] = dataclasses.field(default_factory=list)
    measurements: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, launch: Launch) -> Report:
        """Return the report of this process."""
        return cls(launch.rank, launch.local_rank, socket.gethostname(), os.getpid())

    @property
    def failed(self) -> bool:
        """True if it ended before its time."""
        return self.state not in ("runs", "done")

    def fail(self, message: str, **data: Any) -> None:
        """Add how it ended as a finding of the check that ran; the message up to its first colon is the state."""
        self.findings.append(Finding(self.check or "start", "problem", message, (self.rank,), data))
        self.state = message.partition(":")[0]

    def as_json(self) -> str:
        """Serialise for another process."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Invert :meth:`as_json`."""
        values = json.loads(text)
        found = [Finding(**each | {"ranks": tuple(each["ranks"])}) for each in values.pop("findings")]
        return cls(**values, findings=found)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Join equal findings of several ranks, in the order of their first appearance."""
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
    """The findings of a job, of all ranks.

    Attributes:
        ranks: for each rank its host and how its part ended.
        findings: merged, in the order of the checks.
    """

    ranks: Sequence[Mapping[str, Any]]
    findings: Sequence[Finding]
    measurements: Mapping[str, Any]

    @property
    def exit_status(self) -> int:
        """1 if there is a problem, else 0."""
        return int(any(finding.status == "problem" for finding in self.findings))

    def as_json(self) -> str:
        """Return one JSON object on one line, without secrets and without what would steer a terminal."""
        return json.dumps({"version": FORMAT, **_plain_values(dataclasses.asdict(self))}, allow_nan=False, default=str)

    def as_text(self) -> str:
        """Return lines for people: the findings, and their number by status."""
        hosts = len({rank["host"] for rank in self.ranks})
        size = len(self.ranks)
        lines = [f"smp doctor: {counted(size, 'process', 'processes')} on {counted(hosts, 'host')}"]
        width = max((len(finding.check) for finding in self.findings), default=0)
        for finding in self.findings:
            who = _who(finding.ranks, size)
            lines.append(f"  {finding.status:<7}  {finding.check:<{width}}  {who}{plain(finding.message)}")
        number = {status: sum(f.status == status for f in self.findings) for status in STATUSES}
        verdict = f"{number['ok']} ok, {counted(number['warning'], 'warning')}, {counted(number['problem'], 'problem')}"
        return "\n".join([*lines, "", verdict])


# --- compared


def _differing(reports: Sequence[Report], name: str, key: str) -> dict[str, list[int]]:
    """Return ranks by what they measured, if not all measured the same; else nothing."""
    found: dict[str, list[int]] = {}
    for report in reports:
        value = (report.measurements.get(name) or {}).get(key)
        if value is not None:
            found.setdefault(str(value), []).append(report.rank)
    return found if len(found) > 1 else {}


def differences(reports: Sequence[Report]) -> Iterator[Finding]:
    """Compare what must be the same on all ranks."""
    packages = dict.fromkeys(name for report in reports for name in report.measurements.get("versions") or {})
    compared: list[tuple[str, str, str, Status, str, str]] = [
        ("versions", "versions", name, "problem" if name == "torch" else "warning", f"{name} differs",
         "install the same version on all hosts")
        for name in packages
    ]  # fmt: skip
    compared += [
        ("devices", "gpu", "name", "warning", "the GPUs differ", "the slowest decides the speed"),
        ("devices", "gpu", "nccl", "warning", "NCCL differs", "install the same torch on all hosts"),
        ("dry run", "data", "training", "problem", "the training data is not the same on all hosts",
         "copy the same files to each, or use a shared file system"),
        ("dry run", "data", "validation", "problem", "the validation data is not the same on all hosts",
         "copy the same files to each, or use a shared file system"),
    ]  # fmt: skip
    for check, name, key, status, what, advice in compared:
        if found := _differing(reports, name, key):
            shown = "; ".join(f"{value} on rank(s) {listed(ranks)}" for value, ranks in found.items())
            ranks = tuple(sorted(rank for group in found.values() for rank in group))
            yield Finding(check, status, f"{what}: {shown}: {advice}", ranks, {"of": key, "by_value": found})


def diagnose(reports: Sequence[Report], order: Sequence[str]) -> Diagnosis:
    """Join the reports of a job: findings in the order of the checks, equal ones of several ranks as one."""
    found = merged([*(finding for report in reports for finding in report.findings), *differences(reports)])
    found.sort(key=lambda finding: order.index(finding.check) if finding.check in order else len(order))
    measurements: dict[str, Any] = {}
    for name in _OF_THE_JOB:
        if values := [report.measurements[name] for report in reports if name in report.measurements]:
            measurements[name] = values[0]
    measurements["by_rank"] = {
        str(report.rank): {name: value for name, value in report.measurements.items() if name not in _OF_THE_JOB}
        for report in reports
    }
    ranks = [{name: getattr(r, name) for name in ("rank", "local_rank", "host", "pid", "state")} for r in reports]
    return Diagnosis(ranks, found, measurements)


# --- shown


def listed(ranks: Sequence[int]) -> str:
    """Name the first of the ranks, and how many more there are."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def counted(number: int, one: str, several: str = "") -> str:
    """Return ``1 host``, ``2 hosts``."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def _who(ranks: Sequence[int], size: int) -> str:
    """Name the ranks that have a finding, where that is not all of them or the first."""
    if len(ranks) == size or not ranks or tuple(ranks) == (0,):
        return ""
    return f"rank{'' if len(ranks) == 1 else 's'} {listed(ranks)}: "
