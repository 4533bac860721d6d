"""The manifests for Kubernetes: their structure, the schemas of Kubeflow, and the command that a pod runs."""

import ast
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import yaml

from smp.launch import kubernetes, script
from smp.launch.command_line import quoted
from tests.clock import HANG_SECONDS, wait_until
from tests.conformance.test_launch_scripts import ODD, job_of

LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
KUBERNETES = kubernetes.KubernetesOptions(
    name="big", claim="data", namespace="ml", resources=(("cpu", "32"), ("vpc.amazonaws.com/efa", "4")), max_restarts=7
)


def manifests(kind, **changes):
    make = kubernetes.train_job if kind == "trainjob" else kubernetes.pytorch_job
    return list(yaml.safe_load_all(make(job_of(image="r/smp:1", **changes), KUBERNETES)))


def containers(pod):
    return pod["containers"][0], {volume["name"]: volume for volume in pod["volumes"]}


def check_pod(pod, volumes_of):
    container, volumes = containers(pod)
    assert volumes["smp-data"]["persistentVolumeClaim"] == {"claimName": "data"}
    assert volumes["smp-shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert {m["mountPath"]: m["name"] for m in volumes_of["volumeMounts"]} == {
        "/mnt/smp": "smp-data",
        "/dev/shm": "smp-shared-memory",
    }
    return container


@pytest.mark.smoke
def test_the_trainjob():
    runtime, job = manifests("trainjob")
    assert [runtime["kind"], job["kind"]] == ["TrainingRuntime", "TrainJob"]
    assert runtime["metadata"] == job["metadata"] == {"name": "big", "namespace": "ml"}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "big"}
    assert job["spec"]["runtimeRef"] == reference
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    policy = runtime["spec"]["template"]["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7 and policy["rules"][0]["action"] == "FailJobSet"
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node" and node["template"]["metadata"]["labels"] == {LABEL: "trainer"}
    inner = node["template"]["spec"]
    [rule] = inner["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2] and inner["backoffLimit"] == 0
    pod = inner["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and check_pod(pod, containers(pod)[0])["image"] == "r/smp:1"
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 8, "r/smp:1")
    limits = {"cpu": "32", "vpc.amazonaws.com/efa": "4", "nvidia.com/gpu": "8"}
    assert trainer["resourcesPerNode"] == {"limits": limits, "requests": limits}
    assert "env" not in pod["containers"][0]


def test_a_trainjob_that_names_a_checkpoint_counts_its_starts():
    runtime, _ = manifests("trainjob", arguments=["--resume_from_checkpoint", "x"], resumes=True)
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    path = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    [container] = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "SMP_RESTARTS", "valueFrom": {"fieldRef": {"fieldPath": path}}}]


def test_the_pytorchjob():
    [job] = manifests("pytorchjob")
    assert job["kind"] == "PyTorchJob" and job["spec"]["nprocPerNode"] == "8"
    assert job["spec"]["runPolicy"]["backoffLimit"] == 14
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: (r["replicas"], r["restartPolicy"]) for kind, r in replicas.items()} == {
        "Master": (1, "OnFailure"),
        "Worker": (1, "OnFailure"),
    }
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        container = check_pod(pod, containers(pod)[0])
        assert container["name"] == "pytorch" and container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert list(manifests("pytorchjob", nodes=1)[0]["spec"]["pytorchReplicaSpecs"]) == ["Master"]


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_the_command_of_a_pod_runs(kind, tmp_path):
    expected = [*ODD, "--resume_from_checkpoint", "latest"]
    assert run_pod(kind, tmp_path, {}) == expected
    assert run_pod(kind, tmp_path, {"SMP_RESTARTS": "3"}) == expected


@pytest.mark.parametrize(("restarts", "ends"), [(None, []), ("", []), ("0", []), ("1", ["latest"]), ("12", ["latest"])])
def test_a_checkpoint_that_the_flags_name_is_for_the_first_start(restarts, ends, tmp_path):
    named = [*ODD, "--resume_from_checkpoint", "x"]
    environment = {} if restarts is None else {"SMP_RESTARTS": restarts}
    later = ["--resume_from_checkpoint", *ends] if ends else []
    assert run_pod("trainjob", tmp_path, environment, arguments=named, resumes=True) == [*named, *later]
    assert run_pod("pytorchjob", tmp_path, environment, arguments=named, resumes=True) == named  # v1 does not count


