"""What may be replaced: what an earlier export has written and nobody has changed, and nothing that is read."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from smp.checkpoint.directory import LATEST
from smp.errors import UserError
from smp.models.families import list_presets

# Lists the files of an export with their sizes and digests, so that a later export may replace them alone.
MARKER = "smp_export.json"
OLDER = "older"
_READ_IN_FULL = 64 << 20  # bytes of a file
_SAMPLES, _SAMPLE = 16, 1 << 14  # of a larger one, and bytes of one

# Settings that name what a run reads, of any model, adapter and data.
_READ = (
    "model", "pretrained_model_name", "hf_pretrained_model_name_or_dir", "pretrained_checkpoint_file",
    "finetune_checkpoint_load_dir", "adapter_path", "tokenizer_name_or_dir", "chat_template", "training_dir",
    "test_dir", "resume_from_checkpoint",
)  # fmt: skip


def beside(directory: Path, suffix: str) -> Path:
    """Return the hidden name by which an export to ``directory`` is written, or an earlier one is kept meanwhile."""
    return directory.with_name(f".{directory.name}.{suffix}")


def identity(size: int, read: Callable[[int, int], bytes]) -> str:
    """Return size and digest of a file: of all bytes, of a large one of samples, as training on changes all of it.

    Args:
        read: returns its bytes from a start to an end.
    """
    digest = hashlib.sha256()
    step, length = (size // _SAMPLES, _SAMPLE) if size > _READ_IN_FULL else (max(size, 1), size)
    for start in range(0, size, step):
        digest.update(read(start, min(start + length, size)))
    return f"{size} {digest.hexdigest()}"


def _identity_of(file: Path) -> str:
    with file.open("rb") as content:
        return identity(file.stat().st_size, lambda start, end: os.pread(content.fileno(), end - start, start))


def marker_of(directory: Path) -> dict[str, list[str]]:
    """Return what the marker of a finished export says: each file's identity, by name."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): [_identity_of(path)] for path in files if path.name != MARKER}


def marker_text(files: Mapping[str, list[str]]) -> str:
    """Return the content of a marker."""
    return json.dumps({"files": files}, indent=2) + "\n"


def exported(marker: bytes) -> dict[str, list[str]]:
    """Return what a marker says: the identities of each file that exports wrote; empty if it cannot be read."""
    try:
        files = json.loads(marker)["files"]
        return {str(name): list(files[name]) if isinstance(files, dict) else [] for name in files}
    except (ValueError, KeyError, TypeError):
        return {}


def not_exported(known: Mapping[str, list[str]], found: Mapping[str, Callable[[], str]]) -> str | None:
    """Name a file that exports did not write, or not as it is; None if there is none.

    Args:
        known: what the marker says.
        found: what returns the identity of each file, by its name; of a file without one, of an export of an earlier
            version, ``OLDER`` where it is older than the marker.
    """
    names = sorted(found.keys() - ({MARKER} if known else set()))
    if foreign := [name for name in names if name not in known]:
        return f"{foreign[0]}, which no earlier export wrote"
    for name in names:
        if not known[name] and found[name]() != OLDER:
            return f"{name}, which may have changed since an earlier version of smp exported it"
        if known[name] and found[name]() not in known[name]:
            return f"{name}, which has changed since it was exported"
    return None


