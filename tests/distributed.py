"""Run a function on several ranks of a process group inside a test."""

import datetime
import json
import multiprocessing
import os
import pathlib
import tempfile
import time
import traceback
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# What ranks would import, each for itself: they are forked.
from transformers.models.gpt_neox import modeling_gpt_neox  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.mistral import modeling_mistral  # noqa: F401

from tests.clock import HANG_SECONDS

# Of groups whose ranks all come in the end; less than what kills them, so that they say who has not come.
GROUP_SECONDS = HANG_SECONDS / 2


def _join_group(rank: int, world_size: int, folder: str, backend: str, timeout: float | None, prepare) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    # torch lets a rank leave before the others have finished connecting to it; those then fail over gloo.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    torch.set_num_threads(1)
    if prepare is not None:
        prepare(rank)
    if "smddp" in backend:
        import smp.comm  # noqa: F401 # registers it
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size, timeout=limit
    )


def _rank_main(rank: int, world_size: int, folder: str, fn, args, backend: str, timeout: float | None, prepare) -> None:
    try:
        _join_group(rank, world_size, folder, backend, timeout, prepare)
        fn(*args)
    except BaseException:
        # Written before leaving: the peers then fail with "connection closed", which would hide the cause.
        pathlib.Path(folder, f"rank{rank}.txt").write_text(traceback.format_exc())
        raise
    dist.destroy_process_group()


def run_distributed(
    fn, *args, world_size: int, backend: str = "gloo", timeout: float | None = None, prepare=None, limit: float = 1800
) -> None:
    """Call ``fn(*args)`` on every rank; if any rank fails, raise with every failed rank's traceback.

    Processes are forked, so imports made by the parent are free; not after CUDA is initialised. ``timeout`` is the
    group's, in seconds; ``prepare(rank)`` is called before the group is made. After ``limit`` seconds they are killed.
    """
    end = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(
            _rank_main,
            args=(world_size, folder, fn, args, backend, timeout, prepare),
            nprocs=world_size,
            join=False,
            start_method="fork",
        )
        try:
            while not ranks.join(max(0.0, end - time.monotonic())):
                if time.monotonic() > end:
                    for process in ranks.processes:
                        process.kill()
                    raise AssertionError(f"the ranks have not ended within {limit:g} s")
        except Exception as error:
            reports = [f"{p.stem}:\n{p.read_text()}" for p in sorted(pathlib.Path(folder).glob("rank*.txt"))]
            raise AssertionError("\n".join(reports) or str(error)) from None


class Outcome(NamedTuple):
    """How a rank of :func:`run_ranks` ended: its exit status (negative: the signal, None: it was still running) and
    what it returned, or its traceback."""

    status: int | None
    result: Any
    error: str


def _lone_main(rank: int, world_size: int, folder: str, fn, args, backend: str, timeout: float | None, prepare) -> None:
    try:
        _join_group(rank, world_size, folder, backend, timeout, prepare)
        outcome = {"result": fn(*args), "error": ""}
    except BaseException:
        outcome = {"result": None, "error": traceback.format_exc()}
    pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(outcome))


def run_ranks(
    fn,
    *args,
    world_size: int,
    timeout: float = GROUP_SECONDS,
    limit: float = HANG_SECONDS,
    start_method: str = "fork",
    prepare=None,
) -> list[Outcome]:
    """Call ``fn(*args)`` on every rank of a ``smddp`` group, and tell how each ended, whatever became of the others.

    Ranks leave without destroying the group. After ``limit`` seconds those that still run are killed.
    """
    context: Any = multiprocessing.get_context(start_method)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_lone_main, args=(r, world_size, folder, fn, args, "smddp", timeout, prepare))
            for r in range(world_size)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + limit
        for rank, process in enumerate(ranks):
            process.join(max(0.0, end - time.monotonic()))
            status = process.exitcode
            if status is None:
                process.kill()
                process.join()
            file = pathlib.Path(folder, f"rank{rank}.json")
            outcome = json.loads(file.read_text()) if file.exists() else {"result": None, "error": ""}
            outcomes.append(Outcome(status, **outcome))
    return outcomes


def signal_others(key: str) -> None:
    """Tell the other ranks, beside any collective, that this one has got to ``key``."""
    dist.distributed_c10d._get_default_store().set(f"test/{key}", "1")


def wait_for(*keys: str) -> None:
    """Wait until some rank has called :func:`signal_others` for each key."""
    store = dist.distributed_c10d._get_default_store()
    store.wait([f"test/{key}" for key in keys], datetime.timedelta(seconds=HANG_SECONDS))
