"""The process in the job: process group, device, seeds, threads, and variables of the environment.

With ``smp.environment``, which reads the launcher's part of it, the only reader of the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from smp.config import CommConfig
from smp.environment import Launch, read_launch, rendezvous
from smp.environment.launch_info import NAMES
from smp.environment.threads import share_cores
from smp.errors import RankError, UserError, first_line
from smp.log import get_logger, say

logger = get_logger("train")


def launcher_serves_store() -> bool:
    """Return whether the launcher, which outlives its workers, serves the job's store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


_LAUNCHER_WATCH = "smp-launcher"  # the name of a thread
_LAUNCHER_SECONDS = 0.25


def end_with_launcher(launch: Launch) -> None:
    """From now on, end this process when torchrun or ``smp.launch.local``, if one started it, is killed.

    Raises:
        RankError: it has ended already.
    """
    # By name, as a forked child has no thread of its parent's.
    if not os.environ.get("TORCHELASTIC_RUN_ID") or _LAUNCHER_WATCH in (t.name for t in threading.enumerate()):
        return
    parent = os.getppid()
    if launcher_serves_store():
        # Whoever is the parent of one that is left behind: a launcher that lives answers since before it started this.
        host, port = rendezvous(launch)
        try:
            socket.create_connection((host, port), timeout=5.0).close()
        except ConnectionRefusedError:
            raise RankError(f"rank {launch.rank}: the launcher, which served {host}:{port}, is gone: ended") from None
        except OSError:
            pass  # reported by whoever needs the store

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LAUNCHER_SECONDS)
        say(f"rank {launch.rank}: the launcher (pid {parent}) is gone: ended")
        os._exit(1)

    threading.Thread(target=watch, name=_LAUNCHER_WATCH, daemon=True).start()


def local_world_size() -> int:
    """Return the ranks of a host; all, where the process group is not of the launcher's processes."""
    world, launch = dist.get_world_size(), read_launch()
    return launch.local_world_size if launch.world_size == world else world


def own_arguments(argv: Sequence[str] | None) -> list[str]:
    """Return the arguments without the local rank that ``deepspeed`` and torch's old launcher put in front.

    The environment has it too.

    Args:
        argv: after the program's name; None reads ``sys.argv``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    while arguments and re.fullmatch(r"--local[_-]rank=\d+", arguments[0]):
        del arguments[0]
    return arguments


def data_channel(name: str) -> str | None:
    """Return the folder that SageMaker mounts for a data channel (``SM_CHANNEL_<NAME>``), or None."""
    return os.environ.get(f"SM_CHANNEL_{name.upper()}")


def host_id_override() -> str | None:
    """Return ``SMP_HOST_ID``, which stands for this host in the search for processes to share memory with, or None.

    Collectives between processes with different names go over the network: for containers, and for tests.
    """
    return os.environ.get("SMP_HOST_ID")


def onednn_ceiling() -> str | None:
    """Return ``ONEDNN_MAX_CPU_ISA``, the highest instruction set that oneDNN may use, or None."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA")


def set_onednn_ceiling(ceiling: str | None) -> None:
    """Set or unset ``ONEDNN_MAX_CPU_ISA`` for this process, if it has not computed yet, and its children."""
    if ceiling is None:
        os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
    else:
        os.environ["ONEDNN_MAX_CPU_ISA"] = ceiling


def allocator_variable() -> str | None:
    """Return the variable that sets CUDA's allocator, or None."""
    return next((name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if os.environ.get(name)), None)


def environment_bytes(name: str, default: int, *, multiple: int, minimum: int) -> int:
    """Read a size in bytes.

    Raises:
        UserError: not an integer, below ``minimum``, or not a multiple of ``multiple``.
    """
    text = os.environ.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) < minimum or int(text) % multiple:
        what = f"a multiple of {multiple} bytes" if multiple > 1 else "a number of bytes"
        raise UserError(f"{name}={text} is not allowed: give {what}, at least {minimum}, or leave it out ({default})")
    return int(text)


