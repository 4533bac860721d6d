"""The launcher's part of the environment: this process's ranks, the world size, and the address of rank 0.

torchrun (also as ``accelerate launch`` and ``smp.launch.local``), ``deepspeed``, ``srun``, ``mpirun`` of Open MPI,
MPICH, Intel MPI and MVAPICH, and SageMaker, whatever is inside what. With ``smp.runtime``, the only reader of the
environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from smp.environment.launch_info import (
    NAMES,
    Environment,
    IncompleteError,
    Launch,
    NamedLaunch,
    is_number,
    refuse_impossible,
)
from smp.environment.mpi import port_of, port_of_mpi, read_mpi
from smp.environment.slurm import first_node, job_of_slurm, read_slurm
from smp.errors import UserError

__all__ = [
    "Launch",
    "cache_folder",
    "cached_library",
    "devices_folder",
    "environment_with",
    "read_launch",
    "rendezvous",
    "sagemaker_hosts",
    "sagemaker_parameters",
    "started_by_us",
]

_SAGEMAKER = "SageMaker"
_SAGEMAKER_PORT = 7777
_DEFAULT_PORT = 29500


def cache_folder(name: str, *others: str) -> Path:
    """Return ``~/.cache/smp/NAME``, for what is kept for the user's later runs.

    Args:
        others: flags or variables that give another folder.

    Raises:
        UserError: the user has no home directory.
    """
    try:
        return Path.home() / ".cache" / "smp" / name
    except RuntimeError:
        raise UserError(
            f"~/.cache/smp/{name} cannot be found, as HOME is not set and this user has no entry in passwd: set "
            f"{' or '.join([*others, 'HOME'])} to a folder you may write to"
        ) from None


def cached_library(name: str, key: bytes, build: Callable[[Path], None], folder: Path | None = None) -> Path:
    """Return the shared library of a key, built where it does not exist yet; complete, whichever processes build it.

    Args:
        key: all that the library depends on.
        build: writes it to a path.
        folder: of the library; None: ``~/.cache/smp/kernels``.

    Raises:
        OSError: it cannot be written.
        UserError: the user has no home directory.
    """
    folder = folder or cache_folder("kernels")
    library = folder / f"{name}_{hashlib.sha256(key).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            build(built := Path(work) / library.name)
            built.replace(library)
    return library


def devices_folder() -> Path:
    """Return the folder of the user's device specs: ``SMP_DEVICES_DIR``, or ``~/.cache/smp/devices``."""
    return Path(os.environ.get("SMP_DEVICES_DIR") or cache_folder("devices", "SMP_DEVICES_DIR"))


