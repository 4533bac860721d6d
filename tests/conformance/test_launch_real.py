"""The training script under launchers that are installed here: Open MPI, MPICH, accelerate and DeepSpeed."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.job import LLAMA, losses

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = ["train_lib.py", *LLAMA, "--use_synthetic_data", "1", "--max_steps", "3", "--logging_freq", "1"]


def program(name):
    """The path of a launcher of this environment, or one that the system has."""
    found = shutil.which(name, path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"there is no {name} here")
    return found


def mpirun(words=(), *, processes=2, kind="Open MPI"):
    found = program("mpirun")
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if kind not in version:
        pytest.skip(f"mpirun is not of {kind}: {version.splitlines()[:1]}")
    return [found, "--allow-run-as-root", "--oversubscribe", *words, "-np", str(processes), sys.executable]


def accelerate(words=()):
    return [program("accelerate"), "launch", *words, "--num_processes", "2", "--num_machines", "1"]


def deepspeed():
    # Its first line names the interpreter without quotes.
    return [sys.executable, program("deepspeed"), "--num_accelerators", "2"]


def start(command, *, seconds=180, **variables):
    own = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    environment = outside | own | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)


GROUP = """
import os
import smp
import torch, torch.distributed as dist
device = smp.init_process_group()
total = torch.ones(1)
dist.all_reduce(total)
with open(os.path.join(os.environ["OUT"], os.environ["RANK"]), "w") as file:
    file.write(f"{device} {dist.get_backend()} {total.item()} {os.environ['MASTER_ADDR']}")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_open_mpi_starts_a_group(tmp_path):
    """With more processes than cores, where there are few: Open MPI numbers those of a host in another order."""
    script, processes = tmp_path / "group.py", os.cpu_count() + 1 if os.cpu_count() < 4 else 2
    script.write_text(GROUP)
    done = start([*mpirun(["-x", "OUT"], processes=processes), str(script)], OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = {(tmp_path / str(rank)).read_text() for rank in range(processes)}
    assert found == {f"cpu smddp {processes}.0 127.0.0.1"}


def test_mpich_starts_a_group(tmp_path):
    """Also where a shell is between the launcher and the processes, as MPICH tells no name of the job."""
    script = tmp_path / "group.py"
    script.write_text(GROUP)
    command = [program("mpiexec.hydra"), "-np", "2", "bash", "-c", f"{shlex.quote(sys.executable)} {script}; exit $?"]
    done = start(command, OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {(tmp_path / rank).read_text() for rank in "01"} == {"cpu smddp 2.0 127.0.0.1"}


LAUNCHERS = {"Open MPI": mpirun, "accelerate": lambda: accelerate(["--multi_gpu"]), "DeepSpeed": deepspeed}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_training_under_a_launcher(name, tmp_path):
    done = start([*LAUNCHERS[name](), *TRAIN, "--output_dir", str(tmp_path / "run")])
    text = done.stdout + done.stderr
    assert done.returncode == 0 and "World size = 2: dp_replicate 1 x dp_shard 2" in text, text
    assert len(losses(tmp_path / "run")) == 3


@pytest.mark.slow
@pytest.mark.smoke
def test_accelerate_without_several_processes_is_refused(tmp_path):
    done = start([*accelerate(["--cpu"]), *TRAIN, "--output_dir", str(tmp_path / "run")])
    assert done.returncode != 0 and "accelerate launch was asked for several processes and started one" in done.stderr


@pytest.mark.slow
def test_the_exit_status_of_a_job_under_mpirun(tmp_path):
    done = start([*mpirun(), *TRAIN, "--no_such_flag", "1"])
    assert done.returncode == 2 and "unknown flag --no_such_flag" in done.stderr
