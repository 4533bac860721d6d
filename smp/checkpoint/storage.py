"""Storage of checkpoints: one directory that all ranks share, or one of each rank, and who publishes in it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch.distributed as dist

from smp.checkpoint.directory import TEMPORARY, checkpoint_name
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.mirror import Mirror
from smp.checkpoint.object_store import ObjectStore, is_url
from smp.checkpoint.outcome import agree, attempt
from smp.checkpoint.writer import VISIBLE_WITHIN, appears, finish, start
from smp.errors import RunError, UserError


def storage_at(location: str | Path, model_name: str, staging: Path) -> Storage:
    """Return the storage of a directory that all ranks share, or of a URL.

    Args:
        staging: directory in which checkpoints for a URL are written and kept.

    Raises:
        UserError: the URL's scheme is unknown, or its package is not installed.
    """
    if is_url(location):
        return Storage(staging, mirror=Mirror(ObjectStore(str(location)), model_name))
    return Storage(Path(location))


@dataclasses.dataclass(frozen=True)
class Storage:
    """A directory of checkpoints.

    Attributes:
        directory: of this rank.
        shared: whether all ranks see it and write one checkpoint together (``sharded``); otherwise each rank keeps
            its part of the checkpoints (``local``), with all of its shards.
        mirror: the URL that they are uploaded to, and resumed from; None: they stay here.
    """

    directory: Path
    shared: bool = True
    mirror: Mirror | None = None

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
        agree(attempt(lambda: start(temporary)) if self.leads else None, said)

        def see() -> None:
            if not appears(temporary):
                raise RunError(
                    f"it does not see {temporary}, which rank 0 made, within {VISIBLE_WITHIN:g} s: checkpoints must be "
                    f"on a file system that all hosts share"
                    f"{', also on the way to a URL: choose such a directory for them' if self.mirror else ''}"
                )

        try:
            agree(attempt(see), said)
        except RunError:
            self.remove(temporary)
            raise
        return temporary

    def require_shared(self, model_name: str) -> None:
        """Refuse a directory that hosts do not share before a step is lost, instead of at the first save; collective.

        Raises:
            UserError: a rank does not see what rank 0 makes in it.
        """
        try:
            self.remove(self.begin(checkpoint_name(model_name, 0)))
        except RunError as error:
            raise UserError(f"{error}; --checkpoint_type local keeps them on a disk of each host") from error

    def publish(self, temporary: Path, manifest: Manifest) -> None:
        """Publish what all ranks have written; no-op on a rank that does not lead here."""
        if self.leads:
            ranks = list(range(manifest.world_size)) if self.shared else [dist.get_rank()]
            finish(temporary, temporary.with_name(temporary.name.removesuffix(TEMPORARY)), ranks, manifest)

    def remove(self, temporary: Path) -> None:
        """Delete a checkpoint that was not published."""
        if self.leads:
            shutil.rmtree(temporary, ignore_errors=True)
