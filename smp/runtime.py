"""The process's place in the job: ranks from the launcher, the process group, the device, seeds.

The only reader of the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import gc
import os
import re
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from smp.config import CommConfig
from smp.errors import RankError, UserError


@dataclasses.dataclass(frozen=True)
class Launch:
    """Where this process stands among the processes of the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes shared files and prints."""
        return self.rank == 0


def read_launch() -> Launch:
    """Read the ranks that torchrun sets; without them the job is one process.

    Raises:
        UserError: some of the variables are set and others are not, or one is no number.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = {name: os.environ.get(name) for name in names}
    if values["RANK"] is None and values["WORLD_SIZE"] is None:
        return Launch()
    missing = [name for name, value in values.items() if not (value or "").isdigit()]
    if missing:
        raise UserError(
            f"the environment sets only part of what torchrun sets: {', '.join(missing)} missing or not a number; "
            f"start with `torchrun --nproc_per_node N train_lib.py ...`, or unset RANK and WORLD_SIZE for one process"
        )
    rank, world_size, local_rank, local_world_size = (int(values[name] or 0) for name in names)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(rank, world_size, local_rank, local_world_size, int(restart) if restart.isdigit() else 0)


def launcher_serves_store() -> bool:
    """Whether the job's store is served by its launcher, which outlives its workers, and not by rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launcher_pid() -> int | None:
    """The process that started this one, if that is a launcher without which it should not go on."""
    return os.getppid() if os.environ.get("TORCHELASTIC_RUN_ID") else None


def environment_with(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with changes, for one to be started."""
    return {**os.environ, **changes}


def data_channel(name: str) -> str | None:
    """The folder that SageMaker mounts for a data channel (``SM_CHANNEL_<NAME>``), if there is one."""
    return os.environ.get(f"SM_CHANNEL_{name.upper()}")


def host_id_override() -> str | None:
    """``SMP_HOST_ID``: a name that stands for this host in the search for processes to share memory with.

    Processes with different names exchange over the network even on one machine: for containers, and for tests.
    """
    return os.environ.get("SMP_HOST_ID")


def onednn_ceiling() -> str | None:
    """``ONEDNN_MAX_CPU_ISA``: the highest instruction set that oneDNN may use, or None."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA")


def set_onednn_ceiling(ceiling: str | None) -> None:
    """Set or unset it, for this process, if it has not computed anything yet, and its children."""
    if ceiling is None:
        os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
    else:
        os.environ["ONEDNN_MAX_CPU_ISA"] = ceiling


def environment_bytes(name: str, default: int, *, multiple: int, minimum: int) -> int:
    """Read a size in bytes.

    Raises:
        UserError: not a whole number, below ``minimum``, or not a multiple of ``multiple``.
    """
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isdigit() or int(text) < minimum or int(text) % multiple:
        what = f"a multiple of {multiple} bytes" if multiple > 1 else "a number of bytes"
        raise UserError(f"{name}={text} is not allowed: give {what}, at least {minimum}, or leave it out ({default})")
    return int(text)


def choose_device(launch: Launch) -> torch.device:
    """This process's device: the GPU of its local rank, or the CPU.

    Raises:
        UserError: more processes on this host than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if launch.local_world_size > count:
        raise UserError(
            f"{launch.local_world_size} processes on a host with {count} GPU(s): use --nproc_per_node {count} at most, "
            f"or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    return torch.device("cuda", launch.local_rank)


def choose_backend(comm: CommConfig, device: torch.device) -> str:
    """The process group's backend for this device.

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


START_SECONDS = 300.0  # how long a job waits for all its processes; less if --distributed_timeout is


def _open_store(launch: Launch, limit: datetime.timedelta) -> tuple[dist.Store, str]:
    """The store through which the processes find each other, and its address: the launcher's, or rank 0's own.

    Raises:
        UserError: the environment does not say where it is.
        RankError: it cannot be reached, or not be served.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not (port or "").isdigit() or not 0 < int(port or 0) < 2**16:
        raise UserError(
            f"MASTER_ADDR={host or ''} and MASTER_PORT={port or ''} do not say where rank 0 is: start with torchrun, "
            f"or set both, the same for all processes"
        )
    where = f"{host}:{port}"
    serves = launch.rank == 0 and not launcher_serves_store()
    try:
        store = dist.TCPStore(
            host, int(port or 0), is_master=serves, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError) as error:
        reason = re.sub(r"\s*Exception raised from.*", "", (str(error).splitlines() or [""])[0])
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

    Raises:
        RankError: the processes do not find each other.
    """
    backend = choose_backend(comm, device)
    if cpu_offload and backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"  # gradients in host memory have a norm, too
    timeout = datetime.timedelta(seconds=comm.distributed_timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        limit = min(timeout, datetime.timedelta(seconds=START_SECONDS))
        store, where = _open_store(launch, limit)
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
    try:
        yield
    finally:
        dist.destroy_process_group()


def seed_everything(seed: int, data_rank: int) -> None:
    """Seed torch's generators so that ranks which hold different data draw different dropout masks."""
    torch.manual_seed(seed + data_rank)


def set_default_threads(processes: int) -> None:
    """Share this host's cores among ``processes`` to come, unless the user has set OMP_NUM_THREADS."""
    # macOS has no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))


def release_cache(device: torch.device) -> None:
    """Return memory that the allocator keeps for reuse: CUDA's cache, or the C library's free pages."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc only
        libc.malloc_trim(0)
