"""Checkpoint policy of a training job: when to save, in the background or not, and what to do if a save fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint.background import HostCopies
from smp.checkpoint.base import is_other_base, refuse_other_base, warn_unless_compared
from smp.checkpoint.checkpointer import Checkpointer
from smp.checkpoint.config import CheckpointConfig
from smp.checkpoint.directory import TEMPORARY, clean, find_checkpoints, quick_problem
from smp.checkpoint.disk_forecast import forecast, state_bytes
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.mirror import Mirror
from smp.checkpoint.storage import Storage
from smp.errors import RunError, UserError
from smp.log import get_logger
from smp.units import readable

logger = get_logger("train")

# Steps whose times --checkpoint_freq auto takes before the first checkpoint.
MEASURED_STEPS = 12


@dataclasses.dataclass
class _Target:
    """A directory and its rule: ``every`` so many steps; None where that is measured, and ``due`` is the next."""

    checkpointer: Checkpointer
    every: int | None
    due: int
    seconds: float = 0.0  # to write the last one


class Saver:
    """Saves at step boundaries. All ranks call its methods together.

    Args:
        storages: one for each of ``settings.checkpoint_freq``; of this rank alone for local checkpoints.
        first_step: updates done when the run starts.
        max_steps: the step at which it ends.
        begins_from: the checkpoint that the run starts from; none here is newer than one at a URL.
        record: called with the memory tracker's name of a phase.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        storages: Sequence[Storage],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        model_name: str,
        first_step: int,
        max_steps: int,
        begins_from: str = "",
        record: Callable[[str], None] = lambda tag: None,
    ):
        self._settings, self._model, self._optimizer = settings, model, optimizer
        self._model_name, self._record = model_name, record
        self._max_steps, self._first_step, self._begins_from = max_steps, first_step, begins_from
        copies, self._targets = HostCopies(), []
        rules = zip(storages, settings.checkpoint_freq, settings.num_kept_checkpoints, strict=True)
        for storage, every, keep in rules:
            checkpointer = Checkpointer(
                storage, model, optimizer, name=model_name, keep=keep, keep_best=settings.keep_best, copies=copies
            )
            checkpointer.step = first_step
            self._targets.append(
                _Target(checkpointer, None if every == "auto" else every, due=first_step + MEASURED_STEPS)
            )
        self._writing: _Target | None = None  # in the background; at most one at a time
        self._started, self._paused = time.perf_counter(), 0.0

    def prepare(self) -> None:
        """Check that there is space for a checkpoint, after deleting what interrupted saves have left.

        For asynchronous ones from a GPU, page-lock the host memory that they are copied to, which takes seconds.

        Raises:
            UserError: there is no space, or a directory cannot be written; on ranks that write to it. Or the host
                memory cannot be locked.
        """
        for storage in (target.checkpointer.storage for target in self._targets):
            if storage.leads:
                clean(storage.directory, self._model_name)
                nbytes = state_bytes(self._model, self._optimizer, own=not storage.shared)
                logger.info("A checkpoint in %s: %s.", storage.directory, forecast(storage.directory, nbytes))
        if self._settings.is_async and next(self._model.parameters()).is_cuda:
            nbytes = self._targets[0].checkpointer.reserve()
            logger.info("Page-locked host memory for asynchronous checkpoints: %s.", readable(nbytes))

    @property
    def _mirrors(self) -> list[Mirror]:
        return [t.checkpointer.storage.mirror for t in self._targets if t.checkpointer.storage.mirror is not None]

    def open_mirrors(self) -> None:
        """Become the only writer of each URL, and upload the newest local checkpoint unless it is uploaded; collective.

        Raises:
            UserError: a URL cannot be written.
        """
        for checkpointer in (target.checkpointer for target in self._targets):
            storage = checkpointer.storage
            if storage.mirror is None:
                continue
            try:
                storage.mirror.open()
            except RunError as error:
                raise UserError(f"{error}; mend that, or choose another --checkpoint_dir") from None
            look = storage.leads and not storage.mirror.holds(self._begins_from)
            found = find_checkpoints(storage.directory, self._model_name) if look else []
            complete = [c.path for c in found if c.step <= self._first_step and quick_problem(c.path) is None]
            newest = [complete[-1] if complete else None]
            dist.broadcast_object_list(newest)
            if newest[0] is not None:
                storage.mirror.offer(newest[0], checkpointer.rule(self._first_step))

    def start_clock(self) -> None:
        """Count the time of training from now on: what came before was no step."""
        self._started = time.perf_counter()

    def flags(self) -> dict[str, bool]:
        """Return the state of what is done in this rank's background, to be counted over all ranks."""
        write = self._writing.checkpointer.writing if self._writing else None
        return {
            "save_ended": write is not None and write.ended,
            "save_failed": write is not None and write.failure is not None,
            "upload_ended": any(mirror.waited_for for mirror in self._mirrors),
            "other_base": is_other_base(self._model),
        }

    def require_base(self, counts: dict[str, int]) -> None:
        """Raise a UserError where a rank has found other frozen weights than the checkpoint's; by the counts."""
        if counts["other_base"]:
            refuse_other_base(self._model)

    def due(self, step: int) -> bool:
        """Return whether a checkpoint follows ``step``, the number of updates done."""
        return bool(self._due(step, stop=False))

    def _due(self, step: int, *, stop: bool) -> list[_Target]:
        last = stop or step == self._max_steps
        return [t for t in self._targets if last or (step >= t.due if t.every is None else step % t.every == 0)]

    def ended(self, counts: dict[str, int]) -> bool:
        """Return whether a write has failed on a rank or ended on all, by the counts of :meth:`flags`."""
        return counts["save_failed"] > 0 or counts["save_ended"] == dist.get_world_size()

    def after_step(self, counts: dict[str, int], manifest: Callable[[], Manifest], *, step: int, stop: bool) -> None:
        """Finish what has been written, and save what is due.

        Args:
            counts: over all ranks, of :meth:`flags`; those of an earlier step if no save is due.
            manifest: gives all but kind, files and tensors.
            step: updates done.
            stop: the run is about to end, whatever ``step`` is.

        Raises:
            RunError: a checkpoint could not be written and the run is not to continue without.
        """
        last, due = stop or step == self._max_steps, self._due(step, stop=stop)
        if counts["upload_ended"] == dist.get_world_size():
            for mirror in self._mirrors:
                mirror.advance()
        started, failure = time.perf_counter(), None
        trained = started - self._started - self._paused
        try:
            if due or self.ended(counts):
                self._finish_write(manifest, step)
        except RunError as error:
            failure = error
        for target in due:
            begun = time.perf_counter()
            try:
                if target.checkpointer.step != step:  # else in place of one that failed, just now
                    self._record("Before ckpt (StateDictType.SHARDED_STATE_DICT)")
                    self._save(target, manifest(), background=self._settings.is_async and not last, must=last)
                    self._record("After ckpt (StateDictType.SHARDED_STATE_DICT)")
            except RunError as error:  # the other directories may be on another disk
                failure = failure or error
            if target.every is None and not last:
                self._plan_next(target, step, seconds=time.perf_counter() - begun, trained=trained)
        self._paused += time.perf_counter() - started
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def finishing(self, enter: Callable[[str], None] = lambda phase: None) -> Iterator[None]:
        """Publish the checkpoint that is being written, if all ranks end together in what is done inside; upload it.

        Args:
            enter: called with the name of the phase in which it is waited for, again when an upload gets on.

        Raises:
            RunError: the newest checkpoint could not be uploaded.
        """
        progress = functools.partial(enter, "checkpoint")
        try:
            yield
        except RunError:
            progress()
            with contextlib.suppress(RunError):  # the first one is the cause of the end
                if self._writing is not None:
                    self._published(self._writing)
            for mirror in self._mirrors:
                with contextlib.suppress(RunError):
                    mirror.finish(progress)
            raise
        warn_unless_compared(self._model)
        failures = []
        for checkpointer in (t.checkpointer for t in self._targets if t.checkpointer.storage.mirror is not None):
            try:
                checkpointer.finish(progress)
            except RunError as error:  # the other ones may be on another store
                failures.append(error)
        for failure in failures:
            raise failure

    def _save(self, target: _Target, manifest: Manifest, *, background: bool, must: bool) -> None:
        failure, settings = None, self._settings
        if background:
            try:
                self._finish_write(lambda: manifest, manifest.step)
            except RunError as error:  # of another directory, which may be on another disk
                failure = error
        started = time.perf_counter()
        verify = settings.read_back == "always" or (background and settings.read_back == "async")
        try:
            path = target.checkpointer.write(manifest, wait=not background, verify=verify)
        except RunError as error:
            if must or settings.on_save_error == "stop":
                raise
            logger.warning("Training continues without it: %s", error)
            return
        seconds = time.perf_counter() - started
        if background:
            self._writing = target
            logger.info("Saving %s in the background (begun in %.2f s).", path.name, seconds)
        else:
            target.seconds = seconds
            logger.info("Saved %s (%.1f s).", path, seconds)
        if failure is not None:
            raise failure

    def _published(self, target: _Target) -> None:
        """Wait for what is being written in the background, and publish it."""
        assert target.checkpointer.writing is not None
        temporary, self._writing = target.checkpointer.writing.temporary, None
        target.seconds = target.checkpointer.publish()
        logger.info("Saved %s.", temporary.with_name(temporary.name.removesuffix(TEMPORARY)))

    def _finish_write(self, manifest: Callable[[], Manifest], step: int) -> None:
        """Publish what is being written; what could not be written is saved anew, as the state is now."""
        if self._writing is None:
            return
        target = self._writing
        try:
            self._published(target)
        except RunError as error:
            logger.warning("%s. Saving step %d now, before training continues.", error, step)
            self._save(target, manifest(), background=False, must=False)

    def _plan_next(self, target: _Target, step: int, *, seconds: float, trained: float) -> None:
        """Choose the next step to save at, so that saving takes its share of the time; rank 0's times count.

        Args:
            seconds: that training stood still for the checkpoint of this step.
            trained: seconds of training since the run began.
        """
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
