"""Installed versions, the environment's variables, and this host's name.

Values of variables are shown for known names only.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Callable, Iterator, Mapping

from smp.comm.kernel import load
from smp.comm.segment import refusal
from smp.comm.settings import read_settings
from smp.doctor.check import CheckContext
from smp.doctor.report import Status
from smp.environment.launch_info import is_number
from smp.errors import UserError
from smp.runtime import Launch

# --- versions

# As in pyproject.toml, which a test compares.
MINIMUM = {
    "python": "3.11",
    "torch": "2.11",
    "transformers": "5.17",
    "accelerate": "1.10",
    "datasets": "4.0",
    "safetensors": "0.6",
    "pyyaml": "6.0",
    "tqdm": "4.66",
    "xxhash": "3.0",
}


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of ``2.13.0+cpu``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def installed() -> dict[str, str | None]:
    """Return the version of everything in ``MINIMUM``, None where it is not installed; nothing is imported."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in list(MINIMUM)[1:]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def check_versions(ctx: CheckContext) -> None:
    """Compare versions with the least that smp works with."""
    found = installed()
    ctx.measure("versions", found)
    wrong = False
    for name, least in MINIMUM.items():
        version = found[name]
        if version is None:
            ctx.problem(f"{name} is not installed: pip install '{name}>={least}'", package=name)
        elif numbers(version) < numbers(least):
            what = f"install Python {least} or newer" if name == "python" else f"pip install '{name}>={least}'"
            ctx.problem(f"{name} {version} is older than {least}, the least that smp works with: {what}", package=name)
        else:
            continue
        wrong = True
    if not wrong:
        ctx.ok(", ".join(f"{name} {version}" for name, version in found.items()), **found)


def check_backend_parts(ctx: CheckContext) -> None:
    """Try what the smddp backend needs for collectives through shared memory at full speed."""
    if why := refusal():
        ctx.warn(f"smddp cannot share memory between processes here, and leaves everything to gloo: {why}")
        return
    if load() is None:
        ctx.warn(
            "smddp's C kernel cannot be compiled or loaded here, so that Python runs its rounds and short collectives "
            "take a third longer: install a C compiler (cc, gcc or clang), and see that ~/.cache is writable"
        )
        return
    ctx.ok("memory can be shared between processes, and smddp's C kernel is compiled")


# --- environment

