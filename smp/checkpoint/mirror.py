"""Upload checkpoints to a URL in the background, and keep as many of them as on the disk.

Each rank uploads a share of the files of a checkpoint that has been published in a directory that all ranks share; a
thread of each does it, without a collective. Rank 0 uploads the manifest when all files are uploaded: that commits it.

Two agreements make that safe. Which checkpoint is next is decided by all ranks together, where one is published. And
``<model>.writer.json`` says which job writes to the URL, and of which content the objects without a manifest are: an
interrupted upload is continued if its objects have the same content; else they are deleted before the first object of
the new content is uploaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smp.checkpoint.directory import checkpoint_name, step_of
from smp.checkpoint.manifest import MANIFEST_FILE, Manifest, checksum_of, now, parse_manifest
from smp.checkpoint.object_store import ObjectStore, StoreError
from smp.checkpoint.outcome import attempt
from smp.checkpoint.remote import ASIDE, find_remote, of_model, read_remote, remote_problem
from smp.checkpoint.retention import Rated, doomed_of
from smp.checkpoint.safetensors_io import reason
from smp.errors import RunError, UserError
from smp.faults.agreement import of_all_ranks
from smp.log import get_logger

logger = get_logger(__name__)

POLL_SECONDS = (0.2, 5.0)  # from, to
# After which the end of a process waits no longer.
STALLED_SECONDS = 300.0


class _CancelledError(Exception):
    """Another rank has failed: the upload will not be committed."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Retention of a checkpointer; checkpoints of steps after ``after`` are of another branch than the one uploaded."""

    keep: int
    keep_best: int
    after: int


def share_of(manifest: Manifest, rank: int, size: int) -> list[str]:
    """Return the files that one of ``size`` ranks copies."""
    return list(manifest.files)[rank::size]


class Upload:
    """Upload of one checkpoint by this rank, in a thread.

    Attributes:
        moved: bytes that are uploaded.
        failure: error that ended it; None while it is under way, and after success.
    """

    def __init__(self, mirror: Mirror, path: Path, rule: Rule):
        self.path, self.rule, self.moved = path, rule, 0
        self.cancelled = threading.Event()
        self.failure: BaseException | None = RunError("the thread that uploaded it has died")
        self._mirror = mirror
        # A daemon: a process that must leave at once does not wait for the network.
        self._thread = threading.Thread(target=self._run, name="smp-upload", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self) -> bool:
        """Wait for this rank's part; give it up, and return False, without progress for long: a rank may be gone."""
        moved = -1
        while not self.ended and self.moved != moved:
            moved = self.moved
            self._thread.join(STALLED_SECONDS)
        if not self.ended:
            self.cancelled.set()
            logger.warning("%s was not uploaded: nothing has moved for %g s.", self.path, STALLED_SECONDS)
        return not self.cancelled.is_set()

    @property
    def ended(self) -> bool:
        """True when this rank has done its part, or could not."""
        return not self._thread.is_alive()

    @property
    def gave_up(self) -> bool:
        """True if it ended because of another rank."""
        return isinstance(self.failure, _CancelledError)

    def _run(self) -> None:
        begun = time.perf_counter()
        self.failure = attempt(self._upload)
        if self.failure is None and self._mirror.leads:
            if self.moved:  # else it was uploaded already
                seconds = time.perf_counter() - begun
                logger.info("Uploaded %s (%.1f s).", self._mirror.store.at(self.path.name), seconds)
            if (failure := attempt(self._prune)) is not None:  # the next upload tries again
                logger.warning("Old checkpoints in %s could not be deleted: %s", self._mirror.store, reason(failure))
        elif self.failure is not None and not self.gave_up:
            logger.warning(
                "%s was not uploaded: %s. It is kept in %s.", self.path.name, reason(self.failure), self.path.parent
            )

    def _upload(self) -> None:
        store, name = self._mirror.store, self.path.name
        data = (self.path / MANIFEST_FILE).read_bytes()
        manifest = parse_manifest(data, self.path, len(os.listdir(self.path)))
        content = [name, checksum_of(data)]
        if self._mirror.leads:
            committed = self._lead_in(data, content)
        else:
            # Rank 0 may have found this rank's files at the URL, committed, and begun the next.
            self._wait_until(lambda: self._mirror.require_own().get("uploading") == content or self._committed(data))
            committed = False  # as far as this rank knows, which then finds its files uploaded
        there = store.sizes(name)
        for file in share_of(manifest, self._mirror.rank, self._mirror.size):
            if there.get(file) != manifest.files[file].size:
                if self.cancelled.is_set():
                    raise _CancelledError
                self._mirror.require_own()  # another job's file of this size would be committed as its own
                store.upload(self.path / file, f"{name}/{file}", self._advance)
        if self._mirror.leads and not committed:
            self._commit(manifest, data)

    def _advance(self, nbytes: int) -> None:
        self.moved += nbytes

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        pause, longest = POLL_SECONDS
        while not ready():
            if self.cancelled.wait(pause):
                raise _CancelledError
            pause = min(2 * pause, longest)

    def _lead_in(self, data: bytes, content: list[str]) -> bool:
        """Make the folder contain this content alone, and say so to the other ranks; True if it is committed."""
        mirror, name = self._mirror, self.path.name
        written = mirror.require_own()
        committed = self._committed(data)
        if not committed:
            mirror.store.remove(f"{name}/{MANIFEST_FILE}")  # before anything of it is replaced
        if written.get("uploading") != content:
            if not committed:
                mirror.store.remove_folder(name)
            mirror.announce(content)
        return committed

    def _committed(self, data: bytes) -> bool:
        return self._mirror.store.read(f"{self.path.name}/{MANIFEST_FILE}") == data

    def _commit(self, manifest: Manifest, data: bytes) -> None:
        store, name, seen = self._mirror.store, self.path.name, [-1]

        def complete() -> bool:
            sizes = store.sizes(name)
            if len(sizes) != seen[0]:
                seen[0] = len(sizes)
                self._advance(1)  # others get on
            return all(sizes.get(file) == entry.size for file, entry in manifest.files.items())

        self._wait_until(complete)
        self._mirror.require_own()
        for checkpoint in of_model(find_remote(store), self._mirror.model_name):
            # Found before this one, they would be resumed from instead of it.
            if checkpoint.step > self.rule.after and checkpoint.path.name != name:
                set_remote_aside(store, checkpoint.path.name)
        store.write(f"{name}/{MANIFEST_FILE}", data)

    def _prune(self) -> None:
        """Delete at the URL what retention does not keep, and what interrupted uploads have left."""
        store, rule, known, model_name = self._mirror.store, self.rule, self._mirror.rated, self._mirror.model_name
        present = of_model(find_remote(store), model_name)
        for checkpoint in present:
            name = checkpoint.path.name
            if name not in known or known[name].problem is not None or name == self.path.name:
                known[name] = _rate(store, name, checkpoint.step)
        rated = [known[checkpoint.path.name] for checkpoint in present]
        names = {c.name for c in rated}
        for doomed in doomed_of(rated, keep=rule.keep, keep_best=rule.keep_best):
            store.remove(f"{doomed.name}/{MANIFEST_FILE}")
            store.remove_folder(doomed.name)
        for name in store.folders():
            left = name not in names and name == checkpoint_name(model_name, step_of(Path(name)) or 0)
            if left and not {ASIDE, MANIFEST_FILE} & store.sizes(name).keys():
                store.remove_folder(name)


