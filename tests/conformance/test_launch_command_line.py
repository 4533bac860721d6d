"""What ``smp launch`` makes of its own flags, the training job's and its ``--config`` file, in every target."""

import argparse
import pathlib
import re
import shlex

import pytest
import yaml

from smp.cli import launch
from smp.errors import ConfigError
from smp.launch import kubernetes, script
from smp.launch.command_line import check_arguments, comment, value_of
from tests.conformance.test_launch_scripts import CPU, says

ROOT = pathlib.Path(__file__).parents[2]
HERE = [*CPU, "--workdir", ROOT]
POD = ["kubernetes", "--image", "r/smp:1", "--claim", "data"]
TINY = ["--model", "llama_tiny", "--use_synthetic_data", "1"]
ENROOT = ["--container", "enroot"]
DOCKER = ["--container", "docker"]
IN_DOCKER = [*HERE, *DOCKER, "--image", "smp", "--mount", "/data:/d"]


def written(*words):
    status, out, err = says(*words)
    assert status == 0, err
    return out


def configured(tmp_path, **settings):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": "llama_tiny", "use_synthetic_data": True} | settings))
    return ["--config", path]


def arguments(manifest):
    """The training command's words."""
    return list(yaml.safe_load_all(manifest))[1]["spec"]["trainer"]["args"][2:]


def test_a_checkpoint_that_the_config_names_is_where_the_first_start_begins(tmp_path):
    named = configured(tmp_path, resume_from_checkpoint="/x")
    first, later = written("slurm", *HERE, "--", *named), written("slurm", *HERE, "--", *configured(tmp_path))
    assert "    --resume_from_checkpoint latest" not in first and "    --resume_from_checkpoint latest" in later
    assert "train+=(--resume_from_checkpoint latest)" in first and "train+=" not in later
    named = configured(tmp_path, resume_from_checkpoint="/x")
    assert "--resume_from_checkpoint" not in written("local", *HERE, "--", *named)


@pytest.mark.parametrize("target", [["slurm"], ["local"], POD, [*POD, "--kind", "pytorchjob"], ["hostfile"]])
def test_a_runs_own_configuration_names_no_checkpoint(target, tmp_path):
    """It has null for what was not given."""
    (tmp_path / "hosts").write_text("a slots=2\n")
    own = ["--hosts", tmp_path / "hosts"] if target == ["hostfile"] else []
    workdir = ["--workdir", ROOT] if "kubernetes" not in target else []
    config = configured(tmp_path, resume_from_checkpoint=None, output_dir=None)
    text = written(*target, *own, *CPU, *workdir, "--", *config)
    pairs = re.findall(r"--resume_from_checkpoint\W+latest", text)
    assert len(pairs) == (1 if "--kind" not in target else len(yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]))
    assert "train+=" not in text and "SMP_RESTARTS" not in text
    assert ("/mnt/smp/runs/smp" in text) == ("kubernetes" in target)


def test_the_users_own_run_directory_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for flags in (["--output_dir", "/mnt/smp/mine"], ["--output_dir=/mnt/smp/mine"]):
        words = arguments(written(*POD, *CPU, "--", *TINY, *flags))
        assert [word for word in words if word.startswith(("--output_dir", "/mnt"))] == flags
        words = arguments(written(*POD, *CPU, "--script", "x.py", "--", *flags))
        assert words == [*flags, "--resume_from_checkpoint", "latest"]
    assert "--output_dir" not in arguments(written(*POD, *CPU, "--", *configured(tmp_path, output_dir="/mnt/smp/own")))
    words = arguments(written(*POD, *CPU, "--", *configured(tmp_path)))
    assert words[words.index("--output_dir") + 1] == "/mnt/smp/runs/smp"


def test_what_a_config_says_is_not_known_to_a_script_that_was_not_checked(tmp_path):
    status, out, err = says("slurm", *CPU, "--script", "x.py", "--", "--config", "run.yaml")
    assert status == 0 and "name them among the flags" in err and "name them among the flags" in out
    assert "name them" not in says("slurm", *CPU, "--script", "x.py")[1]


