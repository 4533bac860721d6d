"""Find the checkpoint to start from at a URL, copy one to a directory, and refuse a directory that has others."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smp.checkpoint.directory import LATEST, disk_free, find_checkpoints, publish, quick_problem, step_of, warn_once
from smp.checkpoint.manifest import MANIFEST_FILE, Manifest, problems_of_files
from smp.checkpoint.mirror import share_of
from smp.checkpoint.object_store import ObjectStore, is_url
from smp.checkpoint.remote import RemoteCheckpoint, find_remote, of_model, read_remote, remote_problem
from smp.checkpoint.safetensors_io import OTHER_DIGEST, new_digest, reason, shown, write_bytes
from smp.checkpoint.storage import Storage
from smp.errors import RunError, UserError
from smp.faults.agreement import of_all_ranks, together
from smp.log import get_logger
from smp.units import readable

logger = get_logger(__name__)

_STREAMS = 4  # files that a rank downloads at a time


def gathered(mine: list[str]) -> list[str]:
    """Return the problems that all ranks have found, the same on all; collective."""
    return sorted({problem for found in of_all_ranks(mine) for problem in found})


def verify_together(path: Path, manifest: Manifest, *, content: bool) -> list[str]:
    """Return the problems of a checkpoint's files, each rank reading a share of them; collective.

    Returns:
        The same on all ranks; of local checkpoints those of all ranks, each named.
    """
    rank, local = dist.get_rank(), manifest.kind == "local"
    names = list(manifest.files) if local else share_of(manifest, rank, dist.get_world_size())
    mine = problems_of_files(path, manifest, content=content, names=names)
    return gathered([f"rank {rank}: {problem}" for problem in mine] if local else mine)


def copies_of(cache: Storage, checkpoint: RemoteCheckpoint) -> Storage:
    """Return the part of a cache that has the copies from one URL: no other run's checkpoint is replaced by them."""
    url = hashlib.sha256(checkpoint.store.url.encode()).hexdigest()
    return dataclasses.replace(cache, directory=cache.directory / url[:12])


def fetch(checkpoint: RemoteCheckpoint, storage: Storage, *, content: bool) -> list[str]:
    """Copy a remote checkpoint to the storage's directory, each rank a share of the files, and publish it; collective.

    A valid copy that exists is taken; another one of that name is replaced.

    Args:
        content: read the files of a copy that exists; otherwise their names and sizes are compared.

    Returns:
        Problems, the same on all ranks: files that are not as they were written. Nothing is published then.

    Raises:
        UserError: on every rank; a rank could not read or write, or there is no space.
    """
    final = storage.directory / checkpoint.name
    manifest, data = together(lambda: asking(functools.partial(read_remote, checkpoint.store, checkpoint.name)))
    missing = gathered([] if _is_copy(final, data) else [f"{final} is no copy"])
    if not missing and not verify_together(final, manifest, content=content):
        return []
    together(lambda: _require_room(storage.directory, manifest, checkpoint))
    if dist.get_rank() == 0:
        logger.info("Downloading %s (%s) to %s.", checkpoint, readable(manifest.nbytes), storage.directory)
    temporary = asking(functools.partial(storage.begin, checkpoint.name))
    try:
        download = functools.partial(_download_share, checkpoint, manifest, temporary)
        if problems := gathered(together(lambda: asking(download))):
            storage.remove(temporary)
        else:
            together(lambda: asking(lambda: _publish(temporary, final, data)) if storage.leads else None)
        return problems
    except UserError:
        storage.remove(temporary)
        raise


def asking(action: Callable[[], Any]) -> Any:
    """Call ``action``; raise what a store or a disk refuses as a UserError, before there is anything to lose."""
    try:
        return action()
    except RunError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(
            f"{error.filename or 'a checkpoint'} cannot be read or copied ({reason(error)}): mend that, start again"
        ) from error


