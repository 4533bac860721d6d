"""Checkpoints that a path or a URL on the command line names, wherever they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from smp.checkpoint.directory import quick_problems, step_of
from smp.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    expected_headers,
    problems_of_files,
    read_manifest,
)
from smp.checkpoint.object_store import ObjectStore, is_url
from smp.checkpoint.reader import CheckpointReader
from smp.checkpoint.remote import ASIDE, RemoteCheckpoint, manifest_of, problems_of_objects
from smp.checkpoint.remote_reader import RemoteFiles
from smp.cli.find import DEPTHS, checkpoints_at, existing_directory, interrupted_at
from smp.errors import UserError


@dataclasses.dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint in a directory, valid or not; ``name`` is shown."""

    path: Path
    name: str

    def manifest(self) -> Manifest:
        """Read the manifest; raises as :func:`read_manifest`."""
        return read_manifest(self.path)

    def quick_problems(self, manifest: Manifest) -> list[str]:
        """Return what names and sizes show."""
        return quick_problems(self.path, manifest)

    def problems_of(self, manifest: Manifest, names: Iterable[str]) -> list[str]:
        """Return what is wrong with the content of files."""
        return problems_of_files(self.path, manifest, content=True, names=names)

    def reader(self, manifest: Manifest) -> CheckpointReader:
        """Return a reader of its tensors."""
        return CheckpointReader(self.path, manifest)


@dataclasses.dataclass(frozen=True)
class UrlCheckpoint:
    """A checkpoint below a URL, valid or not; ``name`` is shown, ``sizes`` are those of its objects."""

    checkpoint: RemoteCheckpoint
    name: str
    sizes: dict[str, int]

    @property
    def path(self) -> str:
        """Its URL."""
        return str(self.checkpoint)

    def manifest(self) -> Manifest:
        """Read the manifest."""
        return manifest_of(self.checkpoint)

    def quick_problems(self, manifest: Manifest) -> list[str]:
        """Return what names and sizes show."""
        return problems_of_objects(self.path, manifest, self.sizes)

    def problems_of(self, manifest: Manifest, names: Iterable[str]) -> list[str]:
        """Return what is wrong with the content of files, each of which is read once."""
        files, expected = RemoteFiles(self.checkpoint), expected_headers(manifest)
        found = ((name, files.problem_of(name, manifest.files[name], expected.get(name, {}))) for name in names)
        return [f"{name} {problem}" for name, problem in found if problem]

    def reader(self, manifest: Manifest) -> CheckpointReader:
        """Return a reader of its tensors, by ranges."""
        return CheckpointReader(self.path, manifest, RemoteFiles(self.checkpoint))


GivenCheckpoint = LocalCheckpoint | UrlCheckpoint


@dataclasses.dataclass(frozen=True)
class Found:
    """What a path or a URL names.

    Attributes:
        single: it is a checkpoint itself.
        left: names of what an interrupted save or upload left.
        aside: names of what was taken out of its run.
        removed_by: what removes that which is left.
    """

    checkpoints: list[GivenCheckpoint]
    single: bool
    left: list[str]
    aside: list[str] = dataclasses.field(default_factory=list)
    removed_by: str = "the next start"


def one_checkpoint(text: str) -> GivenCheckpoint:
    """Return the checkpoint that a path or a URL names.

    Raises:
        UserError: there is none, or several.
    """
    found = find(text)
    if not found.single:
        such_as = f", such as {found.checkpoints[-1].path}" if found.checkpoints else ""
        raise UserError(f"{text} contains {len(found.checkpoints)} checkpoint(s): give one of them{such_as}")
    return found.checkpoints[0]


def find(text: str) -> Found:
    """Return the checkpoints that a path or a URL names: one, or all below it.

    Raises:
        UserError: there is none.
        StoreError: they cannot be listed.
    """
    if is_url(text):
        return _find_remote(text)
    directory = existing_directory(text)
    paths = checkpoints_at(directory)
    checkpoints: list[GivenCheckpoint] = [
        LocalCheckpoint(path, path.name if path == directory else str(path.relative_to(directory))) for path in paths
    ]
    left = [str(path.relative_to(directory)) for path in interrupted_at(directory)]
    return Found(checkpoints, paths == [directory], left)


def _find_remote(url: str) -> Found:
    store = ObjectStore(url)
    objects = store.sizes("")
    if not objects:
        raise UserError(f"{url} does not exist: give the URL of a checkpoint, or one that some are below")
    own = Path(store.url)
    if MANIFEST_FILE in objects or step_of(own) is not None:
        return Found([UrlCheckpoint(RemoteCheckpoint(store, ""), own.name, objects)], True, [])
    folders: dict[str, dict[str, int]] = {}
    for name, size in objects.items():
        folder, _, file = name.rpartition("/")
        if step_of(Path(folder)) is not None and folder.count("/") < len(DEPTHS):
            folders.setdefault(folder, {})[file] = size
    names = sorted(folders, key=lambda name: (Path(name).parent, step_of(Path(name)), name))
    checkpoints: list[GivenCheckpoint] = [
        UrlCheckpoint(RemoteCheckpoint(store, n), n, folders[n]) for n in names if MANIFEST_FILE in folders[n]
    ]
    aside = [name for name in names if ASIDE in folders[name] and MANIFEST_FILE not in folders[name]]
    left = [name for name in names if not {MANIFEST_FILE, ASIDE} & folders[name].keys()]
    if not names:
        raise UserError(f"{url} is not a checkpoint and none is below it: give a <model>-<step>steps URL, or one above")
    return Found(checkpoints, False, left, aside, "the next upload")
