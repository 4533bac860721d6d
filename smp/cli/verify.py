"""Check that checkpoints are as they were written: names, sizes and digests of all files, that the files contain the
tensors which the manifest lists, and that these cover every parameter; of adapters, that the pretrained weights beside
which they were trained, where these are still there, are the same.

Exit status 0: all are valid; 1: at least one is damaged, has no manifest or other weights; 2: nothing to check.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

from smp.checkpoint.base import is_base_of, weights_at
from smp.checkpoint.manifest import Manifest
from smp.cli.checkpoints import GivenCheckpoint, find
from smp.cli.output import progress, shown
from smp.environment.threads import available_cores
from smp.errors import DamagedCheckpointError, UserError, was_deleted
from smp.units import readable

_MOST_THREADS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "directories", nargs="+", metavar="directory",
        help="a checkpoint, or a directory or a URL that contains some, such as a run's",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="manifest, names and sizes only; reads no tensor file")


def _groups(manifest: Manifest, number: int) -> list[list[str]]:
    """Return the files in at most ``number`` groups of about the same size."""
    by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
    return [by_size[start::number] for start in range(min(number, len(by_size)))]


def problems_of(checkpoint: GivenCheckpoint, manifest: Manifest, *, content: bool) -> list[str]:
    """Return what is wrong with a checkpoint, naming files; empty if nothing is.

    Args:
        content: read every file, too; several at a time.
    """
    problems = checkpoint.quick_problems(manifest)
    if problems or not content:
        return problems
    threads = min(_MOST_THREADS, available_cores())
    with progress(f"reading {shown(checkpoint.name)}", manifest.nbytes) as bar, ThreadPoolExecutor(threads) as pool:

        def read(names: list[str]) -> list[str]:
            return checkpoint.problems_of(manifest, names)

        groups = _groups(manifest, 4 * threads)
        for names, found in zip(groups, pool.map(read, groups), strict=True):
            bar.update(sum(manifest.files[name].size for name in names))
            problems += found
    return sorted(problems)


def verified(checkpoint: GivenCheckpoint, *, content: bool) -> Manifest:
    """Return the manifest of a checkpoint that has been found valid.

    Raises:
        UserError: it has no manifest, or one of a newer schema.
        DamagedCheckpointError: it is not valid.
        StoreError: it is on an object store that does not answer.
    """
    manifest = checkpoint.manifest()
    if problems := problems_of(checkpoint, manifest, content=content):
        raise DamagedCheckpointError(checkpoint.path, problems)
    return manifest


def _report(checkpoint: GivenCheckpoint, *, content: bool) -> bool:
    """Print what was found; return whether the checkpoint is valid, or none of its run's any more."""
    started = time.perf_counter()
    try:
        manifest = checkpoint.manifest()
        problems = problems_of(checkpoint, manifest, content=content)
    except UserError as error:
        if not isinstance(error, DamagedCheckpointError) and not was_deleted(checkpoint.path):
            raise
        problems = getattr(error, "problems", [])
    if was_deleted(checkpoint.path):
        print(f"{shown(checkpoint.name)}: deleted meanwhile, as its run keeps newer ones")
        return True
    if problems:
        print(f"{shown(checkpoint.name)}: damaged")
        for problem in problems:
            print(f"  {shown(problem, 400)}")
        return False
    seconds = time.perf_counter() - started
    size = f"{len(manifest.files)} files, {readable(manifest.nbytes)}"
    state = f"valid ({size}, {seconds:.1f} s)" if content else f"complete ({size}; sizes only)"
    print(f"{shown(checkpoint.name)}: {state}")
    if content and (other := _problem_of_base(manifest)):
        print(f"  {shown(other, 400)}")
        return False
    return True


def _problem_of_base(manifest: Manifest) -> str | None:
    """Say why the pretrained weights are not those that a checkpoint names; None if they are, or are elsewhere."""
    named = manifest.model.get("weights")
    if manifest.model.get("base") is None or (weights := weights_at(named)) is None:
        return None
    try:
        same = is_base_of(manifest, weights)
    except (UserError, OSError) as error:
        return f"its pretrained weights cannot be read: {error}"
    return None if same else f"was made with other pretrained weights than {named} contains"


def run(options: argparse.Namespace) -> int:
    """Check what ``options.directories`` name, a line for each checkpoint."""
    return max([_verify(directory, content=not options.quick) for directory in options.directories])


def _verify(directory: str, *, content: bool) -> int:
    found, good = find(directory), 0
    for checkpoint in found.checkpoints:
        try:
            good += _report(checkpoint, content=content)
        except UserError as error:
            print(f"{shown(checkpoint.name)}: not complete")
            print(f"  {shown(error, 400)}")
    for name in found.left:
        print(f"{shown(name)}: left by an interrupted save, and removed by {found.removed_by}")
    for name in found.aside:
        print(f"{shown(name)}: set aside, as the run continued without it; no resume takes it")
    if not found.checkpoints:
        raise UserError(f"{directory} contains no complete checkpoint")
    if good != len(found.checkpoints) and not found.single:
        print(f"{len(found.checkpoints) - good} of {len(found.checkpoints)} checkpoints cannot be resumed from")
    return 0 if good == len(found.checkpoints) else 1
