"""Random collectives of backend smddp for a long time, every result compared with one computed locally.

    python benchmarks/soak.py --minutes 10
    python benchmarks/soak.py --minutes 1 --processes 2 --seed 7        # a trial

Operations, sizes, dtypes, reductions, layouts and groups, synchronous and asynchronous, up to eight in flight on each
rank; groups come and go. Prints a line a minute. Ends with status 1 at the first difference, when a process dies, or if
memory or open descriptors have grown. A failing call prints its case, and the run can be repeated with its seed.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import smp.comm
from smp.runtime import release_cache
from tests.comm_traffic import Traffic

# Elements: nothing, one, less than a page, and several chunks.
SIZES = (0, 1, 3, 17, 500, 1023, 1025, 4097, 20_000, 65_537, 300_001, 1_100_000)
BLOCK = 50  # calls between two looks at the clock
SETTLED = 0.25  # of the time, or one minute: what has grown by then is not counted
M_ARENA_MAX = -8  # of glibc's malloc.h
MAX_GROWTH_MIB, MAX_NEW_DESCRIPTORS = 64, 16


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _seen(traffic: Traffic) -> list[dict[str, float]]:
    """Return the steps and the memory of every rank."""
    traffic.close_groups()  # how many this rank is in, and how large they are, is chance
    release_cache(torch.device("cpu"))  # so that what remains is held by somebody
    own = {
        "calls": traffic.calls,
        "elements": traffic.elements,
        "mib": _resident_mib(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    everyone: list = [None] * traffic.world
    dist.all_gather_object(everyone, own)
    return everyone


def _line(seen: list[dict[str, float]], seconds: float) -> str:
    calls, elements = sum(s["calls"] for s in seen), sum(s["elements"] for s in seen)
    memory, descriptors = max(s["mib"] for s in seen), max(s["descriptors"] for s in seen)
    return (
        f"{seconds / 60:6.1f} min  {calls:9.0f} calls  {elements / 1e9:8.3f} G elements  "
        f"{memory:7.0f} MiB and {descriptors:3.0f} descriptors at most, no difference"
    )


def _grown(before: list[dict[str, float]], after: list[dict[str, float]]) -> list[str]:
    grown = []
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        if new["mib"] - old["mib"] > MAX_GROWTH_MIB:
            grown.append(f"rank {rank} has grown from {old['mib']:.0f} to {new['mib']:.0f} MiB")
        if new["descriptors"] - old["descriptors"] > MAX_NEW_DESCRIPTORS:
            grown.append(f"rank {rank} has {new['descriptors']:.0f} open descriptors, it had {old['descriptors']:.0f}")
    return grown


def _soak(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    # One pool of memory for all threads: with one for each, what they keep for reuse would look like a leak.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*deprecated")
    dist.init_process_group(
        "smddp", init_method=f"file://{folder}/store", rank=rank, world_size=arguments.processes,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    traffic, start = Traffic(arguments.seed, SIZES), time.monotonic()
    end = 60 * arguments.minutes
    settled, line_due, before = min(60.0, SETTLED * end), 60.0, None
    now = torch.zeros(1, dtype=torch.float64)
    while now.item() < end:
        for _ in range(BLOCK):
            traffic.step()
        traffic.finish()
        now.fill_(time.monotonic() - start)
        dist.broadcast(now, 0)  # one clock for all
        if before is None and now.item() > settled:
            before = _seen(traffic)
        if now.item() > line_due:
            line_due += 60
            seen = _seen(traffic)
            if rank == 0:
                print(_line(seen, now.item()), flush=True)
    after = _seen(traffic)
    grown = _grown(before or after, after)
    if rank == 0:
        print(_line(after, now.item()))
        print(f"seed {arguments.seed}, {arguments.processes} processes; {len(smp.comm.report())} kinds of calls")
        print("\n".join(grown) or "nothing has grown", flush=True)
    dist.destroy_process_group()
    if grown:
        raise SystemExit(1)


def _main_of_rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    try:
        _soak(rank, arguments, folder)
    except Exception:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_main_of_rank, args=(rank, arguments, folder)) for rank in range(arguments.processes)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
    print(f"failed: ranks {failed}" if failed else "passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
