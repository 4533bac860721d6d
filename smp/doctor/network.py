"""The checks of all ranks together: their start, the paths and the speed of collectives, and a shared directory."""

from __future__ import annotations

import contextlib
import datetime
import os
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from smp import comm
from smp.checkpoint.directory import nearest_existing
from smp.comm.cuda import all_gather_single, reduce_scatter_single
from smp.comm.topology import this_member
from smp.doctor.check import CheckContext
from smp.doctor.disk import output_directory
from smp.doctor.report import listed
from smp.errors import UserError
from smp.runtime import choose_backend, open_store, with_host
from smp.units import GIB, readable

STORE = "smp/doctor"  # prefix of the ranks' keys in the job's store
START_SHARE = 6.0  # of --timeout: the others' own checks come first
_POLL_SECONDS = 0.05
_SLOW_START = 30.0
_CLOCK_SECONDS = 1.0
_MARK_SECONDS = 10.0
_SHORT, _LONG, _FULL_LONG = 1 << 10, 16 << 20, 64 << 20  # bytes of one rank
_MOST_GATHERED = 512 << 20  # bytes of all ranks
_BUDGET_SECONDS = 0.3  # of one operation and size
wall_clock = time.time


def check_start(ctx: CheckContext) -> None:
    """Wait for all ranks, and start a process group."""
    launch, limit = ctx.launch, ctx.request.timeout
    backend = choose_backend(ctx.request.config.comm, ctx.device)
    store: dist.Store = dist.HashStore()
    if launch.world_size > 1:
        base, _ = open_store(launch, datetime.timedelta(seconds=limit))
        store = dist.PrefixStore(f"{STORE}/{launch.restart}", base)
        _await_everyone(ctx, store, limit * START_SHARE * 0.9)
    started = time.perf_counter()
    dist.init_process_group(
        with_host(backend),
        store=dist.PrefixStore("group", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=datetime.timedelta(seconds=limit * 0.8),
    )
    said = _of_all_ranks(ctx, (this_member().host, time.perf_counter() - started))
    hosts, seconds = [host for host, _ in said], max(each for _, each in said)
    ctx.state.update(backend=backend, store=store, hosts=hosts)
    ctx.measure("start_seconds", seconds)
    if launch.rank == 0:
        size = f"{launch.world_size} process(es) on {len(set(hosts))} host(s)"
        what = f"{size} started backend {backend} within {seconds:.2f} s"
        if seconds > _SLOW_START:
            ctx.warn(f"{what}, which is long: see whether host names are resolved quickly", seconds=seconds)
        else:
            ctx.ok(what, seconds=seconds, backend=backend)


def _await_everyone(ctx: CheckContext, store: dist.Store, seconds: float) -> None:
    """Wait until all ranks are here, or one is known not to come.

    Raises:
        UserError: naming those that have not come.
    """
    keys = [f"here{rank}" for rank in range(ctx.launch.world_size)]
    store.set(keys[ctx.launch.rank], "1")
    end = time.monotonic() + seconds
    while not store.check(keys):
        lost = store.check(["lost"])
        if lost or time.monotonic() > end:
            missing = listed([rank for rank, key in enumerate(keys) if not store.check([key])])
            why = "" if lost else f" within {seconds:.0f} s"
            raise UserError(
                f"rank(s) {missing} have not come to the process group{why}: see what they say here, and whether they "
                f"were started; no collective was run"
            )
        time.sleep(_POLL_SECONDS)


def check_exchange(ctx: CheckContext) -> None:
    """Measure each collective for a short and a long message, and report the path that it took."""
    comm.reset_report()
    size, longest = ctx.launch.world_size, _FULL_LONG if ctx.request.full else _LONG
    rows: list[dict[str, Any]] = []
    for nbytes in (_SHORT, max(_SHORT, min(longest, _MOST_GATHERED // size))):
        for name, run in _operations(ctx, nbytes).items():
            seconds = _seconds(ctx, run)
            moved = nbytes if name == "all_reduce" else nbytes * size
            speed = moved / max(seconds, 1e-9) / GIB
            rows.append({"operation": name, "bytes": nbytes, "seconds": seconds, "gib_per_second": speed})
    if ctx.launch.rank:
        return
    ctx.measure("exchange", rows)
    latency = next(row["seconds"] for row in rows if row["operation"] == "all_reduce")
    speeds = ", ".join(f"{row['operation']} {row['gib_per_second']:.2g} GiB/s" for row in rows[len(rows) // 2 :])
    measured = f"all_reduce of 1 KiB in {latency * 1e6:.0f} µs; {readable(rows[-1]['bytes'])} of each rank: {speeds}"
    _add_paths(ctx, measured)


def _add_paths(ctx: CheckContext, measured: str) -> None:
    """Report the paths that the backend took, and how fast that was."""
    backend = ctx.state["backend"]
    if backend != "smddp":
        ctx.ok(f"backend {backend} runs all collectives itself; {measured}", backend=backend)
        return
    paths: dict[str, set[str]] = {}
    why: dict[str, str] = {}
    for key in sorted(comm.report()):
        paths.setdefault(key.path, set()).add(key.operation)
        if key.why and key.path not in ("shared memory", "shared memory and network", "network"):
            why[key.path] = key.why
    found = {path: sorted(names) for path, names in paths.items()}
    ctx.measure("paths", found)
    text = "; ".join(
        f"{', '.join(names)} by {path}" + (f" ({why[path]})" if path in why else "") for path, names in found.items()
    )
    if "one rank" not in why.get("gloo", "one rank") and ctx.launch.world_size > 1:
        ctx.warn(
            f"backend smddp leaves collectives to gloo, which is slower: {text}; mend that reason; {measured}",
            paths=found, why=why,
        )  # fmt: skip
    else:
        ctx.ok(f"backend smddp: {text}; {measured}", paths=found, why=why)


def _operations(ctx: CheckContext, nbytes: int) -> dict[str, Callable[[], Any]]:
    """Return each collective by name, with ``nbytes`` of one rank."""
    size, elements = ctx.launch.world_size, max(1, nbytes // 4)
    one = torch.zeros(elements, device=ctx.device)
    full = torch.zeros(size * elements, device=ctx.device)
    return {
        "all_gather": lambda: all_gather_single(full, one),
        "reduce_scatter": lambda: reduce_scatter_single(one, full),
        "all_reduce": lambda: dist.all_reduce(one),
    }


def _seconds(ctx: CheckContext, run: Callable[[], Any]) -> float:
    """Return the median seconds of an operation on the slowest rank; collective."""

    def once() -> float:
        started = time.perf_counter()
        run()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize(ctx.device)
        return time.perf_counter() - started

    once()
    first = max(_of_all_ranks(ctx, once()))
    repeats = int(min(50, max(3, _BUDGET_SECONDS / max(first, 1e-6))))
    return max(_of_all_ranks(ctx, statistics.median(once() for _ in range(repeats))))


def _of_all_ranks(ctx: CheckContext, value: Any) -> list[Any]:
    """Gather every rank's value; collective."""
    values = [None] * ctx.launch.world_size
    dist.all_gather_object(values, value)
    return values


def check_clocks(ctx: CheckContext) -> None:
    """Compare the hosts' clocks."""
    rounds: list[Sequence[float]] = []
    for _ in range(5):
        dist.barrier()
        rounds.append(_of_all_ranks(ctx, wall_clock()))
    if ctx.launch.rank:
        return
    offsets = [statistics.median(times[r] - times[0] for times in rounds) for r in range(ctx.launch.world_size)]
    ctx.measure("clock_offsets_seconds", offsets)
    middle = statistics.median(offsets)
    wrong = [rank for rank, offset in enumerate(offsets) if abs(offset - middle) > _CLOCK_SECONDS]
    spread = max(offsets) - min(offsets)
    if spread > _CLOCK_SECONDS:
        wrong = wrong or [max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))]
        named = ", ".join(f"{rank} by {offsets[rank] - middle:+.1f} s" for rank in wrong[:8])
        ctx.warn(
            f"clocks differ by {spread:.1f} s (rank(s) {named}): times in logs and reports of hangs will mislead; let "
            f"all hosts take their time from one server (chrony, systemd-timesyncd)",
            offsets_seconds=offsets,
        )
    else:
        ctx.ok(f"clocks agree within {max(spread, 1e-3):.3f} s")


def check_same_directory(ctx: CheckContext) -> None:
    """Look on all hosts for what rank 0 writes to the run directory."""
    rank, store, hosts = ctx.launch.rank, ctx.state["store"], len(set(ctx.state["hosts"]))
    output = output_directory(ctx)
    if hosts == 1 or output is None or ctx.request.config.checkpoint.is_local:
        if rank == 0:
            why = "one host" if hosts == 1 else "no --output_dir was given" if output is None else "local checkpoints"
            ctx.ok(f"{why}: no file system has to be shared")
        return
    mark = nearest_existing(output) / f".doctor-{uuid.uuid4().hex}"
    if rank == 0:
        with contextlib.suppress(OSError):
            mark.touch()
        store.set("mark", mark.name if mark.exists() else "")
    name, end = store.get("mark").decode(), time.monotonic() + _MARK_SECONDS
    # Network file systems show it late; listing makes NFS look again.
    while name and name not in os.listdir(mark.parent) and time.monotonic() < end:
        time.sleep(0.1)
    seen = _of_all_ranks(ctx, not name or name in os.listdir(mark.parent))
    if rank:
        return
    mark.unlink(missing_ok=True)
    blind = [other for other, sees in enumerate(seen) if not sees]
    if not name:
        ctx.problem(f"rank 0 cannot write to {output}: nothing for the others to see")
    elif blind:
        ctx.problem(
            f"rank(s) {listed(blind)} do not see what rank 0 writes to {output}: give an --output_dir on a file system "
            f"that all hosts share, or --checkpoint_type local",
            ranks=blind,
        )
    else:
        ctx.ok(f"all hosts see what rank 0 writes to {output}")


def check_end(ctx: CheckContext) -> None:
    """End the process group."""
    dist.barrier()
    dist.destroy_process_group()
