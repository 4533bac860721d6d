"""The variables of ``srun``."""

from __future__ import annotations

import re

from smp.environment.launch_info import (
    Environment,
    IncompleteError,
    Launch,
    NamedLaunch,
    is_number,
    number,
    refuse_impossible,
    refuse_round_robin,
)
from smp.errors import UserError

# Step numbers from here on are Slurm's own: the batch script, an interactive shell.
_FIRST_OWN_STEP = 2**32 - 16

_NUMBERS = r"\d{1,9}(?:-\d{1,9})?"
_HOSTS = rf"(?:[^,\[\]\s]|\[{_NUMBERS}(?:,{_NUMBERS})*\])+"  # of a node list, between commas


def first_host(text: str) -> str:
    """Return the first host of a Slurm node list: node01 of ``node[01-03,7],gpu-1``.

    Raises:
        ValueError: it is none.
    """
    if not re.fullmatch(f"{_HOSTS}(?:,{_HOSTS})*", text):
        raise ValueError(text)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.findall(_HOSTS, text)[0])


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's tasks of each node: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: it is none.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if match is None:
            raise ValueError(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_node(env: Environment, *names: str) -> str | None:
    """Return the first host of the first of these node lists that is set, or None.

    Raises:
        UserError: it is no node list.
    """
    for name in names:
        if text := env.get(name):
            try:
                return first_host(text)
            except ValueError:
                raise UserError(
                    f"{name}={text} is no list of nodes: set MASTER_ADDR to the name of rank 0's node"
                ) from None
    return None


def job_of_slurm(env: Environment) -> str:
    """Return the numbers of the job and its step, as ``job.step``."""
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
    return f"{job}.{env.get('SLURM_STEP_ID') or env.get('SLURM_STEPID')}"


def read_slurm(env: Environment) -> NamedLaunch | None:
    """Read the ranks in a step of ``srun``; None in a batch script or an interactive shell: one process.

    Raises:
        UserError: part of it is missing, or its ranks are dealt to the nodes in turn.
    """
    if "SLURM_PROCID" not in env:
        return None
    rank = number(env, "srun", "SLURM_PROCID")
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    if step is None and rank > 0:
        raise IncompleteError(
            f"SLURM_PROCID={rank} is set and SLURM_STEP_ID is not: hand all SLURM_ variables on into the container"
        )
    if step is None or not is_number(step) or int(step) >= _FIRST_OWN_STEP:
        return None
    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    world_size = number(env, "srun", *sizes)
    size = next(name for name in sizes if name in env)
    names = ("SLURM_PROCID", size, "SLURM_LOCALID", "the tasks of this node")
    if world_size == 1:
        return NamedLaunch(Launch(rank, launcher="srun"), names)
    local_rank = number(env, "srun", "SLURM_LOCALID")
    local_world_size, first = _tasks(env, rank, world_size)
    named = NamedLaunch(Launch(rank, world_size, local_rank, local_world_size, launcher="srun"), names)
    refuse_impossible(named)
    if rank != first + local_rank:
        refuse_round_robin(
            named,
            f"SLURM_PROCID={rank} has SLURM_LOCALID={local_rank}, where rank {first + local_rank} was due: ranks were "
            f"dealt to the nodes in turn, and neighbours must share a node; use `srun --distribution=block`",
        )
    return named


def _tasks(env: Environment, rank: int, world_size: int) -> tuple[int, int]:
    """Return the number of tasks on this node, and the rank of the first."""
    if "SLURM_NODEID" in env:
        node = number(env, "srun", "SLURM_NODEID")
        for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
            if (text := env.get(name)) is None:
                continue
            try:
                counts = expand_counts(text)
            except ValueError:
                raise UserError(f"{name}={text} does not say how many tasks each node has: start with srun") from None
            if sum(counts) == world_size and node < len(counts):  # else it is of the job, and not of this step
                return counts[node], sum(counts[:node])
    nodes = env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or ""
    if nodes == "1":
        return world_size, 0
    if nodes == str(world_size):
        return 1, rank
    per_node = re.match(r"[1-9]\d*", env.get("SLURM_NTASKS_PER_NODE") or "")
    if per_node is None:
        raise IncompleteError(
            f"Slurm does not say how many of the {world_size} tasks this node has (SLURM_STEP_TASKS_PER_NODE with "
            f"SLURM_NODEID, or SLURM_NTASKS_PER_NODE): start with `srun --ntasks-per-node N`"
        )
    count = int(per_node[0])
    first = rank // count * count
    return min(count, world_size - first), first
