"""Checkpoints of a user's own script: the same files, checks and guarantees as the training job's.

``save`` and ``load`` are called by all ranks together. Parameters, buffers, the optimizer's state and settings, and the
generators go into the checkpoint; what else the script needs to go on is its ``extra``, as JSON.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint.background import BackgroundWrite, HostCopies
from smp.checkpoint.checkpointer import (
    agree,
    attempt,
    begin,
    check_architecture,
    check_tensors,
    fill,
    model_entry,
    publish_snapshot,
    remove_temporary,
    restore_generators,
    snapshot_of,
    to_host,
    verify_together,
    write_snapshot,
)
from smp.checkpoint.files import Piece, reason
from smp.checkpoint.layout import LATEST, checkpoint_name, choose_checkpoint, set_aside
from smp.checkpoint.manifest import Manifest, now, read_manifest, versions
from smp.checkpoint.owner import bring_back, own
from smp.checkpoint.retention import prune
from smp.checkpoint.script_state import (
    alike,
    allocate,
    buffers_of,
    changed_by,
    check_optimizer,
    extra_states,
    plain,
    require_known,
    restore_extra_states,
    restore_optimizer,
    settings_of,
    state_tensors,
)
from smp.checkpoint.tagged_json import decode, encode
from smp.errors import DamagedCheckpointError, UserError
from smp.faults.agreement import require_same, together
from smp.log import get_logger

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

logger = get_logger(__name__)


class Saved(NamedTuple):
    """What :meth:`Checkpoints.load` found: its path, the step, and the script's own ``extra``."""

    path: Path
    step: int
    extra: Any


