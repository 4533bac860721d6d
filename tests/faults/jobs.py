"""Small jobs that something happens to."""

from __future__ import annotations

import pathlib
import signal
import time
from collections.abc import Callable

from smp.checkpoint.background import PendingWrite
from smp.faults import members, propagate, watchdog
from smp.train import __main__ as train_main
from smp.train import step as one_step
from smp.train import trainer, validation
from tests.clock import HANG_SECONDS, SharedClock, wait_until
from tests.job import LLAMA, read_metrics, running_job

JOB = [*LLAMA, "--use_synthetic_data", 1, "--lr_decay_iters", 20, "--sharding_strategy", "full_shard"]
HEARD = "SIGTERM: all ranks stop at the next step boundary"
LONG = [*JOB, "--max_steps", 100_000, "--checkpoint_freq", 100_000]


def wrapped(name: str, before: Callable[[], None]) -> None:
    """Call ``before`` each time the job calls its part ``name``; for ``prepare`` of a job."""
    modules = [module for module in (one_step, validation, trainer, train_main) if name in vars(module)]
    inner = getattr(modules[0], name)

    def call(*args, **kwargs):
        before()
        return inner(*args, **kwargs)

    for module in modules:
        setattr(module, name, call)


def at_call(number: int, then: Callable[[], None]) -> Callable[[], None]:
    """What calls ``then`` when it is called for the so-manieth time; for :func:`wrapped`."""
    calls = []

    def call() -> None:
        calls.append(None)
        if len(calls) == number:
            then()

    return call


def slowly(rank: int) -> None:
    """``prepare``: steps take 20 ms and more, so that a test sees them pass."""
    wrapped("forward", lambda: time.sleep(0.02))


def watched_by(clock: SharedClock, *, silent: int | None = None) -> None:
    """Let the watchdog of this process go by a clock that the test sets; for ``prepare`` of a job.

    What the watchdog asks of the store is waited for, every rank has published before its first step, and the second
    look at what the ranks have published is taken when all but ``silent`` have done so since the first: a busy machine
    changes nothing.
    """
    within, seen, first = members.within, members.Members.seen, []
    connect = watchdog.Watchdog.connect

    def patient(seconds, call):
        return within(HANG_SECONDS, call)

    def connected(self, ranks):
        connect(self, ranks)
        wait_until(lambda: ranks is None or ranks.store.check([f"at{ranks.rank}"]))

    def seen_anew(self):
        others = [m.rank for m in self.members if m.rank != silent]
        wait_until(lambda: not first or all(seen(self)[r].beat > first[0][r].beat for r in others))
        first.append(seen(self))
        return first[-1]

    watchdog.time = clock
    watchdog.Watchdog.connect = connected
    members.ANSWER_SECONDS = HANG_SECONDS
    members.within = watchdog.within = propagate.within = patient
    members.Members.seen = seen_anew


def writes_end_first() -> None:
    """Begin each step when what is being written in the background has ended; for ``prepare`` of a job."""
    begin, begun = PendingWrite.start, []

    def noted(self):
        begin(self)
        begun.append(self)

    def ended() -> None:
        for write in begun:
            write.wait()

    PendingWrite.start = noted
    wrapped("forward", ended)


def last_step(run: pathlib.Path) -> int:
    """The last step in the run's metrics; 0 before the first."""
    try:
        return max((line["step"] for line in read_metrics(run)), default=0)
    except (OSError, ValueError):  # not there, or half written
        return 0


def checkpoints(run: pathlib.Path) -> list[int]:
    """Steps of the run's checkpoints."""
    return sorted(int(p.name.partition("-")[2].removesuffix("steps")) for p in run.glob("checkpoints/*-*steps"))


def stopped_in_forward(resume: list, folder: pathlib.Path, number: int, prepare=lambda rank: None):
    """A job of two ranks whose first one gets SIGTERM inside its so-manieth forward; returns its outcome."""
    here, go = folder / "here", folder / "go"

    def held(rank: int) -> None:
        def hold() -> None:
            here.touch()
            wait_until(go.exists)

        prepare(rank)
        if rank == 0:
            wrapped("forward", at_call(number, hold))

    with running_job(*resume, world_size=2, prepare=held) as job:
        job.wait_until(here.exists)
        job.signal(signal.SIGTERM, 0)
        job.wait_until(lambda: HEARD in job.output)
        go.touch()
        return job.wait()
