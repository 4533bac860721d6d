"""Where checkpoints lie on disk, what a complete one holds, and which to resume from.

A checkpoint is a directory ``<model>-<step>steps`` with safetensors files written by torch's distributed
checkpointing and ``state.json``. It is written under a temporary name and renamed when complete, so a directory
of that name with a ``state.json`` is whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from smp.errors import UserError
from smp.log import get_logger

FORMAT = 1
STATE_FILE = "state.json"
LATEST = "latest"
TEMPORARY = ".tmp"

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int


def checkpoint_name(model_name: str, step: int) -> str:
    """SMP v2's directory name."""
    return f"{model_name}-{step}steps"


def find_checkpoints(directory: Path, model_name: str) -> list[Checkpoint]:
    """Complete checkpoints of ``model_name`` in ``directory``, oldest first."""
    pattern = re.compile(re.escape(model_name) + r"-(\d+)steps")
    found = []
    if directory.is_dir():
        for path in directory.iterdir():
            match = pattern.fullmatch(path.name)
            if match and (path / STATE_FILE).is_file():
                found.append(Checkpoint(path, int(match.group(1))))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def choose_checkpoint(wanted: str | None, directories: list[Path], model_name: str) -> Path | None:
    """The checkpoint to resume from, or None for a fresh start.

    Args:
        wanted: None, ``latest`` (the newest in any of ``directories``), or a path.

    Raises:
        UserError: the path is no complete checkpoint; or a fresh start was asked for where checkpoints lie.
    """
    present = sorted((c for d in directories for c in find_checkpoints(d, model_name)), key=lambda c: c.step)
    if wanted == LATEST:
        if not present:
            _refuse_headless(directories, model_name)
        return present[-1].path if present else None
    if wanted is None:
        if present:
            raise UserError(
                f"{present[-1].path.parent} already holds checkpoints up to step {present[-1].step}: continue that run "
                f"with --resume_from_checkpoint latest, or start a new one in another --output_dir"
            )
        return None
    path = Path(wanted)
    if (path / STATE_FILE).is_file():
        return path.resolve()
    near = sorted({p.parent.name for p in path.glob(f"*/{STATE_FILE}")} - {LATEST}) if path.is_dir() else []
    hint = f"; it contains {', '.join(near)}" if near else ""
    raise UserError(
        f"--resume_from_checkpoint {wanted} is not a complete checkpoint (no {STATE_FILE}){hint}: "
        f"give the path of a <model>-<step>steps directory, or latest"
    )


def refuse_older_branch(chosen: Path, directories: list[Path]) -> None:
    """Refuse to resume beside newer checkpoints of the run: the two branches would be mixed, and the newer kept.

    Raises:
        UserError: naming the newest.
    """
    model_name, step = chosen.name.rpartition("-")[0], int(chosen.name.rpartition("-")[2].removesuffix("steps"))
    newest = max((c for d in directories for c in find_checkpoints(d, model_name)), key=lambda c: c.step)
    if newest.step > step:
        raise UserError(
            f"{newest.path} is newer than the checkpoint to resume from, step {step}: move the newer ones away, or "
            f"branch off into another --output_dir"
        )


def refuse_foreign(directories: list[Path]) -> None:
    """Refuse to start anew where checkpoints lie, of whatever model.

    Raises:
        UserError: naming one.
    """
    for directory in directories:
        for path in sorted(directory.glob("*-*steps")):
            raise UserError(
                f"{directory} holds checkpoints of a run that this one does not continue ({path.name}): "
                f"choose another --output_dir"
            )


def _refuse_headless(directories: list[Path], model_name: str) -> None:
    """A run whose checkpoints have all lost their ``state.json`` must not be mistaken for one that has none yet."""
    for directory in directories:
        for path in sorted(directory.glob(f"{model_name}-*steps")):
            raise UserError(
                f"{path} has no {STATE_FILE}, so nothing can be resumed from it: restore the file, or start anew in "
                f"another --output_dir"
            )


def tensor_files(path: Path) -> dict[str, int]:
    """Name and size in bytes of each tensor file of a checkpoint."""
    return {file.name: file.stat().st_size for file in sorted(path.glob("*.safetensors"))}


def read_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint's ``state.json`` and check that its tensor files are all there, and no others.

    Raises:
        UserError: unreadable, of a newer format, or with missing, extra or truncated files.
    """
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {path}: {STATE_FILE} cannot be read ({error}); resume from another one") from None
    if not isinstance(state, dict) or "files" not in state:
        raise UserError(f"checkpoint {path} is damaged: {STATE_FILE} lists no files; resume from another one")
    if state.get("format") != FORMAT:
        raise UserError(
            f"checkpoint {path} has format {state.get('format')}, this version of smp reads {FORMAT}: "
            f"resume with the version that wrote it"
        )
    present = tensor_files(path)
    for name in sorted(set(state["files"]) | set(present)):
        expected, got = state["files"].get(name), present.get(name)
        if expected != got:
            what = "is missing" if got is None else "does not belong to it" if expected is None else f"has {got} bytes"
            wanted = "" if expected is None or got is None else f" instead of {expected}"
            raise UserError(f"checkpoint {path} is damaged: {name} {what}{wanted}; resume from another one")
    return state


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON and flush it to disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name and point ``latest`` at it; both steps are atomic."""
    _sync_directory(temporary)
    if final.exists():
        # Only a checkpoint of the same step of the same run can be here: a resumed run that passes this step again.
        shutil.rmtree(final)
    temporary.rename(final)
    link = final.parent / (LATEST + TEMPORARY)
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(final.parent / LATEST)
    _sync_directory(final.parent)


def prune(directory: Path, model_name: str, keep: int) -> None:
    """Delete all but the ``keep`` newest checkpoints, and what interrupted saves left behind."""
    for checkpoint in find_checkpoints(directory, model_name)[:-keep]:
        # Renamed first: a deletion that is interrupted must not leave something that looks complete.
        doomed = checkpoint.path.with_name(checkpoint.path.name + TEMPORARY)
        checkpoint.path.rename(doomed)
    for leftover in directory.glob(f"{model_name}-*steps{TEMPORARY}"):
        shutil.rmtree(leftover)
