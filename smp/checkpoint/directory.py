"""The directories of checkpoints on disk: names, atomic publication, deletion, and the choice of one to resume from.

A checkpoint is a directory ``<model>-<step>steps`` with the files that its ``manifest.json`` lists, and no others. It
is written under a temporary name, which ends in ``.tmp``, and renamed when complete; one to be deleted is renamed back
first. So a directory of that name is complete, or has been damaged from outside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import shlex
import shutil
from collections.abc import Collection
from pathlib import Path

from smp.checkpoint.manifest import MANIFEST_FILE, Manifest, problems_of_files, read_manifest
from smp.checkpoint.safetensors_io import reason, sync
from smp.errors import DamagedCheckpointError, UserError
from smp.log import get_logger

LATEST = "latest"
BEST = "best"
TEMPORARY = ".tmp"
_REPLACED = f".old{TEMPORARY}"
# Of one that a rank publishes as its process ends.
CLAIMED = f".exit{TEMPORARY}"
_NAME = re.compile(r"(.+)-(\d+)steps")

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint."""

    path: Path
    step: int


def checkpoint_name(model_name: str, step: int) -> str:
    """Return the directory's name, as SMP v2 has it."""
    return f"{model_name}-{step}steps"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(2)) if match else None


def find_checkpoints(directory: Path, model_name: str) -> list[Checkpoint]:
    """Return the published checkpoints of ``model_name`` in ``directory``, oldest first."""
    found = [c for c in _named(directory, model_name) if (c.path / MANIFEST_FILE).exists()]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _named(directory: Path, model_name: str, ending: str = "") -> list[Checkpoint]:
    """Return the entries named as a checkpoint of ``model_name``, followed by ``ending``."""
    pattern = re.compile(rf"{re.escape(model_name)}-(\d+)steps{ending}")
    matches = ((path, pattern.fullmatch(path.name)) for path in (directory.iterdir() if directory.is_dir() else ()))
    return [Checkpoint(path, int(match.group(1))) for path, match in matches if match]


