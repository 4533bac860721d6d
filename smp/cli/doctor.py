"""Look for what would stop or slow a job, before its first step: versions, devices, memory, limits, environment,
disk, data, model, and the collectives of all ranks.

Started alone it starts --nproc_per_node processes of this machine. To look at a cluster, start it as the job is
started: `torchrun ... -m smp doctor`, `srun python -m smp doctor`; rank 0 shows what all have found. Every finding is
ok, a warning or a problem, in one sentence. All other flags are the training job's, such as --config, --model,
--training_dir or --output_dir: without any, no model, data and disk are looked at.

Exit status 0: no problem, though perhaps warnings; 1: a problem was found; 2: nothing was looked at.
"""

from __future__ import annotations

import argparse
import os

from smp.doctor.check import Request
from smp.doctor.report import Diagnosis
from smp.doctor.supervisor import examine_here, examine_rank
from smp.environment import read_launch
from smp.environment.threads import set_default_threads
from smp.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.passes_on = True  # type: ignore[attr-defined]
    parser.add_argument(
        "--nproc_per_node", type=int, metavar="N", help="processes to start, without a launcher (default 2)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds that one check may take (default 60)"
    )
    parser.add_argument("--full", action="store_true", help="measure longer messages")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, and nothing else")


def request_of(options: argparse.Namespace) -> Request:
    """Check the arguments.

    Raises:
        UserError: an argument is out of its bounds, or the flags ask for something else than a job.
    """
    if not 1 <= options.timeout <= 86400:
        raise UserError(f"--timeout {options.timeout:g} is not allowed: give 1 to 86400 seconds")
    flags = [word for word in options.more if word != "--"]
    if {"--help", "-h"} & set(flags):
        raise UserError(
            "the flags after -- ask for help instead of a job: leave --help out, and read it with `python -m smp.train "
            "--help`"
        )
    return Request(tuple(flags), options.timeout, options.full)


def run(options: argparse.Namespace) -> int:
    """Examine what ``options`` ask for."""
    request, launch = request_of(options), read_launch()
    has_launcher = bool(launch.launcher) or launch.world_size > 1
    if has_launcher and options.nproc_per_node is not None:
        raise UserError("--nproc_per_node is for a start without a launcher, and there is one: leave it out")
    processes = 1 if has_launcher else 2 if options.nproc_per_node is None else options.nproc_per_node
    if not 1 <= processes <= 1024:
        raise UserError(f"--nproc_per_node {processes} is not allowed: give 1 to 1024 processes")
    if launch.world_size == 1:
        set_default_threads(processes)
        return _show(examine_here(request, processes), options)
    try:
        diagnosis = examine_rank(request, launch)
        status = 0 if diagnosis is None else _show(diagnosis, options)
    except KeyboardInterrupt:
        status = 130
    os._exit(status)  # a check that hangs, or a group that was not left in good order, would be waited for


def _show(diagnosis: Diagnosis, options: argparse.Namespace) -> int:
    print(diagnosis.as_json() if options.json else diagnosis.as_text(), flush=True)
    return diagnosis.exit_status
