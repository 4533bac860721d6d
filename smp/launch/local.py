"""Start the processes of a job on this machine: ``python -m smp.launch.local --nproc_per_node N SCRIPT ...``.

Speaks torchrun's environment, so that a script cannot tell the two apart. It prints no table of failures: the exit
status is the one of the first process that failed, and the job's own message is all there is to read. SIGTERM, SIGUSR1
and Ctrl-C are handed on to the processes, which are then waited for, however long their last checkpoint takes.

``--max_restarts N`` starts all processes again after a crash. Two ends are no crash: bad input (2) would be as bad
again, and a job that was asked to stop (75, 130) is not to be started by its own launcher.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

from torch.distributed import TCPStore

from smp.runtime import environment_with, set_default_threads

FINAL = (0, 2, 75, 130)
HANDED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SURVIVORS_SECONDS = 5.0  # for those that outlive a crash to say what they have lost
ENDING_SECONDS = 60.0  # for those that are ending in good order
POLL_SECONDS = 0.02


class LocalJob:
    """A job of this machine.

    Args:
        command: what each process runs.
        processes: their number.
        max_restarts: how often all are started again after a crash.
    """

    def __init__(self, command: list[str], processes: int, max_restarts: int):
        self._command, self._processes, self._max_restarts = command, processes, max_restarts
        self._running: list[subprocess.Popen[bytes]] = []
        self._asked_to_stop = False

    def run(self) -> int:
        """Run it to its end; returns its exit status."""
        previous = {number: signal.signal(number, self._hand_on) for number in HANDED_ON}
        try:
            for attempt in range(self._max_restarts + 1):
                status = self._attempt(attempt)
                if status in FINAL or self._asked_to_stop or attempt == self._max_restarts:
                    break
                print(
                    f"launcher: the job has ended with status {status}: restart {attempt + 1} of {self._max_restarts}",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            return status
        finally:
            for process in self._running:
                process.kill()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_stop = True
        for process in self._running:
            process.send_signal(number)  # nothing happens to one that has ended

    def _attempt(self, attempt: int) -> int:
        """Start all processes and wait for them; returns the status of the first that failed, or 0."""
        # A fresh store for each attempt, on the loopback interface alone.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        try:
            # One by one, so that a signal finds those that are there.
            self._running.clear()
            for rank in range(self._processes):
                environment = environment_with(self._environment(rank, attempt, port))
                self._running.append(subprocess.Popen(self._command, env=environment))
                if self._asked_to_stop:
                    self._running[-1].terminate()
            return self._wait()
        finally:
            del store

    def _environment(self, rank: int, attempt: int, port: int) -> dict[str, str]:
        size = self._processes
        values = {
            "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0,
            "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "GROUP_WORLD_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RUN_ID": os.getpid(), "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": self._max_restarts,
        }  # fmt: skip
        return {name: str(value) for name, value in values.items()}

    def _wait(self) -> int:
        status, deadline = 0, float("inf")
        left = list(self._running)
        while left:
            ended = [process for process in left if process.poll() is not None]
            left = [process for process in left if process not in ended]
            failed = [process.returncode for process in ended if process.returncode]
            if failed and not status:
                first = min(failed)  # of those that ended together, one that was killed is the cause
                status = first if first > 0 else 128 - first
                patience = ENDING_SECONDS if status in FINAL else SURVIVORS_SECONDS
                deadline = time.monotonic() + patience
            if time.monotonic() > deadline:
                for process in left:
                    process.kill()
            if left:
                time.sleep(POLL_SECONDS)
        return status


def main(argv: list[str] | None = None) -> int:
    """Run the script in ``--nproc_per_node`` processes; returns the job's exit status."""
    parser = argparse.ArgumentParser(prog="smp.launch.local", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nproc_per_node", type=int, default=2, metavar="N", help="processes to start (default 2)")
    parser.add_argument(
        "--max_restarts", type=int, default=0, metavar="N", help="starts all again after a crash, N times (default 0)"
    )
    parser.add_argument("script", help="Python file to run in each process")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    options = parser.parse_args(argv)
    if options.nproc_per_node < 1:
        parser.error(f"--nproc_per_node must be at least 1, got {options.nproc_per_node}")
    if options.max_restarts < 0:
        parser.error(f"--max_restarts must be at least 0, got {options.max_restarts}")
    set_default_threads(options.nproc_per_node)
    command = [sys.executable, "-u", options.script, *options.arguments]
    return LocalJob(command, options.nproc_per_node, options.max_restarts).run()


if __name__ == "__main__":
    sys.exit(main())
