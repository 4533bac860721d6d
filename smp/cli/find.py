"""The checkpoints or the model that a path on the command line names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from smp.checkpoint.directory import TEMPORARY, step_of
from smp.checkpoint.manifest import MANIFEST_FILE
from smp.errors import UserError
from smp.models.weight_files import ADAPTER_CONFIG, refuse_adapter

# Below a run directory checkpoints lie one directory deeper, those of single ranks two.
DEPTHS = ("*", "*/*", "*/*/*")
_LEFT = re.compile(rf"{re.escape(TEMPORARY)}$|steps\.aside\d+$")  # has a separate line, or is no longer of the run


def existing_directory(text: str) -> Path:
    """Return the directory itself, where ``text`` may be a link to it such as ``latest``.

    Raises:
        UserError: there is none.
    """
    path = Path(text).expanduser()
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{text} {what}: give the directory of a checkpoint, or one that contains some")
    return path.resolve()


def is_checkpoint(directory: Path) -> bool:
    """Tell whether it is meant to be a checkpoint, valid or not: by its manifest, or else its name."""
    return (directory / MANIFEST_FILE).exists() or step_of(directory) is not None


def is_model(directory: Path) -> bool:
    """Tell whether it is a Hugging Face model directory, or one of an adapter in peft's format."""
    return config_file_of(directory).is_file()


def config_file_of(directory: Path) -> Path:
    """Return the file that says what a model directory, or an adapter's, contains."""
    adapter = directory / ADAPTER_CONFIG
    return adapter if adapter.is_file() else directory / "config.json"


def refuse_links_out(directory: Path, files: Iterable[Path], named_by: object) -> None:
    """Refuse files of a directory that a checkpoint names, and not the user, which lie elsewhere.

    Those of a snapshot in Hugging Face's cache are links to the blobs of its repository.

    Args:
        named_by: the checkpoint.

    Raises:
        UserError: one is a link to a file outside of the directory.
    """
    root = directory.resolve()
    snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
    inside = [root] if snapshots is None else [root, snapshots.parent / "blobs"]
    for file in files:
        real = file.resolve()
        if not any(map(real.is_relative_to, inside)):
            raise UserError(
                f"{file} is a link to {real}, outside of the directory that checkpoint {named_by} names: replace the "
                f"link by a copy, or give the tokenizer's directory by --tokenizer, with --merge the model's by --base"
            )


def checkpoints_at(directory: Path) -> list[Path]:
    """Return the checkpoint that ``directory`` is, or those in it (a run directory, or its ``checkpoints``), by step.

    Raises:
        UserError: there is none.
    """
    if is_checkpoint(directory):
        return [directory]
    found = [
        path
        for depth in DEPTHS
        for path in directory.glob(depth)
        if _is_listed(path) and path.is_dir() and not path.is_symlink()
    ]
    if not found:
        refuse_adapter(directory)
        raise UserError(
            f"{directory} is not a checkpoint and contains none: give a <model>-<step>steps directory, or one with some"
        )
    return sorted(found, key=lambda path: (path.parent, step_of(path) or 0, path.name))


def _is_listed(path: Path) -> bool:
    """Tell whether it is named as a checkpoint, or is a copy under another name, and not what a run has left."""
    return step_of(path) is not None or ((path / MANIFEST_FILE).is_file() and not _LEFT.search(path.name))


def interrupted_at(directory: Path) -> list[Path]:
    """Return what interrupted saves have left in a directory of checkpoints."""
    return sorted(path for depth in DEPTHS[:2] for path in directory.glob(f"{depth}steps{TEMPORARY}"))
