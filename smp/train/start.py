"""Where a run writes and where it starts from: checked before anything is written over."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from smp.checkpoint.hf_export import refuse_foreign_files
from smp.checkpoint.layout import (
    LATEST,
    TEMPORARY,
    choose_checkpoint,
    nearest_existing,
    refuse_foreign,
    refuse_older_branch,
)
from smp.checkpoint.local import own_checkpoint
from smp.checkpoint.manifest import Manifest, read_manifest
from smp.checkpoint.restore import is_script
from smp.checkpoint.saver import MEASURED_STEPS
from smp.errors import ConfigError, DamagedCheckpointError, UserError
from smp.runtime import Launch
from smp.train.arguments import TrainConfig
from smp.train.metrics import last_logged_step
from smp.train_state import TrainState


def check_output(config: TrainConfig, run_dir: Path) -> None:
    """Refuse directories that cannot be written.

    Raises:
        ConfigError: with every problem found.
    """
    final = [config.checkpoint.model_dir] if config.checkpoint.save_final_model and config.checkpoint.model_dir else []
    places = [("output_dir", run_dir)]
    places += [("checkpoint_dir", Path(folder).absolute()) for folder in config.checkpoint.checkpoint_dir]
    places += [("tensorboard_dir", Path(folder).absolute()) for folder in config.logging.tensorboard_dir]
    places += [("model_dir", Path(folder).resolve().parent) for folder in final]
    problems = []
    for flag, directory in places:
        try:
            _probe_directory(flag, directory)
        except UserError as error:
            problems.append(str(error))
    if config.checkpoint.save_final_model:
        try:
            refuse_foreign_files(Path(config.checkpoint.model_dir or run_dir / "final").absolute())
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)


def _probe_directory(flag: str, directory: Path) -> None:
    """Make a nameless file, where there is no such directory yet in the one that it would be made in."""
    try:
        tempfile.TemporaryFile(dir=nearest_existing(directory)).close()
    except OSError as error:
        raise UserError(
            f"--{flag} {directory} cannot be written ({error.strerror}): choose another directory"
        ) from None


def choose_start(
    config: TrainConfig,
    launch: Launch,
    run_dir: Path,
    checkpoint_dirs: list[Path],
    model_name: str,
    damaged: list[Path],
) -> Path | None:
    """The checkpoint to resume from, or None; refuses whatever would write over another run or another branch of it.

    Raises:
        UserError: the run directory holds something that the wanted start does not continue.
    """
    wanted = config.checkpoint.resume_from_checkpoint
    if config.checkpoint.is_local and wanted not in (None, LATEST):
        wanted = str(own_checkpoint(Path(wanted), launch.rank, launch.world_size))
    chosen = choose_checkpoint(wanted, checkpoint_dirs, model_name, damaged=damaged)
    if chosen is not None and chosen.parent.resolve() in [directory.resolve() for directory in checkpoint_dirs]:
        if config.checkpoint.reset_progress:
            raise UserError(
                f"--reset_progress 1 begins a run anew, and {chosen} is of the run in {run_dir}: choose another "
                f"--output_dir"
            )
        if wanted != LATEST:
            refuse_older_branch(chosen, checkpoint_dirs)
        return chosen
    refuse_foreign(checkpoint_dirs)
    if config.checkpoint.is_local and wanted == LATEST:
        return chosen  # another rank may have some: see settle_start
    refuse_logged(config, run_dir, checkpoint_dirs, fresh=chosen is None)
    return chosen


def refuse_logged(config: TrainConfig, run_dir: Path, checkpoint_dirs: list[Path], *, fresh: bool) -> None:
    """Refuse to write over the metrics of a run that is not continued.

    Args:
        fresh: whether the run starts at step 0.

    Raises:
        UserError: the run directory holds metrics.
    """
    metrics = run_dir / "metrics.jsonl"
    logged = last_logged_step(metrics)
    # "latest" may start over what a run left that died before its first checkpoint.
    first_due = min(MEASURED_STEPS if every == "auto" else every for every in config.checkpoint.checkpoint_freq)
    interrupted = any(path for directory in checkpoint_dirs for path in directory.glob(f"*-*steps*{TEMPORARY}"))
    latest = config.checkpoint.resume_from_checkpoint == LATEST
    died_early = latest and fresh and (logged <= first_due or interrupted)
    if logged and not died_early:
        raise UserError(
            f"{metrics} already holds the metrics of a run, up to step {logged}: resume that run from its own "
            f"checkpoints with --resume_from_checkpoint, or choose another --output_dir"
        )


def _is_job(manifest: Manifest) -> bool:
    progress = manifest.run.get("progress")
    numbers = [*progress.values()] if isinstance(progress, dict) else [None]
    known = {field.name for field in dataclasses.fields(TrainState)}
    whole = isinstance(progress, dict) and progress.keys() <= known and all(type(n) is int and n >= 0 for n in numbers)
    has_batch = type(manifest.run.get("global_batch_size")) is int
    return whole and has_batch and isinstance(manifest.run.get("config", {}), dict)


def _check_script(path: Path, manifest: Manifest, *, reset: bool) -> None:
    """Refuse a script's checkpoint of which the job can take nothing, or is not told to.

    Raises:
        UserError: saying what can be done.
    """
    optimizer = manifest.run["optimizer"].get("class")
    if optimizer != "AdamW":
        raise UserError(
            f"checkpoint {path} was made with the optimizer {optimizer} and the job has AdamW: write a model of it "
            f"with `smp export`, and start from that"
        )
    if not reset:
        raise UserError(
            f"checkpoint {path} is a script's, and does not say where in the data the job would go on: "
            f"--reset_progress 1 takes its parameters and AdamW's state, and begins data, schedule and generators anew"
        )


def read_saved(path: Path, local: bool, reset: bool) -> Manifest:
    """The manifest of the checkpoint to resume from.

    Args:
        reset: begin anew: the manifest is returned as that of a run that has done nothing yet.

    Raises:
        UserError: it is damaged, needs ``reset``, or is of the other kind.
    """
    manifest = read_manifest(path)
    if not (is_script(manifest.run) or _is_job(manifest)) or not isinstance(manifest.model.get("config"), dict):
        raise DamagedCheckpointError(path, ["its manifest does not say how far the run was"])
    if is_script(manifest.run):
        _check_script(path, manifest, reset=reset)
    if (manifest.kind == "local") != local:
        raise UserError(
            f"checkpoint {path} is a {manifest.kind} one: resume with --checkpoint_type {manifest.kind} or "
            f"async_{manifest.kind}"
        )
    return dataclasses.replace(manifest, run={"progress": TrainState().state_dict()}) if reset else manifest
