"""The end of a run: its message, printed once for the whole job, and its exit status."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from smp.errors import ConfigError, PeerError, RankError, RunError, UserError, first_line, limit_reached
from smp.faults.guard import Guard
from smp.faults.stop import INTERRUPTED
from smp.log import begin_line, redact
from smp.memory.profile import is_out_of_memory
from smp.starting import raise_on_interrupt, say_interrupted
from smp.train.checked_job import CheckedJob
from smp.train.report import print_out_of_memory


def exit_status(main: Callable[[], int]) -> int:
    """Call a program's ``main``; write unhandled exceptions to the launcher's error file, too."""
    handler = get_error_handler()
    handler.initialize()
    raise_on_interrupt()
    try:
        return main()
    except KeyboardInterrupt:  # before the first step
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hands on what the terminal has sent as well
        say_interrupted()
        return INTERRUPTED
    except Exception as error:
        handler.record_exception(error)
        if (sentence := limit_reached(error)) is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        return 1


def run_to_end(job: CheckedJob, guard: Guard, run: Callable[[], int]) -> int:
    """Call ``run`` and print why it failed, if it does; returns the exit status.

    The rank that failed prints everything, each other rank one line that it lost that rank.
    """
    try:
        with _line_begun():
            return run()
    except PeerError as error:
        if error.status != 2 and str(error):  # else the sentence of the rank that found it is enough
            print(f"error: {error}", file=sys.stderr)
        return error.status
    except UserError as error:
        if job.launch.local_rank == 0 or isinstance(error, RankError):
            print_problems(error)
        return 2
    except RunError as error:
        get_error_handler().record_exception(error)
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        get_error_handler().record_exception(error)
        if (sentence := limit_reached(error)) is not None:
            print(f"error: rank {job.launch.rank}: {sentence}", file=sys.stderr)
            return 1
        if not is_out_of_memory(error):
            print(f"error: rank {job.launch.rank} failed in {guard.watchdog.activity}:", file=sys.stderr)
            traceback.print_exception(error)
            return 1
        failure, tables = first_line(error), getattr(error, "__notes__", [])
    print_out_of_memory(job, failure, tables)  # after the error is gone, with the frames that hold the memory
    return 1


@contextlib.contextmanager
def _line_begun() -> Iterator[None]:
    """Leave no progress bar of rank 0 on the line to which an error is printed."""
    try:
        yield
    except Exception:
        begin_line()
        raise


def print_problems(error: UserError) -> None:
    """Print every problem on a line."""
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    for problem in problems:
        print(redact(f"error: {problem}"), file=sys.stderr)