def test_no_value_of_a_config_ends_a_comment(tmp_path):
    evil = configured(tmp_path, model="x\nrm -rf /tmp/none\n#")
    status, out, err = says("slurm", "--workdir", ROOT, "--", *evil)
    assert (status, out) == (2, "") and "--model 'x\\nrm" in err and "contains a line break" in err
    lines = ["one\ntwo\r\u2028three", "s3://me:hunter2@host/x", "4,194,304 tokens in each round", "a | b"]
    assert comment(lines).splitlines() == ["# one two  three", "# s3://me:***@host/x", *(f"# {x}" for x in lines[2:])]


def test_secrets_of_a_config_are_refused(tmp_path):
    """The run's own config.yaml would keep them."""
    named = configured(tmp_path, training_dir="s3://me:hunter2@host/x")
    with pytest.raises(ConfigError, match=r"--training_dir s3://me:.* contains a secret") as refusal:
        check_arguments(list(map(str, named)), ROOT)
    assert "hunter2" not in str(refusal.value)


def as_kubernetes(word, values):
    """Its expansion of a word: $$ is $, $(NAME) the variable's value where it is known, and all else itself."""
    return re.sub(r"\$(\$|\(([^)]*)\))", lambda m: "$" if m[1] == "$" else values.get(m[2], m[0]), word)


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_words_survive_kubernetes(kind):
    words = ["--a", "$$", "$$x", "a$", "$$$", "$(HOME)", "$$(HOME)", "$HOME", "\U0001f600 \u00e9 \u4e2d", '\\u0041 "q"']
    job = script.Job(1, 0, 1, "/w", ["x.py"], words, resumes=kind == "pytorchjob", comments=[], image="smp:\U0001f600")
    make = kubernetes.train_job if kind == "trainjob" else kubernetes.pytorch_job
    found = list(yaml.safe_load_all(make(job, kubernetes.KubernetesOptions("x", "y", mount="/\U0001f600"))))
    if kind == "trainjob":
        container, args = found[1]["spec"]["trainer"], found[1]["spec"]["trainer"]["args"]
    else:
        pod = found[0]["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
        [container] = pod["containers"]
        args = container["args"]
        assert container["volumeMounts"][0]["mountPath"] == "/\U0001f600"
    read = [as_kubernetes(word, {"HOME": "/root"}) for word in args]
    assert read[2:] == script.with_resume(job) and container["image"] == "smp:\U0001f600"
    assert read[0].strip() == script.node_script(job, rank_info=kubernetes._RANK_INFO, first=True).strip()


def test_restarts_of_all_pods_are_counted_together():
    one, four = (written(*POD, *CPU, "--kind", "pytorchjob", "--nodes", n, "--max_restarts", 3, "--script", "x.py")
                 for n in (1, 4))  # fmt: skip
    assert [yaml.safe_load(text)["spec"]["runPolicy"]["backoffLimit"] for text in (one, four)] == [3, 12]


FINAL = ["--save_final_model", "1", "--model_dir"]
REFUSED = {
    "no separator": (["slurm", "--model", "llama7b", "x"], "'x' is no flag of `smp launch slurm`"),
    "unknown flag": (["slurm", "--nodez", "2"], "unrecognized arguments: --nodez"),
    "training flag": (
        ["slurm", "--tensor_parallel_degree", "4"],
        "--tensor_parallel_degree is a flag of the training job, and those come last: smp launch slurm ... -- --te",
    ),
    "nodes": (["slurm", "--nodes", "0"], "--nodes must be at least 1, got 0"),
    "processes": (["slurm", "--processes_per_node", "4"], "4 processes for 8 GPU(s) of each node"),
    "no processes": (["slurm", "--gpus_per_node", "0"], "say with --processes_per_node"),
    "memory": (["slurm", "--gpu_memory_gib", "nan"], "--gpu_memory_gib must be above 0"),
    "line break": (["slurm", "--", "--name", "a\nb"], "--name 'a\\nb' contains a line break"),
    "line break in a path": (["slurm", "--workdir", "a\nb"], "--workdir 'a\\nb' contains a line break"),
    "directive": (["slurm", "--partition", "a b"], "--partition 'a b' is not allowed"),
    "time": (["slurm", "--time", "1h"], "--time '1h' is not allowed: give minutes[:seconds], hours:minutes:seconds, "),
    "directive's line": (["slurm", "--job_name", "a\n#SBATCH"], "--job_name 'a\\n#SBATCH' is not allowed"),
    "secret": (["slurm", "--", "--hf_access_token", "hf_abcdefghijklmnopqrst"], "looks like a secret"),
    "secret in a URL": (["slurm", "--", "--training_dir", "s3://me:pass@host/x"], "--training_dir looks like a secret"),
    "two environments": (["slurm", "--venv", "a", "--conda", "b"], "--venv and --conda both say where Python is"),
    "image alone": (["slurm", "--image", "a"], "--image and --container belong together"),
    "container alone": (["slurm", "--container", "docker"], "--image and --container belong together"),
    "mount": (["slurm", "--mount", "a:b"], "--mount has a meaning only with --image"),
    "mount of one": (["slurm", "--mount", "a", "--image", "a", "--container", "docker"], "--mount a is not allowed"),
    "claim": (["kubernetes", "--image", "x"], "the following arguments are required: --claim"),
    "name": (
        ["kubernetes", "--image", "x", "--claim", "Data", *CPU, "--script", "x.py"],
        "--claim 'Data' is not allowed: give at most 63",
    ),
    "resource": (["kubernetes", "--image", "x", "--claim", "d", "--resource", "cpu"], "--resource cpu is not allowed"),
    "size": (["kubernetes", "--image", "x", "--claim", "d", "--shared_memory", "big"], "--shared_memory 'big'"),
    "hosts": (["hostfile", "--hosts", "/nowhere"], "--hosts /nowhere cannot be read (No such file"),
    "enroot over ssh": (["hostfile", "--hosts", "x", "--image", "a", "--container", "enroot"], "Slurm's pyxis"),
    "target": (["lsf"], "invalid choice: 'lsf'"),
    "run and output": (["local", "--run", "--output", "F"], "--run writes no script, and --output F asks for one"),
    "slots": (
        ["hostfile", "--hosts", "HOSTS", "--gpus_per_node", "2"],
        "--gpus_per_node 2 contradicts the hosts' slots=4",
    ),
    "two models": (
        ["slurm", "--model", "llama_tiny", "--", "--model", "llama7b"],
        "--model llama_tiny and --model llama7b after `--` are both given",
    ),
    "two models, by =": (["slurm", "--model", "llama_tiny", "--", "--model=llama7b"], "are both given"),
    "GPUs twice": ([*POD, "--resource", "nvidia.com/gpu=2"], "--gpus_per_node says how many GPUs a node has"),
    "a resource twice": ([*POD, "--resource", "cpu=2", "--resource", "cpu=3"], "--resource cpu=2 and --resource cpu=3"),
    "a quantity": ([*POD, "--resource", "cpu=1..2Zz"], "--resource cpu=1..2Zz is not allowed"),
    "a resource's name": ([*POD, "--resource", "@%=3"], "--resource @%=3 is not allowed"),
    "colon": ([*POD, "--mount_path", "/a:b"], "--mount_path '/a:b' is not allowed"),
    "relative mount": ([*POD, "--mount_path", "a"], "--mount_path 'a' is not allowed"),
    "relative in the image": ([*POD, "--workdir", "."], "--workdir '.' is not allowed"),
    "signal": (["slurm", "--signal_seconds", "100000"], "--signal_seconds must be at most 65535, got 100000"),
    "port": (["hostfile", "--hosts", "HOSTS", "--port", "65536"], "--port must be at most 65535, got 65536"),
    "password": (["slurm", *DOCKER, "--image", "user:hunter2@reg.io/i"], "--image looks like a secret"),
    "password of enroot": (["slurm", *ENROOT, "--image", "docker://user:hunter2@reg.io#i"], "--image looks like a"),
    "password with a slash": (["slurm", *DOCKER, "--image", "user:hun/ter2@reg.io/i"], "--image looks like a secret"),
    "one CPU": (["slurm", *HERE, "--shared", "--", *TINY], "--shared leaves a node's processes one CPU, unless"),
    "a name with /": (["slurm", *HERE, "--job_name", "a/b", "--", *TINY], "--job_name 'a/b' is not allowed"),
    "output beside the mounts": (
        ["slurm", *IN_DOCKER, "--", *TINY, "--output_dir", "/shared/x"],
        f"--output_dir /shared/x is on none of its mounts, so that what is written there ends with the container: "
        f"choose a directory under {ROOT} or /d, or add --mount HOST:DIR",
    ),
    "output above": (["slurm", *IN_DOCKER, "--", *TINY, "--output_dir", "../x"], f", {ROOT.parent / 'x'} of the cont"),
    "checkpoints of enroot": (
        ["slurm", *HERE, *ENROOT, "--image", "i", "--", *TINY, "--checkpoint_dir", "/c"],
        "--checkpoint_dir /c is on none of its mounts",
    ),
    "curves on a mount to read": (
        ["slurm", *IN_DOCKER, "--mount", "/r:/r:ro", "--", *TINY, "--tensorboard_dir", "/d/x", "/r/x"],
        "--tensorboard_dir /r/x is on none of its mounts",
    ),
    "output in the image": (
        [*POD, *CPU, "--", *TINY, "--output_dir", "runs/x"],
        "--output_dir runs/x, /opt/smp/runs/x of the container, is on none of its mounts, so that what is written "
        "there ends with the container: choose a directory under /mnt/smp\n",
    ),
    "model in the image": (
        [*POD, *CPU, "--mount_path", "/v", "--", *TINY, "--output_dir", "/v/x", *FINAL, "/vx"],
        "--model_dir /vx is on none",
    ),
    "help": (["slurm", *HERE, "--", "--help"], "the training flags ask for help instead of a job: leave --help out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_ignored_or_refused_later_is_a_sentence(case, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words, text = REFUSED[case]
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    status, out, err = says(*(tmp_path / "hosts" if word == "HOSTS" else word for word in words))
    assert (status, out) == (2, "") and text in err and err.count("\n") == 1, err
    assert "hunter2" not in err and "ter2" not in err


def test_output_on_mounts_is_taken():
    for place in ("runs/x", ROOT / "runs", "/d", "/d/x"):
        assert f"--output_dir {shlex.quote(str(place))}\n" in written(
            "slurm", *IN_DOCKER, "--", *TINY, "--output_dir", place
        )
    urls = ["--checkpoint_dir", "s3://b/run", *FINAL, "s3://b/model"]
    assert "s3://b/run" in written(*POD, *CPU, "--", *TINY, *urls)
    apptainer = ["--container", "apptainer", "--image", "i"]  # mounts as the site says
    assert written("slurm", *HERE, *apptainer, "--", *TINY, "--output_dir", "/shared/x")


@pytest.mark.parametrize(
    "image",
    [
        "smp@sha256:" + "0" * 64, "reg:5000/smp:1@sha256:" + "a" * 64, "docker://user@reg.io#i:1", "reg:5000/smp:1",
        "/images/a:b@c.sif", "./x:1@y.sqsh",
    ],
)  # fmt: skip
def test_images_without_a_password_are_taken(image):
    assert image in written("slurm", *CPU, *ENROOT, "--image", image, "--script", "x.py")


def test_a_directory_is_the_same_on_all_hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=4\n")
    enroot = written("slurm", *CPU, *ENROOT, "--image", "i", "--workdir", ".", "--script", "x.py")
    assert f"--container-mounts={tmp_path}:{tmp_path})" in enroot
    over_ssh = written("hostfile", "--hosts", "hosts", "--gpus_per_node", "4", "--workdir", ".", "--script", "x.py")
    assert f"cd {tmp_path} ||" in over_ssh and "--nproc_per_node 4" in over_ssh
    on_cpus = written("hostfile", "--hosts", "hosts", "--gpus_per_node", "0", "--script", "x.py")
    assert "--nproc_per_node 4" in on_cpus


def test_resources_of_kubernetes():
    good = ["cpu=32", "memory=1.5Ti", "vpc.amazonaws.com/efa=4", "ephemeral-storage=500Gi", "cpu=32"]
    text = written(*POD, *CPU, "--script", "x.py", *(word for each in good for word in ("--resource", each)))
    limits = list(yaml.safe_load_all(text))[1]["spec"]["trainer"]["resourcesPerNode"]["limits"]
    assert [f"{name}={value}" for name, value in limits.items()] == good[:-1]


def test_the_last_value_of_a_flag():
    assert value_of(["--a", "1", "--a=2"], "--a") == "2" and value_of(["--a=1", "--a", "2"], "--a") == "2"
    assert value_of(["--ab", "1"], "--a") is None and value_of(["--a"], "--a") == ""


@pytest.mark.smoke
def test_every_target_has_its_own_flags_and_the_common_ones():
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    options = parser.parse_args(["local", "--gpus_per_node", "3"])
    assert options.gpus_per_node == 3 and parser.parse_args(["local"]).gpus_per_node is None
