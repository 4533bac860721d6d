"""What a check is given, and how it says what it has found."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from smp.config import Section
from smp.doctor.findings import Status
from smp.errors import UserError
from smp.runtime import Launch, choose_device

Scope = Literal["rank", "host", "first", "job"]
SectionType = TypeVar("SectionType", bound=Section)


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be looked at.

    Attributes:
        settings: of the training job by flag name, as far as they are known.
        training_words: what the training job's own command line would be, or empty where none was given.
        timeout: seconds that one check may take.
        full: look at everything instead of samples, and measure more.
        root: stands for ``/`` in what is read of the system.
    """

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    training_words: tuple[str, ...] = ()
    timeout: float = 60.0
    full: bool = False
    root: Path = Path("/")

    def section(self, kind: type[SectionType]) -> SectionType:
        """A section of the training job's configuration, with its defaults for what is not known.

        Raises:
            smp.errors.ConfigError: with every problem of the section.
        """
        known = {field.name for field in dataclasses.fields(kind)}
        values = {name: value for name, value in self.settings.items() if name in known}
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


class Room:
    """One worker's.

    Args:
        request: what is looked at.
        launch: this rank's place.
        send: takes what is said, as an object that JSON can hold.
        address: host and port of the store through which the ranks find each other; None where there is none.
    """

    def __init__(
        self,
        request: Request,
        launch: Launch,
        send: Callable[[dict[str, Any]], None],
        address: tuple[str, int] | None = None,
    ):
        self.request, self.launch, self.address = request, launch, address
        self._send = send
        self.check = ""  # the one that runs
        self.state: dict[str, Any] = {}  # what a check leaves for the next ones

    @functools.cached_property
    def device(self) -> torch.device:
        """This rank's; the CPU where there are fewer GPUs than processes, which is a finding."""
        try:
            return choose_device(self.launch)
        except UserError:
            return torch.device("cpu")

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
        run: does it.
        scope: who does: every rank, one rank of each host, rank 0; or all together, in a process group.
        share: of the seconds allowed, how many it may take.
    """

    name: str
    run: Callable[[Room], None]
    scope: Scope = "rank"
    share: float = 1.0

    def concerns(self, launch: Launch) -> bool:
        """Whether a rank takes part."""
        if self.scope == "host":
            return launch.local_rank == 0
        return self.scope != "first" or launch.rank == 0
