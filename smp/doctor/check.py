"""What a check is given, and how it says what it has found."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from smp.data.data_pipeline import NO_DATA
from smp.doctor.report import Status
from smp.errors import ConfigError, UserError
from smp.runtime import Launch, choose_device
from smp.train.arguments import TrainConfig, parse_args

_NO_JOB = {"output_dir", "distributed_backend"}  # given alone, they describe no job to plan


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be looked at.

    Attributes:
        arguments: of the training job.
        timeout: seconds that one check may take.
        full: measure more.
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
        """Why the job refuses its arguments."""
        return self._parsed[1]

    @property
    def has_job(self) -> bool:
        """Whether the arguments describe a job that can be planned."""
        return bool(self.problems or self.config.given - _NO_JOB - {"use_synthetic_data"})


class CheckContext:
    """One rank's.

    Args:
        request: what is looked at.
        launch: this rank's place.
        send: takes what is said, as an object that JSON can hold.
    """

    def __init__(self, request: Request, launch: Launch, send: Callable[[dict[str, Any]], None]):
        self.request, self.launch, self._send = request, launch, send
        self.check = ""  # the one that runs
        self.state: dict[str, Any] = {}  # what a check leaves for the next ones

    @functools.cached_property
    def device(self) -> torch.device:
        """This rank's; the CPU where there are fewer GPUs than processes, which is a finding."""
        try:
            return choose_device(self.launch)
        except UserError:
            return torch.device("cpu")

    @property
    def on_several_hosts(self) -> bool:
        """Whether the job has ranks on other hosts."""
        return self.launch.local_world_size < self.launch.world_size

    def say(self, status: Status, message: str, **data: Any) -> None:
        """Say one sentence."""
        self._send({"finding": [self.check, status, message, data]})

    def ok(self, message: str, **data: Any) -> None:
        """All is well, and how."""
        self.say("ok", message, **data)

    def warn(self, message: str, **data: Any) -> None:
        """The job runs, but slower or less safely."""
        self.say("warning", message, **data)

    def problem(self, message: str, **data: Any) -> None:
        """The job will not start, or not last."""
        self.say("problem", message, **data)

    def measure(self, name: str, value: Any) -> None:
        """Leave a measurement of this rank's, which JSON can hold."""
        self._send({"measurement": [name, value]})

    def read(self, path: str) -> str | None:
        """A small file of the system, without the space around it; None where it is not there or not to be read.

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
        function: does it.
        scope: who does: every rank, one rank of each host; or all together, in a process group.
        share: of the seconds allowed, how many it may take.
    """

    name: str
    function: Callable[[CheckContext], None]
    scope: Literal["rank", "host", "job"] = "rank"
    share: float = 1.0

    def run(self, ctx: CheckContext) -> bool:
        """Run it; whether the next one can follow."""
        ctx.check = self.name
        try:
            self.function(ctx)
            return True
        except ConfigError as error:
            for sentence in error.problems:
                ctx.problem(sentence)
        except UserError as error:
            ctx.problem(str(error))
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            place = "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
            first = (str(error).splitlines() or [""])[0]
            ctx.problem(f"stopped by {type(error).__name__}: {first}", place=place)
        return self.scope != "job"
