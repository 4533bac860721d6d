"""Check that checkpoints are as they were written: names, sizes and digests of all files, that the files hold the
tensors which the manifest lists, and that these cover every parameter.

Exit status 0: all are whole; 1: at least one is damaged or has no manifest; 2: nothing to check.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from smp.checkpoint.layout import quick_problems
from smp.checkpoint.manifest import Manifest, problems_of_files, read_manifest
from smp.cli.find import checkpoints_at, existing_directory, interrupted_at
from smp.cli.output import Progress, shown
from smp.comm.report import readable
from smp.environment.threads import available_cores
from smp.errors import DamagedCheckpointError, UserError

_MOST_THREADS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", help="a checkpoint, or a directory that holds some, such as a run's")
    parser.add_argument("--quick", action="store_true", help="manifest, names and sizes only; reads no tensor file")


def _groups(manifest: Manifest, number: int) -> list[list[str]]:
    """Return the files in at most ``number`` groups of about the same size."""
    by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
    return [by_size[start::number] for start in range(min(number, len(by_size)))]


def problems_of(path: Path, manifest: Manifest, *, content: bool) -> list[str]:
    """Return what is wrong with a checkpoint, naming files; empty if nothing is.

    Args:
        content: read every file, too; several at a time.
    """
    problems = quick_problems(path, manifest)
    if problems or not content:
        return problems
    threads = min(_MOST_THREADS, available_cores())
    with Progress(f"reading {shown(path.name)}", manifest.nbytes) as progress, ThreadPoolExecutor(threads) as pool:

        def read(names: list[str]) -> list[str]:
            return problems_of_files(path, manifest, content=True, names=names)

        groups = _groups(manifest, 4 * threads)
        for names, found in zip(groups, pool.map(read, groups), strict=True):
            progress.add(sum(manifest.files[name].size for name in names))
            problems += found
    return sorted(problems)


def verified(path: Path, *, content: bool) -> Manifest:
    """Return the manifest of a checkpoint that has been found whole.

    Raises:
        UserError: it has no manifest, or one of a newer schema.
        DamagedCheckpointError: it is not whole.
    """
    manifest = read_manifest(path)
    if problems := problems_of(path, manifest, content=content):
        raise DamagedCheckpointError(path, problems)
    return manifest


def _report(path: Path, name: str, *, content: bool) -> bool:
    """Print what was found; return whether the checkpoint is whole."""
    started = time.perf_counter()
    try:
        manifest = read_manifest(path)
        problems = problems_of(path, manifest, content=content)
    except DamagedCheckpointError as error:
        problems = error.problems
    if problems:
        print(f"{shown(name)}: damaged")
        for problem in problems:
            print(f"  {shown(problem, 400)}")
        return False
    seconds = time.perf_counter() - started
    size = f"{len(manifest.files)} files, {readable(manifest.nbytes)}"
    print(f"{shown(name)}: " + (f"whole ({size}, {seconds:.1f} s)" if content else f"complete ({size}; sizes only)"))
    return True


def run(options: argparse.Namespace) -> int:
    """Check what ``options.directory`` names, a line each."""
    directory = existing_directory(options.directory)
    found = checkpoints_at(directory)
    good = 0
    for path in found:
        name = directory.name if path == directory else str(path.relative_to(directory))
        try:
            good += _report(path, name, content=not options.quick)
        except UserError as error:
            print(f"{shown(name)}: not complete")
            print(f"  {shown(error, 400)}")
    for path in interrupted_at(directory):
        print(f"{shown(path.relative_to(directory))}: left by an interrupted save, and removed by the next start")
    if good != len(found) and found != [directory]:
        print(f"{len(found) - good} of {len(found)} checkpoints cannot be resumed from")
    return 0 if good == len(found) else 1