def choose_device(launch: Launch) -> torch.device:
    """Return this process's device: the GPU of its local rank, or the CPU.

    Raises:
        UserError: more processes on this host than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and _sees_only_its_own_gpu(launch):
        return torch.device("cuda", 0)
    if launch.local_world_size > count:
        raise UserError(
            f"{launch.local_world_size} processes on a host with {count} GPU(s): use --nproc_per_node {count} at most, "
            f"or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    return torch.device("cuda", launch.local_rank)


def _sees_only_its_own_gpu(launch: Launch) -> bool:
    """Return whether the one visible GPU is this process's own, because srun or a wrapper hides the others.

    Where two processes were given the same one after all, NCCL refuses it.
    """
    if launch.launcher not in ("srun", "Open MPI", "MPICH", "MVAPICH"):
        return False
    if re.fullmatch(r"[^,\s]+", os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()):
        return True
    # `srun --gpus-per-task=1` and `--gpu-bind=per_task:1` may hide the others without that variable.
    gpus, everything = os.environ.get("SLURM_GPUS_PER_TASK", ""), os.environ.get("SLURM_TRES_PER_TASK", "")
    bound = re.search(r"\b(per_task|single):1\b", os.environ.get("SLURM_GPU_BIND", "")) is not None
    one = re.fullmatch(r"(\w+:)?1", gpus) is not None or re.search(r"gpu(:\w+)?[:=]1\b", everything) is not None
    return launch.launcher == "srun" and (bound or one)


def choose_backend(comm: CommConfig, device: torch.device) -> str:
    """Return the process group's backend for this device.

    Raises:
        UserError: NCCL was asked for on a CPU, or gloo on GPUs.
    """
    if comm.distributed_backend == "gloo" and device.type == "cuda":
        raise UserError(
            "--distributed_backend gloo cannot shard a model on GPUs: use nccl, leave it out, or hide the GPUs "
            "(CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    if comm.distributed_backend == "nccl" and device.type == "cpu":
        raise UserError("--distributed_backend nccl needs GPUs and none is visible: use smddp or gloo, or leave it out")
    return comm.distributed_backend or ("nccl" if device.type == "cuda" else "smddp")


def with_host(backend: str) -> str:
    """Add gloo to NCCL, over which agreements of the ranks would wait for the device, and offloaded gradients fail."""
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


_MOST_SECONDS = 1e8  # --distributed_timeout's: torch counts nanoseconds in 64 bits
_BUILT_IN = ("gloo", "nccl", "xccl", "ucc", "mpi")  # torch's own backends, where it was built with them
START_SECONDS = 300.0  # how long a job waits for all its processes; less if --distributed_timeout is


def open_store(launch: Launch, limit: datetime.timedelta) -> tuple[dist.Store, str]:
    """Open the job's store, which the launcher or rank 0 serves; return it with its address.

    Raises:
        UserError: the environment does not give its address.
        RankError: it cannot be reached, or not be served.
    """
    host, port = rendezvous(launch)
    where = f"{host}:{port}"
    serves = launch.rank == 0 and not launcher_serves_store()
    try:
        store = dist.TCPStore(host, port, is_master=serves, timeout=limit, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, ValueError) as error:
        reason = re.sub(r"\s*Exception raised from.*", "", first_line(error))
        if serves:
            raise RankError(
                f"rank 0 cannot serve the job's store at {where} ({reason}): choose another MASTER_PORT, and an "
                f"address of this host as MASTER_ADDR"
            ) from None
        raise RankError(
            f"rank {launch.rank} does not reach the job's store at {where} within {limit.total_seconds():g} s "
            f"({reason}): see that rank 0 was started, and that MASTER_ADDR and MASTER_PORT are the same for all "
            f"processes"
        ) from None
    if launch.local_world_size == launch.world_size:
        # The launcher's store outlives a restart, and with it where the processes before listened. On several hosts
        # the launchers do not count restarts alike.
        return dist.PrefixStore(f"attempt{launch.restart}", store), where
    return store, where


def _await_everyone(store: dist.Store, launch: Launch, limit: datetime.timedelta, where: str) -> None:
    """Wait until all processes of the job have come.

    Raises:
        RankError: naming those that have not.
    """
    keys = [f"started{rank}" for rank in range(launch.world_size)]
    try:
        store.set(keys[launch.rank], "1")
        store.wait(keys, limit)
    except RuntimeError:
        try:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:
            raise RankError(
                f"rank {launch.rank} has lost the job's store at {where} while it waited for the other ranks: see why "
                f"the process that serves it has ended"
            ) from None
        raise RankError(
            f"rank(s) {', '.join(missing)} of {launch.world_size} have not come to {where} within "
            f"{limit.total_seconds():g} s: start as many processes as WORLD_SIZE says ({launch.world_size}), and see "
            f"whether they failed"
        ) from None


@contextlib.contextmanager
def process_group(
    comm: CommConfig, launch: Launch, device: torch.device, *, cpu_offload: bool = False
) -> Iterator[None]:
    """Start torch.distributed for the job and stop it at the end, also for a job of one process.

    Args:
        cpu_offload: whether a GPU's process updates parameters on the CPU, which takes more than torchrun's one thread.

    Raises:
        RankError: the processes do not find each other.
    """
    added = _start_group(launch, device, with_host(choose_backend(comm, device)), comm.distributed_timeout)
    if cpu_offload and device.type == "cuda":
        share_cores()
    try:
        yield
    finally:
        dist.destroy_process_group()
        for name in added:
            os.environ.pop(name, None)


def _start_group(launch: Launch, device: torch.device, backend: str, seconds: float) -> list[str]:
    """Start the default process group; return the names of the variables added to the environment.

    Raises:
        UserError: the address of rank 0 is not set.
        RankError: the processes do not find each other.
    """
    timeout = datetime.timedelta(seconds=seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its older name
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that NCCL's flight recorder keeps
        if launch.launcher == "SageMaker" and (idle := torch.cuda.device_count() - 1):
            logger.warning("SageMaker starts one process a host, so %d GPU(s) are idle: start torchrun there.", idle)
    if launch.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return _export(launch)
    limit = min(timeout, datetime.timedelta(seconds=START_SECONDS))
    store, where = open_store(launch, limit)
    _await_everyone(store, launch, limit, where)
    store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    return _export(launch)


def _export(launch: Launch) -> list[str]:
    """Set torchrun's variables where another launcher has set others, for other libraries; return those added."""
    values = dict(zip(NAMES, launch.numbers, strict=True))
    where = dict(zip(("MASTER_ADDR", "MASTER_PORT"), rendezvous(launch), strict=True)) if launch.world_size > 1 else {}
    added = {name: str(value) for name, value in (values | where).items() if not os.environ.get(name)}
    os.environ.update(added)
    return list(added)


