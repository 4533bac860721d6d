"""The wheel alone gives the whole job, away from its source."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.clock import HANG_SECONDS

ROOT = pathlib.Path(__file__).parents[2]
WHERE = "import importlib.util; print(importlib.util.find_spec('smp').origin)"
LOCAL = [sys.executable, "-m", "smp.launch.local", "--nproc_per_node", "2"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, the directory that it is installed into, which has nothing else, and its source, a folder smp."""
    folder = tmp_path_factory.mktemp("a wheel")
    source, wheels, target = folder / "smp", folder / "wheels", folder / "site"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if tracked.returncode:  # not a clone
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__", "build"))
    for name in tracked.stdout.splitlines():
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", wheels, source], check=True)
    (wheel,) = wheels.glob("smp_train-*.whl")
    subprocess.run([*pip, "install", *offline, "--target", target, wheel], check=True)
    return wheel, target, source


def run(target, folder, *command):
    """Run a command in an empty directory with the installed package and nothing of the checkout."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)


def test_what_the_wheel_holds(installed):
    names = set(zipfile.ZipFile(installed[0]).namelist())
    assert {
        "smp/py.typed", "smp/comm/kernel.c", "smp/launch/templates/slurm.sh", "smp/models/presets/llama7b.yaml",
        "smp/report/page.html", "smp/train/__main__.py", "smp/data/prepare.py",
    } <= names  # fmt: skip
    assert {name.split("/")[0] for name in names} == {"smp", "smp_train-0.1.0.dist-info"}
    source = installed[2]
    files = {str(path.relative_to(source)) for path in (source / "smp").rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("smp/")} == files


def test_an_editable_install_is_found_from_the_folder_that_holds_the_clone(installed, tmp_path):
    """There the clone, a folder called smp, is itself an importable name."""
    source, folder = installed[2], tmp_path / "site"
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    code = f"import site, sys; site.addsitedir(sys.argv[1]); {WHERE}"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, folder], cwd=source.parent, env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{source / 'smp' / '__init__.py'}\n", done.stdout + done.stderr


def test_the_job_and_commands_where_only_the_wheel_is(installed, tmp_path):
    where = run(installed[1], tmp_path / "empty", sys.executable, "-c", WHERE)
    assert where.stdout.startswith(str(installed[1]))
    words = "--model llama_tiny --use_synthetic_data 1 --max_steps 3 --logging_freq 1".split()
    done = run(installed[1], tmp_path / "empty", *LOCAL, "-m", "smp", "train", *words)
    assert done.returncode == 0 and "Done: step 3 of 3" in done.stderr + done.stdout, done.stderr
    assert len((tmp_path / "empty/runs/llama_tiny/metrics.jsonl").read_text().splitlines()) == 3
    words = "--model llama_tiny --training_dir data/sample/train.txt --dataset_type text".split()
    words += ["--tokenizer_name_or_dir", ROOT / "data/sample/tokenizer"]
    done = run(installed[1], tmp_path / "empty", sys.executable, "-m", "smp.train", *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "; the sample belongs to a checkout of smp's repository and is not installed" in done.stderr, done.stderr
