"""The installed package works away from its source, presets included."""

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent

CODE = """
import importlib.metadata, pathlib, smp
from smp.models.model_config import ModelConfig, resolve_model
print(pathlib.Path(smp.__file__).parent.parent, resolve_model(ModelConfig(model="llama_tiny")).name)
(distribution,) = importlib.metadata.distributions(name="smp", path=[str(pathlib.Path(smp.__file__).parent.parent)])
(script,) = (entry for entry in distribution.entry_points if entry.group == "console_scripts")
print(script.name, script.load()(["verify", "absent"]))
job = ["--gpus_per_node", "0", "--processes_per_node", "2", "--output", "job.sh"]
print(script.load()(["launch", "slurm", *job]))  # its templates are there
"""


def test_install_and_import_from_elsewhere(tmp_path):
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "smp", source / "smp", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", target, source], check=True, timeout=300)
    # Isolated from the source tree and from the editable install.
    code = f"import sys; sys.path.insert(0, {str(target)!r})\n{CODE}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(target), "llama_tiny", "smp", "2", "0"]
