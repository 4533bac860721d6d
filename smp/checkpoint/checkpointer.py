"""Save and load the state of a run, together on all ranks; used by the training job and by users' own scripts."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint.at_exit import finish_at_exit, finished
from smp.checkpoint.background import HostCopies, PendingWrite, to_host
from smp.checkpoint.base import begin_digest, with_base
from smp.checkpoint.directory import LATEST, checkpoint_name, choose_checkpoint, set_aside
from smp.checkpoint.fetch import asking, asking_together, locate
from smp.checkpoint.lock import bring_back, own
from smp.checkpoint.manifest import Manifest, now, versions
from smp.checkpoint.mirror import Rule
from smp.checkpoint.outcome import agree, attempt
from smp.checkpoint.remote import RemoteCheckpoint, manifest_of
from smp.checkpoint.restore import Candidate, Damaged, Search, is_script, restore
from smp.checkpoint.retention import prune
from smp.checkpoint.safetensors_io import Piece, reason
from smp.checkpoint.same_model import changes_in_training, check_architecture
from smp.checkpoint.shards import Snapshot, snapshot_of
from smp.checkpoint.state import (
    alike,
    changed_by,
    extra_states,
    model_entry,
    plain,
    require_known,
    settings_of,
    state_tensors,
)
from smp.checkpoint.storage import Storage, storage_at
from smp.checkpoint.tagged_json import decode, encode
from smp.errors import DamagedCheckpointError, UserError
from smp.faults.agreement import require_same, together
from smp.log import get_logger
from smp.models.file_names import buffers_of
from smp.optim.optimizers import expected_state

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

logger = get_logger(__name__)


class Saved(NamedTuple):
    """Result of :meth:`Checkpointer.load`: path, step, and the script's own ``extra`` (None for a job's checkpoint)."""

    path: Path | RemoteCheckpoint
    step: int
    extra: Any


class Checkpointer:
    """Saves and loads the state of a script; every method is called by all ranks.

    A checkpoint is published when complete, every byte of it is verified before :meth:`load` returns, and it can
    be loaded at any other number of ranks, sharding or tensor-parallel degree.

    Args:
        directory: on a file system that all hosts share; made if it is not there. One process at a time saves into
            it: the first save takes its lock until the process ends, and deletes what interrupted saves of this name
            have left. Loading needs no lock. Or a URL that fsspec knows, such as ``s3://bucket/run``: checkpoints are
            written to ``staging`` and uploaded from there while training continues, and :meth:`load` finds those that
            are at the URL alone. A :class:`Storage` is one that the caller has made and locked.
        model: of :func:`smp.parallelize`, :class:`smp.FullyShardedDataParallel`, torch's ``fully_shard`` or DDP, or a
            plain module that is the same on all ranks.
        optimizer: any whose state is tensors of its parameters' shapes, and scalars; over the model's parameters.
        name: checkpoints are called ``<name>-<step>steps``.
        keep: how many of the newest stay; at least 1.
        keep_best: how many of the lowest ``val_loss`` (of the manifest's ``run``) stay beside them.
        verify: read every file back before it is published.
        copies: host memory for writes in the background; shared by several that write one at a time.
        staging: directory for a URL, on a file system that all hosts share; default: ``checkpoints/<end of the URL>``.

    Attributes:
        name: of the model, in the names of checkpoints.
        step: last loaded or saved.

    Raises:
        UserError: torch's FSDP1 or DeepSpeed shards the model in a way of its own; a tensor, a name or a number is not
            allowed.
    """

    def __init__(
        self,
        directory: str | Path | Storage,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        name: str = "model",
        keep: int = 2,
        keep_best: int = 0,
        verify: bool = False,
        copies: HostCopies | None = None,
        staging: str | Path | None = None,
    ):
        if not _NAME.fullmatch(name) and not isinstance(directory, Storage):
            raise UserError(f"Checkpointer: name {name!r} is not allowed: use letters, digits, dots, - and _")
        if keep < 1:
            raise UserError(f"Checkpointer: keep {keep} would delete what was just saved: give at least 1")
        if not dist.is_initialized():
            raise UserError("Checkpointer needs a process group: call smp.init_process_group() before it")
        own_staging = Path(staging or f"checkpoints/{Path(str(directory)).name}")
        self.storage = directory if isinstance(directory, Storage) else storage_at(directory, name, own_staging)
        self.name, self._keep, self._keep_best, self._verify = name, keep, keep_best, verify
        require_known(optimizer)
        self._model, self._optimizer = plain(model), optimizer
        self._copies = HostCopies() if copies is None else copies
        self.writing: PendingWrite | None = None
        self.step: int | None = None
        together(lambda: self._prepare(make=not isinstance(directory, Storage)))
        begin_digest(self._model)
        # The update waits for the copy of what it is about to change.
        optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())

    def _prepare(self, *, make: bool) -> None:
        state_tensors(self._model, self._optimizer)  # refused now, and not at the first save
        if make and self.storage.leads:
            try:
                self.storage.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"Checkpointer: {self.storage.directory} cannot be made ({error.strerror}): choose another "
                    f"directory"
                ) from None

    def _wait_for_copy(self) -> None:
        if self.writing is not None:
            self.writing.wait_for_copy()

    def save(self, step: int, extra: Any = None, *, wait: bool = True) -> Path:
        """Save the state after ``step`` updates; collective.

        Checkpoints of later steps than the one that this script resumed from are of another branch: they are renamed
        (``.aside1``), with a line in the log, and no longer found.

        Args:
            step: updates done; in the checkpoint's name.
            extra: what else the script needs to resume: a scheduler's ``state_dict()``, a position in the data. None,
                bools, numbers, texts, and lists, tuples, dicts and counters of them; rank 0's is saved.
            wait: False writes a copy, made before this returns, while training continues; the checkpoint is published
                by the next ``save``, by :meth:`finish`, or when the script ends.

        Returns:
            Where it is, or will be.

        Raises:
            UserError: something else is in ``extra``, the optimizer's state cannot be described, the ranks disagree
                on the step, the directory or what there is to save, another process saves into the directory, or
                another Checkpointer of this one has just saved the same step under the same name.
            RunError: a rank could not write; nothing is published.
        """
        self.publish()
        manifest = together(lambda: self._manifest(step, extra))
        tensors = together(lambda: state_tensors(self._model, self._optimizer))
        self._require_agreement(step, tensors)
        if not wait:
            together(lambda: self._copies.reserve(self._snapshot(tensors).pieces))
            dist.broadcast_object_list(said := [manifest])  # any rank may publish it as the script ends
            manifest = said[0]
        directory = self.storage.directory
        together(lambda: own(directory, self.name, self, step) if self.storage.leads else None)
        if self.storage.mirror is not None and not self.storage.mirror.opened:
            self.storage.mirror.open()
        path = self.write(manifest, wait=wait, verify=self._verify)
        self._wait_for_copy()  # not for the next update alone: averaged weights may be swapped in before
        if not wait or self.storage.mirror is not None:
            finish_at_exit(self)
        return path

    def write(self, manifest: Manifest, *, wait: bool, verify: bool) -> Path:
        """Save the present state; collective, for the owner of the directory's lock.

        Args:
            manifest: describes it, all but kind, files and tensors.
            wait: as of :meth:`save`.
            verify: read every file back before it is published.

        Raises:
            UserError: the frozen weights are others than those of the checkpoint resumed from; nothing is written.
            RunError: a rank could not write; nothing is published.
        """
        self.publish()
        begin_digest(self._model)  # of weights that came after this was made
        manifest = dataclasses.replace(manifest, kind=self.storage.kind, model=with_base(manifest.model, self._model))
        temporary = self.storage.begin(checkpoint_name(self.name, manifest.step))
        snapshot = self._snapshot(state_tensors(self._model, self._optimizer))
        # Asked before pieces become buffers of the host, which the device is still to fill.
        device = next((piece.tensor.device for piece in snapshot.pieces if piece.tensor.is_cuda), None)
        if not wait:
            snapshot = dataclasses.replace(snapshot, pieces=self._copy_unguarded(snapshot.pieces))
        copy = self._copies if self._copies or not wait else to_host
        self.writing = PendingWrite(temporary, manifest, snapshot, copy=copy, check=verify, device=device)
        if wait:
            self.writing.run()
            self.publish()
        else:
            self.writing.start()
        return self.storage.directory / checkpoint_name(self.name, manifest.step)

    def _snapshot(self, tensors: dict[str, torch.Tensor]) -> Snapshot:
        first = {f"model.{name}" for name, _ in buffers_of(self._model)}
        return snapshot_of(tensors, everything=not self.storage.shared, of_rank0=first)

    def reserve(self) -> int:
        """Make the host memory that writes in the background need, before the first; returns its bytes.

        The state that the first step makes is counted too, where it is known: a job's, and Adam's.

        Raises:
            UserError: it cannot be page-locked.
        """
        state = expected_state(self._optimizer)
        return self._copies.reserve(self._snapshot(state_tensors(self._model, self._optimizer, state)).pieces)

    def _copy_unguarded(self, pieces: list[Piece]) -> list[Piece]:
        """Copy what may change before this optimizer's step, which alone waits for the background copy."""
        later = changed_by(self._optimizer, self._model)

        def copied(piece: Piece) -> Piece:
            # From a GPU into host memory that is reserved by now; this stream copies, and the host does not wait.
            return self._copies([piece])[0] if piece.tensor.is_cuda else piece._replace(tensor=piece.tensor.clone())

        return [p if p.name in later else copied(p) for p in pieces]

    def _require_agreement(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Refuse ranks that are about to save different things; collective."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        digest = hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()
        mine = {"the step": step, "the directory": str(self.storage.directory.absolute()), "the tensors": digest[:12]}
        require_same(mine, "call it with the same on every rank", before="Checkpointer.save: ")

    def finish(self, progress: Callable[[], None] = lambda: None) -> None:
        """Publish the checkpoint that is being written, and wait for uploads; collective.

        What a script has not waited for when it ends is finished then, and what fails is said on standard error alone.

        Args:
            progress: called while uploads get on.

        Raises:
            RunError: a rank could not write it, and nothing is published; or the newest could not be uploaded.
        """
        self.publish()
        if self.storage.mirror is not None:
            self.storage.mirror.finish(progress)
            self._prune()  # what was being uploaded at the last save has stayed
        finished(self)

    def publish(self) -> float:
        """Publish the checkpoint that is being written, if there is one, and have it uploaded; collective.

        Returns:
            Seconds that this rank's write took; 0 if there was none.

        Raises:
            RunError: a rank could not write it; nothing is published.
        """
        if self.writing is None:
            return 0.0
        write, self.writing = self.writing, None
        if self.storage.mirror is None:
            finished(self)
        write.wait()
        storage, name = self.storage, checkpoint_name(self.name, write.manifest.step)
        directory, mirror = storage.directory, storage.mirror
        said = f"checkpoint {directory / name} could not be written"
        try:
            agree(write.failure, said)
            if mirror is not None:
                mirror.settle(directory / name)
            agree(attempt(lambda: self._publish(write)), said)
        except Exception:
            self.storage.remove(write.temporary)
            raise
        if mirror is not None:
            mirror.offer(directory / name, self.rule(write.manifest.step))
        self.step = write.manifest.step
        self._prune()
        return write.seconds

    def _prune(self) -> None:
        """Delete what retention does not keep, but for what is yet to be uploaded; collective."""
        directory, mirror = self.storage.directory, self.storage.mirror
        if self.storage.leads:
            rule, spared = {"keep": self._keep, "keep_best": self._keep_best}, mirror.needed if mirror else set()
            failure = attempt(lambda: prune(directory, self.name, **rule, spared=spared))
            if failure is not None:  # the next save tries again
                logger.warning("Old checkpoints in %s could not be deleted: %s", directory, reason(failure))
        agree(None, "")  # deleting may take long, and the others are to wait for it here

    def rule(self, step: int) -> Rule:
        """Return the retention beside a checkpoint of ``step`` that is about to be published."""
        return Rule(self._keep, self._keep_best, after=step if self.step is None else min(self.step, step))

    def _publish(self, write: PendingWrite) -> None:
        if self.storage.leads:
            # Found before this one, they would be loaded instead of it, and kept while it is deleted.
            set_aside(self.storage.directory, self.name, after=self.rule(write.manifest.step).after)
        self.storage.publish(write.temporary, write.manifest)

    def load(self, path: str | Path = LATEST) -> Saved | None:
        """Fill model, optimizer and generators; collective.

        With ``latest``, a damaged checkpoint is passed over, with a line in the log, for the newest one before it.
        The generators are restored at the saved number of ranks and tensor-parallel degree; at another they are seeded
        by the step and the rank, alike in a tensor-parallel group.

        Args:
            path: of a checkpoint of a script or of a training job, or its URL, or ``latest``.

        Returns:
            What was found; None if the directory has no checkpoint of this name.

        Raises:
            DamagedCheckpointError: the path is damaged; of a URL, the model may have been filled in part.
            UserError: it is of another model or optimizer, or there are checkpoints and none is valid.
        """
        self.publish()
        if dist.get_rank() == 0:
            bring_back(self.storage.directory, self.name)
        search = Search(functools.partial(self._candidate, str(path)), latest=str(path) == LATEST, content=True)
        found = search.fill(search.first(), self._fill)
        chosen, manifest = found.checkpoint, found.saved
        if chosen is None or manifest is None:
            return None
        self.step = manifest.step
        extra = decode(manifest.run["extra"]) if is_script(manifest.run) else None
        return Saved(chosen, manifest.step, extra)

    def _fill(self, found: Candidate) -> None:
        chosen, manifest = found.checkpoint, found.saved
        if chosen is None or manifest is None:
            return
        config = getattr(self._model, "config", None)
        if hasattr(config, "to_json_string"):
            together(lambda: check_architecture(chosen, manifest.model["config"], config))
        restore(chosen, manifest, self._model, self._optimizer, seed=f"{manifest.step}:{alike(self._model)[0]}")
        for change in changes_in_training(chosen, manifest, self._model) if dist.get_rank() == 0 else ():
            logger.warning("Changed since the checkpoint: %s", change)

    def _candidate(self, wanted: str, damaged: Damaged) -> Candidate:
        """Return the checkpoint that rank 0 chooses, as another rank's view of the directory may be older; collective.

        Raises:
            UserError: there is none that can be loaded, or the directory cannot be read.
        """
        located = locate([self.storage], wanted, self.name, damaged=damaged)
        if isinstance(located, RemoteCheckpoint):
            return Candidate(located, together(lambda: _read(located)))
        choose = functools.partial(choose_checkpoint, located, [self.storage.directory], self.name, damaged=damaged)
        path: Path | None = asking_together(choose)
        return Candidate(path, None if path is None else together(lambda: _read(path)))

    def _manifest(self, step: int, extra: Any) -> Manifest:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UserError(f"Checkpointer.save: step {step!r} is not allowed: give the number of updates done")
        try:
            extra = encode(extra, "extra")
        except ValueError as error:
            raise UserError(
                f"Checkpointer.save: extra cannot be saved ({error}): give None, numbers, texts, and lists, tuples and "
                f"dicts of them; tensors belong to the model as buffers"
            ) from None
        return Manifest(
            step=step, world_size=dist.get_world_size(), degrees={"tp": len(alike(self._model))},
            model=model_entry(self.name, getattr(self._model, "config", None)),
            run={"script": True, "extra": extra, "optimizer": settings_of(self._model, self._optimizer),
                 "extra_states": extra_states(self._model)},
            saved_at=now(), versions=versions(),
        )  # fmt: skip


def _read(path: Path | RemoteCheckpoint) -> Manifest:
    manifest = asking(lambda: manifest_of(path))
    if manifest.kind != "sharded":
        raise UserError(
            f"checkpoint {path} is a {manifest.kind} one, which has the state of one rank: resume the job from it, and "
            f"save a sharded one"
        )
    of_a_job = isinstance(manifest.run.get("progress"), dict)
    if not (is_script(manifest.run) or of_a_job) or not isinstance(manifest.model.get("config"), dict):
        raise DamagedCheckpointError(path, ["its manifest is neither a script's nor a training job's"])
    return manifest
