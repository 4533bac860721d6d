"""What the ranks' reports say together that none says alone, and the report of the whole job."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smp.doctor.checks import CHECKS
from smp.doctor.findings import Diagnosis, Finding, Status, merged

# Measured once for the whole job, by rank 0.
_OF_THE_JOB = ("start_seconds", "paths", "exchange", "pairs", "clock_offsets_seconds")


@dataclasses.dataclass
class Report:
    """What is known of a rank.

    Attributes:
        rank, local_rank, host, pid: who.
        findings, measurements: so far.
        state: ``done``, ``runs``, or how it ended before its time.
        done: whether nothing more is to come.
        failed: whether it ended before its time.
    """

    rank: int
    local_rank: int = 0
    host: str = "?"
    pid: int = 0
    findings: list[Finding] = dataclasses.field(default_factory=list)
    measurements: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: str = "runs"
    done: bool = False
    failed: bool = False


def _differing(reports: Sequence[Report], name: str, key: str) -> dict[str, list[int]]:
    """Ranks by what they measured, if not all measured the same; empty else."""
    found: dict[str, list[int]] = {}
    for report in reports:
        value = (report.measurements.get(name) or {}).get(key)
        if value is not None:
            found.setdefault(str(value), []).append(report.rank)
    return found if len(found) > 1 else {}


def _shown(found: Mapping[str, list[int]]) -> str:
    return "; ".join(
        f"{value} on rank(s) {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}"
        for value, ranks in found.items()
    )


def differences(reports: Sequence[Report]) -> Iterator[Finding]:
    """What must be the same on all ranks and is not."""
    names = dict.fromkeys(name for report in reports for name in report.measurements.get("versions") or {})
    for name in names:
        if found := _differing(reports, "versions", name):
            status: Status = "problem" if name == "torch" else "warning"
            ranks = tuple(sorted(rank for group in found.values() for rank in group))
            message = f"{name} differs: {_shown(found)}: install the same version on all hosts"
            yield Finding("versions", status, message, ranks, {"package": name, "by_version": found})
    for key in ("name", "nccl"):
        if found := _differing(reports, "gpu", key):
            what = "the GPUs differ" if key == "name" else "NCCL differs"
            ranks = tuple(sorted(rank for group in found.values() for rank in group))
            advice = "the slowest decides the speed" if key == "name" else "install the same torch on all hosts"
            yield Finding("devices", "warning", f"{what}: {_shown(found)}: {advice}", ranks, {"by_value": found})
    yield from _different_data(reports)


def _different_data(reports: Sequence[Report]) -> Iterator[Finding]:
    for flag in ("training_dir", "test_dir"):
        seen: dict[str, list[int]] = {}
        for report in reports:
            if found := (report.measurements.get("data") or {}).get(flag):
                seen.setdefault(f"{found['files']} file(s), {found['bytes']} bytes", []).append(report.rank)
        if len(seen) > 1:
            ranks = tuple(sorted(rank for group in seen.values() for rank in group))
            yield Finding(
                "data",
                "problem",
                f"--{flag} is not the same on all hosts: {_shown(seen)}: copy the same files to each, or use a shared "
                f"file system",
                ranks,
                {"by_content": seen},
            )


def diagnose(reports: Sequence[Report], more: Sequence[Finding] = ()) -> Diagnosis:
    """The report of the job: findings in the order of the checks, those of several ranks as one."""
    order = {check.name: place for place, check in enumerate(CHECKS)}
    found = [finding for report in reports for finding in report.findings] + [*differences(reports), *more]
    found = merged(found)
    found.sort(key=lambda finding: order.get(finding.check, len(order)))
    measurements: dict[str, Any] = {}
    by_rank: dict[str, Any] = {}
    for report in reports:
        own = dict(report.measurements)
        for name in _OF_THE_JOB:
            if name in own:
                measurements.setdefault(name, own.pop(name))
        by_rank[str(report.rank)] = own
    measurements["by_rank"] = by_rank
    ranks = [
        {"rank": r.rank, "local_rank": r.local_rank, "host": r.host, "pid": r.pid, "state": r.state} for r in reports
    ]
    return Diagnosis(ranks, found, measurements)
