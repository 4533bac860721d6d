"""Write the script that starts a training job: for Slurm, Kubernetes, a file of hosts, or this machine.

The training flags come after `--` and are checked before anything is written. What `smp plan` chooses of those that are
not given is added: degrees, micro-batch, recomputation, offloading. The script is printed; --output FILE writes it.

    smp launch slurm --model llama70b --nodes 8 --partition gpu -- --training_dir /data/text --max_steps 10000
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from smp.cli.plan import best, device_of
from smp.errors import UserError
from smp.launch.command_line import (
    Checked,
    check_arguments,
    require_kept,
    require_match,
    require_plain,
    require_plain_arguments,
    value_of,
)
from smp.launch.hostfile import hostfile_script, read_hosts
from smp.launch.kubernetes import KubernetesOptions, pytorch_job, train_job
from smp.launch.script import RESUME, Job, local_command, local_script
from smp.launch.slurm import NO_TIME, SlurmOptions, slurm_script
from smp.train.arguments import FLAGS

_IMAGE_WORKDIR = "/opt/smp"  # the Dockerfile's
_GPUS = 8
# As Kubernetes reads them.
_RESOURCE = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
_QUANTITY = r"\d+(\.\d+)?([KMGTPE]i|[mkMGTPE])?"
# Where quotes do not protect, such as a scheduler's directive: the pattern of a value, and its description.
_Allowed = dict[str, tuple[str, str]]
_WORD = (r"[\w.@%+:,=/-]+", "letters, digits and the characters . _ @ % + : , = / -")
_SLURM_TEXTS: _Allowed = {
    **dict.fromkeys(("partition", "account", "qos", "log"), _WORD),
    "time": (
        r"(\d+-)?\d+(:\d+){0,2}|(?i:unlimited|infinite)",
        "minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]] or unlimited",
    ),
    "job_name": (r"[\w.@%+:,=-]+", "letters, digits and the characters . _ @ % + : , = - (a log file has this name)"),
    "constraint": (r"[\w.@:,&|()\[\]*=-]+", "letters, digits and the characters . _ @ : , & | ( ) [ ] * = -"),
}
_LABEL = "at most {} of a-z, 0-9 and -, beginning with a letter and not ending with -"
_KUBERNETES_TEXTS: _Allowed = {
    "job_name": (r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", _LABEL.format(40)),  # the names of pods are longer
    **dict.fromkeys(("namespace", "claim"), (r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", _LABEL.format(63))),
    "workdir": (r"/.*", "the container's directory from the root, such as /x"),
    "mount_path": (r"/[^:]*", "the container's directory from the root and without a colon, such as /x"),
    "shared_memory": (_QUANTITY, "a size such as 64Gi"),
}
_NO_LIMIT = sys.maxsize
_BOUNDS = {
    "nodes": (1, _NO_LIMIT), "gpus_per_node": (0, _NO_LIMIT), "processes_per_node": (1, _NO_LIMIT),
    "cpus_per_task": (1, _NO_LIMIT), "signal_seconds": (1, 2**16 - 1), "max_requeues": (0, _NO_LIMIT),
    "max_failures": (0, _NO_LIMIT), "max_restarts": (0, _NO_LIMIT), "port": (1, 2**16 - 1),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    targets = parser.add_subparsers(dest="target", required=True, metavar="TARGET")
    for name, (summary, add, _) in _TARGETS.items():
        target = targets.add_parser(name, help=summary, description=summary)
        # For the targets that do not have these flags.
        target.set_defaults(venv=None, conda=None, image=None, container=None, mount=[], setup=[], job_name=None)
        target.of_job = FLAGS  # type: ignore[attr-defined]
        _add_common(target)
        add(target)
        target.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="flags of the training job")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="as the job's; it may stand among its flags instead")
    parser.add_argument(
        "--gpus_per_node", type=int, metavar="N",
        help="default 8, the slots of --hosts, or the GPUs of this machine; 0 trains on CPUs",
    )  # fmt: skip
    parser.add_argument("--processes_per_node", type=int, metavar="N", help="default: as many as GPUs")
    parser.add_argument(
        "--device", default="h100", metavar="NAME", help="GPU to choose for, as `smp plan`'s; default h100"
    )
    parser.add_argument("--gpu_memory_gib", type=float, metavar="GIB", help="of one GPU; default: the device's")
    parser.add_argument("--workdir", metavar="DIR", help="where the job runs, on all nodes; default: here")
    parser.add_argument("--script", metavar="FILE", help="a script to start instead of `-m smp.train`")
    parser.add_argument("--output", metavar="FILE", help="write it there; a file that exists is left as it is")


def _add_environment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--venv", metavar="DIR", help="virtual environment to activate on each node")
    parser.add_argument("--conda", metavar="ENV", help="conda environment to activate on each node")
    parser.add_argument("--image", metavar="IMAGE", help="container image, or file such as smp.sqsh or smp.sif")
    parser.add_argument("--container", choices=("docker", "enroot", "apptainer"), help="what runs --image")
    parser.add_argument(
        "--mount", action="append", default=[], metavar="HOST:DIR", help="also mounted, besides --workdir; repeatable"
    )
    parser.add_argument(
        "--setup", action="append", default=[], metavar="LINE",
        help="bash for each node before that, such as 'module load cuda' or 'export NAME=VALUE'; repeatable",
    )  # fmt: skip


def _add_slurm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="default 1")
    _add_environment(parser)
    for name in ("job_name", "partition", "account", "qos", "constraint", "time"):
        parser.add_argument(f"--{name}", metavar="X", help=f"sbatch's --{name.replace('_', '-')}")
    parser.add_argument("--log", default="%x-%j.out", metavar="FILE", help="sbatch's --output; default %%x-%%j.out")
    parser.add_argument("--cpus_per_task", type=int, metavar="N", help="CPUs of each node for the job; default: all")
    parser.add_argument(
        "--shared", action="store_true", help="other jobs may use the nodes, too; needs --cpus_per_task"
    )
    parser.add_argument("--no_gres", action="store_true", help="the cluster's Slurm does not count GPUs")
    parser.add_argument(
        "--signal_seconds", type=int, default=120, metavar="S", help="for the last checkpoint; default 120"
    )
    parser.add_argument(
        "--max_requeues", type=int, default=20, metavar="N", help="times back into the queue; default 20; 0: never"
    )
    parser.add_argument("--max_failures", type=int, default=3, metavar="N", help="failures in a row; default 3")


def _add_kubernetes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--kind", choices=("trainjob", "pytorchjob"), default="trainjob", help="Kubeflow Trainer v2 (default), or v1"
    )
    parser.add_argument("--image", required=True, metavar="IMAGE", help="with smp installed")
    parser.add_argument("--claim", required=True, metavar="NAME", help="volume claim that all nodes can write")
    parser.add_argument("--mount_path", default="/mnt/smp", metavar="DIR", help="of the claim; default /mnt/smp")
    parser.add_argument("--job_name", metavar="NAME", help="default: the model's")
    parser.add_argument("--namespace", default="default", metavar="NAME", help="default: default")
    parser.add_argument("--shared_memory", default="64Gi", metavar="SIZE", help="of /dev/shm, in memory; default 64Gi")
    parser.add_argument(
        "--resource", action="append", default=[], metavar="NAME=N",
        help="of each node, such as cpu=32 or vpc.amazonaws.com/efa=32; repeatable",
    )  # fmt: skip
    parser.add_argument("--max_restarts", type=int, default=20, metavar="N", help="default 20")


def _add_hostfile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", required=True, metavar="FILE", help="lines such as `node1 slots=8`")
    parser.add_argument("--port", type=int, default=29400, metavar="PORT", help="free on the first host; default 29400")
    _add_environment(parser)


def _add_local(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", action="store_true", dest="start", help="run it, instead of printing it")


def _require_numbers(options: argparse.Namespace) -> None:
    for name, (least, most) in _BOUNDS.items():
        value = getattr(options, name, None)
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise UserError(f"--{name} must be {bound}, got {value}")
    if options.gpu_memory_gib is not None and not 0 < options.gpu_memory_gib < float("inf"):
        raise UserError(f"--gpu_memory_gib must be above 0, got {options.gpu_memory_gib}")


def _require_texts(options: argparse.Namespace) -> None:
    """Refuse what a script cannot carry; directories become the same wherever the script is read."""
    for name in ("workdir", "script", "venv", "conda", "image", "mount_path"):
        if (value := getattr(options, name, None)) is not None:
            require_plain(f"--{name}", value)
    in_image = options.target == "kubernetes"
    if options.workdir is None:
        options.workdir = _IMAGE_WORKDIR if in_image else os.getcwd()
    elif not in_image:
        options.workdir = os.path.abspath(options.workdir)
    for mount in options.mount:
        require_plain("--mount", mount)
        if ":" not in mount:
            raise UserError(f"--mount {mount} is not allowed: write it as HOST_DIRECTORY:CONTAINER_DIRECTORY")
    allowed = _SLURM_TEXTS if options.target == "slurm" else _KUBERNETES_TEXTS if in_image else {}
    for name, (pattern, what) in allowed.items():
        if (value := getattr(options, name, None)) is not None:
            require_match(f"--{name}", value, pattern, what)
    for line in options.setup:
        require_plain("--setup", line)
    image = options.image or ""
    named = re.sub(r"^\w+://|@[\w+.-]+:[0-9a-fA-F]{32,}$", "", image)  # without its scheme and its digest
    if not image.startswith(("/", ".")) and re.match(r"[^/]*:[^@]*@", named):
        raise UserError(
            "--image looks like a secret, which the script would show to everybody: leave the password out of it, and "
            "log in to the registry where the image is pulled"
        )


def _arguments_of(options: argparse.Namespace) -> list[str]:
    arguments = list(options.arguments)
    if arguments and arguments[0] != "--":
        raise UserError(
            f"{arguments[0]!r} is no flag of `smp launch {options.target}`: the training job's flags come after `--`"
        )
    arguments = require_plain_arguments(arguments[1:])
    if options.model is not None:
        if (other := value_of(arguments, "--model")) is not None:
            raise UserError(f"--model {options.model} and --model {other} after `--` are both given: leave one out")
        arguments = ["--model", require_plain("--model", options.model), *arguments]
    return arguments


def _require_environment(options: argparse.Namespace) -> None:
    given = [name for name in ("venv", "conda", "image") if getattr(options, name) is not None]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]} both say where Python is: give one of them")
    if options.target != "kubernetes" and (options.image is None) != (options.container is None):
        raise UserError("--image and --container belong together: give both, such as --container docker --image smp")
    if options.mount and options.image is None:
        raise UserError("--mount has a meaning only with --image: add it, or leave it out")


def _job(options: argparse.Namespace, *, nodes: int, slots: int | None = None) -> Job:
    """Check everything and choose what was left open."""
    _require_numbers(options)
    _require_texts(options)
    _require_environment(options)
    arguments = _arguments_of(options)
    processes, gpus = _processes(options, slots)
    found = _checked(options, arguments)
    given = found.named if found is not None else frozenset(_flags(arguments))
    if found is not None:
        _require_kept(options, found)
    title = f"Made by `smp launch {options.target}`: {nodes} node(s)"
    chosen: list[str] = []
    if found is None:
        comments = [title + ".", _unchecked(arguments)]
    elif not gpus or found.settings["evaluate_only"]:
        comments = [f"{title}{'' if gpus else ', on CPUs'}. No sizes were chosen."]
    else:
        row = device_of(options.device, gpus, memory_gib=options.gpu_memory_gib)
        with contextlib.chdir(options.workdir if os.path.isdir(options.workdir) else "."):
            chosen, lines = best(arguments, row, nodes=nodes, local=gpus)
        comments = [f"{title} of {gpus} GPU(s).", *lines]
    if options.target == "kubernetes" and "output_dir" not in given:
        arguments += ["--output_dir", f"{options.mount_path}/runs/{_name(options, arguments)}"]
    return Job(
        nodes=nodes, gpus=gpus, processes=processes, workdir=options.workdir,
        program=["-m", "smp.train"] if options.script is None else [options.script],
        arguments=[*arguments, *chosen], resumes=RESUME.removeprefix("--") in given, comments=comments,
        venv=options.venv, conda=options.conda, image=options.image, container=options.container,
        mounts=tuple(options.mount), setup=tuple(options.setup),
    )  # fmt: skip


def _require_kept(options: argparse.Namespace, found: Checked) -> None:
    """Refuse to write where only the container is."""
    if options.target == "kubernetes":
        require_kept(found, options.workdir, [options.mount_path], advice="")
    elif options.container in ("docker", "enroot"):
        mounts = [mount.split(":") for mount in options.mount]
        roots = [options.workdir, *(parts[1] for parts in mounts if "ro" not in ",".join(parts[2:]).split(","))]
        require_kept(found, options.workdir, roots, advice=", or add --mount HOST:DIR")


def _processes(options: argparse.Namespace, slots: int | None) -> tuple[int, int]:
    """Return processes and GPUs of each node."""
    gpus = options.gpus_per_node
    if slots is not None and gpus not in (None, 0, slots):
        raise UserError(
            f"--gpus_per_node {gpus} contradicts the hosts' slots={slots}: leave it out, or change the slots"
        )
    if gpus is None and options.target == "local":
        import torch

        gpus = torch.cuda.device_count()
    elif gpus is None:
        gpus = slots or _GPUS
    processes = options.processes_per_node or slots or gpus
    if not processes:
        none = "" if options.gpus_per_node == 0 else "this machine has no GPU; "
        raise UserError(
            f"{none}--gpus_per_node 0 trains on CPUs: say with --processes_per_node how many processes a node runs"
        )
    if slots is not None and processes != slots:
        raise UserError(f"--processes_per_node {processes} contradicts the hosts' slots={slots}: leave it out")
    if gpus and processes != gpus:
        raise UserError(
            f"{processes} processes for {gpus} GPU(s) of each node: each process has one GPU; give --gpus_per_node "
            f"{processes}, or 0 to train on CPUs"
        )
    return processes, gpus


def _flags(arguments: list[str]) -> list[str]:
    return [argument[2:].partition("=")[0] for argument in arguments if argument.startswith("--")]


def _checked(options: argparse.Namespace, arguments: list[str]) -> Checked | None:
    """Read the training flags as the job does; return None where they are another script's."""
    if options.script is not None and Path(options.script).name != "train_lib.py":
        return None
    return check_arguments(arguments, Path(options.workdir))


