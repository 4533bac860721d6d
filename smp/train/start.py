"""Start of a run: its checkpoint, chosen by all ranks together, with the run's directories locked."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from smp.checkpoint.directory import (
    LATEST,
    TEMPORARY,
    choose_checkpoint,
    refuse_foreign,
    refuse_older_branch,
    set_aside,
    step_of,
)
from smp.checkpoint.fetch import asking, asking_together, locate, refuse_remote
from smp.checkpoint.local import common_start, own_checkpoint, refuse_other_kinds
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.object_store import is_url
from smp.checkpoint.remote import RemoteCheckpoint, manifest_of
from smp.checkpoint.restore import Damaged, Search, is_script, restore
from smp.checkpoint.saver import MEASURED_STEPS
from smp.checkpoint.storage import Storage
from smp.cpu_bf16 import ensure_bf16_works
from smp.environment import malloc
from smp.environment.threads import use_deterministic_kernels
from smp.errors import DamagedCheckpointError, UserError
from smp.faults.agreement import require_same, together
from smp.log import get_logger
from smp.memory.limits import agree_on_memory
from smp.mesh import Mesh
from smp.optim.config import OptimConfig
from smp.optim.groups import groups_as_json
from smp.optim.optimizers import PLAIN, kind_of, kind_text, of_script, saved_kind
from smp.parallel.allocator import AllocatorConfig, use_expandable_segments
from smp.parallel.choices import agree_on_choices
from smp.train.arguments import DEFAULT_MAX_STEPS
from smp.train.checked_job import CheckedJob
from smp.train.dry_run import is_elsewhere
from smp.train.history import last_start
from smp.train.job import batch_of_flags, check_global_batch, choose_settings, refuse_too_large
from smp.train.metrics import last_logged_step
from smp.train.on_resume import check_fits
from smp.train.reference import attach_references, expect_references
from smp.train.state import Start, TrainState

logger = get_logger("train")


def resolve(job: CheckedJob, checkpoint: Path | RemoteCheckpoint | None) -> Start:
    """Return the start from a checkpoint, or from none.

    Raises:
        UserError: it is damaged, of another model or kind, or was not written by a training job.
    """
    run, saved = job.config.run, None
    if checkpoint is not None:
        settings = job.config.checkpoint
        saved = read_saved(checkpoint, job.config.optim, local=settings.is_local, reset=settings.reset_progress)
        check_fits(job, checkpoint, saved)
    size = run.global_batch_size  # a resumed run keeps its own unless told otherwise
    if size is None:
        size = (saved and saved.run.get("global_batch_size")) or batch_of_flags(job.config, job.mesh)
    check_global_batch(size, job.mesh)
    limits = [run.max_steps] if run.max_steps else []
    if run.epochs:
        limits.append(-(-run.epochs * job.train_data.samples_per_epoch // size))
    progress = TrainState(**saved.run["progress"]) if saved else TrainState()
    return Start(checkpoint, saved, progress, size, min(limits, default=DEFAULT_MAX_STEPS))


def check_named(job: CheckedJob) -> None:
    """Refuse what a dry run names to resume from and no start could, by its manifest; what is elsewhere is not read.

    Raises:
        UserError: it is no complete checkpoint, or of another model or kind.
    """
    settings = job.config.checkpoint
    wanted = settings.resume_from_checkpoint
    if wanted in (None, LATEST) or is_url(wanted) or is_elsewhere(job.config):
        return
    if (found := named_checkpoint(job, set(), wanted)) is not None:
        evaluates, local = job.config.data.evaluate_only, settings.is_local
        saved = (
            read_usable(found, local=local)
            if evaluates
            else read_saved(found, job.config.optim, local=local, reset=settings.reset_progress)
        )
        check_fits(job, found, saved)


def search_for(job: CheckedJob, candidate: Callable[[Damaged], Start]) -> Search[Start]:
    """Return the search for a checkpoint of the job's among the candidates."""
    settings, folder = job.config.checkpoint, job.config.checkpoint.checkpoint_cache_dir
    return Search(
        candidate,
        latest=settings.resume_from_checkpoint == LATEST,
        content=settings.verify_checkpoint == "full",
        cache=None if folder is None else Storage(Path(folder).expanduser()),
    )