def _rate(store: ObjectStore, name: str, step: int) -> Rated:
    problem = remote_problem(store, name)
    return Rated(name, step, problem, read_remote(store, name)[0].run.get("val_loss") if problem is None else None)


def set_remote_aside(store: ObjectStore, name: str) -> None:
    """Take a checkpoint's manifest out of its place: it is not found any more, and its files stay."""
    data = store.read(f"{name}/{MANIFEST_FILE}")
    if data is not None:
        store.write(f"{name}/{ASIDE}", data)
        store.remove(f"{name}/{MANIFEST_FILE}")
        logger.warning("Set aside: the manifest of %s is now %s.", store.at(name), ASIDE)


class Mirror:
    """A URL that checkpoints are uploaded to, one after the other; all but the attributes is collective.

    While one is uploaded, the newest that has been published since waits, and older ones that wait are left out.

    Attributes:
        writer: name of the object that says who writes to the URL.
        rated: what retention knows of the checkpoints at the URL.
        rank, size: of this process and the job when it was opened; uploads may outlive the process group.
    """

    def __init__(self, store: ObjectStore, model_name: str):
        self.store, self.model_name, self.writer = store, model_name, f"{model_name}.writer.json"
        self.rated: dict[str, Rated] = {}
        self.rank, self.size = -1, 0
        self._id = self._since = ""
        self._current: Upload | None = None
        self._next: Upload | None = None
        self._failed: tuple[Upload, str] | None = None  # unless a newer one has been uploaded
        self._moved = 0

    @property
    def leads(self) -> bool:
        """True if this rank commits and deletes at the URL."""
        return self.rank == 0

    def holds(self, url: str) -> bool:
        """Tell whether this is the URL of a checkpoint here."""
        return url.rstrip("/").rpartition("/")[0] == self.store.url

    @property
    def opened(self) -> bool:
        """True after :meth:`open`."""
        return bool(self._id)

    def open(self) -> None:
        """Become the URL's only writer.

        Raises:
            RunError: it cannot be written.
        """
        failure, self.rank, self.size = None, dist.get_rank(), dist.get_world_size()
        if self.leads:
            self._id = uuid.uuid4().hex
            failure = attempt(self._take)
        said: list[Any] = [self._id, None if failure is None else reason(failure)]
        dist.broadcast_object_list(said)
        self._id = said[0]
        if said[1] is not None:
            self._id = ""
            raise RunError(f"checkpoints cannot be uploaded: {said[1]}")

    def _take(self) -> None:
        self._since = now()
        self.announce(_parsed(self.store.read(self.writer)).get("uploading"))

    def announce(self, content: list[str] | None) -> None:
        """Say who writes, and of which content the objects without a manifest are; for rank 0."""
        mine = {"id": self._id, "host": socket.gethostname(), "pid": os.getpid(), "since": self._since}
        self.store.write(self.writer, json.dumps(mine | {"uploading": content}).encode())

    def require_own(self) -> dict[str, Any]:
        """Return what ``writer.json`` says.

        Raises:
            StoreError: another job has begun to write to the URL.
        """
        written = _parsed(self.store.read(self.writer))
        # An empty folder: on a store whose writes are not atomic, such as a disk, rank 0 is writing it.
        if written.get("id", self._id) != self._id:
            who = " ".join(f"{key} {written[key]}" for key in ("host", "pid", "since") if key in written)
            raise StoreError(
                f"another job writes to {self.store} ({who}): end one of them, or give each a URL of its own"
            )
        return written

    @property
    def waited_for(self) -> bool:
        """True if a checkpoint waits, and this rank has done its part of the one before it."""
        return self._next is not None and (self._current is None or self._current.ended)

    @property
    def needed(self) -> set[str]:
        """Names of the checkpoints that are not to be deleted from the disk yet."""
        return {upload.path.name for upload in (self._current, self._next) if upload is not None}

    def offer(self, path: Path, rule: Rule) -> None:
        """Upload a checkpoint that has just been published, when the one before it is done."""
        if self._next is not None and self.leads:
            logger.warning("%s was not uploaded: %s is newer.", self._next.path.name, path.name)
        self._next = Upload(self, path, rule)
        self.advance()

    def advance(self) -> None:
        """Find out whether the present upload has ended on all ranks, and begin the next."""
        if self._current is not None and self._settled(self._current):
            self._current = None
        if self._current is None and self._next is not None:
            self._current, self._next = self._next, None
            self._current.start()

    def _settled(self, upload: Upload) -> bool:
        """Tell whether an upload has ended on all ranks; where it fails on one, the others give it up."""
        ended = upload.ended
        own = reason(upload.failure) if ended and upload.failure and not upload.gave_up else None
        states = of_all_ranks((ended, own, upload.moved))
        failures = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(states) if text]
        if failures:
            upload.cancelled.set()
        self._moved = sum(moved for *_, moved in states)
        if not all(ended for ended, *_ in states):
            return False
        self._failed = (upload, failures[0]) if failures else None
        return True

    def settle(self, path: Path) -> None:
        """Wait while the files of ``path`` are being uploaded, which are about to be replaced."""
        if self._next is not None and self._next.path == path:
            self._next = None
        while self._current is not None and self._current.path == path:
            self._wait(lambda: None)

    def finish(self, progress: Callable[[], None] = lambda: None) -> None:
        """Wait for all uploads; what failed is tried once more.

        Raises:
            RunError: the newest checkpoint could not be uploaded.
        """
        self.advance()
        if self._failed is not None and self._current is None:
            self._next = Upload(self, self._failed[0].path, self._failed[0].rule)
            self.advance()
        while self._current is not None:
            self._wait(progress)
            self.advance()
        if self._failed is not None:
            upload, why = self._failed
            raise RunError(
                f"{upload.path.name} could not be uploaded to {self.store}: {why}. It is kept in {upload.path.parent}: "
                f"running again with --resume_from_checkpoint latest uploads it"
            )

    def offer_alone(self, path: Path, rule: Rule) -> None:
        """Have a checkpoint uploaded by :meth:`finish_alone`, instead of one that waits."""
        self._next = Upload(self, path, rule)

    def finish_alone(self) -> None:
        """Wait for this rank's part of all uploads, as the process ends; not collective. The log has what fails."""
        # One after the other: rank 0 says of one at a time that it is under way.
        if (self._current is None or self._current.join()) and self._next is not None:
            self._next.start()
            self._next.join()
        self._current = self._next = None

    def _wait(self, progress: Callable[[], None]) -> None:
        """Wait for the present upload to end on all ranks."""
        moved, pause = -1, 0.05
        while self._current is not None:
            if self._settled(self._current):
                self._current = None
                return
            if self._moved != moved:
                moved = self._moved
                progress()
            time.sleep(pause)
            pause = min(2 * pause, 1.0)


def _parsed(data: bytes | None) -> dict[str, Any]:
    try:
        said = json.loads(data or b"{}")
    except (ValueError, UserError):
        return {}
    return said if isinstance(said, dict) else {}
