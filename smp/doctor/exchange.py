"""What only all ranks together can see: whether they come, by which path they exchange, and how fast."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from smp import comm
from smp.comm.topology import gather, this_member
from smp.config import CommConfig
from smp.doctor.disk import existing, leave_mark, output_directory, sees_mark
from smp.doctor.pairs import Pairs, partners, slow_pairs
from smp.doctor.room import Room
from smp.errors import UserError
from smp.runtime import choose_backend

START_SHARE = 6.0  # of --timeout: the others' own checks come first
_POLL_SECONDS = 0.05
_SLOW_START = 30.0
_CLOCK_SECONDS = 1.0
_MARK_SECONDS = 10.0
_SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes of one rank
_FULL_SIZES = (*_SIZES, 64 << 20)
_MOST_GATHERED = 512 << 20  # bytes of all ranks
_BUDGET_SECONDS = 0.3  # of one operation and size
_MOST_ROUNDS = 31  # in which every rank meets another one
_MOST_SUSPECTS = 8
wall_clock = time.time


def _later_name(name: str, older: str) -> Callable[..., Any]:
    """torch 2.13's function, or what it was called before."""
    return getattr(dist, name, None) or getattr(dist, older)


def check_start(room: Room) -> None:
    """Come together, and start a process group."""
    launch, limit = room.launch, room.request.timeout
    backend = choose_backend(room.request.section(CommConfig), room.device)
    if room.device.type == "cuda":
        torch.cuda.set_device(room.device)
    store: dist.Store = dist.HashStore()
    if launch.world_size > 1:
        assert room.address is not None
        host, port = room.address
        limits = datetime.timedelta(seconds=limit)
        base = dist.TCPStore(host, port, is_master=False, timeout=limits, wait_for_workers=False)
        store = dist.PrefixStore(f"smp/doctor/{launch.restart}", base)
        _await_everyone(room, store, limit * START_SHARE * 0.9)
    started = time.perf_counter()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=datetime.timedelta(seconds=limit * 0.8),
        device_id=room.device if backend == "nccl" else None,
    )
    said = gather(
        dist.PrefixStore("members", store), "member", this_member().host, launch.rank, range(launch.world_size),
        datetime.timedelta(seconds=limit * 0.8), "started the process group",
    )  # fmt: skip
    room.state.update(backend=backend, store=store, hosts=said)
    numbers = torch.tensor([time.perf_counter() - started], dtype=torch.float64, device=room.device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    seconds = float(numbers)
    room.measure("start_seconds", seconds)
    if launch.rank == 0:
        hosts = len(set(said))
        what = f"{launch.world_size} process(es) on {hosts} host(s) started backend {backend} within {seconds:.2f} s"
        if seconds > _SLOW_START:
            room.warn(f"{what}, which is long: see whether host names are resolved quickly", seconds=seconds)
        else:
            room.ok(what, seconds=seconds, backend=backend)


def _await_everyone(room: Room, store: dist.Store, seconds: float) -> None:
    """Wait until all ranks are here, or one is known not to come.

    Raises:
        UserError: naming those that have not come.
    """
    keys = [f"here{rank}" for rank in range(room.launch.world_size)]
    store.set(keys[room.launch.rank], "1")
    end = time.monotonic() + seconds
    while not store.check(keys):
        lost = store.check(["lost"])
        if lost or time.monotonic() > end:
            missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
            why = "" if lost else f" within {seconds:.0f} s"
            raise UserError(
                f"rank(s) {missing} have not come to the process group{why}: see what they say here, and whether they "
                f"were started; nothing was exchanged"
            )
        time.sleep(_POLL_SECONDS)


def check_path(room: Room) -> None:
    """One of each collective, and the way it went."""
    comm.reset_report()
    for name, run in _operations(room, 1 << 20).items():
        if name != "nothing":
            run()
    dist.barrier()
    if room.launch.rank:
        return
    backend = room.state["backend"]
    if backend != "smddp":
        room.ok(f"backend {backend} exchanges everything itself", backend=backend)
        return
    found: dict[str, list[str]] = {}
    why: dict[str, str] = {}
    for key in sorted(comm.report()):
        found.setdefault(key.path, []).append(key.operation)
        if key.why and key.path not in ("shared memory", "shared memory and network", "network"):
            why[key.path] = key.why
    paths = {path: sorted(set(names)) for path, names in found.items()}
    room.measure("paths", paths)
    text = "; ".join(
        f"{', '.join(names)} by {path}" + (f" ({why[path]})" if path in why else "") for path, names in paths.items()
    )
    fallen = [path for path in why if path == "gloo" and "one rank" not in why[path]]
    if fallen and room.launch.world_size > 1:
        room.warn(
            f"backend smddp leaves collectives to gloo, which is slower: {text}; mend that reason", paths=paths, why=why
        )
    else:
        room.ok(f"backend smddp: {text}", paths=paths, why=why)


def _operations(room: Room, nbytes: int) -> dict[str, Callable[[], Any]]:
    """Each collective, with so many bytes of one rank."""
    size, elements = room.launch.world_size, max(1, nbytes // 4)
    one = torch.zeros(elements, device=room.device)
    whole = torch.zeros(size * elements, device=room.device)
    all_gather = _later_name("all_gather_single", "all_gather_into_tensor")
    reduce_scatter = _later_name("reduce_scatter_single", "reduce_scatter_tensor")
    return {
        "all_gather": lambda: all_gather(whole, one),
        "reduce_scatter": lambda: reduce_scatter(one, whole),
        "all_reduce": lambda: dist.all_reduce(one),
    }


def check_exchange(room: Room) -> None:
    """Times and bandwidths of the collectives, the slowest rank's."""
    size = room.launch.world_size
    rows: list[dict[str, Any]] = []
    for nbytes in _FULL_SIZES if room.request.full else _SIZES:
        if nbytes * size > _MOST_GATHERED:
            break
        for name, run in _operations(room, nbytes).items():
            seconds = _seconds(room, run)
            moved = nbytes if name == "all_reduce" else nbytes * size
            rows.append(
                {
                    "operation": name, "bytes": nbytes, "seconds": seconds,
                    "gib_per_second": moved / max(seconds, 1e-9) / (1 << 30),
                }
            )  # fmt: skip
    if room.launch.rank:
        return
    room.measure("exchange", rows)
    by_place = {(row["operation"], row["bytes"]): row for row in rows}
    largest = max(row["bytes"] for row in rows)
    latency = by_place["all_reduce", _SIZES[0]]["seconds"]
    speeds = ", ".join(
        f"{name} {by_place[name, largest]['gib_per_second']:.2g} GiB/s"
        for name in dict.fromkeys(row["operation"] for row in rows)
    )
    room.ok(f"all_reduce of 1 KiB in {latency * 1e6:.0f} µs; {largest >> 20} MiB of each rank: {speeds}")


def _seconds(room: Room, run: Callable[[], Any]) -> float:
    """The median time of an operation, of the slowest rank; collective."""

    def once() -> float:
        started = time.perf_counter()
        run()
        if room.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    once()
    first = _maximum(room, once())
    repeats = int(min(50, max(3, _BUDGET_SECONDS / max(first, 1e-6))))
    return _maximum(room, statistics.median(once() for _ in range(repeats)))


def _maximum(room: Room, value: float) -> float:
    number = torch.tensor([value], dtype=torch.float64, device=room.device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)


def _by_rank(room: Room, value: float) -> list[float]:
    """Every rank's value."""
    numbers = torch.zeros(room.launch.world_size, dtype=torch.float64, device=room.device)
    numbers[room.launch.rank] = value
    dist.all_reduce(numbers)
    return numbers.tolist()


# --- pairs


def check_pairs(room: Room) -> None:
    """Messages between every two ranks; a pair that is slow is measured once more, alone, before it is named."""
    size, rank = room.launch.world_size, room.launch.rank
    if size == 1:
        room.ok("one process: there are no pairs")
        return
    most = size if room.request.full else _MOST_ROUNDS
    pairs = Pairs(size, room.state["hosts"])
    for others in partners(size)[:most]:
        if (other := others[rank]) >= 0:
            pairs.note(rank, other, *bounce(room, rank, other))
    _share(room, pairs)
    for a, b in slow_pairs(pairs)[:_MOST_SUSPECTS]:
        again = Pairs(size, room.state["hosts"])
        if rank in (a, b):
            other = b if rank == a else a
            again.note(rank, other, *bounce(room, rank, other))
        _share(room, again)
        pairs.keep_better(a, b, again)
    if rank:
        return
    room.measure("pairs", pairs.as_rows())
    named = slow_pairs(pairs)
    for sentence, data in pairs.complaints(named):
        room.warn(sentence, **data)
    if not named:
        room.ok(pairs.summary())


def _share(room: Room, pairs: Pairs) -> None:
    """Give every rank what each pair's lower rank has measured; collective."""
    numbers = torch.tensor([pairs.latency, pairs.speed], dtype=torch.float64, device=room.device)
    dist.all_reduce(numbers)
    pairs.latency, pairs.speed = numbers.tolist()


def bounce(room: Room, rank: int, other: int) -> tuple[float, float]:
    """Send messages to another rank and back.

    Returns:
        Seconds of a small message one way, and bytes per second of large ones; the best of some.
    """
    first, device = rank < other, room.device

    def there_and_back(tensor: torch.Tensor, times: int) -> float:
        best = float("inf")
        for _ in range(times):
            started = time.perf_counter()
            for sends in (first, not first):
                dist.send(tensor, other) if sends else dist.recv(tensor, other)
            if device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        return best

    latency = there_and_back(torch.zeros(1, device=device), 20) / 2
    small = torch.zeros(16 << 10, device=device)
    seconds = there_and_back(small, 3)
    # As much as takes some milliseconds; the lower rank decides.
    most = (16 if room.request.full else 1) * (1 << 20)
    wanted = torch.tensor([min(most, max(1 << 14, int((1 << 14) * 0.02 / max(seconds, 1e-9))))], device=device)
    dist.send(wanted, other) if first else dist.recv(wanted, other)
    large = torch.zeros(int(wanted), device=device)
    seconds = there_and_back(large, 4)
    return latency, 2 * 4 * large.numel() / seconds


# --- clocks and files


def check_clocks(room: Room) -> None:
    """The differences between the hosts' clocks."""
    rounds: list[Sequence[float]] = []
    for _ in range(5):
        dist.barrier()
        rounds.append(_by_rank(room, wall_clock()))
    if room.launch.rank:
        return
    offsets = [statistics.median(times[r] - times[0] for times in rounds) for r in range(room.launch.world_size)]
    room.measure("clock_offsets_seconds", offsets)
    middle = statistics.median(offsets)
    wrong = [rank for rank, offset in enumerate(offsets) if abs(offset - middle) > _CLOCK_SECONDS]
    spread = max(offsets) - min(offsets)
    if spread > _CLOCK_SECONDS:
        wrong = wrong or [max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))]
        named = ", ".join(f"{rank} by {offsets[rank] - middle:+.1f} s" for rank in wrong[:8])
        room.warn(
            f"clocks differ by {spread:.1f} s (rank(s) {named}): times in logs and reports of hangs will mislead; let "
            f"all hosts take their time from one server (chrony, systemd-timesyncd)",
            offsets_seconds=offsets,
        )
    else:
        room.ok(f"clocks agree within {max(spread, 1e-3):.3f} s")


