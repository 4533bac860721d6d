"""The parts of every kind of job script: the training command, and the script of a node."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from pathlib import Path

from smp.launch.command_line import comment, quoted, quoted_lines

_TEMPLATES = Path(__file__).parent / "templates"

_MARK = re.compile("@@([A-Z_]+)@@")

RESUME = "--resume_from_checkpoint"


@dataclasses.dataclass(frozen=True)
class Job:
    """A training job on several nodes.

    Args:
        gpus: of each; 0: it computes on CPUs.
        processes: on each.
        workdir: where it runs, on all nodes.
        program: what Python starts on each host: a file, or ``-m`` and a module.
        arguments: its flags, with those that were chosen.
        resumes: whether these name a checkpoint to start from.
        comments: on them, for the script's head.
        venv: a virtual environment to activate; or
        conda: a conda environment; or
        image: a container's image or file, with
        container: docker, enroot (through pyxis) or apptainer, and
        mounts: ``HOST:CONTAINER`` directories besides ``workdir``.
        setup: lines of bash that come before Python's environment on each node.
    """

    nodes: int
    gpus: int
    processes: int
    workdir: str
    program: list[str]
    arguments: list[str]
    resumes: bool
    comments: list[str]
    venv: str | None = None
    conda: str | None = None
    image: str | None = None
    container: str | None = None
    mounts: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


def template(name: str) -> str:
    """Return the text of a template."""
    return (_TEMPLATES / name).read_text(encoding="utf-8").rstrip("\n")


def filled(name: str, values: dict[str, str]) -> str:
    """Fill in each ``@@NAME@@`` of a template; an empty value takes its line along if that holds nothing else."""
    lines = []
    for line in template(name).splitlines():
        match = _MARK.fullmatch(line.strip())
        if match is None or values[match[1]]:
            # All in one go: a mark in a value is the user's own text.
            lines.append(_MARK.sub(lambda mark: values[mark[1]], line))
    return "\n".join(lines) + "\n"


def enter(workdir: str) -> str:
    """Return what changes to the directory where the job runs, or ends with status 2 and a sentence."""
    where = shlex.quote(workdir)
    missing = '"is no directory of this node: give --workdir one that all nodes see"'
    return f'cd {where} || {{ echo "smp: $HOSTNAME:" {where} {missing} >&2; exit 2; }}'


def node_script(job: Job, *, rank_info: str, name: str = "", controlled: bool = False, first: bool = False) -> str:
    """Return what bash runs on each node, with the training flags as its arguments; values are quoted in it.

    Args:
        rank_info: sets ``nnodes``, ``node_rank``, ``address`` and ``port``.
        name: of a docker container, in bash, unique on the node.
        controlled: whether standard input names the signals to hand on.
        first: whether this is a container's first process.
    """
    stays = first or job.container == "docker"
    values = {
        "NETWORK": template("network.sh"),
        "RANK_INFO": rank_info,
        "ENTER": enter(job.workdir),
        "SETUP": "\n".join(job.setup),
        "ENVIRONMENT": _environment(job, name, controlled=controlled),
        "INSIDE": '"${inside[@]}" ' if job.container in ("docker", "apptainer") else "",
        "TRAPS": template("hand_on.sh") if stays else "",
        "EXEC": "" if stays else "exec ",
        "BESIDE": " <&0 &" if stays else "",
        "AFTER": template("wait.sh") if stays else "",
        "PROCESSES": str(job.processes),
        "NO_GPUS": "" if job.gpus else "--no_gpus ",
        "CONTROLLED": "--controlled " if controlled else "",
        "PROGRAM": quoted(job.program),
    }
    return filled("node.sh", values).rstrip("\n")


def _environment(job: Job, name: str, *, controlled: bool) -> str:
    """Return what makes ``python3`` the job's, or ``inside`` the command that runs it in a container."""
    if job.venv is not None:
        return f"source {shlex.quote(job.venv + '/bin/activate')} || exit 2"
    if job.conda is not None:
        return f'eval "$(conda shell.bash hook)" && conda activate {shlex.quote(job.conda)} || exit 2'
    image = shlex.quote(job.image or "")
    if job.container == "apptainer":
        gpus = " --nv" if job.gpus else ""
        binds = "".join(f" --bind {shlex.quote(mount)}" for mount in job.mounts)
        return f'inside=(apptainer exec{gpus} --bind "$PWD" --pwd "$PWD"{binds} {image})'
    if job.container == "docker":
        values = {
            "NAME": name,
            "INTERACTIVE": " --interactive" if controlled else "",
            "GPUS": " --gpus all" if job.gpus else "",
            "MOUNTS": "".join(f" --volume {shlex.quote(mount)}" for mount in job.mounts),
            "IMAGE": image,
        }
        return filled("inside_docker.sh", values).rstrip("\n")
    return ""


def local_command(job: Job) -> list[str]:
    """Return the command that runs a job of one node on this machine, by this Python."""
    launcher = [sys.executable, "-m", "smp.launch.local", "--nproc_per_node", str(job.processes)]
    return [*launcher, *([] if job.gpus else ["--no_gpus"]), *job.program, *with_resume(job)]


def with_resume(job: Job) -> list[str]:
    """Return the training flags, which resume where an earlier start has ended."""
    return job.arguments if job.resumes else [*job.arguments, RESUME, "latest"]


def local_script(job: Job) -> str:
    """Return a bash script of that command."""
    start = local_command(job)[: -len(with_resume(job))]
    lines = quoted_lines(with_resume(job)).replace("\n", " \\\n")
    return f"#!/bin/bash\n{comment(job.comments)}\n{enter(job.workdir)}\nexec {quoted(start)} \\\n{lines}\n"
