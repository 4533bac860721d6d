"""Processors, GPUs, and the memory that containers and limits leave."""

from __future__ import annotations

import math
import os
import resource
import sys

import torch

from smp.comm.report import readable
from smp.config import PrecisionConfig
from smp.cpu_bf16 import ensure_bf16_works
from smp.doctor.environment import set_by_user
from smp.doctor.room import Room
from smp.errors import UserError
from smp.memory.limits import control_group, memory_limit
from smp.parallel.parallelize import compute_dtype
from smp.runtime import choose_device

_GIB = 1 << 30
_BUSY_SHARE = 0.1  # of a GPU's memory that others may hold without a word
_SMALL_SHM = 256 << 20  # docker gives 64 MiB


def cores(room: Room) -> int:
    """Cores that this process may use: by its affinity, and by the quota of its control group."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = (room.read(f"{control_group(room.request.root)}/cpu.max") or "").split()
    if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
        return max(1, min(here, math.ceil(int(words[0]) / int(words[1]))))
    return here


def check_devices(room: Room) -> None:
    """GPUs against processes; where there are none, cores and threads."""
    choose_device(room.launch)  # its refusal is the finding
    if room.device.type == "cuda":
        _check_gpu(room)
        return
    if room.request.root.joinpath("proc/driver/nvidia/version").exists():
        built = torch.version.cuda
        why = "this torch is built without CUDA" if built is None else f"torch (CUDA {built}) sees none of them"
        room.warn(
            f"this host has NVIDIA's driver, but {why}: install torch's CUDA build, see CUDA_VISIBLE_DEVICES, or go on "
            f"with the CPU"
        )
    if room.launch.local_rank == 0:
        _check_cores(room)


def _check_cores(room: Room) -> None:
    available, processes = cores(room), room.launch.local_world_size
    threads = set_by_user("OMP_NUM_THREADS")
    number = int(threads) if threads is not None and threads.isascii() and threads.isdigit() else None
    data = {"cores": available, "processes": processes, "omp_num_threads": number}
    if processes > available:
        room.warn(
            f"{processes} processes share {available} core(s), and take turns: use at most {available} processes on "
            f"this host",
            **data,
        )
    elif processes > 1 and number is None:
        room.warn(
            f"OMP_NUM_THREADS is not set, so that each of {processes} processes starts a thread for every core: set "
            f"OMP_NUM_THREADS={max(1, available // processes)}",
            **data,
        )
    elif number is not None and number * processes > available:
        room.warn(
            f"{processes} processes with OMP_NUM_THREADS={number} want {number * processes} cores of {available}: set "
            f"it to {max(1, available // processes)}",
            **data,
        )
    else:
        room.ok(f"no GPU; {available} core(s) for {processes} process(es)", **data)


def _check_gpu(room: Room) -> None:
    index = room.device.index
    free, total = torch.cuda.mem_get_info(index)
    about = torch.cuda.get_device_properties(index)
    driver = next(iter((room.read("proc/driver/nvidia/version") or "").splitlines()), "")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    data = {
        "name": about.name, "free_bytes": free, "total_bytes": total, "cuda": torch.version.cuda, "nccl": nccl,
        "driver": driver, "gpus": torch.cuda.device_count(),
    }  # fmt: skip
    room.measure("gpu", data)
    # This process's own context takes some 0.5 GiB.
    if total - free > _BUSY_SHARE * total + _GIB:
        room.warn(
            f"GPU {index} ({about.name}) has {readable(free)} of {readable(total)} free: see with nvidia-smi which "
            f"other process holds the rest",
            **data,
        )
        return
    room.ok(f"{about.name}, {readable(free)} of {readable(total)} free; CUDA {torch.version.cuda}, NCCL {nccl}", **data)


def check_bf16(room: Room) -> None:
    """The trap of processors that promise more than they keep; before the process computes anything."""
    if room.device.type == "cuda":
        room.ok("computed on the GPU")
        return
    wanted = compute_dtype(room.request.section(PrecisionConfig), torch.device("cpu")) == torch.bfloat16
    try:
        ceiling = ensure_bf16_works()
    except UserError as error:
        room.say("problem" if wanted else "warning", str(error))
        return
    if ceiling is not None:
        room.warn(
            f"a bf16 matrix product dies on this CPU, which advertises instructions that it traps: set "
            f"ONEDNN_MAX_CPU_ISA={ceiling} (the training job does so by itself)",
            ceiling=ceiling,
        )
        return
    room.ok("a bf16 matrix product lives on this CPU")


def check_memory(room: Room) -> None:
    """The host's memory, and what a container or a limit leaves of it."""
    total = _of_meminfo(room, "MemTotal")
    free = _of_meminfo(room, "MemAvailable")
    group = memory_limit(room.request.root)
    limit, left = group if group is not None and (total is None or group[0] < total) else (None, 0)
    data = {"total_bytes": total, "available_bytes": free, "limit_bytes": limit}
    room.measure("host_memory", data)
    if limit is not None:
        share = "" if total is None else f" of the host's {readable(total)}"
        message = f"this container may use {readable(limit)}{share}, {readable(left)} are left"
        if left < _GIB * room.launch.local_world_size:
            room.warn(
                f"{message} for {room.launch.local_world_size} process(es), and a process that goes beyond is killed "
                f"without a word: raise the container's limit",
                **data,
                left_bytes=left,
            )
        else:
            room.ok(message, **data, left_bytes=left)
    elif total is not None and free is not None:
        room.ok(f"{readable(free)} of {readable(total)} available, no container's limit", **data)
    else:
        room.ok("this system does not tell how much memory there is")
    for name, kind in (("RLIMIT_DATA", resource.RLIMIT_DATA), ("RLIMIT_AS", resource.RLIMIT_AS)):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            flag = "-d" if kind == resource.RLIMIT_DATA else "-v"
            room.warn(f"{name} lets each process have {readable(soft)} at most: raise it with ulimit {flag} unlimited")


