"""What a user is likely to want next, as commands that fit how the job was started."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from smp.environment import Launch
from smp.models.weight_files import ADAPTER_CONFIG

DEMO = ["--config", "configs/demo.yaml"]  # what `make train` begins with


def next_commands(
    launch: Launch,
    *,
    run_dir: Path,
    curves: Path | None,
    tensorboard: Sequence[Path],
    final: Path | None,
    checkpoint: Path | None,
    max_steps: int,
    resumes: bool,
    is_chat: bool = False,
    has_adapters: bool = False,
) -> Iterator[str]:
    """Yield the lines: where the curves are, how to train on, how to export, how to finetune; only what exists.

    Args:
        final: the exported model.
        checkpoint: a sharded one.
        resumes: whether the same settings resume this run anyway.
        is_chat: whether conversations were read.
        has_adapters: whether adapters were trained.
    """
    given = sys.argv[1:]
    activated = shutil.which("python") == sys.executable
    locations = [shown(curves)] if curves else []
    if tensorboard:
        program = "tensorboard" if activated else shown(Path(sys.executable).with_name("tensorboard"))
        locations.append(shlex.join([program, "--logdir", shown(tensorboard[0])]))
    if locations:
        yield f"curves:    {', or '.join(locations)}"
    more = ["--max_steps", str(max_steps), *([] if resumes else ["--resume_from_checkpoint", "latest"])]
    if given[: len(DEMO)] == DEMO:
        processes = "" if launch.world_size == 2 else f" NPROC={launch.world_size}"
        further = shlex.join([*without(given[len(DEMO) :], "--max_steps"), *more])
        yield f'train on:  make train{processes} ARGS="{further}"'
    else:
        yield f"train on:  the same command with {shlex.join(more)}"
    python = "python" if activated else _word(Path(sys.executable))
    if checkpoint is not None and final is None:
        yield f"export:    {python} -m smp export {_word(checkpoint)} {_word(_unused(run_dir / 'final'))}"
    is_adapter = final is not None and (final / ADAPTER_CONFIG).exists()
    if checkpoint is not None and has_adapters and (final is None or is_adapter):
        yield f"merge:     {python} -m smp export {_word(checkpoint)} {_word(_unused(run_dir / 'merged'))} --merge"
    if final is not None and not is_adapter:
        job = f"{python} -m smp.launch.local --nproc_per_node {launch.world_size} -m smp.train"
        if launch.local_world_size < launch.world_size:
            job = "a job like this one,"
        yield (
            f"finetune:  {job} --hf_pretrained_model_name_or_dir {_word(final)} --training_dir DATA "
            f"{'--dataset_type chat ' * is_chat}--output_dir {_word(_unused(Path('runs/finetuned')))}"
        )


def _unused(path: Path) -> Path:
    """Return the path, or with a number the first where there is nothing yet: a job or an export may refuse another."""
    numbered = (path.with_name(f"{path.name}{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not os.path.lexists(each))


def without(words: Sequence[str], flag: str) -> list[str]:
    """Return the words without ``flag`` and its value, as one word or two."""
    kept, skip = [], False
    for word in words:
        if not skip and word != flag and not word.startswith(f"{flag}="):
            kept.append(word)
        skip = word == flag
    return kept


def _word(path: Path) -> str:
    """Format a path for a command."""
    return shlex.quote(shown(path))


def shown(path: Path) -> str:
    """Format a path relative to the working directory, if it is inside."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