def _unchecked(arguments: list[str]) -> str:
    """Return, and print, a note that the training flags were not checked."""
    note = "The training flags were not checked, and no sizes chosen: they are of another script."
    if "config" in _flags(arguments):
        note += f" What the file of --config says of {RESUME} and --output_dir is not known: name them among the flags."
    print(f"note: {note}", file=sys.stderr)
    return note


def _name(options: argparse.Namespace, arguments: list[str]) -> str:
    """Return the job's name: the model's, where none is given."""
    if options.job_name:
        return str(options.job_name)
    model = value_of(arguments, "--model") or "smp"
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in Path(model).name.lower()).strip("-")
    return plain[:40] or "smp"


def _slurm(options: argparse.Namespace) -> str:
    job = _job(options, nodes=options.nodes)
    own = {name: getattr(options, name) for name in ("partition", "account", "qos", "constraint", "time")}
    known = SlurmOptions(
        job_name=_name(options, job.arguments), output=options.log, cpus_per_task=options.cpus_per_task,
        exclusive=not options.shared, gres=not options.no_gres, signal_seconds=options.signal_seconds,
        max_requeues=options.max_requeues, max_failures=options.max_failures, **own,
    )  # fmt: skip
    text = slurm_script(job, known)
    if options.time is None:
        print(f"note: {NO_TIME}", file=sys.stderr)
    return text


