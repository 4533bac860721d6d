"""The variables of ``mpirun``: Open MPI, MVAPICH, MPICH and Intel MPI."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Sequence

from smp.environment.launch_info import Environment, Launch, NamedLaunch, number, refuse_impossible, refuse_round_robin
from smp.environment.slurm import read_slurm

# Launcher; rank, size, and names for the local rank and the local size. Intel MPI is a kind of MPICH.
_KINDS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
     ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    ("MPICH", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
)  # fmt: skip
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "MPIRUN_ID")
_DAEMONS = ("hydra_pmi_proxy", "pmi_proxy", "mpiexec", "mpirun", "mpiexec.hydra")


def read_mpi(env: Environment) -> NamedLaunch | None:
    """Read the ranks that ``mpirun`` gave this process; None without ``mpirun``.

    Raises:
        UserError: part of it is missing, or its ranks are dealt to the hosts in turn.
    """
    for launcher, rank, size, local_ranks, local_sizes in _KINDS:
        if rank in env or size in env:
            ranks = number(env, launcher, rank), number(env, launcher, size)
            if not any(name in env for name in local_ranks):
                # `srun --mpi=pmi2` sets PMI's ranks, and leaves the rest to Slurm's variables.
                slurm = read_slurm(env)
                if slurm is not None and slurm.launch.numbers[:2] == ranks:
                    return slurm
            local = number(env, launcher, *local_ranks), number(env, launcher, *local_sizes)
            names = (rank, size, _set(env, local_ranks), _set(env, local_sizes))
            named = NamedLaunch(Launch(*ranks, *local, launcher=launcher), names)
            refuse_impossible(named)
            _refuse_scattered_ranks(named)
            return named
    return None


def _set(env: Environment, names: Sequence[str]) -> str:
    return next(name for name in names if name in env)


def _refuse_scattered_ranks(named: NamedLaunch) -> None:
    """Refuse placements in which consecutive ranks are not on one host, as degrees and meshes take them to be.

    One host alone is not refused: with more processes than cores, Open MPI numbers local ranks in another order.
    """
    launch = named.launch
    even = launch.world_size % launch.local_world_size == 0
    several = launch.local_world_size < launch.world_size
    if several and even and launch.rank % launch.local_world_size != launch.local_rank:
        refuse_round_robin(
            named,
            f"{named.shown(0)} has {named.shown(2)} of {launch.local_world_size}: ranks were dealt to the hosts, or to "
            f"their cores, in turn, and neighbours must share a host; use `mpirun --map-by slot` (more processes than "
            f"slots: `slot:OVERSUBSCRIBE`; MPICH: `-ppn {launch.local_world_size}`)",
        )


def port_of_mpi(env: Environment, *, one_host: bool) -> int | None:
    """Derive a port from the launcher's name of the job; None where the ranks have no name in common."""
    if name := next((name for name in _JOB_NAMES if env.get(name)), None):
        return port_of(env[name].partition("@")[0])
    return port_of(str(_process_above())) if one_host else None


def port_of(job: str) -> int:
    """Derive a port from the job's name, below those that systems hand out; the same on all ranks."""
    return 10_000 + zlib.crc32(job.encode()) % 20_000


def _process_above() -> int:
    """Return the pid of the nearest ancestor that is part of MPICH; of the parent where none is found."""
    parent = pid = os.getppid()
    daemons = {name[:15] for name in _DAEMONS}  # Linux cuts off the rest
    with contextlib.suppress(OSError):  # no Linux
        while pid > 1:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                before, _, after = file.read().rpartition(")")
            if before.partition("(")[2] in daemons:
                return pid
            pid = int(after.split()[1])
    return parent
