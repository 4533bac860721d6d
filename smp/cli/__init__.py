"""The ``smp`` command: what comes before and after a job, without one and without a process group.

A file per sub-command, each with ``add_arguments(parser)`` and ``run(options)``, which returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Container
from typing import Any, NoReturn

from smp import __version__
from smp.errors import ConfigError, RunError, UserError
from smp.log import prepare_streams

TRAIN = "train"

# Sub-command -> what it does, in one line of the help.
COMMANDS = {
    TRAIN: "train, resume, finetune or evaluate a model",
    "verify": "check that checkpoints are as they were written",
    "inspect": "show what a checkpoint or a Hugging Face model contains",
    "export": "write a Hugging Face model from a checkpoint",
    "diff": "compare two checkpoints or models",
    "report": "write a page about a run: curves, time, memory, checkpoints, settings",
    "plan": "before anything is rented: does a job fit, how fast is it, which layout is best, what does it cost",
    "launch": "write the script that starts a job: Slurm, Kubernetes, a file of hosts, this machine",
    "doctor": "look for what would stop or slow a job, before its first step",
}


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one sentence, as all of smp does.

    Attributes:
        passes_on: unknown arguments are the training job's, and kept as ``more``.
        of_job: names of the training job's flags, which come after ``--``.
    """

    passes_on = False
    of_job: Container[str] = ()

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        """Refuse unknown arguments here, where the sub-command is known."""
        known, unknown = super().parse_known_args(*args, **options)
        if self.passes_on:
            known.more, unknown = unknown, []
        theirs = [flag for word in unknown if (flag := word.partition("=")[0]).removeprefix("--") in self.of_job]
        if theirs:
            self.error(
                f"{theirs[0]} is a flag of the training job, and those come last: {self.prog} ... -- {theirs[0]} X"
            )
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` shows what there is")


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Return the parser; only the ``chosen`` sub-command's module is imported, as most of them import torch."""
    parser = _Parser(
        prog="smp",
        description="A training job, and what comes before and after it.",
        epilog="To train: smp train --model llama_tiny --use_synthetic_data 1 --max_steps 3\n"
        "on N processes: python -m smp.launch.local --nproc_per_node N -m smp.train ..., or torchrun",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"smp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == chosen and name != TRAIN:
            module = importlib.import_module(f"smp.cli.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _train(arguments: list[str]) -> NoReturn:
    """Become ``python -m smp.train``: the same job under any launcher, with its exit status and signals."""
    python = sys.orig_argv[1 : -len(sys.argv)]  # Python's own options, as torchrun's -u
    if python[-1:] == ["-m"]:
        del python[-1]
    else:
        python.append("-P")  # a script's folder is not searched for modules; python -m would search the current one
    os.execv(sys.executable, [sys.executable, *python, "-m", "smp.train", *arguments])


def main(argv: list[str] | None = None) -> int:
    """Run a sub-command.

    Returns:
        The exit status: 0 good, 1 damaged or different, 2 bad input; the training job's own.
    """
    prepare_streams()
    try:
        arguments = sys.argv[1:] if argv is None else argv
        if arguments[:1] == [TRAIN]:
            _train(arguments[1:])
        options = _parser(arguments[0] if arguments else "").parse_args(arguments or ["--help"])
        status = options.run(options)
        sys.stdout.flush()
        return status
    except UserError as error:
        for problem in error.problems if isinstance(error, ConfigError) else [error]:
            print(f"error: {problem}", file=sys.stderr)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read has had enough. Python would complain once more when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"error: {error.filename or 'reading'}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 2