def _kubernetes(options: argparse.Namespace) -> str:
    resources: dict[str, str] = {}
    for text in options.resource:
        name, separator, count = text.partition("=")
        if not separator or not re.fullmatch(_RESOURCE, name, re.ASCII) or not re.fullmatch(_QUANTITY, count, re.ASCII):
            raise UserError(f"--resource {text} is not allowed: write it as NAME=N, such as cpu=32 or memory=512Gi")
        if name == "nvidia.com/gpu":
            raise UserError(f"--resource {text} is not allowed: --gpus_per_node says how many GPUs a node has")
        if resources.setdefault(name, count) != count:
            raise UserError(f"--resource {name}={resources[name]} and --resource {text} are both given: leave one out")
    job = _job(options, nodes=options.nodes)
    name = _name(options, job.arguments)
    require_match("--job_name", name, *_KUBERNETES_TEXTS["job_name"])  # also where it is the model's
    known = KubernetesOptions(
        name=name, claim=options.claim, namespace=options.namespace, mount=options.mount_path,
        shared_memory=options.shared_memory, resources=tuple(resources.items()), max_restarts=options.max_restarts,
    )  # fmt: skip
    return (train_job if options.kind == "trainjob" else pytorch_job)(job, known)


def _hostfile(options: argparse.Namespace) -> str:
    if options.container == "enroot":
        raise UserError("--container enroot works through Slurm's pyxis: use docker or apptainer over ssh")
    hosts, slots = read_hosts(Path(options.hosts))
    return hostfile_script(_job(options, nodes=len(hosts), slots=slots), hosts, options.port)