class Checkpoints:
    """Saves and loads the state of a script; every method is called by all ranks.

    A checkpoint is published whole or not at all, every byte of it is verified before it is used, and it can be loaded
    at any other number of ranks, sharding or tensor-parallel degree.

    Args:
        directory: on a file system that all hosts share; made if it is not there. One process at a time saves into
            it: the first save takes its lock until the process ends, and deletes what interrupted saves of this name
            have left. Loading needs no lock.
        model: of :func:`smp.parallelize`, :class:`smp.FullyShardedDataParallel`, torch's ``fully_shard`` or DDP, or a
            plain module that is the same on all ranks.
        optimizer: any whose state is tensors of its parameters' shapes, and scalars; over the model's parameters.
        name: checkpoints are called ``<name>-<step>steps``.
        keep: how many of the newest stay; at least 1.
        verify: read every file back before it is published.

    Raises:
        UserError: torch's FSDP1 or DeepSpeed shards the model in a way of its own; a tensor, a name or a number is not
            allowed.
    """

    def __init__(
        self,
        directory: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        name: str = "model",
        keep: int = 2,
        verify: bool = False,
    ):
        if not _NAME.fullmatch(name):
            raise UserError(f"Checkpoints: name {name!r} is not allowed: use letters, digits, dots, - and _")
        if keep < 1:
            raise UserError(f"Checkpoints: keep {keep} would delete what was just saved: give at least 1")
        if not dist.is_initialized():
            raise UserError("Checkpoints needs a process group: call smp.init_process_group() before it")
        self._directory, self._name, self._keep, self._verify = Path(directory), name, keep, verify
        require_known(optimizer)
        self._model, self._optimizer = plain(model), optimizer
        self._copies = HostCopies()
        self._writing: BackgroundWrite | None = None
        self._at: int | None = None  # the step last loaded or saved
        together(self._prepare)
        # The update waits for the copy of what it is about to change.
        optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())

    def _prepare(self) -> None:
        state_tensors(self._model, self._optimizer)  # refused now, and not at the first save
        if dist.get_rank() == 0:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"Checkpoints: {self._directory} cannot be made ({error.strerror}): choose another directory"
                ) from None

    def _wait_for_copy(self) -> None:
        if self._writing is not None:
            self._writing.wait_for_copy()

    def save(self, step: int, extra: Any = None, *, wait: bool = True) -> Path:
        """Save the state after ``step`` updates; collective.

        Checkpoints of later steps than the one that this script goes on from are of another branch: they are renamed
        (``.aside1``), with a line in the log, and no longer found.

        Args:
            step: updates done; in the checkpoint's name.
            extra: what else the script needs to go on: a scheduler's ``state_dict()``, a position in the data. None,
                bools, numbers, texts, and lists, tuples, dicts and counters of them; rank 0's is saved.
            wait: False writes while training goes on; the checkpoint is published by the next ``save`` or by
                :meth:`finish`.

        Returns:
            Where it is, or will be.

        Raises:
            UserError: something else is in ``extra``, the optimizer's state cannot be described, the ranks disagree
                on the step, the directory or what there is to save, another process saves into the directory, or
                another Checkpoints of this one has just saved the same step under the same name.
            RunError: a rank could not write; nothing is published.
        """
        self.finish()
        manifest = together(lambda: self._manifest(step, extra))
        tensors = together(lambda: state_tensors(self._model, self._optimizer))
        self._require_agreement(step, tensors)
        together(lambda: own(self._directory, self._name, self, step) if dist.get_rank() == 0 else None)
        temporary = begin(self._directory, checkpoint_name(self._name, step), own=False)
        final = temporary.with_name(checkpoint_name(self._name, step))
        rank = dist.get_rank()
        copy = to_host if wait else self._copy_what_waits_for_nobody
        first = {f"model.{name}" for name, _ in buffers_of(self._model)}
        snapshot = snapshot_of(tensors, everything=False, copy=copy, of_rank0=first)
        if not wait:
            self._writing = BackgroundWrite(
                temporary, manifest, snapshot, copies=self._copies, rank=rank, check=self._verify
            )
            return final
        failure = attempt(
            lambda: write_snapshot(temporary, snapshot, rank=rank, check=self._verify), self._directory, snapshot.nbytes
        )
        self._publish(temporary, manifest, failure)
        return final

    def _copy_what_waits_for_nobody(self, pieces: list[Piece]) -> list[Piece]:
        """Only this optimizer's step waits for a copy; a forward may change buffers, another optimizer the rest."""
        later = changed_by(self._optimizer, self._model)
        return [p if p.name in later else p._replace(tensor=p.tensor.detach().cpu().clone()) for p in pieces]

    def _require_agreement(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Refuse ranks that are about to save different things; collective."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        digest = hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()
        mine = {"the step": step, "the directory": str(self._directory.absolute()), "the tensors": digest[:12]}
        require_same(mine, "call it with the same on every rank", before="Checkpoints.save: ")

    def finish(self) -> None:
        """Publish the checkpoint that is being written, if there is one; collective. Call it before the script ends.

        Raises:
            RunError: a rank could not write it; nothing is published.
        """
        if self._writing is not None:
            write, self._writing = self._writing, None
            write.wait()
            self._publish(write.temporary, write.manifest, write.failure)

    def _publish(self, temporary: Path, manifest: Manifest, failure: BaseException | None) -> None:
        said = f"checkpoint {self._directory / checkpoint_name(self._name, manifest.step)} could not be written"
        try:
            agree(failure, said)
            agree(attempt(lambda: self._put(temporary, manifest), self._directory, 0), said)
        except Exception:
            remove_temporary(temporary, own=False)
            raise
        self._at = manifest.step
        if dist.get_rank() == 0:
            failure = attempt(lambda: prune(self._directory, self._name, keep=self._keep), self._directory, 0)
            if failure is not None:  # the next save tries again
                logger.warning("Old checkpoints in %s could not be deleted: %s", self._directory, reason(failure))
        agree(None, "")  # deleting may take long, and the others are to wait for it here

    def _put(self, temporary: Path, manifest: Manifest) -> None:
        if dist.get_rank() == 0:
            # Found before this one, they would be loaded instead of it, and kept while it is deleted.
            after = manifest.step if self._at is None else min(self._at, manifest.step)
            set_aside(self._directory, self._name, after=after)
        publish_snapshot(temporary, manifest)

    def load(self, path: str | Path = LATEST) -> Saved | None:
        """Fill model, optimizer and generators; collective.

        With ``latest``, a damaged checkpoint is passed over, with a line in the log, for the newest one before it.
        The generators are restored at the saved number of ranks and tensor-parallel degree; at another they are seeded
        by the step and the rank, alike in a tensor-parallel group.

        Args:
            path: of a checkpoint, or ``latest``.

        Returns:
            What was found; None if the directory has no checkpoint of this name.

        Raises:
            DamagedCheckpointError: the path that was given is damaged.
            UserError: it is of another model or optimizer, or there are checkpoints and none is whole.
        """
        self.finish()
        chosen, manifest = self._choose(str(path))
        if chosen is None or manifest is None:
            return None
        config = getattr(self._model, "config", None)
        if hasattr(config, "to_json_string"):
            together(lambda: check_architecture(chosen, manifest.model["config"], config))
        together(lambda: check_optimizer(self._model, self._optimizer, manifest))
        state = together(lambda: allocate(self._model, self._optimizer, manifest))
        tensors = together(lambda: state_tensors(self._model, self._optimizer, state))
        together(lambda: check_tensors(chosen, manifest, tensors))
        together(lambda: fill(chosen, manifest, tensors))
        restore_optimizer(self._model, self._optimizer, state, manifest.run["optimizer"])
        restore_extra_states(self._model, manifest.run.get("extra_states", {}))
        together(lambda: self._restore_generators(chosen, manifest))
        self._at = manifest.step
        return Saved(chosen, manifest.step, decode(manifest.run["extra"]))

    def _restore_generators(self, chosen: Path, manifest: Manifest) -> None:
        group = alike(self._model)
        same_layout = (manifest.world_size, manifest.degrees.get("tp", 1)) == (dist.get_world_size(), len(group))
        restore_generators(chosen, manifest, same_layout=same_layout, otherwise=f"{manifest.step}:{group[0]}")

    def _choose(self, wanted: str) -> tuple[Path | None, Manifest | None]:
        """The checkpoint that all ranks have found whole; collective."""
        damaged: list[Path] = []
        if dist.get_rank() == 0:
            bring_back(self._directory, self._name)
        while True:
            # Rank 0 chooses for all: another rank's view of the directory may be older.
            chosen = _from_rank0(lambda: choose_checkpoint(wanted, [self._directory], self._name, damaged=damaged))
            if chosen is None:
                return None, None
            manifest = together(functools.partial(_read, chosen))
            problems = verify_together(chosen, manifest, content=True)
            if not problems:
                return chosen, manifest
            if wanted != LATEST:
                raise DamagedCheckpointError(chosen, problems)
            if dist.get_rank() == 0:
                logger.warning("Passed over: %s", DamagedCheckpointError(chosen, problems))
            damaged.append(chosen)

    def _manifest(self, step: int, extra: Any) -> Manifest:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UserError(f"Checkpoints.save: step {step!r} is not allowed: give the number of updates done")
        try:
            extra = encode(extra, "extra")
        except ValueError as error:
            raise UserError(
                f"Checkpoints.save: extra cannot be saved ({error}): give None, numbers, texts, and lists, tuples and "
                f"dicts of them; tensors belong to the model as buffers"
            ) from None
        config = getattr(self._model, "config", None)
        entry = (
            model_entry(self._name, config) if hasattr(config, "to_json_string") else {"name": self._name, "config": {}}
        )
        return Manifest(
            kind="sharded", step=step, world_size=dist.get_world_size(), degrees={"tp": len(alike(self._model))},
            model=entry,
            run={"script": True, "extra": extra, "optimizer": settings_of(self._model, self._optimizer),
                 "extra_states": extra_states(self._model)},
            saved_at=now(), versions=versions(),
        )  # fmt: skip


def _read(path: Path) -> Manifest:
    manifest = read_manifest(path)
    if not _is_script(manifest.run):
        raise UserError(
            f"checkpoint {path} was not written by Checkpoints.save: the training job's are resumed by the job itself, "
            f"and `smp export` makes a model of them"
        )
    return manifest


def _from_rank0(choose: Callable[[], Path | None]) -> Path | None:
    """What rank 0 chooses, on all ranks; collective.

    Raises:
        UserError: what ``choose`` raises, or the directory cannot be read.
    """

    def look() -> Path | None:
        try:
            return choose() if dist.get_rank() == 0 else None
        except OSError as error:
            raise UserError(f"checkpoints cannot be looked for ({reason(error)}): mend that and start again") from None

    chosen: list[Path | None] = [together(look)]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def _is_script(run: dict[str, Any]) -> bool:
    """Whether this is what :meth:`Checkpoints.save` writes."""
    optimizer = run.get("optimizer")
    if run.get("script") is not True or "extra" not in run or not isinstance(optimizer, dict):
        return False
    groups, scalars = optimizer.get("groups"), optimizer.get("scalars")
    if not isinstance(groups, list) or not isinstance(scalars, dict):
        return False
    kinds = (("names", list), ("values", dict))
    whole = [isinstance(g, dict) and all(isinstance(g.get(key), kind) for key, kind in kinds) for g in groups]
    return all(whole) and all(isinstance(values, dict) for values in scalars.values())
