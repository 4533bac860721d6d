"""Start the processes of a job on this machine: ``python -m smp.launch.local --nproc_per_node N SCRIPT ...``.

Speaks torchrun's environment, so that a script cannot tell the two apart. It prints no table of failures: the exit
status is the one of the first process that failed, and the job's message is the only output. SIGTERM, SIGUSR1
and Ctrl-C are handed on to the processes, and SIGHUP as SIGTERM; they are then waited for, however long their last
checkpoint takes.

``--max_restarts N`` starts all processes again after a crash. Two ends are no crash: bad input (2) would be as bad
again, and a job that was asked to stop (75, 130) is not to be started by its own launcher.

For a job on several hosts it is started on each, with ``--nnodes``, ``--node_rank``, ``--master_addr`` and
``--master_port``: by ``srun``, ``ssh`` or Kubernetes, as ``smp launch`` writes it. See ``smp.launch.hosts``.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

import torch

from smp.environment import environment_with, malloc
from smp.environment.threads import default_threads
from smp.launch.hosts import ENDING_SECONDS, ONE_HOST, SURVIVORS_SECONDS, Attempt, Host
from smp.log import prepare_streams, say
from smp.starting import raise_on_interrupt

FINAL = (0, 2, 75, 130)
HANDED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
POLL_SECONDS = 0.02
KILLED_SECONDS = 10.0  # for one that was killed to be gone: in a call to a broken disk or device it stays


class LocalJob:
    """A job of this machine, or its part on this machine.

    Args:
        max_restarts: how often all are started again after a crash.
        host: which of the job's hosts this is.
        controlled: whether standard input names signals to hand on, a line each; at its end the job is ended.
        no_gpus: whether the processes see no GPU.
    """

    def __init__(
        self,
        command: list[str],
        processes: int,
        max_restarts: int,
        host: Host = ONE_HOST,
        *,
        controlled: bool = False,
        no_gpus: bool = False,
    ):
        self._command, self._processes, self._max_restarts = command, processes, max_restarts
        self._host, self._controlled, self._no_gpus = host, controlled, no_gpus
        self._running: list[subprocess.Popen[bytes]] = []
        self._asked_to_stop = self._stuck = False
        self._abandoned = float("inf")  # when what controls this job is gone for too long

    def run(self) -> int:
        """Run it to its end, and return its exit status."""
        # Under nohup, SIGHUP stays ignored; what a shell lets the processes behind its back ignore does not.
        deaf = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        heard = [number for number in HANDED_ON if number not in deaf]
        previous = {number: signal.signal(number, self._hand_on) for number in heard}
        if self._controlled:
            threading.Thread(target=self._obey, name="smp-control", daemon=True).start()
        try:
            for attempt in range(self._max_restarts + 1):
                status = self._attempt(attempt)
                if status in FINAL or self._asked_to_stop or self._stuck or attempt == self._max_restarts:
                    break
                say(f"launcher: the job has ended with status {status}: restart {attempt + 1} of {self._max_restarts}")
            return status
        finally:
            for process in self._running:
                process.kill()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_stop = True
        for process in self._running:
            # A no-op for one that has ended.
            process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def _obey(self) -> None:
        names = {number.name.removeprefix("SIG"): number for number in HANDED_ON}
        while line := os.read(0, 4096):
            for word in line.decode(errors="replace").split():
                if word in names:
                    os.kill(os.getpid(), names[word])
        self._abandoned = time.monotonic() + ENDING_SECONDS
        os.kill(os.getpid(), signal.SIGTERM)

    def _attempt(self, attempt: int) -> int:
        """Start all processes and wait for them; return the status of the first that failed, or 0."""
        together = Attempt(self._host, lambda: self._asked_to_stop)
        self._running.clear()
        try:
            port = together.join()
            if port is None:  # asked to stop before anything was started
                return 128 + signal.SIGTERM
            # One by one, so that a signal finds those that have started.
            for local_rank in range(self._processes):
                environment = environment_with(self._environment(local_rank, attempt, port))
                stdin = subprocess.DEVNULL if self._controlled else None
                self._running.append(subprocess.Popen(self._command, env=environment, stdin=stdin))
                if self._asked_to_stop:
                    self._running[-1].terminate()
            status = self._wait()
            return together.leave(status, in_order=status in FINAL)
        finally:
            together.close()

    def _environment(self, local_rank: int, attempt: int, port: int) -> dict[str, str]:
        size, host = self._processes, self._host
        rank, world = host.number * size + local_rank, host.hosts * size
        values = {
            "RANK": rank, "LOCAL_RANK": local_rank, "ROLE_RANK": rank, "GROUP_RANK": host.number,
            "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": world, "GROUP_WORLD_SIZE": host.hosts,
            "MASTER_ADDR": host.address, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RUN_ID": os.getpid(), "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": self._max_restarts,
        } | ({"CUDA_VISIBLE_DEVICES": ""} if self._no_gpus else {})  # fmt: skip
        own = malloc.tunables() if self._no_gpus or not torch.cuda.is_available() else {}
        return own | default_threads(size) | {name: str(value) for name, value in values.items()}

    def _wait(self) -> int:
        status, deadline, killed = 0, float("inf"), float("inf")
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
            if time.monotonic() > min(deadline, self._abandoned):
                for process in left:
                    process.kill()
                killed = min(killed, time.monotonic())
            if left and time.monotonic() > killed + KILLED_SECONDS:
                pids = ", ".join(str(process.pid) for process in left)
                say(
                    f"launcher: pid {pids} killed and not gone: a disk or device does not answer, see dmesg; left there"
                )
                self._stuck = True
                return status or 128 + signal.SIGKILL
            if left:
                time.sleep(POLL_SECONDS)
        return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smp.launch.local", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--nproc_per_node", type=int, default=2, metavar="N", help="processes to start (default 2)")
    parser.add_argument(
        "--max_restarts", type=int, default=0, metavar="N",
        help="starts all again after a crash, N times (default 0); of a job on one host",
    )  # fmt: skip
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="hosts of the job (default 1)")
    parser.add_argument("--node_rank", type=int, default=0, metavar="R", help="which of them this is, from 0")
    parser.add_argument("--master_addr", metavar="HOST", help="name or address of host 0; needed with --nnodes")
    parser.add_argument("--master_port", type=int, metavar="PORT", help="a free port of host 0; needed with --nnodes")
    parser.add_argument(
        "--controlled", action="store_true",
        help="reads names of signals to hand on from standard input (TERM, USR1, INT), and ends with it",
    )  # fmt: skip
    parser.add_argument("--no_gpus", action="store_true", help="hides this machine's GPUs from the processes")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as python -m takes it")
    parser.add_argument("script", help="Python file, or module with -m, to run in each process")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the script in ``--nproc_per_node`` processes, and return the job's exit status."""
    prepare_streams()
    parser = _parser()
    options = parser.parse_args(argv)
    for name, least in (("nproc_per_node", 1), ("max_restarts", 0), ("nnodes", 1), ("node_rank", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(options, name)}")
    host = ONE_HOST
    if options.nnodes > 1:
        if options.node_rank >= options.nnodes:
            parser.error(f"--node_rank must be below --nnodes {options.nnodes}, got {options.node_rank}")
        if not options.master_addr or not 0 < (options.master_port or 0) < 2**16:
            parser.error(f"--nnodes {options.nnodes} needs --master_addr and --master_port, the same on all hosts")
        if options.max_restarts:
            parser.error("--max_restarts is for jobs on one host: what starts this on each host is to start it again")
        host = Host(options.node_rank, options.nnodes, options.master_addr, options.master_port)
    command = [sys.executable, "-u", *(["-m"] if options.module else []), options.script, *options.arguments]
    job = LocalJob(
        command, options.nproc_per_node, options.max_restarts, host,
        controlled=options.controlled, no_gpus=options.no_gpus,
    )  # fmt: skip
    raise_on_interrupt()
    return job.run()


if __name__ == "__main__":
    sys.exit(main())
