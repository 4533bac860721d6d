"""Bring a checkpoint from a URL to a directory that all ranks share, and refuse to start beside others there."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smp.checkpoint.layout import LATEST, disk_free, find_checkpoints, publish, quick_problem, step_of
from smp.checkpoint.manifest import MANIFEST_FILE, Manifest, checksum_of
from smp.checkpoint.mirror import share_of
from smp.checkpoint.object_store import ObjectStore, is_url
from smp.checkpoint.remote import RemoteCheckpoint, find_remote, of_model, read_remote, remote_problem
from smp.checkpoint.safetensors_io import write_bytes
from smp.checkpoint.storage import Storage
from smp.comm.report import readable
from smp.errors import DamagedCheckpointError, RunError, UserError
from smp.faults.agreement import together
from smp.log import get_logger

logger = get_logger(__name__)

_STREAMS = 4  # files that a rank downloads at a time


def fetch(store: ObjectStore, name: str, storage: Storage, advance: Callable[[int], None], *, again: bool) -> list[str]:
    """Copy a remote checkpoint to the storage's directory, each rank a share of the files, and publish it; collective.

    One of that name that is there is replaced.

    Args:
        advance: is told the bytes that have come, by other threads.
        again: even if the same one is there, whole as far as names and sizes tell.

    Returns:
        Problems, the same on all ranks: files that are not as they were written. Nothing is published then.

    Raises:
        UserError: on every rank; a rank could not read or write, or there is no space.
    """
    final = storage.directory / name
    manifest, data = together(lambda: _asking(functools.partial(read_remote, store, name)))
    if not again and _everywhere(_is_there(final, data)):
        return []
    together(lambda: _require_room(storage.directory, manifest, store.at(name)))
    if dist.get_rank() == 0:
        logger.info("Downloading %s (%s) to %s.", store.at(name), readable(manifest.nbytes), storage.directory)
    temporary = _asking(functools.partial(storage.begin, name))
    try:
        mine = together(lambda: _asking(functools.partial(_download_share, store, name, manifest, temporary, advance)))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        problems = sorted({problem for found in everyone for problem in found})
        if not problems:
            together(lambda: _asking(lambda: _publish(temporary, final, data)) if storage.leads else None)
            return []
    except UserError:
        storage.remove(temporary)
        raise
    storage.remove(temporary)
    return problems


def _asking(action: Callable[[], Any]) -> Any:
    """Call ``action``; raise what a store or a disk refuses as bad input, before there is anything to lose.

    Raises:
        UserError: it does.
    """
    try:
        return action()
    except RunError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{error.filename or 'a checkpoint'} cannot be copied ({error.strerror})") from error


def asking_together(action: Callable[[], Any]) -> Any:
    """Call ``action`` on rank 0 and return its result on all; collective.

    Raises:
        UserError: on every rank.
    """
    said: list[Any] = [together(lambda: _asking(action) if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(said)
    return said[0]


def _is_there(final: Path, data: bytes) -> bool:
    try:
        same = checksum_of((final / MANIFEST_FILE).read_bytes()[:200]) == checksum_of(data)
    except OSError:
        return False
    return same and quick_problem(final) is None


def _everywhere(mine: bool) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return all(everyone)


def _require_room(directory: Path, manifest: Manifest, url: str) -> None:
    free = disk_free(directory)
    if free < manifest.nbytes:
        raise UserError(
            f"{url} has {readable(manifest.nbytes)} and {directory}, where it is to be copied to, has {readable(free)} "
            f"free: free some space, or choose another --output_dir (or --checkpoint_cache_dir)"
        )


def _download_share(
    store: ObjectStore, name: str, manifest: Manifest, temporary: Path, advance: Callable[[int], None]
) -> list[str]:
    """Download this rank's files, and return the problems of what has come."""

    def one(file: str) -> str | None:
        entry = manifest.files[file]
        digest = store.download(f"{name}/{file}", temporary / file, entry.size, advance)
        return None if digest == entry.digest else f"{file} is not as it was written (its digest differs)"

    with concurrent.futures.ThreadPoolExecutor(_STREAMS) as pool:
        own = share_of(manifest, dist.get_rank(), dist.get_world_size())
        return [problem for problem in pool.map(one, own) if problem]


def _publish(temporary: Path, final: Path, data: bytes) -> None:
    write_bytes(temporary / MANIFEST_FILE, data)
    publish(temporary, final)


