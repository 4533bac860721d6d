"""A check, and what it is given: the request, the rank and the report to add to."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from smp.data.config import NO_DATA
from smp.doctor.report import Finding, Report, Status
from smp.errors import ConfigError, UserError, first_line
from smp.runtime import Launch, choose_device
from smp.train.arguments import TrainConfig, parse_args

_NO_JOB = {"output_dir", "distributed_backend"}  # given alone, they describe no job to plan


@dataclasses.dataclass(frozen=True)
class Request:
    """The command's arguments.

    Attributes:
        arguments: of the training job.
        timeout: seconds that one check may take.
        full: measure longer messages.
        root: stands for ``/`` in what is read of the system.
    """

    arguments: tuple[str, ...] = ()
    timeout: float = 60.0
    full: bool = False
    root: Path = Path("/")

    @functools.cached_property
    def _parsed(self) -> tuple[TrainConfig, list[str]]:
        synthetic = ("--use_synthetic_data", "1")
        try:
            config = parse_args(self.arguments)
            if config.data.missing() == [NO_DATA]:  # the rest of the job can still be planned
                config = parse_args([*self.arguments, *synthetic])
            return config, []
        except UserError as error:
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        return parse_args(synthetic), problems

    @property
    def config(self) -> TrainConfig:
        """The job's settings; the defaults where it refuses its arguments."""
        return self._parsed[0]

    @property
    def problems(self) -> list[str]:
        """The sentences with which the job refuses its arguments."""
        return self._parsed[1]

    @property
    def has_job(self) -> bool:
        """True if the arguments describe a job that can be planned."""
        return bool(self.problems or self.config.given - _NO_JOB - {"use_synthetic_data"})


class CheckContext:
    """The request, the rank and the report of a check."""

    def __init__(self, request: Request, launch: Launch, report: Report):
        self.request, self.launch, self.report = request, launch, report
        self.state: dict[str, Any] = {}  # what a check leaves for the next ones in this process

    @functools.cached_property
    def device(self) -> torch.device:
        """This rank's device; the CPU where there are fewer GPUs than processes, which is a finding."""
        try:
            return choose_device(self.launch)
        except UserError:
            return torch.device("cpu")

    def add(self, status: Status, message: str, **data: Any) -> None:
        """Add a finding: one sentence, and the numbers behind it."""
        self.report.findings.append(Finding(self.report.check, status, message, (self.launch.rank,), data))

    def ok(self, message: str, **data: Any) -> None:
        """Add a finding of what is well."""
        self.add("ok", message, **data)

    def warn(self, message: str, **data: Any) -> None:
        """Add a finding with which the job runs, but slower or less safely."""
        self.add("warning", message, **data)

    def problem(self, message: str, **data: Any) -> None:
        """Add a finding with which the job will not start, or not last."""
        self.add("problem", message, **data)

    def measure(self, name: str, value: Any) -> None:
        """Keep a measurement of this rank, which JSON can represent."""
        self.report.measurements[name] = value

    def read(self, path: str) -> str | None:
        """Return a small file of the system, stripped; None where it is missing or not readable.

        Args:
            path: from the root, without a leading slash.
        """
        try:
            return (self.request.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None


@dataclasses.dataclass(frozen=True)
class Check:
    """One kind of check.

    Attributes:
        name: as findings show it.
        scope: run by every rank, by one rank of each host, or by all together in a process group.
        share: times ``--timeout``, after which it is given up.
    """

    name: str
    function: Callable[[CheckContext], None]
    scope: Literal["rank", "host", "job"] = "rank"
    share: float = 1.0

    def run(self, ctx: CheckContext) -> bool:
        """Run it, and return whether the next one can follow."""
        try:
            self.function(ctx)
            return True
        except UserError as error:
            for sentence in error.problems if isinstance(error, ConfigError) else [str(error)]:
                ctx.problem(sentence)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            ctx.problem(
                f"stopped by {type(error).__name__}: {first_line(error)}", place=f"{last.filename}:{last.lineno}"
            )
        return self.scope != "job"
