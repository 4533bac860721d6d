"""Processors, GPUs, and the memory that containers and limits leave."""

from __future__ import annotations

import math
import os
import resource
import sys

import torch

from smp.cpu_bf16 import ensure_bf16_works
from smp.doctor.check import CheckContext
from smp.doctor.system import variable
from smp.environment.threads import available_cores
from smp.errors import UserError
from smp.memory.limits import control_group, meminfo, memory_limit
from smp.parallel.parallelize import compute_dtype
from smp.runtime import choose_device
from smp.units import GIB, readable

_BUSY_SHARE = 0.1  # of a GPU's memory that others may hold without a warning
_SMALL_SHM = 256 << 20  # docker gives 64 MiB


def cores(ctx: CheckContext) -> int:
    """Return the cores that this process may use: by its affinity, and by the quota of its control group."""
    quota, _, period = (ctx.read(f"{control_group(ctx.request.root)}/cpu.max") or "").partition(" ")
    allowed = math.ceil(int(quota) / int(period)) if quota.isdigit() and period.isdigit() else sys.maxsize
    return min(available_cores(), max(1, allowed))


def check_devices(ctx: CheckContext) -> None:
    """Compare processes with GPUs; where there are none, with cores and threads."""
    choose_device(ctx.launch)  # its refusal is the finding
    if ctx.device.type == "cuda":
        _check_gpu(ctx)
        return
    if ctx.request.root.joinpath("proc/driver/nvidia/version").exists():
        built = torch.version.cuda
        why = "this torch is built without CUDA" if built is None else f"torch (CUDA {built}) sees none of them"
        ctx.warn(
            f"this host has NVIDIA's driver, but {why}: install torch's CUDA build, see CUDA_VISIBLE_DEVICES, or "
            f"continue on the CPU"
        )
    if ctx.launch.local_rank == 0:
        _check_cores(ctx)


def _check_cores(ctx: CheckContext) -> None:
    available, processes = cores(ctx), ctx.launch.local_world_size
    threads = variable("OMP_NUM_THREADS")
    number = int(threads) if threads is not None and threads.isascii() and threads.isdigit() else None
    data = {"cores": available, "processes": processes, "omp_num_threads": number}
    if processes > available:
        ctx.warn(
            f"{processes} processes share {available} core(s), and take turns: use at most {available} processes on "
            f"this host",
            **data,
        )
    elif (processes > 1 and number is None) or (number or 0) * processes > available:
        what = "is not set, which is a thread for every core" if number is None else f"is {number}"
        ctx.warn(
            f"OMP_NUM_THREADS {what}, in each of {processes} processes on {available} core(s): set it to "
            f"{max(1, available // processes)}",
            **data,
        )
    else:
        ctx.ok(f"no GPU; {available} core(s) for {processes} process(es)", **data)


def _check_gpu(ctx: CheckContext) -> None:
    index = ctx.device.index
    free, total = torch.cuda.mem_get_info(index)
    about = torch.cuda.get_device_properties(index)
    driver = next(iter((ctx.read("proc/driver/nvidia/version") or "").splitlines()), "")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    data = {
        "name": about.name, "free_bytes": free, "total_bytes": total, "cuda": torch.version.cuda, "nccl": nccl,
        "driver": driver, "gpus": torch.cuda.device_count(),
    }  # fmt: skip
    ctx.measure("gpu", data)
    # This process's own context takes some 0.5 GiB.
    if total - free > _BUSY_SHARE * total + GIB:
        ctx.warn(
            f"GPU {index} ({about.name}) has {readable(free)} of {readable(total)} free: see with nvidia-smi which "
            f"other process uses the rest",
            **data,
        )
        return
    ctx.ok(f"{about.name}, {readable(free)} of {readable(total)} free; CUDA {torch.version.cuda}, NCCL {nccl}", **data)


