"""Directories and URLs that a run writes to."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from smp.checkpoint.directory import nearest_existing
from smp.checkpoint.local import local_directory
from smp.checkpoint.model_store import refuse_foreign_objects
from smp.checkpoint.object_store import is_url
from smp.checkpoint.outputs import (
    inputs_of,
    local_path,
    refuse_foreign_files,
    refuse_inputs,
    refuse_mixing,
    refuse_replacing,
)
from smp.checkpoint.storage import Storage, storage_at
from smp.environment import Launch
from smp.errors import ConfigError, Problems, UserError
from smp.plan.document import START
from smp.plan.ledger import ERROR, PLAN
from smp.train.arguments import TrainConfig
from smp.train.dry_run import is_elsewhere

# Files that a run replaces in its directory, by names that others use, too, and how smp's begin.
_WRITTEN = {
    "config.yaml": b"# model FLOPs: ", "metrics.jsonl": b'"step"', "history.jsonl": b'"event"',
    "curves.png": b"Matplotlib", PLAN: START, ERROR: START,
}  # fmt: skip


def storages_of(config: TrainConfig, launch: Launch, run_dir: Path, model_name: str) -> list[Storage]:
    """Return where checkpoints go; those for URLs are written to ``checkpoints``, ``checkpoints-2``... of the run.

    Raises:
        UserError: the package for a URL is not installed, or two would be written to one directory.
    """
    locations = config.checkpoint.checkpoint_dir or (str(run_dir / "checkpoints"),)
    if config.checkpoint.is_local:
        folders = [local_directory(Path(location).absolute(), launch.rank, launch.world_size) for location in locations]
        return [Storage(folder, shared=False) for folder in folders]
    urls = [location for location in locations if is_url(location)]
    folders = [run_dir / "checkpoints", *(run_dir / f"checkpoints-{number}" for number in range(2, len(urls) + 1))]
    staging = dict(zip(urls, folders, strict=False))
    absolute = [location if is_url(location) else Path(location).absolute() for location in locations]
    storages = [storage_at(location, model_name, staging.get(str(location), run_dir)) for location in absolute]
    for storage in storages:
        if [other.directory.resolve() for other in storages].count(storage.directory.resolve()) > 1:
            raise UserError(
                f"--checkpoint_dir {storage.directory} is where checkpoints for {urls[0]} are written before they are "
                f"uploaded: choose another directory, or leave it out"
            )
    return storages


def check_output(config: TrainConfig, run_dir: Path) -> None:
    """Raise a ConfigError with every directory that cannot be written."""
    if is_url(config.run.output_dir or ""):
        raise UserError(
            f"--output_dir {config.run.output_dir} is a URL, and metrics and logs are written to a directory: give a "
            f"local one, and the URL as --checkpoint_dir or --model_dir"
        )
    if config.data.evaluate_only or is_elsewhere(config):  # no file is written, or by other machines
        return
    model_dir = config.checkpoint.model_dir
    final = [model_dir] if model_dir and not is_url(model_dir) else []
    inputs = inputs_of(config.flat())
    locations = [("output_dir", run_dir)]
    folders = [location for location in config.checkpoint.checkpoint_dir if not is_url(location)]
    locations += [("checkpoint_dir", Path(folder).absolute()) for folder in folders]
    locations += [("tensorboard_dir", Path(folder).absolute()) for folder in config.logging.tensorboard_dir]
    locations += [("model_dir", Path(folder).resolve().parent) for folder in final]
    problems = Problems()
    for flag, directory in locations:
        problems.attempt(_probe_directory, flag, directory)
        if flag in ("output_dir", "checkpoint_dir"):
            problems.attempt(refuse_mixing, flag, directory, inputs)
    for name, mark in _WRITTEN.items():
        problems.attempt(refuse_replacing, run_dir / name, "--output_dir", mark)
    if config.checkpoint.save_final_model:
        caches = {
            "data_cache_dir": config.data.data_cache_dir,
            "checkpoint_cache_dir": config.checkpoint.checkpoint_cache_dir,
            "offload_dir": config.activation.offload_dir,
        }
        written = [(flag, directory) for flag, directory in locations if flag != "model_dir"]
        written += [(flag, Path(text).expanduser().absolute()) for flag, text in caches.items() if text]
        problems.attempt(_check_final, Path(*final).absolute() if final else run_dir / "final", inputs, written)
        if model_dir and not final:
            problems.attempt(_check_final_url, model_dir, inputs)
    if problems:
        raise ConfigError(problems)


def _check_final(directory: Path, inputs: Mapping[str, Path], written: list[tuple[str, Path]]) -> None:
    for flag, other in written:
        if directory.resolve() in (other.resolve(), *other.resolve().parents):
            raise UserError(
                f"the final model would replace {directory}, where --{flag} {other} writes other files: give another "
                f"--model_dir, such as {directory / 'final'}"
            )
    refuse_inputs(directory, inputs)
    refuse_foreign_files(directory)


def _check_final_url(url: str, inputs: Mapping[str, Path]) -> None:
    if (directory := local_path(url)) is not None:
        refuse_inputs(directory, inputs)
    refuse_foreign_objects(url)


def _probe_directory(flag: str, directory: Path) -> None:
    """Create an unnamed file in the directory, or in the nearest one above it that exists."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.stat(directory)  # a name that is too long, or a link to itself, never exists
        tempfile.TemporaryFile(dir=nearest_existing(directory)).close()
    except OSError as error:
        raise UserError(
            f"--{flag} {directory} cannot be written ({error.strerror}): choose another directory"
        ) from None