def test_a_pod_ends_by_a_signal_that_comes_before_python_asks_for_it(tmp_path):
    """Linux drops those that would end the first process of a namespace, which is what a pod runs."""
    alone = ["unshare", "--fork", "--pid", "--kill-child"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to start a namespace of processes")
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text(f"#!/bin/bash\ntouch {tmp_path}/up\nexec sleep 3600\n")
    stub.chmod(0o755)
    text = script.node_script(job_of(workdir=str(tmp_path)), rank_info=kubernetes._RANK_INFO, first=True)
    environment = os.environ | {"PATH": f"{stub.parent}:{os.environ['PATH']}"}
    pod = subprocess.Popen([*alone, "bash", "-c", text, "smp-node"], env=environment)
    try:
        wait_until((tmp_path / "up").exists, alive=lambda: pod.poll() is None)
        [first] = pathlib.Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert pod.wait(timeout=HANG_SECONDS) == 143
    finally:
        pod.kill()


def run_pod(kind, tmp_path, environment, **changes):
    """Run a pod's command as Kubernetes would, with what the operator sets; returns the words that reach the job."""
    words = manifests(kind, workdir=str(tmp_path), gpus=0, processes=2, **changes)
    if kind == "trainjob":
        trainer = words[1]["spec"]["trainer"]
    else:
        trainer = containers(words[0]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"])[0]
    command = [word.replace("$$(", "$(") for word in [*trainer["command"], *trainer["args"]]]
    assert not re.search(r"(?<!\$)\$\([A-Za-z_]+\)", " ".join([*trainer["command"], *trainer["args"]]))
    stub, printing = tmp_path / "bin" / "python3", [sys.executable, "-c", "import sys; print(repr(sys.argv[1:]))"]
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(f'#!/bin/bash\nexec {quoted(printing)} "$@"\n')
    stub.chmod(0o755)
    place = {"PET_NNODES": "2", "PET_NODE_RANK": "1"}
    prefix = "PET_MASTER" if kind == "trainjob" else "MASTER"
    place |= {f"{prefix}_ADDR": "big-node-0-0.big", f"{prefix}_PORT": "29400"}
    place |= environment | {"PATH": f"{stub.parent}:{os.environ['PATH']}"}
    said = ast.literal_eval(subprocess.check_output(command, env=place, text=True))
    launcher = "-u -m smp.launch.local --nnodes 2 --node_rank 1 --master_addr big-node-0-0.big --master_port 29400"
    launcher = [*launcher.split(), *"--nproc_per_node 2 --no_gpus -m smp.train".split()]
    assert said[: len(launcher)] == launcher
    return said[len(launcher) :]


def strict(schema):
    """A structural schema of Kubernetes as JSON schema, where unknown fields are refused instead of dropped."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items() if key not in ("default", "description", "format")}
    if found.pop("x-kubernetes-int-or-string", False):
        found.pop("type", None)
    if isinstance(found.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in found:
        found.setdefault("additionalProperties", False)
    return found


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("resumes", [False, True])
def test_kubeflows_own_schemas(kind, nodes, resumes):
    """With SMP_KUBEFLOW_CRDS, a folder of Kubeflow's CustomResourceDefinitions (its manifests/base/crds)."""
    folder = os.environ.get("SMP_KUBEFLOW_CRDS")
    if folder is None:
        pytest.skip("set SMP_KUBEFLOW_CRDS to a folder of Kubeflow's CustomResourceDefinitions")
    jsonschema = pytest.importorskip("jsonschema")
    schemas = {}
    for path in pathlib.Path(folder).glob("*.yaml"):
        for found in yaml.safe_load_all(path.read_text()):
            if found and found["kind"] == "CustomResourceDefinition":
                [version] = found["spec"]["versions"]
                api = f"{found['spec']['group']}/{version['name']}"
                schemas[found["spec"]["names"]["kind"], api] = version["schema"]["openAPIV3Schema"]
    for manifest in manifests(kind, nodes=nodes, resumes=resumes):
        schema = strict(schemas[manifest["kind"], manifest["apiVersion"]])
        schema["properties"]["metadata"] = {"type": "object"}
        jsonschema.Draft202012Validator(schema).validate(manifest)
