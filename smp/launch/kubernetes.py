"""Manifests for Kubeflow: a TrainJob with its runtime (Trainer v2), or a PyTorchJob (v1); see ``templates/*.yaml``.

Scalars are written as JSON, which YAML contains, so that no value can be read as something else.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

from smp.launch.command_line import comment
from smp.launch.script import RESUME, Job, filled, node_script, with_resume

# Trainer v2 sets these; v1 has other names for the last two.
_PLACE = (
    "nnodes=$PET_NNODES node_rank=$PET_NODE_RANK address=${PET_MASTER_ADDR:-$MASTER_ADDR} "
    "port=${PET_MASTER_PORT:-$MASTER_PORT}"
)
# A JobSet counts its starts in an annotation of each pod; where there is none, the variable is empty.
_RESTARTS = """
- name: SMP_RESTARTS
  valueFrom: {fieldRef: {fieldPath: "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"}}
""".strip().splitlines()
_LATER = f'if [ "${{SMP_RESTARTS:-0}}" -gt 0 ]; then set -- "$@" {RESUME} latest; fi'
_GRACE_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class KubernetesOptions:
    """What only Kubernetes knows.

    Args:
        name, namespace: of the job.
        claim: a volume claim that all nodes can write.
        mount: where it is mounted.
        shared_memory: size of ``/dev/shm``, such as ``64Gi``.
        resources: of each node, by name, besides GPUs.
        max_restarts: after which the job has failed.
    """

    name: str
    claim: str
    namespace: str = "default"
    mount: str = "/mnt/smp"
    shared_memory: str = "64Gi"
    resources: tuple[tuple[str, str], ...] = ()
    max_restarts: int = 20


def train_job(job: Job, options: KubernetesOptions) -> str:
    """A TrainingRuntime and the TrainJob that uses it; a checkpoint in the flags is for its first start."""
    resources = _resources(job, options)
    container = [
        f"image: {_scalar(job.image or '')}",
        *(["env:", *_RESTARTS] if job.resumes else []),
        *_mounts(options),
    ]
    values = _common(job, options) | {
        "NODE": _escaped(_node(job, f"{_PLACE}\n{_LATER}" if job.resumes else _PLACE)),
        "POD": _indented(_pod("Never", options), 18),
        "CONTAINER": _indented(container, 22),
        "WORDS": _indented(_items(with_resume(job)), 6),
        "RESOURCES": _indented(resources and ["resourcesPerNode:", *resources], 4),
    }
    return filled("trainjob.yaml", values)


def pytorch_job(job: Job, options: KubernetesOptions) -> str:
    """A PyTorchJob."""
    resources = _resources(job, options)
    container = [
        "- name: pytorch",
        f"  image: {_scalar(job.image or '')}",
        '  command: ["/bin/bash", "-c"]',
        "  args:",
        *(f"    {line}" for line in _items([_node(job), "smp-node", *with_resume(job)])),
        *(f"  {line}" for line in (["resources:", *resources] if resources else [])),
        *(f"  {line}" for line in _mounts(options)),
    ]
    replicas = []
    for kind, count in (("Master", 1), ("Worker", job.nodes - 1)):
        if count:
            replicas += [
                f"{kind}:",
                f"  replicas: {count}",
                "  restartPolicy: OnFailure",
                "  template:",
                "    spec:",
                *(f"      {line}" for line in _pod(None, options)),
                "      containers:",
                *(f"        {line}" for line in container),
            ]
    values = _common(job, options) | {"REPLICAS": _indented(replicas, 4)}
    # The operator adds up the restarts of all pods, of which a restart of the job takes one each.
    return filled("pytorchjob.yaml", values | {"MAX_RESTARTS": str(options.max_restarts * job.nodes)})


def _common(job: Job, options: KubernetesOptions) -> dict[str, str]:
    return {
        "COMMENTS": comment(job.comments),
        "NAME": _scalar(options.name),
        "NAMESPACE": _scalar(options.namespace),
        "CLAIM_PLAIN": options.claim,
        "NODES": str(job.nodes),
        "PROCESSES": str(job.processes),
        "MAX_RESTARTS": str(options.max_restarts),
        "IMAGE": _scalar(job.image or ""),
    }


def _node(job: Job, place: str = _PLACE) -> str:
    return node_script(dataclasses.replace(job, container=None), place=place, first=True) + "\n"


def _escaped(word: str) -> str:
    """A word of a command as it is: Kubernetes puts variables' values into ``$(NAME)``, and reads ``$$`` as ``$``."""
    return _scalar(re.sub(r"\$(?=[$(])", "$$", word))


def _scalar(text: str) -> str:
    """A text as YAML: characters beyond 16 bits stay themselves, as YAML does not join JSON's two escapes of one."""
    return json.dumps(text, ensure_ascii=False)


def _items(words: Sequence[str]) -> list[str]:
    return [f"- {_escaped(word)}" for word in words]


def _resources(job: Job, options: KubernetesOptions) -> list[str]:
    found = dict(options.resources)
    if job.gpus:
        found["nvidia.com/gpu"] = str(job.gpus)
    lines = [f"  {_scalar(name)}: {_scalar(value)}" for name, value in found.items()]
    return (
        [line for kind in ("limits", "requests") for line in (f"  {kind}:", *(f"  {x}" for x in lines))]
        if lines
        else []
    )


def _pod(restart: str | None, options: KubernetesOptions) -> list[str]:
    claim = _scalar(options.claim)
    return [
        *([f"restartPolicy: {restart}"] if restart else []),
        f"terminationGracePeriodSeconds: {_GRACE_SECONDS}",
        "volumes:",
        "  - name: smp-data",
        f"    persistentVolumeClaim: {{claimName: {claim}}}",
        "  - name: smp-shared-memory",
        f"    emptyDir: {{medium: Memory, sizeLimit: {_scalar(options.shared_memory)}}}",
    ]


def _mounts(options: KubernetesOptions) -> list[str]:
    return [
        "volumeMounts:",
        f"  - {{name: smp-data, mountPath: {_scalar(options.mount)}}}",
        "  - {name: smp-shared-memory, mountPath: /dev/shm}",
    ]


def _indented(lines: Sequence[str], spaces: int) -> str:
    return "\n".join(" " * spaces + line for line in lines)
