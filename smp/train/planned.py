"""What is predicted of a run: the report of ``--dry_run 1``, and ``--plan 1``.

That is a run's plan, made by another process before it starts, and how wrong it was.

Nothing of the run depends on it: the planner draws no random numbers here, and what is measured is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from smp.checkpoint.manifest import versions
from smp.config import ActivationConfig
from smp.environment import environment_with, malloc
from smp.log import get_logger
from smp.memory.limits import available_memory
from smp.memory.profile import profile_memory
from smp.memory.tracker import peak_rss_bytes
from smp.parallel.choices import Choice
from smp.plan import document, ledger
from smp.processes import end_with_parent
from smp.train.checked_job import CheckedJob
from smp.train.dry_run import is_elsewhere, report
from smp.train.job import Job, choose_settings, given_words, host_memory, plan_command, planned_batch, sizes
from smp.units import GIB

logger = get_logger("train")

SECONDS = 20.0
STEPS = 20
# Of the start's steps: the first makes the optimizer's state, the second is the first like all others.
_PROFILED = 2


def dry_run(job: CheckedJob) -> None:
    """Print the report of a dry run."""
    if job.launch.rank == 0:
        for sentence in job.config.without_effect():
            logger.info(sentence)
        available = None
        if job.device.type == "cpu" or torch.cuda.is_available():
            available = available_memory(job.device, job.launch.local_world_size)
            batch = planned_batch(job.config, job.mesh)
            job.choices.extend(choose_settings(job, available, batch=batch))
        shape, work = sizes(job)
        # A GPU of other machines is not here to be asked.
        reason = "nothing to choose here" if available is not None else "chosen on the GPUs"
        off = {
            "activation_checkpointing_mode": not job.config.activation.activation_checkpointing,
            "activation_checkpointing_every": not job.config.activation.activation_checkpointing,
            "tp_overlap": job.mesh.tp.size == 1,
            "cp_comm_type": job.mesh.cp.size == 1,
        }
        plain = {name: value for name, value in job.settings.undecided().items() if not off.get(name)}
        others = (Choice(name, value, reason) for name, value in plain.items())
        text = report(
            job.model,
            job.mesh,
            shape=shape,
            work=work,
            available=None if is_elsewhere(job.config) else available,
            choices=[*job.choices, *others],
            where=f", a process on {'CPUs' if job.device.type == 'cpu' else 'a GPU'} in {str(job.dtype)[6:]}",
            host=host_memory(job, shape, work),
        )
        command = plan_command(job, *_size_words(job))
        says = f"\n\n`{command}` finds the fastest layout that fits on GPUs, and with --search 0 plans this one"
        print(text if job.config.data.evaluate_only else text + says)


def planner_command(job: Job) -> list[str]:
    """Return the command that plans a job as it is, without a search."""
    device = job.device
    argv = [sys.executable, "-m", "smp", "plan", "--search", "0", *_size_words(job)]
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / GIB
        argv += ["--device", torch.cuda.get_device_name(device), "--gpu_memory_gib", f"{memory:.2f}"]
    else:
        argv += ["--device", "cpu"]
    return [*argv, *given_words(job)]


def _size_words(job: Job) -> list[str]:
    launch = job.launch
    nodes = launch.world_size // launch.local_world_size
    return ["--nodes", str(nodes), "--gpus_per_node", str(launch.local_world_size)]


def print_plan(job: Job) -> None:
    """Print the plan of a job, below the report of its dry run."""
    if not _even(job):
        return
    print(flush=True)
    subprocess.run(planner_command(job), stdin=subprocess.DEVNULL, env=_environment(), check=False)


def _even(job: Job) -> bool:
    if odd := job.launch.world_size % job.launch.local_world_size:
        logger.info("No plan: hosts have as many processes each in a plan, and do not here.")
    return not odd


def _environment() -> dict[str, str]:
    return environment_with({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **malloc.as_here()})


def predict(job: Job, *, seconds: float = SECONDS) -> dict[str, Any] | None:
    """Return the plan of a job, by another process; None, with a line in the log, where there is none in time."""
    if not _even(job):
        return None
    seconds = min(seconds, job.config.comm.distributed_timeout / 2)  # the other ranks wait for this one
    try:
        process = subprocess.Popen(
            [*planner_command(job), "--json", "-"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=_environment(), start_new_session=True, preexec_fn=end_with_parent,
        )  # fmt: skip
    except OSError as error:
        logger.info("No plan: its process cannot be started (%s).", error.strerror)
        return None
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        logger.info("No plan: it took longer than %g s (`smp plan` with the same flags takes its time).", seconds)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # also a worker of it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    try:
        plan = json.loads(out)
        return plan if plan["layouts"][0]["memory"] else None
    except (ValueError, LookupError, TypeError):
        said = err.strip().splitlines()[-1:] or [f"the planner ended with {process.returncode}"]
        logger.info("No plan: %s", said[0].removeprefix("error: "))
        return None


class Planned:
    """A run's plan, and what is measured to compare; without a plan every method does nothing.

    Args:
        first: updates done before this start.
        predicted: what :func:`predict` has returned.
    """

    def __init__(self, job: CheckedJob, first: int, predicted: Mapping[str, Any] | None):
        self._job, self._first, self._predicted = job, first, predicted
        self._times: list[float] = []
        self._categories: dict[str, int] | None = None
        self._allocated = self._reserved = 0
        self._line: dict[str, Any] | None = None
        if predicted is not None:
            self._write_document(predicted, ledger.PLAN)

    @contextlib.contextmanager
    def profiled(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, mark: Callable[[str], None]
    ) -> Iterator[Callable[[str], None]]:
        """Profile the memory of one early step; what is compiled would run otherwise, and is not profiled.

        Args:
            mark: called with each phase that has ended.
        """
        due = self._predicted is not None and step == self._first + _PROFILED
        if not due or self._job.settings[ActivationConfig].compile:  # reading settings copies them all: not each step
            yield mark
            return
        self._read_allocator()  # which the profile resets
        with profile_memory(model, optimizer, device=self._job.device) as profile:

            def both(tag: str) -> None:
                profile.mark(tag)
                mark(tag)

            yield both
        self._categories = dict(profile.peak().categories)

    def settled(self, step: int) -> None:
        """Note that a step has ended; after step 20 of this start, write how wrong the plan was."""
        if self._predicted is None or self._line is not None:
            return
        self._times.append(time.perf_counter())
        if step >= self._first + STEPS:
            self._write()

    def finish(self) -> None:
        """Log how wrong the plan was; a shorter run writes it here."""
        if self._predicted is not None and self._line is None:
            self._write()
        if self._line is not None:
            logger.info("plan: %s", ledger.sentence(self._line))

    def _write(self) -> None:
        # After the profiled step: it and the one before it end late.
        seconds = [after - before for before, after in zip(self._times, self._times[1:], strict=False)][_PROFILED + 1 :]
        if not seconds or self._predicted is None:
            return
        self._read_allocator()
        launch, cuda = self._job.launch, self._job.device.type == "cuda"
        self._line = ledger.entry(
            self._predicted,
            categories=self._categories,
            allocated=self._allocated if cuda else None,
            reserved=self._reserved if cuda else None,
            resident=None if cuda else peak_rss_bytes(),
            # Steps with a validation or a checkpoint behind them are few.
            step_seconds=statistics.median(seconds),
            about={
                "model": self._job.model.name,
                "device": torch.cuda.get_device_name(self._job.device) if cuda else "cpu",
                "processes": launch.world_size,
                "steps": len(seconds),
                "versions": versions(),
            },
        )
        self._write_document(self._line, ledger.ERROR)

    def _write_document(self, content: Mapping[str, Any], name: str) -> None:
        try:
            document.write(content, self._job.run_dir / name)
        except OSError as error:
            logger.warning("%s cannot be written (%s).", self._job.run_dir / name, error.strerror)

    def _read_allocator(self) -> None:
        device = self._job.device
        if device.type == "cuda":
            self._allocated = max(self._allocated, torch.cuda.max_memory_allocated(device))
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(device))