def check_bf16(ctx: CheckContext) -> None:
    """Try a bf16 product, which some processors advertise and trap; before the process computes anything."""
    if ctx.device.type == "cuda":
        ctx.ok("computed on the GPU")
        return
    wanted = compute_dtype(ctx.request.config.precision, torch.device("cpu")) == torch.bfloat16
    try:
        ceiling = ensure_bf16_works()
    except UserError as error:
        ctx.add("problem" if wanted else "warning", str(error))
        return
    if ceiling is not None:
        ctx.warn(
            f"a bf16 matrix product dies on this CPU, which advertises instructions that it traps: set "
            f"ONEDNN_MAX_CPU_ISA={ceiling} (the training job does so by itself)",
            ceiling=ceiling,
        )
        return
    ctx.ok("bf16 matrix products work on this CPU")


def check_memory(ctx: CheckContext) -> None:
    """Report the host's memory, and what a container or a limit leaves of it."""
    host = meminfo(ctx.request.root)
    total, free = host.get("MemTotal"), host.get("MemAvailable")
    group = memory_limit(ctx.request.root)
    limit, left = group if group is not None and (total is None or group[0] < total) else (None, 0)
    data = {"total_bytes": total, "available_bytes": free, "limit_bytes": limit}
    ctx.measure("host_memory", data)
    if limit is not None:
        share = "" if total is None else f" of the host's {readable(total)}"
        message = f"this container may use {readable(limit)}{share}, {readable(left)} are left"
        if left < GIB * ctx.launch.local_world_size:
            ctx.warn(
                f"{message} for {ctx.launch.local_world_size} process(es), and a process that goes beyond is killed "
                f"without a word: raise the container's limit",
                **data,
                left_bytes=left,
            )
        else:
            ctx.ok(message, **data, left_bytes=left)
    elif total is not None and free is not None:
        ctx.ok(f"{readable(free)} of {readable(total)} available, no container's limit", **data)
    else:
        ctx.ok("this system does not tell how much memory there is")
    for name, kind in (("RLIMIT_DATA", resource.RLIMIT_DATA), ("RLIMIT_AS", resource.RLIMIT_AS)):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            flag = "-d" if kind == resource.RLIMIT_DATA else "-v"
            ctx.warn(f"{name} lets each process have {readable(soft)} at most: raise it with ulimit {flag} unlimited")


def check_shared_memory(ctx: CheckContext) -> None:
    """Look at ``/dev/shm``, which NCCL and data workers use, and at the limit on locked memory."""
    folder = ctx.request.root / "dev/shm"
    try:
        status = os.statvfs(folder)
    except OSError as error:
        ctx.warn(
            f"/dev/shm cannot be used ({error.strerror}): NCCL and data workers need it; smddp does without. Start "
            f"the container with --ipc host"
        )
    else:
        size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
        data = {"size_bytes": size, "free_bytes": free}
        if free < _SMALL_SHM:
            ctx.warn(
                f"/dev/shm has {readable(free)} of {readable(size)} free, which NCCL or data workers may fill (smddp "
                f"does not use it): start the container with --shm-size 8g or --ipc host",
                **data,
            )
        else:
            ctx.ok(f"/dev/shm has {readable(free)} free", **data)
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    fabric = ctx.request.root / "sys/class/infiniband"
    has_fabric = fabric.is_dir() and any(fabric.iterdir())
    if has_fabric and soft != resource.RLIM_INFINITY:
        ctx.warn(
            f"RLIMIT_MEMLOCK is {readable(soft)}, and RDMA adapters need memory that is locked: ulimit -l unlimited "
            f"(in a container: --ulimit memlock=-1)",
            memlock_bytes=soft,
        )


def check_limits(ctx: CheckContext) -> None:
    """Compare the limit on open files with the connections of every rank to every other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 512 + 8 * ctx.launch.world_size
    soft = sys.maxsize if soft == resource.RLIM_INFINITY else soft
    if soft < needed:
        ctx.problem(
            f"a process may open {soft} files, and {ctx.launch.world_size} processes with their data need about "
            f"{needed} in each: ulimit -n {max(needed, 65536) if hard in (-1, resource.RLIM_INFINITY) else hard}",
            soft=soft,
            needed=needed,
        )
        return
    ctx.ok(f"a process may open {soft} files", soft=soft, needed=needed)
