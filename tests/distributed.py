"""Run a function on several ranks of a gloo process group inside a test."""

import os
import pathlib
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank_main(rank: int, world_size: int, folder: str, fn, args) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    try:
        fn(*args)
    except BaseException:
        # Written before leaving: the peers then fail with "connection closed", which would hide the cause.
        pathlib.Path(folder, f"rank{rank}.txt").write_text(traceback.format_exc())
        raise
    dist.destroy_process_group()


def run_distributed(fn, *args, world_size: int) -> None:
    """Call ``fn(*args)`` on every rank; if any rank fails, raise with every failed rank's traceback.

    Processes are forked, so imports made by the parent are free; not after CUDA is initialised.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(_rank_main, args=(world_size, folder, fn, args), nprocs=world_size, start_method="fork")
        except Exception as error:
            reports = [f"{p.stem}:\n{p.read_text()}" for p in sorted(pathlib.Path(folder).glob("rank*.txt"))]
            raise AssertionError("\n".join(reports) or str(error)) from None