def agree_on_start(job: CheckedJob, enter: Callable[[str], None], damaged: Damaged) -> Start:
    """Choose a checkpoint, alike on all ranks, or none; collective, with the directories locked.

    Args:
        enter: called with the name of the phase while a checkpoint comes from a URL.
        damaged: those that are not to be resumed from.

    Raises:
        UserError: on every rank; there is none that can be resumed from, or ranks would start from different ones.
    """
    settings = job.config.checkpoint
    latest = settings.resume_from_checkpoint == LATEST
    if settings.is_local and latest:
        together(functools.partial(choose_start, job, set(), LATEST))  # for what it refuses
        chosen: Path | RemoteCheckpoint | None = _common_start(job, damaged)
    else:
        wanted = locate_wanted(job, enter, damaged)
        chosen = together(functools.partial(choose_start, job, damaged, wanted))
        own = _is_own(job, chosen)
        asking_together(lambda: refuse_remote(job.storages, job.model.name, chosen, own=own, latest=latest))
    start = together(functools.partial(resolve, job, chosen))
    require_agreement(job, start)
    return start


def locate_wanted(job: CheckedJob, enter: Callable[[str], None], damaged: Damaged) -> str | RemoteCheckpoint | None:
    """Return what to resume from, the checkpoint itself if it is at a URL, and have ``enter`` called while it comes."""
    wanted = locate(job.storages, job.config.checkpoint.resume_from_checkpoint, job.model.name, damaged=damaged)
    if isinstance(wanted, RemoteCheckpoint):
        wanted.store.advance = lambda _: enter("start")
    return wanted


def named_checkpoint(
    job: CheckedJob, damaged: Damaged, wanted: str | RemoteCheckpoint | None, *, others: str = "--output_dir"
) -> Path | RemoteCheckpoint | None:
    """Return this rank's checkpoint that ``wanted`` names; arguments and errors as of :func:`choose_checkpoint`."""
    if isinstance(wanted, RemoteCheckpoint):
        return wanted
    if job.config.checkpoint.is_local and wanted not in (None, LATEST):
        wanted = str(own_checkpoint(Path(wanted), job.launch.rank, job.launch.world_size))
    return choose_checkpoint(wanted, job.checkpoint_dirs, job.model.name, damaged=damaged, others=others)


def restore_start(
    job: CheckedJob, mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer, start: Start
) -> None:
    """Restore the state of a run from the checkpoint that it starts from, if there is one; collective."""
    if start.checkpoint is None or start.saved is None:
        return
    if start.progress.step:
        together(functools.partial(expect_references, job, start, model))
    run, anew = job.config.run, job.config.checkpoint.reset_progress
    seed = None if anew else f"{run.seed}:{start.progress.step}:{mesh.loss.rank}"
    restore(start.checkpoint, start.saved, model, optimizer, seed=seed)
    together(functools.partial(attach_references, job, start, model))


def _common_start(job: CheckedJob, damaged: Damaged) -> Path | None:
    """Return the newest local checkpoint that every rank has; collective."""
    chosen = together(lambda: common_start(job.checkpoint_dirs, job.model.name, damaged))
    if chosen is None:
        together(lambda: _refuse_logged(job, fresh=True))
        for directory in job.checkpoint_dirs:  # of a run that ended in its first save
            set_aside(directory, job.model.name, after=0)
    return chosen


def _is_own(job: CheckedJob, chosen: Path | RemoteCheckpoint | None) -> bool:
    """Tell whether a checkpoint is of this run: in one of its directories, or at one of its URLs."""
    if isinstance(chosen, RemoteCheckpoint):
        return any(s.mirror is not None and s.mirror.holds(str(chosen)) for s in job.storages)
    return chosen is not None and chosen.parent.resolve() in [folder.resolve() for folder in job.checkpoint_dirs]