def refuse_foreign_files(directory: Path) -> None:
    """Check that an export to ``directory`` would replace nothing but an earlier export.

    Raises:
        UserError: it is a file or a mount point, or contains others, or a file of an export that has changed since.
    """
    if not os.path.exists(directory):
        return
    if not directory.is_dir():
        raise UserError(f"{directory} is a file: give a directory that does not exist yet")
    if os.path.ismount(directory.resolve()):  # an export appears by a rename, which cannot replace one
        raise UserError(f"{directory} is a mount point and must be a directory in one: give {directory / 'final'}")
    marker = directory / MARKER
    known = exported(marker.read_bytes()) if marker.is_file() else {}
    present = {path.name for path in directory.iterdir()}
    if present <= {name.partition("/")[0] for name in (*known, MARKER)}:
        files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if not path.is_dir()}
    else:
        files = {name: directory / name for name in present}

    def identified(file: Path) -> str:
        try:
            if not file.is_file():  # which may never answer
                return ""
            status = file.stat()
            # The marker is the last that an export writes. A part of a large file may have changed between the samples.
            newer = status.st_mtime_ns > marker.stat().st_mtime_ns
            if known[file.relative_to(directory).as_posix()]:
                return "" if newer and status.st_size > _READ_IN_FULL else _identity_of(file)
            return "newer" if newer else OLDER
        except OSError:
            return ""

    if problem := not_exported(known, {name: functools.partial(identified, file) for name, file in files.items()}):
        raise UserError(
            f"{directory} contains {problem}, and would be replaced: give another directory, or move the file away"
        )


def inputs_of(settings: Mapping[str, Any]) -> dict[str, Path]:
    """Return the paths that a run reads, by the flags that name them.

    Args:
        settings: of a job, by name; those of a manifest may be anything.
    """
    paths = {}
    for name in _READ:
        text = settings.get(name)
        if not isinstance(text, str) or text in ("", LATEST) or "\0" in text:
            continue
        is_preset = name in ("model", "pretrained_model_name") and text in list_presets()
        if not is_preset and (path := local_path(text)) is not None:
            paths[f"--{name}"] = path
    return paths


def local_path(location: str) -> Path | None:
    """Return the path of what a location names on this machine's file systems; None of any other URL."""
    scheme, separator, rest = location.partition("://")
    if separator and scheme not in ("file", "local"):
        return None
    return Path(os.path.expanduser(rest if separator else location))


def _read_at(path: Path) -> Iterator[Path]:
    """Yield where the files of an input are: itself, what it is a link to, and what links in it point to."""
    if glob.has_magic(str(path)) and not os.path.exists(path):
        path = path.parent
    yield path.parent.resolve() / path.name
    yield path.resolve()
    if os.path.isdir(path):
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            yield from {Path(os.path.realpath(entry.path)).parent for entry in entries if entry.is_symlink()}


def _same(output: Path, path: Path) -> bool:
    """Tell whether two paths are one file or directory, however they are mounted or linked."""
    try:
        return os.path.samefile(output, path)
    except OSError:  # one of them does not exist
        return False


def refuse_inputs(output: Path, inputs: Mapping[str, Path | str | None]) -> None:
    """Refuse to replace a directory that is, or contains, something that is read.

    Args:
        output: of an export.
        inputs: directories and files, by what names them.

    Raises:
        UserError: naming both.
    """
    for directory in (output, beside(output, "partial"), beside(output, "old")):
        if not os.path.exists(directory):
            continue
        for what, given in inputs.items():
            for path in _read_at(Path(given)) if given is not None else ():
                if any(_same(directory, each) for each in (path, *path.parents)):
                    raise UserError(
                        f"{directory} would be replaced, and {what} reads {given}: give another directory to write to"
                    )


def refuse_mixing(flag: str, directory: Path, inputs: Mapping[str, Path]) -> None:
    """Refuse to write a run's files into a directory whose files it reads.

    Raises:
        UserError: naming both.
    """
    for what, path in inputs.items():
        # What is wrong with a directory of checkpoints the search for one says.
        if what != "--resume_from_checkpoint" and _same(directory, next(_read_at(path))):
            raise UserError(
                f"--{flag} {directory} is where {what} {path} reads its files, and the run's would be mixed with them: "
                f"give another directory"
            )


def refuse_replacing(file: Path, flag: str, mark: bytes) -> None:
    """Refuse to replace a file that smp did not write.

    Args:
        flag: that named it.
        mark: is in the first 4096 bytes of all that smp writes to it.

    Raises:
        UserError: it lacks the mark.
    """
    head = b""
    if os.path.isfile(file):
        with contextlib.suppress(OSError), file.open("rb") as content:
            head = content.read(4096)
    if head and mark not in head:
        raise UserError(
            f"{file} exists, smp did not write it, and it would be replaced: move it away, or give another {flag}"
        )