def bring(
    storages: Sequence[Storage],
    wanted: str | None,
    model_name: str,
    *,
    damaged: set[Path],
    elsewhere: Storage | None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> str | RemoteCheckpoint | None:
    """Bring the checkpoint to resume from to a directory, if it belongs there; collective.

    Args:
        wanted: ``latest``, which here is the newest that is newer than every valid one in the directories; a URL; or
            something else, for which nothing is done.
        damaged: local checkpoints that have been found damaged; what is brought in place of one is taken out.
        elsewhere: where one of no storage's URL is brought to; None: it is read there.
        advance: is told the bytes that have come, by other threads.

    Returns:
        ``wanted``, the path of what was brought for a URL, or what is to be read there.

    Raises:
        UserError: on every rank; the URL is no valid checkpoint, the store cannot be read, or there is no space; or it
            contains checkpoints, and none is valid, there or here.
    """
    if wanted is not None and is_url(wanted):
        folder, _, name = wanted.rstrip("/").rpartition("/")
        storage = next((s for s in storages if s.mirror is not None and s.mirror.holds(wanted)), elsewhere)
        store = together(lambda: ObjectStore(folder))
        if step_of(Path(name)) is None:
            raise UserError(f"{wanted} is no checkpoint: give the URL of a <model>-<step>steps folder, or latest")
        if storage is None:
            if (problem := asking_together(lambda: remote_problem(store, name))) is not None:
                raise UserError(problem)
            return RemoteCheckpoint(store, name)
        if problems := fetch(store, name, storage, advance, again=False):
            raise DamagedCheckpointError(wanted, problems)
        _mended(damaged, storage.directory / name)
        return str(storage.directory / name)
    if wanted == LATEST and any(storage.mirror is not None for storage in storages):
        _bring_latest(storages, model_name, damaged, advance)
    return wanted


def _mended(damaged: set[Path], path: Path) -> None:
    damaged -= {other for other in damaged if other.resolve() == path.resolve()}


def _bring_latest(
    storages: Sequence[Storage], model_name: str, damaged: set[Path], advance: Callable[[int], None]
) -> None:
    passed: set[str] = set()  # URLs of what is damaged there
    while True:
        chosen = asking_together(lambda: _newer_than_here(storages, model_name, damaged, passed))
        if chosen is None:
            return
        index, name = chosen
        mirror = storages[index].mirror
        assert mirror is not None
        problems = fetch(mirror.store, name, storages[index], advance, again=True)
        if not problems:
            _mended(damaged, storages[index].directory / name)
            return
        passed.add(mirror.store.at(name))
        if dist.get_rank() == 0:
            logger.warning("Passed over: %s", DamagedCheckpointError(mirror.store.at(name), problems))


def _newer_than_here(
    storages: Sequence[Storage], model_name: str, damaged: set[Path], passed: set[str]
) -> tuple[int, str] | None:
    """Return the newest remote checkpoint, whole by names and sizes, if none here is as new; its storage and name.

    Raises:
        UserError: there are some, and none is whole, there or here.
    """
    known = {path.resolve() for path in damaged}
    here = [c for s in storages for c in find_checkpoints(s.directory, model_name) if c.path.resolve() not in known]
    newest = max((c.step for c in here if quick_problem(c.path) is None), default=-1)
    remote = [
        (c.step, -index, c.path.name, storage.mirror.store)
        for index, storage in enumerate(storages)
        if storage.mirror is not None
        for c in of_model(find_remote(storage.mirror.store), model_name)
    ]
    for step, index, name, store in sorted(remote, key=lambda entry: entry[:3], reverse=True):
        if step <= newest:
            return None
        if store.at(name) in passed:
            continue
        problem = remote_problem(store, name)
        if problem is None:
            return -index, name
        logger.warning("Not resuming from %s: %s.", store.at(name), problem)
        passed.add(store.at(name))
    if remote and newest < 0:
        raise UserError(
            f"none of the {len(remote)} checkpoints in {remote[-1][3]} is valid: run `smp verify {remote[-1][3]}` to "
            f"see what is wrong, or start anew with another --checkpoint_dir"
        )
    return None


def refuse_remote(
    storages: Sequence[Storage], model_name: str, chosen: Path | RemoteCheckpoint | None, *, own: bool, latest: bool
) -> None:
    """Refuse to start beside remote checkpoints that this start does not continue; for rank 0.

    Args:
        chosen: the checkpoint to resume from; None: a fresh start.
        own: whether it is in one of the storages' directories.
        latest: whether it was chosen as the newest valid one; what is newer is damaged, and is set aside.

    Raises:
        UserError: naming one.
        StoreError: they cannot be listed.
    """
    for mirror in (storage.mirror for storage in storages if storage.mirror is not None):
        found = find_remote(mirror.store)
        if not found:
            continue
        mine, newest = of_model(found, model_name), found[-1]
        if own and isinstance(chosen, Path):
            step = step_of(chosen) or 0
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
        else:
            raise UserError(
                f"{mirror.store} contains checkpoints of a run that this one does not continue ({newest.path.name}): "
                f"choose another --checkpoint_dir"
            )
