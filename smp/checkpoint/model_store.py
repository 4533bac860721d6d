"""Final models on object stores: written to the disk first, then uploaded, their configuration last.

That is ``config.json``, of adapters ``adapter_config.json``. A folder without either is no model, so one that is being
uploaded or replaced is not taken for one.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from smp.checkpoint.object_store import ObjectStore, StoreError
from smp.checkpoint.outputs import MARKER, exported, identity, marker_of, marker_text, not_exported
from smp.errors import RunError, UserError
from smp.models.weight_files import ADAPTER_CONFIG

_LAST = ("config.json", ADAPTER_CONFIG)
# Seconds between two looks at an upload that other ranks wait for.
_PAUSE = (0.05, 1.0)


def refuse_foreign_objects(url: str) -> None:
    """Check that a model at ``url`` would replace nothing but an earlier export.

    Raises:
        UserError: the URL cannot be used, or other objects are below it, or one of an export that has changed since.
    """
    try:
        store = ObjectStore(url)
        sizes = store.sizes("")
        known = exported(store.read(MARKER) or b"{}") if sizes else {}

        def identified(name: str) -> str:
            return identity(sizes[name], functools.partial(store.range, name))

        problem = not_exported(known, {name: functools.partial(identified, name) for name in sizes})
    except StoreError as error:
        raise UserError(f"no model can be written to {url}: {error}") from error
    if problem:
        raise UserError(
            f"{url} contains {problem}, and would be replaced by the model or mixed with it: give another URL, or move "
            f"the object away"
        )


def upload_model(directory: Path, url: str, advance: Callable[[int], None] = lambda nbytes: None) -> None:
    """Copy an export to a URL, in place of an earlier one.

    Args:
        directory: as :func:`smp.checkpoint.hf_export.export_hf` has written it.
        advance: is told the bytes that are uploaded.

    Raises:
        UserError: as :func:`refuse_foreign_objects`.
        StoreError: it cannot be written.
    """
    refuse_foreign_objects(url)
    store = ObjectStore(url)
    names = sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())
    # The marker first: whatever of this is uploaded, a later export may replace it.
    old, new = exported(store.read(MARKER) or b"{}"), marker_of(directory)
    for name in _LAST:
        store.remove(name)
    both = {name: sorted({*old.get(name, ()), *new.get(name, ())}) for name in sorted({*old, *new})}
    store.write(MARKER, marker_text(both).encode())
    for name in names:
        if name not in (MARKER, *_LAST):
            store.upload(directory / name, name, advance)
    for name in sorted(old.keys() - new.keys()):
        store.remove(name)
    for name in (MARKER, *_LAST):
        if name in names:
            store.upload(directory / name, name, advance)


def upload_model_together(directory: Path, url: str, progress: Callable[[], None]) -> None:
    """Upload a model from rank 0 while the others wait; collective.

    Args:
        progress: called by every rank whenever more is uploaded.

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