def check_same_directory(room: Room) -> None:
    """Whether all hosts see what rank 0 writes to the run directory."""
    launch, store = room.launch, room.state["store"]
    output = output_directory(room)
    hosts = len(set(room.state["hosts"]))
    if hosts == 1 or output is None or "local" in str(room.request.settings.get("checkpoint_type") or ""):
        if launch.rank == 0:
            why = "one host" if hosts == 1 else "no --output_dir was given" if output is None else "local checkpoints"
            room.ok(f"{why}: no file system has to be shared")
        return
    mark = None
    if launch.rank == 0:
        mark = leave_mark(output, f".doctor-mark-{time.time_ns()}")
        store.set("mark", "\n".join([str(output), str(mark or "")]))
    try:
        theirs, place = store.get("mark").decode().split("\n")
        seen = 1.0
        if place and launch.rank:
            path = existing(output) / place.rpartition("/")[2]
            seen = float(sees_mark(path, seconds=_MARK_SECONDS))
        blind = [rank for rank, yes in enumerate(_by_rank(room, seen)) if not yes]
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)
    if launch.rank:
        return
    if not place:
        room.problem(f"rank 0 cannot write to {theirs}: nothing for the others to see")
    elif blind:
        named = ", ".join(map(str, blind[:8])) + (f" and {len(blind) - 8} more" if len(blind) > 8 else "")
        room.problem(
            f"rank(s) {named} do not see what rank 0 writes to {theirs}: give an --output_dir on a file system that "
            f"all hosts share, or --checkpoint_type local",
            ranks=blind,
        )
    else:
        room.ok(f"all hosts see what rank 0 writes to {theirs}")


def check_end(room: Room) -> None:
    """Part in good order."""
    dist.barrier()
    dist.destroy_process_group()
