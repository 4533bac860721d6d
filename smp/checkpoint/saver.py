"""When checkpoints are saved, by which way, and what happens when one cannot be."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint.background import BackgroundWrite, HostCopies
from smp.checkpoint.checkpointer import (
    agree,
    attempt,
    begin,
    publish_snapshot,
    remove_temporary,
    save_checkpoint,
    take_snapshot,
    to_host,
)
from smp.checkpoint.config import CheckpointConfig
from smp.checkpoint.files import reason
from smp.checkpoint.layout import TEMPORARY, checkpoint_name, clean, set_aside
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.retention import prune
from smp.checkpoint.space import forecast, state_bytes
from smp.errors import RunError
from smp.log import get_logger

logger = get_logger("train")

# Steps whose times --checkpoint_freq auto takes before the first checkpoint.
MEASURED_STEPS = 12


@dataclasses.dataclass
class _Target:
    """A directory and its rule: ``every`` so many steps; None where that is measured, and ``due`` is the next."""

    directory: Path
    every: int | None
    keep: int
    due: int | None = None
    saved: int | None = None  # the last step
    seconds: float = 0.0  # to write the last one


class Saver:
    """Saves at step boundaries. All ranks call its methods together.

    Args:
        settings: the user's.
        directories: one for each of ``settings.checkpoint_freq``; of this rank alone for local checkpoints.
        model, optimizer: what is saved.
        model_name: in the names of checkpoints.
        first_step: updates done when the run starts.
        max_steps: the step at which it ends.
        record: called with the memory tracker's name of a phase.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        directories: list[Path],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        model_name: str,
        first_step: int,
        max_steps: int,
        record: Callable[[str], None] = lambda tag: None,
    ):
        self._settings, self._model, self._optimizer, self._record = settings, model, optimizer, record
        self._max_steps, self._model_name = max_steps, model_name
        self._targets = [
            _Target(directory, None if every == "auto" else every, keep, first_step + MEASURED_STEPS)
            for directory, every, keep in zip(
                directories, settings.checkpoint_freq, settings.num_kept_checkpoints, strict=True
            )
        ]
        self._copies = HostCopies()
        self._writing: tuple[BackgroundWrite, _Target] | None = None
        self._started, self._paused, self._first_step = time.perf_counter(), 0.0, first_step

    def prepare(self) -> None:
        """See that a checkpoint will have room, after deleting what interrupted saves have left.

        Raises:
            UserError: there is no room, or a directory cannot be written; on ranks that write there.
        """
        local = self._settings.is_local
        if local or dist.get_rank() == 0:
            nbytes = state_bytes(self._model, own=local)
            for target in self._targets:
                clean(target.directory, self._model_name)
                logger.info("A checkpoint in %s: %s.", target.directory, forecast(target.directory, nbytes))

    def set_aside(self) -> None:
        """Rename the checkpoints that the run goes on without."""
        if self._settings.is_local or dist.get_rank() == 0:
            for target in self._targets:
                set_aside(target.directory, self._model_name, after=self._first_step)

    def flags(self) -> dict[str, bool]:
        """What this rank has to say of a checkpoint that is being written, to be counted over all ranks."""
        if self._writing is None:
            return {"save_ended": False, "save_failed": False}
        write = self._writing[0]
        return {"save_ended": write.ended, "save_failed": write.failure is not None}

    def before_updates(self, enter: Callable[[str], None]) -> Callable[[str], None]:
        """What a step is to call with the name of each phase: ``enter``, and before an update, waiting for a copy."""

        def entering(phase: str) -> None:
            enter(phase)
            if phase == "optimizer" and self._writing is not None:
                self._writing[0].wait_for_copy()

        return entering

    def after_step(self, counts: dict[str, int], manifest: Callable[[], Manifest], *, step: int, stop: bool) -> None:
        """Finish what has been written, and save what is due.

        Args:
            counts: over all ranks, of :meth:`flags`.
            manifest: gives all but files and tensors.
            step: updates done.
            stop: the run is about to end, whatever ``step`` is.

        Raises:
            RunError: a checkpoint could not be written and the run is not to go on without.
        """
        last = stop or step == self._max_steps
        due = [t for t in self._targets if last or (step >= (t.due or 0) if t.every is None else step % t.every == 0)]
        started, failure = time.perf_counter(), None
        try:
            if counts["save_failed"]:
                self._retry(manifest, step)
            elif counts["save_ended"] == dist.get_world_size() or due:
                self._finish_write(manifest, step)
        except RunError as error:
            failure = error
        for target in due:
            begun = time.perf_counter()
            try:
                if target.saved != step:  # else in place of one that failed, just now
                    self._record("Before ckpt (StateDictType.SHARDED_STATE_DICT)")
                    self._save(target, manifest(), background=self._settings.is_async and not last, must=last)
                    self._record("After ckpt (StateDictType.SHARDED_STATE_DICT)")
            except RunError as error:  # the other directories may be on another disk
                failure = failure or error
            if target.every is None and not last:
                self._plan_next(target, step, time.perf_counter() - begun)
        self._paused += time.perf_counter() - started
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def finishing(self, enter: Callable[[str], None] = lambda phase: None) -> Iterator[None]:
        """Publish the checkpoint that is being written, if all ranks end together in what is done inside.

        Args:
            enter: called with the name of the phase in which it is waited for.
        """
        try:
            yield
        except RunError:
            if self._writing is not None:
                write, target = self._writing
                self._writing = None
                enter("checkpoint")
                write.wait()
                with contextlib.suppress(RunError):  # the first one is the cause of the end
                    self._publish(write, target)
            raise

    def _save(self, target: _Target, manifest: Manifest, *, background: bool, must: bool) -> None:
        started = time.perf_counter()
        try:
            if background:
                try:
                    self._finish_write(lambda: manifest, manifest.step)  # at most one at a time
                except RunError:  # of another directory, which may be on another disk
                    self._start_write(target, manifest)
                    raise
                self._start_write(target, manifest)
                return
            path = save_checkpoint(
                target.directory, model=self._model, optimizer=self._optimizer, manifest=manifest,
                check=self._settings.read_back == "always", copy=self._copies if self._settings.is_async else to_host,
            )  # fmt: skip
        except RunError as error:
            if must or self._settings.on_save_error == "stop":
                raise
            logger.warning("Training goes on without it: %s", error)
            return
        target.saved, target.seconds = manifest.step, time.perf_counter() - started
        logger.info("Saved %s (%.1f s).", path, target.seconds)
        self._prune(target, manifest)

    def _start_write(self, target: _Target, manifest: Manifest) -> None:
        started = time.perf_counter()
        local, rank = manifest.kind == "local", dist.get_rank()
        temporary = begin(target.directory, checkpoint_name(manifest.model["name"], manifest.step), own=local)
        snapshot = take_snapshot(self._model, self._optimizer, everything=local, copy=list)
        check = self._settings.read_back != "never"
        write = BackgroundWrite(temporary, manifest, snapshot, copies=self._copies, rank=rank, check=check)
        self._writing = write, target
        logger.info(
            "Saving %s in the background (begun in %.2f s).",
            temporary.name.removesuffix(TEMPORARY), time.perf_counter() - started,
        )  # fmt: skip

    def _finish_write(self, manifest: Callable[[], Manifest], step: int) -> None:
        """Wait for the checkpoint that is being written, if there is one, and publish it."""
        if self._writing is None:
            return
        write, target = self._writing
        write.wait()
        try:
            self._publish(write, target)
        except RunError as error:
            self._retry(manifest, step, error)
            return
        self._writing = None

    def _publish(self, write: BackgroundWrite, target: _Target) -> None:
        """Publish what the threads of all ranks have written.

        Raises:
            RunError: one has failed.
        """
        name = write.temporary.name.removesuffix(TEMPORARY)
        said = f"checkpoint {name} could not be written"
        agree(write.failure, said)
        agree(attempt(lambda: publish_snapshot(write.temporary, write.manifest), target.directory, 0), said)
        target.seconds = write.seconds
        logger.info("Saved %s.", write.temporary.with_name(name))
        self._prune(target, write.manifest)

    def _retry(self, manifest: Callable[[], Manifest], step: int, error: RunError | None = None) -> None:
        """Save the present state in the foreground, in place of a checkpoint that could not be written meanwhile."""
        assert self._writing is not None
        write, target = self._writing
        write.wait()
        self._writing = None
        if error is None:
            try:
                agree(write.failure, f"checkpoint {write.temporary.name.removesuffix(TEMPORARY)} could not be written")
            except RunError as said:
                error = said
        remove_temporary(write.temporary, write.manifest.kind == "local")
        logger.warning("%s. Saving step %d now, before training goes on.", error, step)
        self._save(target, manifest(), background=False, must=False)

    def _prune(self, target: _Target, manifest: Manifest) -> None:
        if dist.get_rank() == 0 or manifest.kind == "local":
            name = manifest.model["name"]
            try:
                prune(target.directory, name, keep=target.keep, keep_best=self._settings.keep_best)
            except OSError as error:  # the next one tries again
                logger.warning("Old checkpoints in %s could not be deleted: %s", target.directory, reason(error))
        agree(None, "")  # deleting may take long, and the others are to wait for it here

    def _plan_next(self, target: _Target, step: int, seconds: float) -> None:
        """Choose the next step to save at, so that saving takes its share of the time; rank 0's times count.

        Args:
            seconds: that training stood still for the checkpoint of this step.
        """
        trained = time.perf_counter() - self._started - self._paused - seconds
        per_step = max(trained / max(step - self._first_step, 1), 1e-9)
        share = self._settings.checkpoint_overhead
        # Not before an asynchronous write, if it takes as long as the last one, is done: that would be waited for.
        wanted = max(seconds * (1 - share) / share, target.seconds if self._settings.is_async else 0.0)
        interval = [max(1, math.ceil(wanted / per_step))]
        dist.broadcast_object_list(interval, src=0)
        target.due = step + interval[0]
        logger.info(
            "A checkpoint takes %.2f s and a step %.3f s: the next one is at step %d (--checkpoint_overhead %g).",
            seconds, per_step, target.due, share,
        )  # fmt: skip