def choose_start(
    job: CheckedJob, damaged: Damaged, wanted: str | RemoteCheckpoint | None
) -> Path | RemoteCheckpoint | None:
    """Return the checkpoint to resume from, or None; refuses to overwrite another run or branch.

    Args:
        damaged: checkpoints that are not to be resumed from.
        wanted: a path, ``latest``, a checkpoint below a URL, or None.

    Raises:
        UserError: the run directory holds a run that this start does not continue.
    """
    settings, directories = job.config.checkpoint, job.checkpoint_dirs
    shared = [directory.parent if settings.is_local else directory for directory in directories]
    refuse_other_kinds(shared, job.launch.world_size, local=settings.is_local)
    others = "--output_dir and --checkpoint_dir" if settings.checkpoint_dir else "--output_dir"
    chosen = named_checkpoint(job, damaged, wanted, others=others)
    if chosen is not None and _is_own(job, chosen):
        if settings.reset_progress:
            raise UserError(
                f"--reset_progress 1 begins a run anew, and {chosen} is of the run in {job.run_dir}: choose another "
                f"{others}"
            )
        if settings.resume_from_checkpoint != LATEST:
            refuse_older_branch(Path(chosen.name), directories, others=others)
        return chosen
    refuse_foreign(directories, run_dir=job.run_dir)
    if settings.is_local and wanted == LATEST:
        return chosen  # another rank may have some
    _refuse_logged(job, fresh=chosen is None)
    return chosen


def _refuse_logged(job: CheckedJob, *, fresh: bool) -> None:
    """Refuse to overwrite the metrics of a run that is not continued.

    Args:
        fresh: whether the run starts at step 0.

    Raises:
        UserError: the run directory holds metrics.
    """
    settings = job.config.checkpoint
    metrics = job.run_dir / "metrics.jsonl"
    logged = last_logged_step(metrics)
    last, saved = last_start(job.run_dir)
    # "latest" may overwrite a run that died before its first checkpoint, or in that one's save.
    frequencies = last.get("checkpoint_freq", settings.checkpoint_freq)
    first_due = min(MEASURED_STEPS if every == "auto" else every for every in frequencies)
    cut_short = (path for directory in job.checkpoint_dirs for path in directory.glob(f"*-*steps{TEMPORARY}"))
    interrupted = any((step_of(path.with_suffix("")) or first_due + 1) <= first_due for path in cut_short)
    latest = settings.resume_from_checkpoint == LATEST
    died_early = latest and fresh and not saved and (logged <= first_due or interrupted)
    if logged and not died_early:
        found = shlex.join(last.get("checkpoint_dir") or [str(job.run_dir / "checkpoints")])
        raise UserError(
            f"{metrics} already contains the metrics of a run, up to step {logged}: resume that run with "
            f"--resume_from_checkpoint latest and --checkpoint_dir {found}, where its checkpoints were, or where they "
            f"are now; or choose another --output_dir"
        )


def _is_job(manifest: Manifest) -> bool:
    progress = manifest.run.get("progress")
    numbers = [*progress.values()] if isinstance(progress, dict) else [None]
    known = {field.name for field in dataclasses.fields(TrainState)}
    valid = isinstance(progress, dict) and progress.keys() <= known and all(type(n) is int and n >= 0 for n in numbers)
    has_batch = type(manifest.run.get("global_batch_size")) is int
    return valid and has_batch and isinstance(manifest.run.get("config", {}), dict)