def _local(options: argparse.Namespace) -> str:
    if options.start and options.output is not None:
        raise UserError(f"--run writes no script, and --output {options.output} asks for one: leave one of them out")
    job = _job(options, nodes=1)
    if options.start:
        os.chdir(job.workdir)
        sys.stdout.flush()
        command = local_command(job)
        os.execv(command[0], command)
    return local_script(job)


_Add = Callable[[argparse.ArgumentParser], None]
_TARGETS: dict[str, tuple[str, _Add, Callable[[argparse.Namespace], str]]] = {
    "slurm": ("a script for sbatch, which resumes after preemption and the end of its time", _add_slurm, _slurm),
    "kubernetes": ("a manifest for Kubeflow: TrainJob (Trainer v2) or PyTorchJob (v1)", _add_kubernetes, _kubernetes),
    "hostfile": ("a script that starts the job over ssh on the hosts of a file", _add_hostfile, _hostfile),
    "local": ("the command for this machine", _add_local, _local),
}


def run(options: argparse.Namespace) -> int:
    """Print the script, or write it to ``--output``."""
    text = _TARGETS[options.target][2](options)
    if options.output is None:
        print(text, end="")
        return 0
    mode = 0o666 if options.target == "kubernetes" else 0o777
    try:
        descriptor = os.open(options.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise UserError(f"--output {options.output} exists: remove it, or choose another name") from None
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    print(f"wrote {options.output}", file=sys.stderr)
    return 0
