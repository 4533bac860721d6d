"""A process's ranks and the world size, and the checks of what launchers set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from smp.errors import PeerError, UserError

Environment = Mapping[str, str]

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process's ranks and the size of the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart: int = 0
    launcher: str = dataclasses.field(default="", compare=False)  # for messages; empty: none was found

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes shared files and prints."""
        return self.rank == 0

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Rank, size, local rank and local size, in the order of ``NAMES``."""
        return self.rank, self.world_size, self.local_rank, self.local_world_size


class IncompleteError(UserError):
    """A launcher has left something out: no harm where all four numbers were set by hand."""


class NamedLaunch(NamedTuple):
    """A launch, with the names that its launcher has for the four numbers."""

    launch: Launch
    names: tuple[str, str, str, str]

    def shown(self, index: int) -> str:
        """One of the numbers with its name."""
        return f"{self.names[index]}={self.launch.numbers[index]}"


def number(env: Environment, launcher: str, *names: str) -> int:
    """Return the number in the first of the variables that is set.

    Raises:
        IncompleteError: none is.
        UserError: it is no number.
    """
    for name in names:
        if (value := env.get(name)) is not None:
            if not is_number(value):
                raise UserError(f"{name}={value}, which {launcher} sets, is not a number: start the job anew with it")
            return int(value)
    raise IncompleteError(
        f"{launcher} started this process, but {' or '.join(names)} is not set: hand all of its variables on (into "
        f"the container, too), or set {', '.join(NAMES)}, MASTER_ADDR and MASTER_PORT"
    )


def is_number(text: str | None) -> bool:
    """Return whether ``int`` reads the text as the launcher meant it: ``²`` is a digit, and no number."""
    return text is not None and text.isascii() and text.isdigit() and len(text) < 19


def refuse_impossible(named: NamedLaunch) -> None:
    """Refuse numbers that cannot be.

    Raises:
        UserError: naming two of them.
    """
    values = named.launch.numbers
    for small, large, below in ((0, 1, True), (2, 3, True), (3, 1, False)):
        if values[small] > values[large] or (below and values[small] == values[large]):
            raise UserError(
                f"{named.shown(small)} is not possible with {named.shown(large)}: it must be "
                f"{'below' if below else 'at most'} {values[large]}; start all processes with one launcher, such as "
                f"torchrun, which sets both"
            )


def refuse_round_robin(named: NamedLaunch, text: str) -> NoReturn:
    """Refuse a rank whose neighbours are on other hosts.

    Raises:
        UserError: with this text.
        PeerError: the same, where rank 1 is refused too, and reports it for all.
    """
    rank, world_size, local_rank, local_world_size = named.launch.numbers
    in_turn = world_size % local_world_size == 0 and local_rank == rank * local_world_size // world_size
    raise (PeerError if in_turn and rank > 1 else UserError)(text)
