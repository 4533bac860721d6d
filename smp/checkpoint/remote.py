"""Checkpoints below a URL: which exist, and what names and sizes say of them.

A folder ``<model>-<step>steps`` is a checkpoint from the moment that its ``manifest.json`` exists, which is uploaded
last and deleted first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from smp.checkpoint.directory import Checkpoint, checkpoint_name, problems_of_step, step_of
from smp.checkpoint.manifest import MANIFEST_FILE, Manifest, parse_manifest, problems_of_sizes, read_manifest
from smp.checkpoint.object_store import ObjectStore
from smp.errors import DamagedCheckpointError, UserError

# Manifest of a checkpoint of an abandoned branch, which is not found.
ASIDE = "manifest.aside.json"


@dataclasses.dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint below a URL.

    Attributes:
        name: of its folder; empty: the store is it.
        copy: a verified one, which is read instead; None: files are read at the URL.
    """

    store: ObjectStore
    name: str
    copy: Path | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        return self.store.at(self.name)


def manifest_of(checkpoint: Path | RemoteCheckpoint) -> Manifest:
    """Return the manifest of a checkpoint; raises as :func:`read_remote`."""
    if isinstance(checkpoint, Path):
        return read_manifest(checkpoint)
    return read_remote(checkpoint.store, checkpoint.name)[0]


def find_remote(store: ObjectStore) -> list[Checkpoint]:
    """Return the checkpoints below the URL, of whatever model, oldest first; ``path`` is the name alone.

    Raises:
        StoreError: they cannot be listed.
    """
    named = [(Path(name), step_of(Path(name))) for name in store.folders()]
    found = [Checkpoint(path, step) for path, step in named if step is not None]
    return sorted((c for c in found if MANIFEST_FILE in store.sizes(c.path.name)), key=lambda c: c.step)


def of_model(found: Sequence[Checkpoint], model_name: str) -> list[Checkpoint]:
    """Return those of ``model_name``."""
    return [c for c in found if c.path.name == checkpoint_name(model_name, c.step)]


def read_remote(store: ObjectStore, name: str) -> tuple[Manifest, bytes]:
    """Return the manifest of a remote checkpoint, and its bytes.

    Raises:
        UserError: it has none, or one of a newer schema.
        DamagedCheckpointError: it is malformed.
        StoreError: it cannot be read.
    """
    data = store.read(f"{name}/{MANIFEST_FILE}")
    if data is None:
        raise UserError(f"{store.at(name)} is not a complete checkpoint: it has no {MANIFEST_FILE}")
    return parse_manifest(data, store.at(name), len(store.sizes(name))), data


def problems_of_objects(name: str, manifest: Manifest, sizes: dict[str, int]) -> list[str]:
    """Compare the name of a checkpoint, and the names and sizes of its objects, with its manifest."""
    problems = problems_of_sizes(manifest, {file: size for file, size in sizes.items() if file != ASIDE})
    return problems + problems_of_step(name, manifest)


def remote_problem(store: ObjectStore, name: str) -> str | None:
    """Return a sentence of what the manifest, names and sizes show; None if they show nothing.

    Raises:
        StoreError: they cannot be read.
    """
    try:
        manifest, _ = read_remote(store, name)
        problems = problems_of_objects(name, manifest, store.sizes(name))
        return str(DamagedCheckpointError(store.at(name), problems)) if problems else None
    except UserError as error:
        return str(error)
