"""Kill small jobs while their checkpoints are uploaded to an S3 server, resume on a new machine, and tally.

    python -m benchmarks.upload_kill_trials --trials 48 --seed 0

A trial: a job of 2 processes saves every 2 of 6 steps to ``s3://``, through a proxy that holds one request of a phase
of an upload, a deletion or a download; then all ranks, or one, are killed by ``kill -9``. After that

- ``smp verify URL`` must find every published checkpoint whole;
- a new machine, with nothing but the URL, must begin at the newest checkpoint whose manifest was acknowledged to the
  killed job, or a newer one, and end with the very losses and tensors of a run that nothing happened to;
- nothing must be left in the store that is no whole checkpoint.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import io
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import s3fs

# The next four are imported before the ranks are forked: imports are most of the time of so small a job.
import transformers.generation.utils  # noqa: F401
from torch.utils import tensorboard  # noqa: F401
from transformers import CONFIG_MAPPING
from transformers.models.llama import modeling_llama  # noqa: F401

import smp.cli
from smp.checkpoint import mirror
from smp.checkpoint.manifest import parse_manifest
from smp.train import report
from smp.train import step as one_step
from tests.clock import wait_until
from tests.job import LLAMA, read_metrics, run_job, running_job
from tests.s3 import (
    Fault,
    Proxy,
    Request,
    Rule,
    Server,
    environment,
    few_attempts,
    new_bucket,
    nth,
    s3_server,
    small_parts,
)

JOB = [
    *LLAMA, "--use_synthetic_data", 1, "--lr_decay_iters", 6, "--checkpoint_freq", 2, "--sharding_strategy",
    "full_shard", "--train_batch_size", 1, "--attn_pdrop", 0.2, "--resume_from_checkpoint", "latest",
]  # fmt: skip
UPLOADS = ("put", "begin")
Match = Callable[[Request], object]
_ = CONFIG_MAPPING["llama"]  # imported, too


def job(server: Server, run: pathlib.Path, *words: object, steps: int = 6) -> list[object]:
    """Return the job's words, for a machine whose own disk is ``run``."""
    return [*JOB, "--max_steps", steps, "--output_dir", run, "--checkpoint_dir", f"{server.url}/run", *words]


def uploads_settle_between_steps() -> None:
    """Let each step wait for this rank's uploads, so that every checkpoint is uploaded; training itself never waits."""
    forward = one_step.forward

    def call(*args, **kwargs):
        while any(thread.name == "smp-upload" for thread in threading.enumerate()):
            time.sleep(0.005)
        return forward(*args, **kwargs)

    one_step.forward = call


def prepared(proxy: Proxy, *, settle: bool = True) -> Callable[[int], None]:
    """Return what each rank does first."""

    def prepare(rank: int) -> None:
        os.environ.update(environment(proxy.url))
        small_parts()
        few_attempts()
        mirror.POLL_SECONDS = (0.02, 0.2)
        report.write_curves = lambda run_dir: ""
        if settle:
            uploads_settle_between_steps()

    return prepare


@dataclasses.dataclass(frozen=True)
class Trial:
    """A kill at one request."""

    phase: str
    step: int  # of the checkpoint
    place: str  # of the request: before, middle, applied, answering
    number: int  # which request of the phase
    victim: int | None  # a rank; None: all
    keep: int  # checkpoints


def _of(step: int, *kinds: str) -> Match:
    return lambda r: r.kind in kinds and f"-{step}steps/" in r.key and not r.key.endswith("manifest.json")


def _manifest(step: int, *kinds: str) -> Match:
    return lambda r: r.kind in kinds and r.key.endswith(f"-{step}steps/manifest.json")


