"""Fault handling of the training program in one object: signals, watchdog, agreement."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from smp import comm
from smp.errors import RunError
from smp.faults.agreement import count, count_later
from smp.faults.config import FaultConfig
from smp.faults.members import Members
from smp.faults.nonfinite import NonFinite
from smp.faults.propagate import failing_together
from smp.faults.restart import SAME_STARTS, is_crash_loop
from smp.faults.stop import INTERRUPTED, STOPPED, StopRequest
from smp.faults.watchdog import Watchdog
from smp.log import get_logger
from smp.runtime import Launch

logger = get_logger("train")


class Guard:
    """Entered before anything is built; :meth:`connected` follows when there is a process group.

    Args:
        timeout: seconds to wait for other ranks.
    """

    def __init__(self, config: FaultConfig, launch: Launch, device: torch.device, *, run_dir: Path, timeout: float):
        self._launch, self._timeout, self._run_dir = launch, timeout, run_dir
        self.stop = StopRequest(launch.rank)
        self.watchdog = Watchdog(
            launch.rank, timeout=config.watchdog_timeout, operations=comm.last_operations, nccl=comm.nccl_operations
        )
        self.enter = self.watchdog.enter
        self.nonfinite = NonFinite(config, run_dir)
        self._device = device

    def __enter__(self) -> Guard:
        self.stop.__enter__()
        self.watchdog.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.watchdog.stop()
        self.stop.__exit__()

    @property
    def hosts(self) -> list[str]:
        """Name of the host of each rank."""
        members = self.watchdog.members
        return [socket.gethostname()] if members is None else [member.host for member in members.members]

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Inside a process group: watch the other ranks, and end with them; collective.

        Raises:
            PeerError: instead of what followed from another rank's failure.
        """
        with failing_together(self.watchdog, self._launch.rank):
            rank, size = self._launch.rank, self._launch.world_size
            self.watchdog.connect(Members(rank, size, timedelta(seconds=self._timeout)) if size > 1 else None)
            yield

    def refuse_crash_loop(self, step: int) -> None:
        """End a job that its launcher has started again from the same step too often; collective.

        Raises:
            RunError: on every rank.
        """
        # Asked of all: on several hosts, each launcher counts its restarts.
        loop = self._launch.is_main and is_crash_loop(self._run_dir, self._launch.restart, step)
        if count(self._device, loop=loop)["loop"]:
            raise RunError(
                f"this restart begins at step {step}, as the {SAME_STARTS - 1} before it did: the job "
                f"fails before its next checkpoint each time. See the first error above; start it again when that is "
                f"mended, or with a smaller --checkpoint_freq"
            )

    def ask(self, **flags: bool) -> Callable[[], dict[str, int]]:
        """Begin to count the ranks that raise each flag at a step boundary, and those asked to stop; collective.

        Args:
            flags: further ones, counted in the same collective.

        Returns:
            Function that returns the counts, for :meth:`verdict`.
        """
        self.enter("agreement")
        return count_later(self._device, stop=self.stop.raised, interrupt=self.stop.interrupted, **flags)

    def verdict(self, counts: Mapping[str, int], step: int) -> int:
        """Return 0 to go on, 75 after a request to stop, 130 after Ctrl-C."""
        if not counts["stop"]:
            return 0
        logger.warning(
            "%d of %d ranks were asked to stop: ending at step %d.", counts["stop"], dist.get_world_size(), step
        )
        return INTERRUPTED if counts["interrupt"] else STOPPED

    def part(self, status: int) -> None:
        """Leave the job after the last collective: from here on each rank ends by itself; collective."""
        self.enter("end")
        count(self._device, done=True)
        self.watchdog.leave(status, self._timeout)