def asking_together(action: Callable[[], Any]) -> Any:
    """Call ``action`` on rank 0 and return its result on all; collective.

    Raises:
        UserError: on every rank.
    """
    said: list[Any] = [together(lambda: asking(action) if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(said)
    return said[0]


def _is_copy(final: Path, data: bytes) -> bool:
    """Tell whether a directory has a checkpoint with this manifest, valid as far as names and sizes tell."""
    try:
        return quick_problem(final) is None and (final / MANIFEST_FILE).read_bytes() == data
    except OSError:  # another job that shares the directory is replacing it
        return False


def _require_room(directory: Path, manifest: Manifest, checkpoint: RemoteCheckpoint) -> None:
    free = disk_free(directory)
    if free < manifest.nbytes:
        raise UserError(
            f"{checkpoint} has {readable(manifest.nbytes)} and {directory}, where it is to be copied to, has "
            f"{readable(free)} free: free some space, choose another --checkpoint_cache_dir, or leave it out"
        )


def _download_share(checkpoint: RemoteCheckpoint, manifest: Manifest, temporary: Path) -> list[str]:
    """Download this rank's files, and return the problems of what has come."""

    def one(file: str) -> str | None:
        entry, digest = manifest.files[file], new_digest()
        with open(temporary / file, "xb") as out:
            for part in checkpoint.store.pieces(f"{checkpoint.name}/{file}", 0, entry.size):
                digest.update(part)
                out.write(part)
            out.flush()
            os.fsync(out.fileno())
        return None if shown(digest) == entry.digest else f"{file} {OTHER_DIGEST}"

    with concurrent.futures.ThreadPoolExecutor(_STREAMS) as pool:
        own = share_of(manifest, dist.get_rank(), dist.get_world_size())
        return [problem for problem in pool.map(one, own) if problem]


def _publish(temporary: Path, final: Path, data: bytes) -> None:
    write_bytes(temporary / MANIFEST_FILE, data)
    publish(temporary, final)


def locate(
    storages: Sequence[Storage], wanted: str | None, model_name: str, *, damaged: Collection[Path | RemoteCheckpoint]
) -> str | RemoteCheckpoint | None:
    """Find the checkpoint to start from at a URL, if there is one; collective.

    Args:
        wanted: ``latest``, which here is the newest that is newer than every valid one in the directories; a URL; or
            something else, which is returned.

    Returns:
        What is at its URL, or ``wanted``.

    Raises:
        UserError: on every rank; the URL is no valid checkpoint, or the store cannot be read; or it contains
            checkpoints, and none is valid, at the URL or in the directory.
    """
    if wanted is not None and is_url(wanted):
        return _named(wanted)
    if wanted == LATEST and any(storage.mirror is not None for storage in storages):
        newer = asking_together(lambda: _newer_than_here(storages, model_name, damaged))
        if newer is not None and (mirror := storages[newer[0]].mirror) is not None:
            return RemoteCheckpoint(mirror.store, newer[1])
    return wanted


def _named(url: str) -> RemoteCheckpoint:
    folder, _, name = url.rstrip("/").rpartition("/")
    checkpoint = RemoteCheckpoint(together(lambda: ObjectStore(folder)), name)
    if step_of(Path(name)) is None:
        raise UserError(f"{url} is no checkpoint: give the URL of a <model>-<step>steps folder, or latest")
    if (problem := asking_together(lambda: remote_problem(checkpoint.store, name))) is not None:
        raise UserError(problem)
    return checkpoint


def _newer_than_here(
    storages: Sequence[Storage], model_name: str, damaged: Collection[Path | RemoteCheckpoint]
) -> tuple[int, str] | None:
    """Return the newest remote checkpoint, complete by names and sizes, if none here is as new; its storage and name.

    Raises:
        UserError: there are some, and none is complete, at the URL or in the directory.
    """
    here = [c for s in storages for c in find_checkpoints(s.directory, model_name) if c.path not in damaged]
    newest = max((c.step for c in here if quick_problem(c.path) is None), default=-1)
    remote = [
        (c.step, -index, RemoteCheckpoint(storage.mirror.store, c.path.name))
        for index, storage in enumerate(storages)
        if storage.mirror is not None
        for c in of_model(find_remote(storage.mirror.store), model_name)
    ]
    for step, index, found in sorted(remote, key=lambda entry: entry[:2], reverse=True):
        if step <= newest:
            return None
        if found in damaged:
            continue
        problem = remote_problem(found.store, found.name)
        if problem is None:
            return -index, found.name
        warn_once(f"Not resuming from {found}: {problem}.")
    if remote and newest < 0:
        url = remote[-1][2].store
        raise UserError(
            f"none of the {len(remote)} checkpoints in {url} is valid: run `smp verify {shlex.quote(str(url))}` to see "
            f"what is wrong, or start anew with another --checkpoint_dir"
        )
    return None


def refuse_remote(
    storages: Sequence[Storage], model_name: str, chosen: Path | RemoteCheckpoint | None, *, own: bool, latest: bool
) -> None:
    """Refuse a URL with checkpoints that this start does not continue; for rank 0.

    Args:
        chosen: the checkpoint to resume from; None: a fresh start.
        own: whether it is in one of the storages' directories, or at one of their URLs.
        latest: whether it was chosen as the newest valid one; what is newer is damaged, and is set aside.

    Raises:
        UserError: naming one.
        StoreError: they cannot be listed.
    """
    for mirror in (storage.mirror for storage in storages if storage.mirror is not None):
        found = find_remote(mirror.store)
        mine = of_model(found, model_name)
        if own and chosen is not None:
            step = step_of(Path(chosen.name)) or 0
            if mine and mine[-1].step > step and not latest:
                raise UserError(
                    f"{mirror.store.at(mine[-1].path.name)} is newer than the checkpoint to resume from, step {step}: "
                    f"move the newer ones away, or branch off into another --output_dir and --checkpoint_dir"
                )
        elif chosen is None and mine:
            raise UserError(
                f"{mirror.store} already contains checkpoints up to step {mine[-1].step}: continue that run with "
                f"--resume_from_checkpoint latest, or start a new one with another --checkpoint_dir"
            )
        elif found:
            raise UserError(
                f"{mirror.store} contains checkpoints of a run that this one does not continue "
                f"({found[-1].path.name}): choose another --checkpoint_dir"
            )