# Phase -> (its requests, places in them at which there is a kill, how many of the requests there are at least).
PHASES: dict[str, tuple[Callable[[int], Match], tuple[str, ...], int]] = {
    "before the first byte": (lambda s: _of(s, *UPLOADS), ("before",), 1),
    "in a file": (lambda s: _of(s, "part"), ("middle", "applied"), 8),
    "at a file's end": (lambda s: _of(s, "complete"), ("before", "applied"), 2),
    "between files": (lambda s: _of(s, *UPLOADS), ("before", "applied"), 4),
    "all files, no manifest": (lambda s: _manifest(s, "put"), ("before",), 1),
    "in the manifest's PUT": (lambda s: _manifest(s, "put"), ("middle", "applied"), 1),
    "right after": (lambda s: _manifest(s, "put"), ("after",), 1),
    "retention": (lambda s: lambda r: (r.kind == "delete" and "steps" in r.key) or "delete" in r.query, ("before", "applied"), 2),  # noqa: E501
    "download at resume": (lambda s: _of(4, "get"), ("before", "answering"), 4),
}  # fmt: skip


class Bench:
    """Runs trials against one server."""

    def __init__(self, folder: pathlib.Path, port: int, proxy: Proxy):
        self._folder, self._port, self.proxy = folder, port, proxy
        self._expected: tuple[dict[int, float], dict[str, str]] | None = None
        self._numbers = 0

    def fresh(self) -> pathlib.Path:
        """Return an empty disk of a new machine."""
        self._numbers += 1
        return self._folder / f"machine{self._numbers}"

    def bucket(self) -> Server:
        """Make a new bucket, and a proxy that does nothing yet and remembers nothing."""
        self.proxy.rules, self.proxy.requests = [], []
        return new_bucket(self._port)

    @property
    def expected(self) -> tuple[dict[int, float], dict[str, str]]:
        """Losses by step and digests of the last checkpoint, of a run that nothing happens to."""
        if self._expected is None:
            server, run = self.bucket(), self.fresh()
            run_job(*job(server, run), world_size=2, prepare=prepared(self.proxy)).succeeded()
            self._expected = {line["step"]: line["loss"] for line in read_metrics(run)}, digests(server, 6)
        return self._expected

    def draw(self, random_: random.Random, done: collections.Counter) -> Trial:
        """Return a trial, of a phase that few have been of."""
        fewest = min(done[phase] for phase in PHASES)
        phase = random_.choice([phase for phase in PHASES if done[phase] == fewest])
        _, places, count = PHASES[phase]
        step = random_.choice((2, 4, 6) if phase not in ("retention", "download at resume") else (4,))
        return Trial(phase, step, random_.choice(places), random_.randrange(count), random_.choice((None, 0, 1)),
                     random_.choice((1, 2)))  # fmt: skip

    def _rule(self, trial: Trial, fault: Fault) -> Rule:
        matches = PHASES[trial.phase][0](trial.step)
        if trial.place != "after":
            return nth(trial.number, matches, fault)
        return nth(0, lambda r: any(matches(q) and q.status == 200 for q in list(self.proxy.requests)), fault)

    def run(self, trial: Trial) -> str:
        """``kept``, ``missed`` where the request did not come, or what is wrong."""
        expected, server, words = self.expected, self.bucket(), ["--num_kept_checkpoints", trial.keep]
        prepare = prepared(self.proxy)
        if trial.phase == "download at resume":
            run_job(*job(server, self.fresh(), *words, steps=4), world_size=2, prepare=prepare).succeeded()
        fault = Fault(cut="before" if trial.place == "after" else trial.place, hold=threading.Event())
        self.proxy.rules = [self._rule(trial, fault)]
        try:
            with running_job(*job(server, self.fresh(), *words), world_size=2, prepare=prepare) as started:
                alive = lambda: any(process.is_alive() for process in started.processes)  # noqa: E731
                wait_until(lambda: fault.reached.is_set() or not alive(), said=lambda: started.output)
                if not fault.reached.is_set():
                    return "missed" if set(started.wait().statuses) == {0} else f"failed: {started.output}"
                known = newest_acknowledged(self.proxy)
                started.signal(signal.SIGKILL, *([] if trial.victim is None else [trial.victim]))
                fault.hold.set()
                first = started.wait()
        finally:
            fault.hold.set()
            self.proxy.rules = []
        if -1 in first.statuses and trial.victim is not None and first.statuses[1 - trial.victim] == -1:
            return f"a survivor has not left, {first.statuses}\n{first.output}"
        return self._after(server, words, known, expected, first.output)

    def _after(self, server: Server, words: list[object], known: int, expected, said: str) -> str:
        """Return what a look at the store and a new machine find."""
        if problem := damage(server):
            return f"damaged: {problem}\n{said}"
        run = self.fresh()
        second = run_job(*job(server, run, *words), world_size=2, prepare=prepared(self.proxy))
        if set(second.statuses) != {0}:
            return f"unresumable: {second.statuses}\n{said}\n{second.output}"
        losses = {line["step"]: line["loss"] for line in read_metrics(run)} if (run / "metrics.jsonl").exists() else {}
        began = min(losses, default=7) - 1
        if began < known:
            return f"lost: the manifest of step {known} was acknowledged, and step {began} resumed\n{second.output}"
        if any(expected[0][step] != loss for step, loss in losses.items()) or digests(server, 6) != expected[1]:
            return f"different: {losses}, {expected[0]}\n{second.output}"
        if (problem := damage(server)) or (problem := leftovers(server)):
            return f"left behind: {problem}\n{said}\n{second.output}"
        shutil.rmtree(run)
        return "kept"


