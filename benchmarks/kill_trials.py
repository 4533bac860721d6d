"""Kill ranks of small jobs at random points, resume, and tally what became of the run.

    python -m benchmarks.kill_trials --trials 200 --seed 0

A trial: a job of 2 to 4 processes saves every 2 of 6 steps and exports its model; one rank is killed by ``kill -9`` in
a step or at one operation of its saves; the others must leave by themselves; every published checkpoint must be whole,
none that was announced may be missing; and the same command must bring the run to its end with the very losses, tensors
and exported model of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time

from smp.checkpoint.directory import find_checkpoints
from smp.checkpoint.manifest import problems_of_files, read_manifest
from smp.train import step as one_step
from tests.faults.disk import kill_at, record
from tests.job import LLAMA, losses, run_job, running_job

KINDS = ("sharded", "async_sharded", "local")
JOB = [
    *LLAMA, "--use_synthetic_data", 1, "--max_steps", 6, "--lr_decay_iters", 6, "--checkpoint_freq", 2,
    "--sharding_strategy", "full_shard", "--train_batch_size", 1, "--attn_pdrop", 0.2,
    "--save_final_model", 1, "--resume_from_checkpoint", "latest",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trial:
    """What is done to which rank of which job."""

    kind: str
    world_size: int
    rank: int
    label: str  # "step", or an operation on the disk
    number: int  # the step, or which of the operations with this label
    after: bool


def job(run: pathlib.Path, kind: str) -> list[object]:
    return [*JOB, "--checkpoint_type", kind, "--output_dir", run]


def die_in_step(number: int) -> None:
    """End this process in the forward of a step."""
    forward, seen = one_step.forward, [0]

    def call(*args, **kwargs):
        if seen[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1
        return forward(*args, **kwargs)

    one_step.forward = call


def checkpoint_folders(run: pathlib.Path, kind: str) -> list[pathlib.Path]:
    folder = run / "checkpoints"
    return sorted(folder.glob("rank*")) if kind == "local" else [folder]


def outcome_of(run: pathlib.Path, kind: str) -> dict[str, object]:
    """Return what must be equal in the end: losses, the content of the last checkpoint, the exported model."""
    found: dict[str, object] = {"losses": losses(run)}
    for folder in checkpoint_folders(run, kind):
        last = find_checkpoints(folder, "llama_v2")[-1]
        manifest = read_manifest(last.path)
        found[folder.name] = (last.step, {name: entry.digest for name, entry in manifest.files.items()})
    for file in sorted((run / "final").iterdir()):
        found[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


class Bench:
    """Runs trials, with the undisturbed run of each layout made once."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._expected: dict[tuple[str, int], dict[str, object]] = {}
        self._labels: dict[tuple[str, int], list[collections.Counter]] = {}

    def expected(self, kind: str, world_size: int) -> dict[str, object]:
        """Of the undisturbed run."""
        self._make(kind, world_size)
        return self._expected[kind, world_size]

    def labels(self, kind: str, world_size: int) -> list[collections.Counter]:
        """How often each rank does each operation."""
        self._make(kind, world_size)
        return self._labels[kind, world_size]

    def _make(self, kind: str, world_size: int) -> None:
        if (kind, world_size) in self._expected:
            return
        run = self._folder / f"whole-{kind}-{world_size}"
        run_job(
            *job(run, kind), world_size=world_size, prepare=lambda rank: record(run, self._folder / f"log{rank}")
        ).succeeded()
        self._expected[kind, world_size] = outcome_of(run, kind)
        counters = []
        for rank in range(world_size):
            log = self._folder / f"log{rank}"
            lines = log.read_text().splitlines() if log.exists() else []
            counters.append(collections.Counter(lines))
            log.unlink(missing_ok=True)
        self._labels[kind, world_size] = counters
        shutil.rmtree(run)

    def draw(self, random_: random.Random, done: collections.Counter) -> Trial:
        """Return a trial, of a phase that few have been of."""
        kind, world_size = random_.choice(KINDS), random_.choice((2, 2, 3, 4))
        options = [("step", rank, 6) for rank in range(world_size)]
        for rank, counter in enumerate(self.labels(kind, world_size)):
            options += [(label, rank, count) for label, count in counter.items()]
        fewest = min(done[label] for label, _, _ in options)
        label, rank, count = random_.choice([o for o in options if done[o[0]] == fewest])
        return Trial(kind, world_size, rank, label, random_.randrange(count), random_.random() < 0.5)

    def run(self, trial: Trial) -> str:
        """``good``, or what is wrong."""
        run = self._folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        words = job(run, trial.kind)

        def prepare(rank: int) -> None:
            if rank != trial.rank:
                return
            if trial.label == "step":
                die_in_step(trial.number)
            else:
                kill_at(run, trial.label, trial.number, after=trial.after)

        with running_job(*words, world_size=trial.world_size, prepare=prepare) as started:
            first = started.wait()
        if first.statuses[trial.rank] != -signal.SIGKILL and trial.label != "step" and set(first.statuses) == {0}:
            return "missed"  # the operation did not come: thread timing
        if -1 in first.statuses and first.statuses[trial.rank] == -signal.SIGKILL and first.statuses.count(-1):
            return f"unresumable: a survivor has not left, {first.statuses}\n{first.output}"
        if problem := self._damage(run, trial.kind, first.output):
            return problem
        expected = self.expected(trial.kind, trial.world_size)
        second = run_job(*words, world_size=trial.world_size)
        if set(second.statuses) != {0}:
            return f"unresumable: {second.statuses}\n{first.output}\n{second.output}"
        found = outcome_of(run, trial.kind)
        if different := [key for key in expected if expected[key] != found.get(key)]:
            return f"lost: {different} differ from the undisturbed run's\n{second.output}"
        if leftovers := [str(p) for p in run.rglob("*.tmp")]:
            return f"left behind: {leftovers}"
        return "good"

    @staticmethod
    def _damage(run: pathlib.Path, kind: str, output: str) -> str | None:
        announced = [int(step) for step in re.findall(r"Saved \S+-(\d+)steps", output)]
        for folder in checkpoint_folders(run, kind):
            present = find_checkpoints(folder, "llama_v2")
            for checkpoint in present:
                problems = problems_of_files(checkpoint.path, read_manifest(checkpoint.path), content=True)
                if problems:
                    return f"corrupt: {checkpoint.path.name}: {problems}"
            # A rank's own newest may be older than the one that rank 0 has announced only if that rank was killed.
            if kind != "local" and announced and max(announced) not in [c.step for c in present]:
                return f"lost: step {max(announced)} was announced, there are {present}"
        return None


def main(argv: list[str] | None = None) -> int:
    """Run trials and print the tally; returns 1 if any went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop early after so many")
    arguments = parser.parse_args(argv)
    random_, tally, done = random.Random(arguments.seed), collections.Counter(), collections.Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(pathlib.Path(folder))
        number = 0
        while number < arguments.trials and time.monotonic() - start < 60 * arguments.minutes:
            trial = bench.draw(random_, done)
            result = bench.run(trial)
            tally[result.partition(":")[0]] += 1
            if result == "missed":
                continue
            number += 1
            done[trial.label] += 1
            if result != "good":
                print(f"{trial}\n{result}", file=sys.stderr)
            if number % 10 == 0:
                print(f"{number} trials, {time.monotonic() - start:.0f} s: {dict(tally)}", file=sys.stderr)
    print("killed at: " + ", ".join(f"{label} {count}" for label, count in sorted(done.items())))
    print(
        f"{number} trials: {tally['good']} good, {tally['lost']} lost, {tally['corrupt']} corrupt, "
        f"{tally['unresumable']} unresumable, {tally['left behind']} with something left behind"
    )
    return int(tally["good"] != number)


if __name__ == "__main__":
    sys.exit(main())