def read_saved(path: Path | RemoteCheckpoint, optim: OptimConfig, *, local: bool, reset: bool) -> Manifest:
    """Return the manifest of the checkpoint to resume from.

    Args:
        optim: the job's optimizer.
        reset: replace its progress by that of a new run.

    Raises:
        UserError: it is damaged, of another optimizer, needs ``reset``, or is of the other kind.
    """
    manifest = read_usable(path, local=local)
    theirs, mine, plain = saved_kind(manifest.run), kind_of(optim), PLAIN
    if is_script(manifest.run):
        theirs, mine = of_script(theirs), of_script(mine)
        plain = {"optimizer": PLAIN["optimizer"], "optimizer_state_dtype": optim.param_dtype}
    if theirs != mine:
        differ = {name: theirs.get(name, plain[name]) for name in plain if theirs.get(name) != mine.get(name)}
        flags = "" if "class" in theirs else f"give {kind_text(differ)}, or "
        raise UserError(
            f"checkpoint {path} was made with the optimizer {kind_text(theirs)} and the job has {kind_text(mine)}: "
            f"{flags}write a model of it with `smp export`, and start from that"
        )
    if is_script(manifest.run) and not reset:
        raise UserError(
            f"checkpoint {path} is a script's, and does not say where in the data the job would continue: "
            f"--reset_progress 1 takes its parameters and the optimizer's state, and begins data, schedule and "
            f"generators anew"
        )
    run = {"progress": dataclasses.asdict(TrainState()), "optimizer": kind_of(optim)}
    return dataclasses.replace(manifest, run=run) if reset else manifest


def read_usable(path: Path | RemoteCheckpoint, *, local: bool) -> Manifest:
    """Return the manifest of a job's or a script's checkpoint.

    Raises:
        UserError: it is damaged, or of the other kind.
    """
    manifest = asking(lambda: manifest_of(path))
    if not (is_script(manifest.run) or _is_job(manifest)) or not isinstance(manifest.model.get("config"), dict):
        raise DamagedCheckpointError(path, ["its manifest does not say how far the run was"])
    # A sharded one at a URL is on no rank's own disk, and fits any layout.
    if (manifest.kind == "local") != (local and isinstance(path, Path)):
        raise UserError(
            f"checkpoint {path} is a {manifest.kind} one: resume with --checkpoint_type {manifest.kind} or "
            f"async_{manifest.kind}"
        )
    return manifest


def prepare_device(job: CheckedJob, *, batch: int) -> None:
    """Make the device ready, and choose the settings that are ``auto`` by the memory that it has; collective.

    Args:
        batch: samples of a step over all ranks.

    Raises:
        UserError: on every rank; a GPU has too little memory.
    """
    if job.config.run.deterministic:
        use_deterministic_kernels()
    if job.device.type == "cpu":
        malloc.keep_freed_memory()
        if job.dtype == torch.bfloat16:
            ensure_bf16_works()
        return
    available = agree_on_memory(job.device, job.launch.local_world_size)
    together(functools.partial(refuse_too_large, job, available))  # what hosts have left may differ
    job.choices.extend(agree_on_choices(job.settings, choose_settings(job, available, batch=batch)))
    if job.settings[AllocatorConfig].expandable_segments:
        use_expandable_segments()


def require_agreement(job: CheckedJob, start: Start) -> None:
    """Check that all ranks are about to run the same job; collective.

    Each reads flags, data and checkpoints by itself; a host with another or a stale file system would cause mismatched
    collectives or wrong numbers.

    Raises:
        UserError: on every rank, naming the first difference.
    """
    mine = {
        "the start (checkpoint, step, sample)": (
            start.checkpoint.name if start.checkpoint else None, start.progress.step, start.progress.samples,
        ),
        "the global batch": start.global_batch_size,
        "the last step": start.max_steps,
        "the training data": job.train_data.fingerprint,
        "the rows of the training data": job.train_data.digest,
        "the validation data": job.validation_data.fingerprint if job.validation_data else None,
        "the rows of the validation data": job.validation_data.digest if job.validation_data else None,
        "the groups of --param_groups": groups_as_json(job.config.optim.param_groups),
        **{f"--{name}": value for name, value in job.config.flat().items()},
    }  # fmt: skip
    require_same(mine, "give all hosts the same flags and the same view of --output_dir and the data")