def read_outline(path: Path) -> Manifest:
    """Return the manifest without its tensors; from memory while the file is as it was when read.

    Retention checks the kept checkpoints at every save. Raises: as :func:`read_manifest`.
    """
    try:
        status = os.lstat(path / MANIFEST_FILE)
    except OSError:
        return read_manifest(path)  # which says what is wrong
    return _read(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.lru_cache(maxsize=64)
def _read(path: Path, *identity: int) -> Manifest:
    return dataclasses.replace(read_manifest(path), tensors={})


def quick_problems(path: Path, manifest: Manifest) -> list[str]:
    """Return the problems of a checkpoint that its name, and names and sizes of its files show."""
    return problems_of_files(path, manifest, content=False) + problems_of_step(path, manifest)


def problems_of_step(path: str | Path, manifest: Manifest) -> list[str]:
    """Return what is wrong if a checkpoint's name has a step, and it is another one than the manifest's."""
    renamed = step_of(Path(path)) not in (None, manifest.step)
    return [f"its manifest is of step {manifest.step}"] if renamed else []


def quick_problem(path: Path) -> str | None:
    """Return a sentence of :func:`quick_problems` and of the manifest; None if there are none."""
    try:
        problems = quick_problems(path, read_outline(path))
        problems += ["it was renamed"] if step_of(path) is None else []
    except UserError as error:
        return str(error)
    return str(DamagedCheckpointError(path, problems)) if problems else None


def choose_checkpoint(
    wanted: str | None,
    directories: list[Path],
    model_name: str,
    *,
    damaged: Collection[object] = (),
    others: str = "--output_dir",
) -> Path | None:
    """Return the checkpoint to resume from, or None for a fresh start.

    Args:
        wanted: None, ``latest`` (the newest in any of ``directories`` that is not damaged), or a path.
        others: flags that say where ``directories`` are.

    Raises:
        UserError: the path is no complete checkpoint, there are checkpoints but none is complete, or a fresh start was
            asked for where checkpoints lie.
    """
    present = sorted((c for d in directories for c in find_checkpoints(d, model_name)), key=lambda c: c.step)
    if wanted == LATEST:
        return _newest_whole(present, directories, model_name, damaged, others)
    if wanted is None:
        if present:
            raise UserError(
                f"{present[-1].path.parent} already contains checkpoints up to step {present[-1].step}: continue that "
                f"run with --resume_from_checkpoint latest, or start a new one in another {others}"
            )
        return None
    path = Path(wanted)
    if (path / MANIFEST_FILE).exists():
        if problem := quick_problem(path.resolve()):
            raise UserError(problem)
        return path.resolve()
    refuse_distcp(path)
    near = sorted({p.parent.name for p in path.glob(f"*/{MANIFEST_FILE}")} - {LATEST, BEST}) if path.is_dir() else []
    hint = f"; it contains {', '.join(near)}" if near else ""
    raise UserError(
        f"--resume_from_checkpoint {wanted} is not a complete checkpoint (no {MANIFEST_FILE}){hint}: "
        f"give the path of a <model>-<step>steps directory, or latest"
    )


def _newest_whole(
    present: list[Checkpoint], directories: list[Path], model_name: str, damaged: Collection[object], others: str
) -> Path | None:
    """Return the newest checkpoint that is complete, with a line about each newer one that is not.

    Raises:
        UserError: there are some, and none is complete: a fresh start would lose what may still be mended.
    """
    # Also what has lost its manifest, of steps that the run goes through anew.
    named = sorted((c for d in directories for c in _named(d, model_name)), key=lambda c: c.step)
    for checkpoint in reversed(named if present else []):
        if checkpoint.path in damaged:
            continue  # who found it has said so
        problem = quick_problem(checkpoint.path)
        if problem is None:
            return checkpoint.path
        warn_once(f"Not resuming from {checkpoint.path}: {problem}.")
    if present:
        raise UserError(
            f"none of the {len(present)} checkpoints in {present[-1].path.parent} is valid: run `smp verify "
            f"{shlex.quote(str(present[-1].path.parent))}` to see what is wrong, or start anew in another {others}"
        )
    for found in named:
        refuse_distcp(found.path)
        raise UserError(
            f"{found.path} has no {MANIFEST_FILE}, so nothing can be resumed from it: restore the file, or "
            f"start anew in another {others}"
        )
    return None


def refuse_distcp(path: Path) -> None:
    """Refuse, by a UserError, to resume from what ``torch.distributed.checkpoint`` wrote, as SMP v2 did."""
    if any(path.glob("*.distcp")) or any(path.glob("*/*.distcp")):
        raise UserError(
            f"{path} contains .distcp files, which SMP v2 and torch.distributed.checkpoint write, and no run resumes "
            f"from them: make a model directory of them, as docs/resume_and_finetune.md does, and train on from that "
            f"with --hf_pretrained_model_name_or_dir"
        )


@functools.cache
def warn_once(text: str) -> None:
    """Warn once of what each look at the directory finds."""
    logger.warning("%s", text)


def refuse_older_branch(chosen: Path, directories: list[Path], *, others: str = "--output_dir") -> None:
    """Raise a UserError where the run has newer checkpoints: two branches would be mixed, and the newer one kept."""
    model_name, step = chosen.name.rpartition("-")[0], step_of(chosen) or 0
    present = (c for d in directories for c in find_checkpoints(d, model_name))
    newest = max(present, key=lambda c: c.step, default=Checkpoint(chosen, step))
    if newest.step > step:
        raise UserError(
            f"{newest.path} is newer than the checkpoint to resume from, step {step}: move the newer ones away, or "
            f"branch off into another {others}"
        )


def refuse_foreign(directories: list[Path], *, run_dir: Path) -> None:
    """Refuse to start anew where checkpoints lie, of whatever model.

    Raises:
        UserError: naming one.
    """
    for directory in directories:
        flag = "output_dir" if directory.is_relative_to(run_dir) else "checkpoint_dir"
        for path in sorted(directory.glob("*-*steps")):
            raise UserError(
                f"{directory} contains checkpoints of a run that this one does not continue ({path.name}): "
                f"choose another --{flag}"
            )


def publish(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name, and point ``latest`` at it; both are atomic."""
    sync(temporary)
    # Only a checkpoint of the same step of the same run can be here: a resumed run that passes this step again.
    doomed = _doomed(final) if final.exists() else None
    if doomed is not None:
        final.rename(doomed)
    try:
        temporary.rename(final)
    except BaseException:
        if doomed is not None:
            doomed.rename(final)
        raise
    sync(final.parent)
    point(final.parent / LATEST, final.name)
    if doomed is not None:
        try:
            _delete(doomed)
        except OSError as error:  # such as a file that another host has open: the checkpoint is published all the same
            logger.warning("%s could not be deleted: %s", doomed, reason(error))


def point(link: Path, name: str) -> None:
    """Make a symbolic link to ``name`` in its directory, in place of an earlier one. For people: no code reads it."""
    fresh = link.with_name(link.name + TEMPORARY)
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name)
        fresh.replace(link)
        sync(link.parent)
    except OSError as error:  # no symbolic links here, or a directory of that name
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        copied = link.is_dir() and not link.is_symlink()
        why = "it is a directory, an old copy: remove it, and the next save links it" if copied else reason(error)
        logger.warning("%s could not be pointed at %s: %s", link, name, why)


def _doomed(path: Path) -> Path:
    """Return the name under which a checkpoint is deleted, free."""
    doomed = path.with_name(path.name + _REPLACED)
    _delete(doomed)
    return doomed


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def discard(path: Path) -> None:
    """Delete a checkpoint. Renamed first: a deletion that is cut short must not leave something that looks complete."""
    doomed = _doomed(path)
    path.rename(doomed)
    sync(path.parent)
    _delete(doomed)


def set_aside(directory: Path, model_name: str, *, after: int) -> None:
    """Rename checkpoints of steps after ``after``: the run goes on without them, as they are damaged or not everywhere.

    They are not found under the new name, so they cannot be taken for checkpoints of the new branch. One that has lost
    its manifest, which may be restored, would be replaced.
    """
    for checkpoint in _named(directory, model_name):
        if checkpoint.step > after:
            number = 1
            while (aside := checkpoint.path.with_name(f"{checkpoint.path.name}.aside{number}")).exists():
                number += 1
            checkpoint.path.rename(aside)
            logger.warning("Set aside: %s is now %s.", checkpoint.path, aside.name)


def interrupted_replacements(directory: Path, model_name: str) -> list[tuple[Path, Path]]:
    """Return complete checkpoints that an interrupted replacement left under another name, with their names."""
    found = []
    for checkpoint in _named(directory, model_name, re.escape(_REPLACED)):
        final = checkpoint.path.with_name(checkpoint.path.name.removesuffix(_REPLACED))
        with contextlib.suppress(UserError):
            if not final.exists() and not quick_problems(checkpoint.path, read_outline(checkpoint.path)):
                found.append((checkpoint.path, final))
    return found


def clean(directory: Path, model_name: str) -> None:
    """Delete what interrupted saves and deletions of ``model_name`` have left; for its only writer.

    A checkpoint that was about to be replaced gets its name back.
    """
    for replaced, final in interrupted_replacements(directory, model_name):
        replaced.rename(final)
        logger.warning("Brought back: %s, which was about to be replaced or deleted.", final)
    for leftover in _named(directory, model_name, rf"(\.old|\.exit)?{re.escape(TEMPORARY)}"):
        if leftover.path.is_symlink():
            leftover.path.unlink()
        elif leftover.path.is_dir():
            shutil.rmtree(leftover.path, ignore_errors=True)
    for link in (LATEST, BEST):
        (directory / (link + TEMPORARY)).unlink(missing_ok=True)


def nearest_existing(path: Path) -> Path:
    """Return ``path`` if it exists, else the nearest parent that does."""
    return path if os.path.lexists(path) or path == path.parent else nearest_existing(path.parent)


def no_inodes(path: Path) -> bool:
    """Return whether the file system of ``path`` has room for no more files, however much for bytes."""
    status = os.statvfs(nearest_existing(path.resolve()))
    return status.f_files > 0 and status.f_favail == 0  # some count none


def disk_free(path: Path) -> int:
    """Return the bytes that may be written below ``path``, which need not exist yet."""
    status = os.statvfs(nearest_existing(path.resolve()))
    return status.f_bavail * status.f_frsize