def init_process_group(backend: str | None = None, *, timeout: float = 1800.0) -> torch.device:
    """Start ``torch.distributed`` from whatever started this process; collective.

    Works under torchrun, ``accelerate launch``, ``deepspeed``, ``srun``, ``mpirun`` (Open MPI, MPICH, Intel MPI,
    MVAPICH) and SageMaker, and without a launcher as a job of one process. ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set where they are not, so that other libraries find
    them. End with ``torch.distributed.destroy_process_group()``. From here on the process ends within 5 s when torchrun
    or ``smp.launch.local``, if that is its parent, is killed.

    Args:
        backend: one that torch knows, such as ``"smddp"``, ``"gloo"``, ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``; None:
            NCCL on GPUs, with gloo for tensors and objects of the host, smddp on CPUs.
        timeout: seconds to wait for other ranks, in a collective; for all of them to start, 300 at most.

    Returns:
        This process's device: the GPU of its local rank, which is made the current one, or the CPU.

    Raises:
        UserError: a group runs already, the environment contradicts itself, the backend is none or does not fit, or
            there are more processes on this host than GPUs.
        RankError: the processes do not find each other; names those that are missing.
    """
    if dist.is_initialized():
        raise UserError(
            "smp.init_process_group: a process group runs already: call it instead of torch's, or leave it out"
        )
    if not 0 < timeout <= _MOST_SECONDS:
        raise UserError(
            f"smp.init_process_group: timeout {timeout} is not allowed: give seconds above 0, at most {_MOST_SECONDS:g}"
        )
    launch = read_launch()
    end_with_launcher(launch)
    device = choose_device(launch)
    backend = backend or with_host("nccl" if device.type == "cuda" else "smddp")
    _refuse_backend(backend, device)
    _start_group(launch, device, backend, timeout)
    return device


def _refuse_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that torch would fail on.

    Raises:
        UserError: it is not known or not built into this torch, is not written as torch reads it, or needs GPUs.
    """
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    built = [name for name in known if name not in _BUILT_IN or dist.is_backend_available(name)]
    usable = [name for name in built if name != "nccl" or device.type != "cpu"]
    choices = f"choose from {', '.join(usable)}, or leave it out"
    parts = [part.lower().rpartition(":") for part in backend.split(",")]
    names, devices = [name for _, _, name in parts], [kind for kind, _, _ in parts]
    if "nccl" in names and device.type == "cpu":
        raise UserError(f"smp.init_process_group: backend {backend} needs GPUs, and none is visible: {choices}")
    for name in names:
        if name not in known:
            raise UserError(f"smp.init_process_group: backend {backend} is not known: {choices}")
        if name not in usable:
            raise UserError(f"smp.init_process_group: backend {backend} is not built into this torch: {choices}")
    if (len(parts) > 1 or devices != [""]) and (
        not set(devices) <= set(dist.Backend.default_device_backend_map) or len(set(devices)) < len(devices)
    ):
        raise UserError(
            f"smp.init_process_group: backend {backend} is not allowed: write one name, or one for each kind of "
            f"device, such as cpu:gloo,cuda:nccl"
        )


def seed_everything(seed: int, data_rank: int) -> None:
    """Seed torch's generators so that ranks which have different data draw different dropout masks."""
    torch.manual_seed(seed + data_rank)


def release_cache(device: torch.device) -> None:
    """Return memory that the allocator keeps for reuse: CUDA's cache, or the C library's free pages."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc only
        libc.malloc_trim(0)
