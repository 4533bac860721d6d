"""A script for ``sbatch``: a step of one task a node, which starts the node's processes; see ``templates/slurm.sh``."""

from __future__ import annotations

import dataclasses
import shlex

from smp.errors import UserError
from smp.launch.command_line import comment, quoted_lines
from smp.launch.script import RESUME, Job, enter, filled, node_script, with_resume
from smp.runtime import START_SECONDS

NO_TIME = "Without --time the partition's limit applies; where it has none, the job is never asked to stop."
_BEYOND_SECONDS = 120.0  # for processes that give up after START_SECONDS to end by themselves
_NAME = '"smp-$SLURM_JOB_ID-$SLURM_NODEID"'
# A task that was killed could not remove its container.
_CLEANUP = """if [ "$status" -ne 0 ]; then
    timeout --signal=KILL 60 srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --overlap \\
        bash -c 'docker rm --force {name} >/dev/null 2>&1; true' </dev/null
fi"""


@dataclasses.dataclass(frozen=True)
class SlurmOptions:
    """The options of Slurm alone; names are those of ``sbatch``.

    Args:
        exclusive: whether the nodes are the job's alone.
        gres: whether Slurm counts GPUs, so that they are asked for.
        signal_seconds: before the end of the time, in which the last checkpoint must be saved.
        max_requeues: how often the job may be put back into the queue; 0: never.
        max_failures: how many failures in a row are tried again.
    """

    job_name: str
    output: str = "%x-%j.out"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    cpus_per_task: int | None = None
    exclusive: bool = True
    gres: bool = True
    signal_seconds: int = 120
    max_requeues: int = 20
    max_failures: int = 3


def slurm_script(job: Job, options: SlurmOptions) -> str:
    """Return the script's text.

    Raises:
        UserError: the job would have one CPU of each node, as nothing says how many.
    """
    if not options.exclusive and options.cpus_per_task is None:
        raise UserError(
            "--shared leaves a node's processes one CPU, unless --cpus_per_task says how many: add it, such as "
            "--cpus_per_task 32"
        )
    rank_info = "nnodes=$SLURM_NNODES node_rank=$SLURM_NODEID address=$MASTER_ADDR port=$MASTER_PORT"
    later = f'if [ "$restarts" -gt 0 ]; then\n    train+=({RESUME} latest)\nfi'
    step = ""
    if options.cpus_per_task is not None:
        step += f"step_options+=(--cpus-per-task={options.cpus_per_task})\n"
    if job.container == "enroot":
        mounts = ",".join((f"{job.workdir}:{job.workdir}", *job.mounts))
        extra = (f"--container-image={job.image}", f"--container-mounts={mounts}", f"--container-workdir={job.workdir}")
        step += "".join(f"step_options+=({shlex.quote(word)})\n" for word in extra)
    values = {
        "DIRECTIVES": "\n".join(f"#SBATCH --{directive}" for directive in _directives(job, options)),
        "COMMENTS": comment([*job.comments, *([] if options.time else [NO_TIME])]),
        "ENTER": enter(job.workdir),
        "MAX_REQUEUES": str(options.max_requeues),
        "MAX_FAILURES": str(options.max_failures),
        "ARGUMENTS": quoted_lines(with_resume(job)),
        "RESUME": later if job.resumes else "",
        "NODE": node_script(job, rank_info=rank_info, name=_NAME),
        "NODES": str(job.nodes),
        "WAIT": str(int(START_SECONDS + _BEYOND_SECONDS)),
        "STEP_OPTIONS": step.rstrip("\n"),
        "CLEANUP": _CLEANUP.format(name=_NAME, nodes=job.nodes) if job.container == "docker" else "",
    }
    return filled("slurm.sh", values)


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    found = [f"job-name={options.job_name}", f"nodes={job.nodes}", "ntasks-per-node=1"]
    if job.gpus and options.gres:
        found.append(f"gpus-per-node={job.gpus}")
    if options.cpus_per_task is not None:
        found.append(f"cpus-per-task={options.cpus_per_task}")
    if options.exclusive:
        found += ["exclusive", "mem=0"]  # all of it, which exclusive alone does not give
    for name in ("partition", "account", "qos", "constraint", "time"):
        if (value := getattr(options, name)) is not None:
            found.append(f"{name}={value}")
    return [
        *found,
        f"output={options.output}",
        "open-mode=append",
        "requeue" if options.max_requeues else "no-requeue",
        f"signal=B:USR1@{options.signal_seconds}",
    ]
