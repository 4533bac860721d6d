"""Run the training job of ``train_lib.py`` in forked processes, as torchrun would start it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

import train_lib
from smp.checkpoint.directory import find_checkpoints
from smp.checkpoint.hf_export import export_hf  # noqa: F401  imported before the ranks are forked
from smp.checkpoint.manifest import problems_of_files, read_manifest
from smp.train import report
from tests.clock import HANG_SECONDS, wait_until
from tests.ports import free_port

# A model small enough for a test, in SMP v2's own flags.
LLAMA = (
    "--model_type llama_v2 --hidden_width 32 --num_layers 2 --num_heads 4 --num_key_value_heads 2 "
    "--llama_intermediate_size 48 --vocab_size 64 --max_context_width 16"
).split()
NEOX = (
    "--model_type gpt_neox --hidden_width 32 --num_layers 2 --num_heads 4 --vocab_size 64 --max_context_width 16"
).split()


@dataclasses.dataclass
class Outcome:
    """What a job did: each process's exit status, and what all of them printed."""

    statuses: list[int]
    output: str

    def succeeded(self) -> Outcome:
        assert set(self.statuses) == {0}, self.output
        return self


def no_curves(run_dir: pathlib.Path) -> str:
    """Draw nothing: it takes longer than the steps of so small a job; test_output.py sees it drawn."""
    return ""


def _process(
    rank: int, world_size: int, port: int, argv: list[str], output: str, data_limit: int | None = None, prepare=None
) -> None:
    if prepare is not None:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        prepare(rank)
    if data_limit is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        unlimited = hard == resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_DATA, (data_limit if unlimited else min(data_limit, hard), hard))
    if world_size > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    report.write_curves = no_curves
    status = 1
    try:
        status = train_lib.main(argv)
    finally:
        with contextlib.suppress(ValueError):
            sys.stdout.flush()
        if sys.exc_info()[0] is not None:
            import traceback

            traceback.print_exc()
        os._exit(status)


def _serve_store(listener: socket.socket) -> None:
    port, descriptor = listener.getsockname()[1], listener.detach()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    while store:
        signal.pause()


class RunningJob:
    """A job whose processes run; made by :func:`running_job`."""

    def __init__(self, processes: list, output: pathlib.Path):
        self.processes, self._output = processes, output

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [process.pid for process in self.processes]

    @property
    def output(self) -> str:
        """What they have printed so far."""
        return self._output.read_text()

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, or to all if none is named."""
        for rank in ranks or range(len(self.processes)):
            os.kill(self.pids[rank], number)

    def wait_until(self, reached: Callable[[], object]) -> None:
        """Wait until ``reached()`` is true, while all ranks run."""
        alive = lambda: all(process.is_alive() for process in self.processes)  # noqa: E731
        wait_until(reached, alive=alive, said=lambda: self.output)

    def wait(self) -> Outcome:
        """Wait for the ranks' ends; -1 is the status of one that hangs."""
        end = time.monotonic() + HANG_SECONDS
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        return Outcome([-1 if p.exitcode is None else p.exitcode for p in self.processes], self.output)


@contextlib.contextmanager
def running_job(
    *argv: object, world_size: int = 1, data_limit: int | None = None, prepare=None
) -> Iterator[RunningJob]:
    """Start the job with the given words; what still runs in the end is killed. Arguments: as of `run_job`."""
    words = [str(word) for word in argv]
    with tempfile.NamedTemporaryFile("r") as output, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1] if prepare is not None else free_port()
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=_process, args=(rank, world_size, port, words, output.name, data_limit, prepare))
            for rank in range(world_size)
        ]
        server = context.Process(target=_serve_store, args=(listener,))
        if prepare is not None:
            server.start()
        listener.close()
        for process in processes:
            process.start()
        try:
            yield RunningJob(processes, pathlib.Path(output.name))
        finally:
            for process in processes if prepare is None else [*processes, server]:
                process.kill()
                process.join()


def run_job(*argv: object, world_size: int = 1, data_limit: int | None = None, prepare=None) -> Outcome:
    """Run the job with the given words; everything in fresh processes that inherit this one's imports.

    ``data_limit`` is the most bytes that each process may allocate; ``prepare(rank)`` is called in each first, and
    another process then serves the job's store, as torchrun does.
    """
    with running_job(*argv, world_size=world_size, data_limit=data_limit, prepare=prepare) as job:
        return job.wait()


def read_metrics(run_dir: pathlib.Path) -> list[dict]:
    """The training lines of ``metrics.jsonl``."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def losses(run_dir: pathlib.Path) -> list[float]:
    """The loss of every logged step, in order."""
    return [line["loss"] for line in read_metrics(run_dir)]


def steps_of_valid(checkpoints: pathlib.Path, name: str = "llama_v2") -> list[int]:
    """Steps of the checkpoints in a directory, all of which must be valid."""
    found = find_checkpoints(checkpoints, name)
    for checkpoint in found:
        assert problems_of_files(checkpoint.path, read_manifest(checkpoint.path), content=True) == []
    return [checkpoint.step for checkpoint in found]


def flip(file: pathlib.Path) -> None:
    """Change a bit of a tensor."""
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def tensors_in(checkpoint: pathlib.Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    return {f"{f.name}/{k}": v for f in sorted(checkpoint.glob("*.safetensors")) for k, v in load_file(f).items()}


def tensors(run_dir: pathlib.Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a run's checkpoint of a step."""
    (checkpoint,) = (run_dir / "checkpoints").glob(f"*-{step}steps")
    return tensors_in(checkpoint)


def assert_same_tensors(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    """They are equal, bit for bit."""
    assert one.keys() == two.keys() and one
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert not different, different


def assert_resumes(folder: pathlib.Path, *argv: object, at: int, steps: int, world_size: int = 2) -> pathlib.Path:
    """A run that ends at a step and is resumed is one that does not end there, bit for bit; returns its directory."""
    whole, parts = folder / "whole", folder / "parts"
    run_job(*argv, "--max_steps", steps, "--output_dir", whole, world_size=world_size).succeeded()
    run_job(*argv, "--max_steps", at, "--output_dir", parts, world_size=world_size).succeeded()
    resume = ["--max_steps", steps, "--output_dir", parts, "--resume_from_checkpoint", "latest"]
    run_job(*argv, *resume, world_size=world_size).succeeded()
    assert [line["step"] for line in read_metrics(parts)] == list(range(1, steps + 1))
    assert losses(parts) == losses(whole)
    assert_same_tensors(tensors(parts, steps), tensors(whole, steps))
    return parts