# Switches that cost speed, and what to do. What is set to 0 or nothing is off.
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before: unset it",
    "NCCL_P2P_DISABLE": "GPUs of one host do not copy to each other directly: unset it",
    "NCCL_SHM_DISABLE": "GPUs of one host do not use shared memory: unset it",
    "NCCL_IB_DISABLE": "RDMA adapters are not used: unset it where the hosts have some",
    "TORCH_NCCL_BLOCKING_WAIT": "every collective waits on the CPU: unset it",
    "SMP_POISON_SHARED_BUFFERS": "every shared buffer is filled before its use, to find defects: unset it",
}
# Variables of gloo, NCCL and launchers that a report of a job should hold; others may be secrets, or tell nothing.
SHOWN = (
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_ALGO",
    "NCCL_PROTO", "FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "ONEDNN_MAX_CPU_ISA", "SMP_HOST_ID", "SMP_COMM_KERNEL",
    "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
    "PMI_SIZE", "TORCH_DISTRIBUTED_DEBUG", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
_LOOPBACK = ("localhost", "127.", "::1")


def variable(name: str) -> str | None:
    """Return a variable of this process's environment, or None."""
    return os.environ.get(name)


def set_variables(values: Mapping[str, str]) -> None:
    """Set variables of this process's environment."""
    os.environ.update(values)


def interfaces() -> list[str]:
    """Return the names of this host's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


Complaint = tuple[Status, str]


def contradictions(
    values: Mapping[str, str], launch: Launch, present: list[str], resolve: Callable[[str], object]
) -> Iterator[Complaint]:
    """Find variables that contradict the machine, each other, or the job.

    Args:
        present: the host's interfaces.
        resolve: finds the address of a name, or raises OSError.
    """
    yield from _wrong_interfaces(values, launch, present)
    several_hosts = launch.local_world_size < launch.world_size
    address = values.get("MASTER_ADDR", "")
    if several_hosts and address.startswith(_LOOPBACK):
        yield (
            "problem",
            f"MASTER_ADDR={address} is each host's own address, and the {launch.world_size} processes are on several: "
            f"set it to the name or address of rank 0's host",
        )
    elif address:
        try:
            resolve(address)
        except OSError as error:
            yield (
                "problem",
                f"MASTER_ADDR={address} has no address here ({error}): give one that all hosts can resolve",
            )
    for name, what in SLOW.items():
        if values.get(name, "0") not in ("", "0"):
            yield "warning", f"{name}={values[name]}: {what}"
    if values.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield "warning", "TORCH_DISTRIBUTED_DEBUG=DETAIL compares every collective, which is slow: unset it"
    if values.get("NCCL_DEBUG", "").upper() in ("TRACE", "INFO"):
        yield "warning", f"NCCL_DEBUG={values['NCCL_DEBUG']} prints a lot on every rank: set it to WARN"
    tasks = values.get("SLURM_NTASKS", "")
    if launch.world_size == 1 and is_number(tasks) and int(tasks) > 1:
        yield (
            "warning",
            f"this is one process in a Slurm allocation of {tasks} tasks: `srun python -m smp doctor` looks at all",
        )


def _wrong_interfaces(values: Mapping[str, str], launch: Launch, present: list[str]) -> Iterator[Complaint]:
    shown = ", ".join(present)
    gloo = values.get("GLOO_SOCKET_IFNAME", "")
    for name in filter(None, gloo.split(",")):
        if name not in present:
            yield "problem", f"GLOO_SOCKET_IFNAME={gloo}: this host has no interface {name}; it has {shown}"
    if gloo == "lo" and launch.local_world_size < launch.world_size:
        yield "problem", "GLOO_SOCKET_IFNAME=lo cannot reach other hosts: name the interface that can, of " + shown
    nccl = values.get("NCCL_SOCKET_IFNAME", "")
    if nccl and not nccl.startswith("^"):
        exact, names = nccl.startswith("="), nccl.lstrip("=").split(",")
        if not any(p == n or (not exact and p.startswith(n)) for n in names for p in present):
            yield "problem", f"NCCL_SOCKET_IFNAME={nccl} names none of this host's interfaces: {shown}"


def check_environment(ctx: CheckContext) -> None:
    """Look at the variables of this process."""
    values = dict(os.environ)
    clean = True
    found = contradictions(
        values, ctx.launch, interfaces(), lambda name: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    )
    for status, message in found:
        ctx.add(status, message)
        clean = False
    try:
        read_settings()
    except UserError as error:
        ctx.problem(str(error))
        clean = False
    shown = {name: values[name] for name in SHOWN if name in values}
    # A proxy's address may hold a password: its name is enough.
    proxies = sorted(name for name in values if name.lower() in ("http_proxy", "https_proxy", "all_proxy"))
    ctx.measure("environment", shown | dict.fromkeys(proxies, "(set)"))
    if clean:
        said = f"; {', '.join(proxies)} is set, which reading s3:// data goes by" if proxies else ""
        ctx.ok(f"no contradictions{said}")


def check_hostname(ctx: CheckContext) -> None:
    """Resolve this host's name: gloo listens on the address that it stands for."""
    host = socket.gethostname()
    several = ctx.launch.local_world_size < ctx.launch.world_size
    named = bool(variable("GLOO_SOCKET_IFNAME"))
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        addresses = []
        why = f"the host's name {host} has no address ({error})"
    else:
        why = f"the host's name {host} stands for {', '.join(addresses)}, which other hosts cannot reach"
    data = {"hostname": host, "addresses": addresses}
    reachable = [address for address in addresses if not address.startswith(_LOOPBACK)]
    if reachable or named:
        where = f"GLOO_SOCKET_IFNAME={variable('GLOO_SOCKET_IFNAME')}" if named else ", ".join(reachable)
        ctx.ok(f"{host}: {where}", **data)
    elif several:
        ctx.problem(
            f"{why}, and gloo listens there: set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface between "
            f"the hosts, of {', '.join(interfaces())}, or mend /etc/hosts",
            **data,
        )
    else:
        ctx.ok(f"{why}; fine on one host; on several set GLOO_SOCKET_IFNAME", **data)
