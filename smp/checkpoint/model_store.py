"""Final models on object stores: written to the disk first, then uploaded, ``config.json`` last.

A folder without ``config.json`` is no model, so one that is being uploaded or replaced is not taken for one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from smp.checkpoint.hf_export import MARKER
from smp.checkpoint.object_store import ObjectStore, StoreError
from smp.errors import RunError, UserError

_LAST = "config.json"
# Seconds between two looks at an upload that other ranks wait for.
_PAUSE = (0.05, 1.0)


def _files_of_export(store: ObjectStore) -> set[str]:
    """Return the names of the objects that an earlier export put there."""
    try:
        return {MARKER, *map(str, json.loads(store.read(MARKER) or b"{}")["files"])}
    except (ValueError, KeyError, TypeError):
        return set()


def refuse_foreign_objects(url: str) -> None:
    """Check that a model at ``url`` would replace nothing but an earlier export.

    Raises:
        UserError: the URL cannot be used, or other objects are below it.
    """
    try:
        store = ObjectStore(url)
        present = store.sizes("").keys()
        foreign = sorted(present - _files_of_export(store)) if present else []
    except StoreError as error:
        raise UserError(f"no model can be written to {url}: {error}") from error
    if foreign:
        raise UserError(
            f"{url} contains {foreign[0]}, which no earlier export wrote, and would be mixed with the model: give "
            f"another URL, or move the object away"
        )


def upload_model(directory: Path, url: str, advance: Callable[[int], None] = lambda nbytes: None) -> None:
    """Copy an export to a URL, in place of an earlier one.

    Args:
        directory: as :func:`smp.checkpoint.hf_export.export_hf` has written it.
        advance: is told the bytes that have got there.

    Raises:
        StoreError: it cannot be written.
    """
    store = ObjectStore(url)
    names = sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())
    # The marker first: whatever of this is there, a later export may replace it.
    old = _files_of_export(store)
    store.remove(_LAST)
    marker = {"files": sorted({*names, *old} - {MARKER})}
    store.write(MARKER, json.dumps(marker).encode())
    for name in names:
        if name not in (MARKER, _LAST):
            store.upload(directory / name, name, advance)
    for name in sorted(old - set(names)):
        store.remove(name)
    store.upload(directory / MARKER, MARKER, advance)
    store.upload(directory / _LAST, _LAST, advance)


def upload_model_together(directory: Path, url: str, progress: Callable[[], None]) -> None:
    """Upload a model from rank 0 while the others wait; collective.

    Args:
        progress: called by every rank whenever more has got there.

    Raises:
        RunError: on every rank, if it could not be uploaded.
    """
    moved, failures, pause = [0], list[Exception](), _PAUSE[0]

    def advance(nbytes: int) -> None:
        moved[0] += nbytes

    def upload() -> None:
        try:
            upload_model(directory, url, advance)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=upload, daemon=True) if dist.get_rank() == 0 else None
    if thread is not None:
        thread.start()
    seen, running = -1, True
    while running:
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE[1])
        said = [(thread is not None and thread.is_alive(), moved[0], str(failures[0]) if failures else None)]
        dist.broadcast_object_list(said)
        running, there, failure = said[0]
        if there != seen:
            seen = there
            progress()
    if failure is not None:
        raise RunError(f"the final model could not be uploaded: {failure}. It is in {directory}: copy it from there")