def environment_with(changes: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with changes, for a process to be started."""
    return {**os.environ, **changes}


def read_launch(environment: Environment | None = None) -> Launch:
    """Read this process's ranks and the world size from its launcher's variables; without a launcher: one process.

    The innermost launcher counts: torchrun and ``deepspeed`` started by ``srun`` or ``mpirun`` on each host stand above
    these. Plain ``python`` in a Slurm allocation is one process, as only ``srun`` starts several.

    Args:
        environment: names and values; None: this process's.

    Raises:
        UserError: only part of the variables is set, one is no number, or two of them contradict each other.
    """
    env = os.environ if environment is None else environment
    values = {name: env.get(name) for name in NAMES}
    per_host = _per_host_launcher(env)
    if per_host == "deepspeed" and values["LOCAL_WORLD_SIZE"] is None:
        values["LOCAL_WORLD_SIZE"] = env.get("LOCAL_SIZE")
    native = None if per_host else _native(env)
    if values["RANK"] is None and values["WORLD_SIZE"] is None:
        if native is None:
            _refuse_lost_processes(env)
            return Launch()
        _is_meant(env, native)  # or refused: a local rank or size that was left in it would reach other libraries
        return native.launch
    if native is not None and _is_meant(env, native):
        if values["WORLD_SIZE"] is None:  # exported for all, it would be right on one rank, which would wait for others
            raise UserError(
                f"RANK={values['RANK']} is set and WORLD_SIZE is not: unset RANK, as {native.launch.launcher} says both"
            )
        values = {name: values[name] or str(own) for name, own in zip(NAMES, native.launch.numbers, strict=True)}
    missing = [name for name, value in values.items() if not is_number(value)]
    if missing:
        raise UserError(
            f"the environment sets only part of what torchrun sets: {', '.join(missing)} missing or not a number; "
            f"start with `torchrun --nproc_per_node N -m smp.train ...`, or unset RANK and WORLD_SIZE for one process"
        )
    rank, world_size, local_rank, local_world_size = (int(values[name] or 0) for name in NAMES)
    restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    launcher = per_host or (native.launch.launcher if native is not None else "")
    attempt = int(restart) if is_number(restart) else 0
    launch = Launch(rank, world_size, local_rank, local_world_size, attempt, launcher)
    refuse_impossible(NamedLaunch(launch, NAMES))
    return launch


def started_by_us(environment: Environment | None = None) -> bool:
    """Return whether ``smp.launch.local`` started this process: it names a job by its process."""
    env = os.environ if environment is None else environment
    return env.get("TORCHELASTIC_RUN_ID") == str(os.getppid())


def rendezvous(launch: Launch, environment: Environment | None = None) -> tuple[str, int]:
    """Return the address and port at which rank 0 serves the job's store, the same on every rank.

    ``MASTER_ADDR`` and ``MASTER_PORT`` where they are set. Else what the launcher has set: the first of Slurm's or
    SageMaker's hosts, or this host if it has all ranks, and a port that follows from the launcher's name of the job.

    Raises:
        UserError: the address of rank 0 is not set, or the port is not one.
    """
    env = os.environ if environment is None else environment
    host, port = env.get("MASTER_ADDR") or None, env.get("MASTER_PORT") or None
    native = None if _per_host_launcher(env) else _native(env)
    if native is not None and native.launch.numbers == launch.numbers:
        host, port = host or _address(env, native.launch), port or str(_port(env, native.launch))
    if not host or not is_number(port) or not 0 < int(port or 0) < 2**16:
        raise UserError(
            f"MASTER_ADDR={host or ''} and MASTER_PORT={port or ''} do not say where rank 0 is: start with torchrun, "
            f"or set both, the same for all processes"
        )
    return host, int(port or 0)


def sagemaker_hosts(environment: Environment | None = None) -> list[str]:
    """Return the hosts of a SageMaker job (``SM_HOSTS``), in its order; empty elsewhere.

    Raises:
        UserError: ``SM_HOSTS`` is no JSON list of names.
    """
    env = os.environ if environment is None else environment
    text = env.get("SM_HOSTS")
    if not text:
        return []
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
        raise UserError(f'SM_HOSTS={text} is no JSON list of host names such as ["algo-1", "algo-2"]: mend or unset it')
    return hosts


def sagemaker_parameters(environment: Environment | None = None) -> dict[str, Any]:
    """Return SMP v2's configuration of SageMaker's estimator (``SM_HP_MP_PARAMETERS``); empty elsewhere.

    Raises:
        UserError: it is no JSON object.
    """
    env = os.environ if environment is None else environment
    text = env.get("SM_HP_MP_PARAMETERS") or "{}"
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(
            f'SM_HP_MP_PARAMETERS={text} is no JSON object such as {{"tensor_parallel_degree": 2}}: mend or unset it'
        )
    return found


def _per_host_launcher(env: Environment) -> str:
    """Return the launcher that another one may have started on each host, or an empty string."""
    if env.get("TORCHELASTIC_RUN_ID"):
        return "torchrun"
    return "deepspeed" if all(env.get(name) for name in ("CROSS_SIZE", "LOCAL_SIZE", "RANK")) else ""


def _native(env: Environment) -> NamedLaunch | None:
    """Return what MPI, Slurm or SageMaker have set, the innermost of them; None: nothing, or one process.

    ``mpirun`` in a Slurm allocation starts its processes under Slurm's own steps, so it stands above Slurm.
    """
    try:
        named = read_mpi(env) or read_slurm(env)
    except IncompleteError:
        if not all(is_number(env.get(name)) for name in NAMES):
            raise
        return None  # what is missing was set by hand
    if named is None and "PMIX_RANK" in env and not env.get("RANK"):
        raise UserError(
            f"PMIX_RANK={env['PMIX_RANK']} says which process this is and nothing says how many there are: start with "
            f"mpirun, srun or torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
        )
    named = named or _sagemaker(env)
    return named if named is not None and named.launch.world_size > 1 else None


def _sagemaker(env: Environment) -> NamedLaunch | None:
    """One process a host."""
    hosts, current = sagemaker_hosts(env), env.get("SM_CURRENT_HOST")
    if len(hosts) < 2:
        return None
    if current not in hosts:
        raise UserError(
            f"SM_CURRENT_HOST={current or ''} is not one of SM_HOSTS={env['SM_HOSTS']}: mend them, or unset both for "
            f"one process"
        )
    names = ("the index of SM_CURRENT_HOST", "the hosts of SM_HOSTS", "the local rank of one process a host",
             "processes on each host")  # fmt: skip
    return NamedLaunch(Launch(hosts.index(current), len(hosts), 0, 1, launcher=_SAGEMAKER), names)


def _is_meant(env: Environment, native: NamedLaunch) -> bool:
    """Return whether variables set by hand are about the launcher's processes, not about others these have started.

    Raises:
        UserError: it contradicts the launcher.
    """
    mine = {name: int(env[name]) for name in NAMES if is_number(env.get(name))}
    wrong = [index for index, name in enumerate(NAMES) if mine.get(name, native.launch.numbers[index]) !=
             native.launch.numbers[index]]  # fmt: skip
    if not wrong:
        return True
    if native.launch.launcher == _SAGEMAKER and mine.keys() & {"RANK", "WORLD_SIZE"}:  # it sets nothing about processes
        return False
    if len(mine) == len(NAMES):
        rank, world_size, local_rank, inside = mine.values()
        if world_size == inside * native.launch.world_size and rank == inside * native.launch.rank + local_rank:
            return False
    raise UserError(
        f"{NAMES[wrong[0]]}={mine[NAMES[wrong[0]]]} and {native.shown(wrong[0])} contradict each other: unset "
        f"{', '.join(mine)}, or start without {native.launch.launcher}"
    )


def _refuse_lost_processes(env: Environment) -> None:
    """Refuse to be one process where ``accelerate launch`` was asked for several.

    Without GPUs it starts a single one, and tells that only by the address that several would need.

    Raises:
        UserError: saying what starts several.
    """
    names = ("MASTER_ADDR", "MASTER_PORT")
    if "ACCELERATE_DYNAMO_BACKEND" in env and all(env.get(name) for name in names):
        raise UserError(
            "accelerate launch was asked for several processes and started one, as it does without GPUs: add "
            "--multi_gpu, which starts them on CPUs too, or use torchrun; for one process unset MASTER_ADDR and "
            "MASTER_PORT"
        )


def _address(env: Environment, launch: Launch) -> str:
    if launch.local_world_size == launch.world_size:
        return "127.0.0.1"
    # The daemons of mpirun are a separate step, which leaves out the first host.
    names = ["SLURM_STEP_NODELIST"] if launch.launcher == "srun" else []
    host = first_node(env, *names, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if host is None and (hosts := sagemaker_hosts(env)):
        host = hosts[0]
    if host is None:
        how = "-genv MASTER_ADDR HOST" if launch.launcher == "MPICH" else "-x MASTER_ADDR=HOST"
        raise UserError(
            f"{launch.launcher} started {launch.world_size} processes on several hosts and does not say where rank 0 "
            f"runs: add `{how}` to mpirun, with the name or address of rank 0's host, the first in the hostfile"
        )
    return host


def _port(env: Environment, launch: Launch) -> int:
    if launch.launcher == _SAGEMAKER:
        return _SAGEMAKER_PORT
    if launch.launcher == "srun":
        return port_of(job_of_slurm(env))
    return port_of_mpi(env, one_host=launch.local_world_size == launch.world_size) or _DEFAULT_PORT
