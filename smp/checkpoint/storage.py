"""Storage of checkpoints: one directory that all ranks share, or one of each rank, and who publishes there."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smp.checkpoint.layout import TEMPORARY, disk_free
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.safetensors_io import reason
from smp.checkpoint.writer import VISIBLE_WITHIN, appears, finish, start
from smp.comm.report import readable
from smp.errors import RunError


def agree(failure: BaseException | None, what: str) -> None:
    """Raise on every rank if any has failed; collective.

    Args:
        what: the beginning of the sentence.

    Raises:
        RunError: naming the first rank that failed, and why.
    """
    said = None if failure is None else reason(failure)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    for rank, text in enumerate(everyone):
        if text is not None:
            raise RunError(f"{what}: rank {rank}: {text}") from failure


def attempt(action: Callable[[], object], directory: Path, nbytes: int) -> BaseException | None:
    """Run ``action`` and return what it raises, with what is needed and what is free if the disk is full."""
    try:
        action()
    except Exception as error:
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT) or not nbytes:
            return error
        free = readable(disk_free(directory))
        return RunError(f"{reason(error)}; its part needs {readable(nbytes)} and {directory} has {free} free")
    return None


@dataclasses.dataclass(frozen=True)
class Storage:
    """A directory of checkpoints.

    Attributes:
        directory: of this rank.
        shared: whether all ranks see it and write one checkpoint together (``sharded``); otherwise each rank keeps
            checkpoints of its own there (``local``), with all that it holds.
    """

    directory: Path
    shared: bool = True

    @property
    def kind(self) -> str:
        """Kind of its manifests."""
        return "sharded" if self.shared else "local"

    @property
    def leads(self) -> bool:
        """True if this rank begins, publishes and deletes checkpoints here."""
        return not self.shared or dist.get_rank() == 0

    def begin(self, name: str) -> Path:
        """Make the temporary directory of a checkpoint; collective.

        Raises:
            RunError: it cannot be made, or a rank does not see it; nothing is left behind.
        """
        temporary = self.directory / (name + TEMPORARY)
        said = f"checkpoint {self.directory / name} could not be begun"
        agree(attempt(lambda: start(temporary), self.directory, 0) if self.leads else None, said)

        def see() -> None:
            if not appears(temporary):
                raise RunError(
                    f"it does not see {temporary}, which rank 0 made, within {VISIBLE_WITHIN:g} s: checkpoints must be "
                    f"on a file system that all hosts share"
                )

        try:
            agree(attempt(see, self.directory, 0), said)
        except RunError:
            self.remove(temporary)
            raise
        return temporary

    def publish(self, temporary: Path, manifest: Manifest) -> None:
        """Publish what all ranks have written; does nothing on a rank that does not lead here."""
        if self.leads:
            ranks = list(range(manifest.world_size)) if self.shared else [dist.get_rank()]
            finish(temporary, temporary.with_name(temporary.name.removesuffix(TEMPORARY)), ranks, manifest)

    def remove(self, temporary: Path) -> None:
        """Delete a checkpoint that was not published."""
        if self.leads:
            shutil.rmtree(temporary, ignore_errors=True)
