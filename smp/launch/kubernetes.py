"""Manifests for Kubeflow: a TrainJob with its runtime (Trainer v2), or a PyTorchJob (v1)."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

import yaml

from smp.launch.command_line import comment
from smp.launch.script import RESUME, Job, node_script, with_resume

# Trainer v2 sets these; v1 has other names for the last two.
_RANK_INFO = (
    "nnodes=$PET_NNODES node_rank=$PET_NODE_RANK address=${PET_MASTER_ADDR:-$MASTER_ADDR} "
    "port=${PET_MASTER_PORT:-$MASTER_PORT}"
)
# A JobSet counts its starts in an annotation of each pod; where there is none, the variable is empty.
_ATTEMPT = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
_RESTARTS = {"name": "SMP_RESTARTS", "valueFrom": {"fieldRef": {"fieldPath": _ATTEMPT}}}
_LATER = f'if [ "${{SMP_RESTARTS:-0}}" -gt 0 ]; then set -- "$@" {RESUME} latest; fi'
_GRACE_SECONDS = 300
_TRAINER = "trainer.kubeflow.org"
_V2 = """
Kubeflow Trainer v2. Before: a volume claim named {claim} that all nodes can write. Then: kubectl apply -f FILE
A node that ends with 2 (bad input) ends the job; after any other failure, and after an eviction (75), all nodes start
again and resume, {restarts} times at most."""
_V1 = """
Kubeflow's v1 training operator. Before: a volume claim named {claim} that all nodes can write. Then:
kubectl apply -f FILE. After any failure, and after an eviction, a node starts again and the job resumes; after
{restarts} times it has failed."""


@dataclasses.dataclass(frozen=True)
class KubernetesOptions:
    """The options of Kubernetes alone.

    Args:
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

    @property
    def metadata(self) -> dict[str, str]:
        """Name and namespace, as each object has them."""
        return {"name": self.name, "namespace": self.namespace}


def train_job(job: Job, options: KubernetesOptions) -> str:
    """Return a TrainingRuntime and the TrainJob that uses it; a checkpoint in the flags is for its first start."""
    bad_input = {"containerName": "node", "operator": "In", "values": [2]}
    container = {"name": "node", "image": job.image} | ({"env": [_RESTARTS]} if job.resumes else {})
    node = {
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": bad_input}]},
        "template": {"spec": {"restartPolicy": "Never"} | _pod(container, options)},
    }
    labels = {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}
    failed = {"name": "badinput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job_set = {
        "failurePolicy": {"maxRestarts": options.max_restarts, "rules": [failed]},
        "replicatedJobs": [{"name": "node", "template": {"metadata": {"labels": labels}, "spec": node}}],
    }
    runtime = {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": job_set}}
    trainer: dict[str, Any] = {"numNodes": job.nodes, "numProcPerNode": job.processes, "image": job.image}
    trainer |= _command(job, f"{_RANK_INFO}\n{_LATER}" if job.resumes else _RANK_INFO)
    if resources := _resources(job, options):
        trainer["resourcesPerNode"] = resources
    reference = {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": options.name}
    return _manifest(
        [*job.comments, *_V2.format(claim=options.claim, restarts=options.max_restarts).splitlines()],
        _object(f"{_TRAINER}/v1alpha1", "TrainingRuntime", options, runtime),
        _object(f"{_TRAINER}/v1alpha1", "TrainJob", options, {"runtimeRef": reference, "trainer": trainer}),
    )


def pytorch_job(job: Job, options: KubernetesOptions) -> str:
    """Return a PyTorchJob."""
    container = {"name": "pytorch", "image": job.image} | _command(job, _RANK_INFO)
    if resources := _resources(job, options):
        container["resources"] = resources
    replica = {"restartPolicy": "OnFailure", "template": {"spec": _pod(container, options)}}
    counts = {"Master": 1, "Worker": job.nodes - 1}
    # The operator adds up the restarts of all pods, of which a restart of the job takes one each.
    restarts = options.max_restarts * job.nodes
    content = {
        "nprocPerNode": str(job.processes),
        "runPolicy": {"backoffLimit": restarts, "cleanPodPolicy": "Running"},
        "pytorchReplicaSpecs": {kind: {"replicas": count} | replica for kind, count in counts.items() if count},
    }
    return _manifest(
        [*job.comments, *_V1.format(claim=options.claim, restarts=restarts).splitlines()],
        _object("kubeflow.org/v1", "PyTorchJob", options, content),
    )


def _object(version: str, kind: str, options: KubernetesOptions, content: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": options.metadata, "spec": content}


def _pod(container: dict[str, Any], options: KubernetesOptions) -> dict[str, Any]:
    mounts = [
        {"name": "smp-data", "mountPath": options.mount},
        {"name": "smp-shared-memory", "mountPath": "/dev/shm"},
    ]
    memory = {"medium": "Memory", "sizeLimit": options.shared_memory}
    return {
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "volumes": [
            {"name": "smp-data", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "smp-shared-memory", "emptyDir": memory},
        ],
        "containers": [container | {"volumeMounts": mounts}],
    }


def _command(job: Job, rank_info: str) -> dict[str, Any]:
    """Return what a node runs, with the training flags as arguments.

    Kubernetes puts variables' values into ``$(NAME)``, and reads ``$$`` as ``$``.
    """
    node = node_script(dataclasses.replace(job, container=None), rank_info=rank_info, first=True) + "\n"
    arguments = [re.sub(r"\$(?=[$(])", "$$", word) for word in (node, "smp-node", *with_resume(job))]
    return {"command": ["/bin/bash", "-c"], "args": arguments}


def _resources(job: Job, options: KubernetesOptions) -> dict[str, dict[str, str]]:
    found = dict(options.resources) | ({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {})
    return {"limits": found, "requests": found} if found else {}


class _Dumper(yaml.SafeDumper):
    """Quote every text, so that no reader takes one for a number, and repeat what stands in two places."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


def _manifest(comments: list[str], *objects: dict[str, Any]) -> str:
    text = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    return f"{comment(comments)}\n{text}"
