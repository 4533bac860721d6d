"""Look for what would stop or slow a job, before its first step: versions, devices, memory, limits, environment,
disk, data, model, and how the ranks exchange.

Started alone it starts --nproc_per_node processes of this machine. To look at a cluster, start it as the job is
started: `torchrun ... -m smp doctor`, `srun python -m smp doctor`; rank 0 shows what all have found. Every finding is
ok, a warning or a problem, in one sentence. What the training job will be given is told by --config, by its flags
after --, or by the few flags here.

Exit status 0: no problem, though perhaps warnings; 1: a problem was found; 2: nothing was looked at.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from smp.doctor.environment import has_launcher, says_another_rank
from smp.doctor.findings import Diagnosis
from smp.doctor.local import examine_alone, examine_here
from smp.doctor.ranks import examine_rank
from smp.doctor.room import Request
from smp.errors import UserError
from smp.runtime import data_channel, read_launch, set_default_threads
from smp.train.arguments import parse_args

_OWN = ("model", "training_dir", "test_dir", "dataset_type", "tokenizer_name_or_dir", "vocab_size", "output_dir",
        "distributed_backend")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--config", metavar="FILE", help="the training job's run.yaml")
    parser.add_argument("--model", metavar="NAME", help="preset or Hugging Face directory, to predict its memory")
    parser.add_argument("--training_dir", metavar="DIR", help="data to look at")
    parser.add_argument("--test_dir", metavar="DIR", help="validation data to look at")
    parser.add_argument("--dataset_type", choices=("gpt_jsonl", "hf", "text"), help="default: as the files' names say")
    parser.add_argument("--tokenizer_name_or_dir", metavar="DIR", help="the tokenizer of text")
    parser.add_argument("--vocab_size", type=int, metavar="N", help="ids must be below it; default: the model's")
    parser.add_argument("--output_dir", metavar="DIR", help="where the run will write")
    parser.add_argument("--distributed_backend", choices=("smddp", "gloo", "nccl"), help="default: as the job")
    parser.add_argument(
        "--nproc_per_node", type=int, metavar="N", help="processes to start, without a launcher (default 2)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds that one check may take (default 60)"
    )
    parser.add_argument("--full", action="store_true", help="read all data, write and exchange more, measure all pairs")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, and nothing else")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of the training job")


def request_of(options: argparse.Namespace) -> Request:
    """What is asked for, with the training job's settings where they can be known.

    Raises:
        UserError: an argument is out of its bounds.
    """
    if not 1 <= options.timeout <= 86400:
        raise UserError(f"--timeout {options.timeout:g} is not allowed: give 1 to 86400 seconds")
    if options.vocab_size is not None and options.vocab_size < 1:
        raise UserError(f"--vocab_size {options.vocab_size} is not allowed: give at least 1")
    given = {name: getattr(options, name) for name in _OWN if getattr(options, name) is not None}
    words: list[str] = []
    if options.config is not None or options.flags:
        words = ["--config", options.config] if options.config is not None else []
        words += options.flags + [word for name, value in given.items() for word in (f"--{name}", str(value))]
    settings: dict[str, Any] = _settings(words) | given if words else dict(given)
    for name, channel in (("training_dir", "train"), ("test_dir", "test")):
        if settings.get(name) is None and (place := data_channel(channel)):
            settings[name] = place
    return Request(
        {name: value for name, value in settings.items() if value is not None},
        tuple(words), options.timeout, options.full,
    )  # fmt: skip


def _settings(words: list[str]) -> dict[str, Any]:
    """The training job's settings; empty where it refuses its flags, of which its dry run tells.

    Raises:
        UserError: the flags ask for something else than a job.
    """
    if {"--help", "-h"} & set(words):
        raise UserError(
            "the flags after -- ask for help instead of a job: leave --help out, and read it with `python -m smp.train "
            "--help`"
        )
    try:
        return parse_args(words).flat()
    except UserError:
        return {}


def run(options: argparse.Namespace) -> int:
    """Examine what ``options`` ask for."""
    request = request_of(options)
    try:
        started = has_launcher()
    except UserError:  # of the launcher's words: check_environment says it
        return _show(examine_alone(request), options, others=says_another_rank())
    if not started:
        processes = 2 if options.nproc_per_node is None else options.nproc_per_node
        if not 1 <= processes <= 1024:
            raise UserError(f"--nproc_per_node {processes} is not allowed: give 1 to 1024 processes")
        set_default_threads(processes)
        return _show(examine_here(request, processes), options)
    if options.nproc_per_node is not None:
        raise UserError("--nproc_per_node is for a start without a launcher, and there is one: leave it out")
    launch = read_launch()
    diagnosis = examine_here(request, 1) if launch.world_size == 1 else examine_rank(request, launch)
    return 0 if diagnosis is None else _show(diagnosis, options, others=launch.rank > 0)


def _show(diagnosis: Diagnosis, options: argparse.Namespace, *, others: bool = False) -> int:
    """Print it; what ``others`` than rank 0 say on their own must not come between its lines on standard output."""
    shown = diagnosis.as_json() if options.json and not others else diagnosis.as_text()
    print(shown, file=sys.stderr if others else sys.stdout, flush=True)
    return diagnosis.exit_status
