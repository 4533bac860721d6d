"""Run an example as a launcher would, in forked processes that inherit this one's imports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping

import torch

from tests.clock import HANG_SECONDS
from tests.ports import free_port

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
PATIENCE = 10.0  # seconds that the others may still take when one has failed
SHARED = ("shared memory", "shared buffer")  # the paths of the backend's report that use the host's memory


@dataclasses.dataclass
class Outcome:
    """The processes' exit statuses, what they printed, and what rank 0 wrote to ``--results``."""

    statuses: list[int | None]
    output: str
    results: dict

    def succeeded(self) -> Outcome:
        assert set(self.statuses) == {0}, f"{self.statuses}\n{self.output}"
        return self

    @property
    def losses(self) -> list[float]:
        return self.results["losses"]

    def calls(self, *paths: str) -> int:
        """Calls on some paths, or in all."""
        return sum(call["calls"] for call in self.results["calls"] if not paths or call["path"] in paths)

    def operations(self, *paths: str) -> set[str]:
        """The operations that took some paths."""
        return {call["operation"] for call in self.results["calls"] if call["path"] in paths}


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    values = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def _rank_main(script: pathlib.Path, argv: list[str], environment: Mapping[str, str], output: str) -> None:
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", **environment})  # several processes, and maybe one GPU
    # As in an activated environment, whose ninja DeepSpeed calls.
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    sys.argv = [str(script), *argv]
    sys.path.insert(0, str(script.parent))
    status = 1
    try:
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(ValueError):
            sys.stdout.flush()
        os._exit(status)


def run_example(
    name: str,
    *argv: object,
    world_size: int = 2,
    timeout: float = HANG_SECONDS,
    environments: list[dict[str, str]] | None = None,
) -> Outcome:
    """Run ``examples/<name>.py`` with the given words on ``world_size`` processes.

    Args:
        environments: what each process finds set; default: what torchrun sets.
        timeout: seconds, after which what still runs is killed, with status -9; what a failed one leaves, sooner.
    """
    port = free_port()
    context = multiprocessing.get_context("fork")
    with tempfile.NamedTemporaryFile("r") as output, tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder, "results.json")
        words = [*map(str, argv), "--results", str(results)]
        found = environments or [torchrun_environment(rank, world_size, port) for rank in range(world_size)]
        processes = [
            context.Process(target=_rank_main, args=(EXAMPLES / f"{name}.py", words, environment, output.name))
            for environment in found
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            if any(process.exitcode for process in processes):
                end = min(end, time.monotonic() + PATIENCE)
            time.sleep(0.02)
        for process in processes:
            process.kill()
            process.join()
        written = json.loads(results.read_text()) if results.exists() else {}
        return Outcome([process.exitcode for process in processes], pathlib.Path(output.name).read_text(), written)