def _of_meminfo(room: Room, name: str) -> int | None:
    for line in (room.read("proc/meminfo") or "").splitlines():
        words = line.split()
        if words[:1] == [f"{name}:"]:
            return int(words[1]) * 1024
    return None


def check_shared_memory(room: Room) -> None:
    """``/dev/shm``, which NCCL and data workers use, and memory that may be locked."""
    folder = room.request.root / "dev/shm"
    try:
        status = os.statvfs(folder)
    except OSError as error:
        room.warn(
            f"/dev/shm cannot be used ({error.strerror}): NCCL and data workers need it; smddp does without. Start "
            f"the container with --ipc host"
        )
    else:
        size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
        data = {"size_bytes": size, "free_bytes": free}
        if free < _SMALL_SHM:
            room.warn(
                f"/dev/shm has {readable(free)} of {readable(size)} free, which NCCL or data workers may fill (smddp "
                f"does not use it): start the container with --shm-size 8g or --ipc host",
                **data,
            )
        else:
            room.ok(f"/dev/shm has {readable(free)} free", **data)
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    fabric = room.request.root / "sys/class/infiniband"
    has_fabric = fabric.is_dir() and any(fabric.iterdir())
    if has_fabric and soft != resource.RLIM_INFINITY:
        room.warn(
            f"RLIMIT_MEMLOCK is {readable(soft)}, and RDMA adapters need memory that is locked: ulimit -l unlimited "
            f"(in a container: --ulimit memlock=-1)",
            memlock_bytes=soft,
        )


def check_limits(room: Room) -> None:
    """Open files: every rank holds connections to every other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 512 + 8 * room.launch.world_size
    soft = sys.maxsize if soft == resource.RLIM_INFINITY else soft
    if soft < needed:
        room.problem(
            f"a process may open {soft} files, and {room.launch.world_size} processes with their data need about "
            f"{needed} in each: ulimit -n {max(needed, 65536) if hard in (-1, resource.RLIM_INFINITY) else hard}",
            soft=soft,
            needed=needed,
        )
        return
    room.ok(f"a process may open {soft} files", soft=soft, needed=needed)