def newest_acknowledged(proxy: Proxy) -> int:
    """Return the newest step whose manifest the job knows to be there; 0: none."""
    found = [re.search(r"-(\d+)steps/manifest.json$", key) for key in proxy.answered("put", "manifest.json")]
    return max((int(match[1]) for match in found if match), default=0)


def digests(server: Server, step: int) -> dict[str, str]:
    """Digests of a checkpoint's files in the store."""
    data = server.get(f"run/llama_v2-{step}steps/manifest.json")
    return {name: entry.digest for name, entry in parse_manifest(data, "it", 1000).files.items()}


def verify(server: Server) -> tuple[int, str]:
    """Status and output of ``smp verify`` of all that is in the store."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = smp.cli.main(["verify", f"{server.url}/run"])
    return status, said.getvalue()


def damage(server: Server) -> str | None:
    """Return what ``smp verify`` finds that is published and not whole."""
    status, said = verify(server)
    nothing = status == 2 and ("holds no complete" in said or "none is below" in said or "does not exist" in said)
    return None if status == 0 or nothing else said


def leftovers(server: Server) -> str | None:
    """Return what is in the store and belongs to no whole checkpoint."""
    keys = server.keys("run")
    folders = {key.rpartition("/")[0] for key in keys if key.endswith("/manifest.json")}
    left = [key for key in keys if key.rpartition("/")[0] not in folders and not key.endswith("writer.json")]
    return f"{left}" if left else None


@contextlib.contextmanager
def bench(folder: pathlib.Path, port: int | None = None) -> Iterator[Bench]:
    """Start a server, unless there is one, a proxy, and this process's environment set to them."""

    with contextlib.ExitStack() as stack:
        port = port or stack.enter_context(s3_server())
        proxy = stack.enter_context(Proxy(port))
        replaced = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in environment(proxy.url).items():
            replaced.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            yield Bench(folder, port, proxy)
        finally:
            proxy.shutdown()
            s3fs.S3FileSystem.clear_instance_cache()


def main(argv: list[str] | None = None) -> int:
    """Run trials and print the table; returns 1 if any went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop early after so many")
    arguments = parser.parse_args(argv)
    random_, done, kept = random.Random(arguments.seed), collections.Counter(), collections.Counter()
    start, missed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder, bench(pathlib.Path(folder)) as trials:
        while done.total() < arguments.trials and time.monotonic() - start < 60 * arguments.minutes:
            trial = trials.draw(random_, done)
            result = trials.run(trial)
            if result == "missed":
                missed += 1
                continue
            done[trial.phase] += 1
            kept[trial.phase] += result == "kept"
            if result != "kept":
                print(f"{trial}\n{result}", file=sys.stderr)
            print(f"{done.total()}: {trial} {result.partition(':')[0]}", file=sys.stderr, flush=True)
    print(f"{'phase':26} kills  kept  lost")
    for phase in PHASES:
        print(f"{phase:26} {done[phase]:5} {kept[phase]:5} {done[phase] - kept[phase]:5}")
    print(f"{'all':26} {done.total():5} {kept.total():5} {done.total() - kept.total():5}")
    print(f"{missed} missed, {time.monotonic() - start:.0f} s")
    return int(kept.total() != done.total())


if __name__ == "__main__":
    sys.exit(main())
