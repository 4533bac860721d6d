"""Start the processes of a job on this machine: ``python -m smp.launch.local --nproc_per_node N SCRIPT ...``.

torchrun's engine, without its table of failures: the exit status is the one of the first process that failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from smp.runtime import set_default_threads


def main(argv: list[str] | None = None) -> int:
    """Run the script in ``--nproc_per_node`` processes; returns the job's exit status."""
    parser = argparse.ArgumentParser(prog="smp.launch.local", description=__doc__)
    parser.add_argument("--nproc_per_node", type=int, default=2, metavar="N", help="processes to start (default 2)")
    parser.add_argument("script", help="Python file to run in each process")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    options = parser.parse_args(argv)
    if options.nproc_per_node < 1:
        parser.error(f"--nproc_per_node must be at least 1, got {options.nproc_per_node}")
    set_default_threads(options.nproc_per_node)
    # The job's own message is enough; the engine would add a page to it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.nproc_per_node,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-u", options.script, *options.arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
