"""A run that is killed and resumed at other world sizes sees every sample once per epoch, in the same global order."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pathlib
import signal

import pytest

from smp.train import step as one_step
from smp.train import trainer
from tests.job import LLAMA, losses, run_job

ROWS, BATCH = 96, 4
STEPS = ROWS // BATCH


def note_samples(log: pathlib.Path, die_at: int | None) -> None:
    """Append the samples of each step that this rank has finished; end the process in the step ``die_at``."""
    train_step, forward = trainer.train_step, one_step.forward
    log.parent.mkdir(exist_ok=True)
    steps = [0]

    def step(model, optimizer, batch, **settings):
        samples = [int(i) for microbatch in batch.microbatches for i in microbatch["sample_ids"] if i >= 0]
        result = train_step(model, optimizer, batch, **settings)
        steps[0] += 1
        with log.open("a") as file:
            file.write(json.dumps(samples) + "\n")
        return result

    def dying(*args, **settings):
        if die_at is not None and steps[0] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args, **settings)

    trainer.train_step, one_step.forward = step, dying


def read(folder: pathlib.Path, world_size: int) -> list[list[int]]:
    """Samples of all ranks, by step since the start of the attempt."""
    ranks = [
        [json.loads(line) for line in (folder / f"rank{rank}").read_text().splitlines()]
        if (folder / f"rank{rank}").exists()
        else []
        for rank in range(world_size)
    ]
    return [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=False)]


@pytest.mark.slow
def test_killed_five_times_at_four_two_three_one_and_four_processes(tmp_path):
    data = tmp_path / "data.jsonl.gz"
    with gzip.open(data, "wt") as file:
        for row in range(ROWS):
            file.write(json.dumps({"input_ids": [(row * 7 + i) % 64 for i in range(17)]}) + "\n")
    words = [
        *LLAMA, "--training_dir", data, "--data_cache_dir", tmp_path / "cache", "--global_batch_size", BATCH,
        "--train_batch_size", 1, "--checkpoint_freq", 2, "--max_steps", STEPS, "--sharding_strategy", "full_shard",
        "--resume_from_checkpoint", "latest",
    ]  # fmt: skip
    run_job(*words, "--output_dir", tmp_path / "whole", world_size=2).succeeded()
    seen: dict[int, list[int]] = {}
    begun = 0
    for attempt, (world_size, steps) in enumerate([(4, 5), (2, 3), (3, 7), (1, 4), (4, 5), (2, None)]):
        folder = tmp_path / f"samples{attempt}"

        def prepare(rank: int, folder=folder, steps=steps, last=world_size - 1) -> None:
            note_samples(folder / f"rank{rank}", steps if rank == last else None)

        outcome = run_job(*words, "--output_dir", tmp_path / "run", world_size=world_size, prepare=prepare)
        if steps is None:
            outcome.succeeded()
        else:
            assert outcome.statuses[-1] == -signal.SIGKILL, outcome.output
        finished = read(folder, world_size)
        for number, samples in enumerate(finished):
            seen[begun + number] = samples  # steps after the last checkpoint are done again, by the next attempt
        saved = sorted(
            int(p.name.partition("-")[2].removesuffix("steps")) for p in (tmp_path / "run").glob("checkpoints/*-*steps")
        )
        begun = saved[-1]
    assert sorted(seen) == list(range(STEPS))
    assert sorted(itertools.chain(*seen.values())) == list(range(ROWS))
    got, expected = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert len(got) == STEPS and all(abs(a - b) < 1e-4 for a, b in zip(got, expected, strict=True))
