"""``import smp``: in any order with torch, light for the command's help, and every import that the pages show."""

from __future__ import annotations

import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import smp
import smp.cli
from tests import names
from tests.clock import HANG_SECONDS

ROOT = pathlib.Path(__file__).parents[2]

JOIN = """
dist.init_process_group("smddp", init_method="file://" + sys.argv[1], rank=0, world_size=1)
assert dist.get_backend() == "smddp"
dist.destroy_process_group()
"""
ORDERS = {
    "torch first": "import sys, torch.distributed as dist, smp",
    "smp first": "import sys, smp, torch, torch.distributed as dist",
    "smp alone": "import sys, smp\ndist = sys.modules['torch.distributed']",
    "a module of smp": "import sys, smp.errors, torch.distributed as dist",
}


@pytest.mark.full
def test_every_order_of_imports_registers_the_backend(tmp_path):
    started = {}
    for number, (order, imports) in enumerate(ORDERS.items()):
        script = tmp_path / str(number) / "smp"  # the command's own name
        script.parent.mkdir()
        script.write_text(imports + JOIN)
        words = [sys.executable, "-c", f"exec(open({str(script)!r}).read())"] if number else [sys.executable, script]
        started[order] = subprocess.Popen(
            [*words, script.with_name("rendezvous")], cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    for order, process in started.items():
        _, said = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 0, f"{order}: {said}"


def imported_by(*words: str | pathlib.Path) -> set[str]:
    """Run a command and return the modules that it has imported."""
    done = subprocess.run(
        words, cwd=ROOT, env={"PYTHONPROFILEIMPORTTIME": "1"}, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0 and "usage: smp" in done.stdout, done.stderr
    assert all(f"\n    {name} " in done.stdout for name in smp.cli.COMMANDS)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("command", [["-m", "smp"], ["-u", "-m", "smp"], [pathlib.Path(sys.executable).parent / "smp"]])
def test_the_commands_help_imports_no_torch(command):
    if not isinstance(command[0], str) and not command[0].exists():
        pytest.skip("smp is not installed here")
    found = imported_by(sys.executable, *command, "--help")
    assert "smp.cli" in found and not found & {"torch", "transformers", "numpy"}


TORCH = "torch was asked for"
BEGINS = f"smp {smp.__version__}: loading torch\n"
RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        (["-m", "smp.train"], {}, BEGINS),
        (["-u", "-m", "smp", "train", "--max_steps", "3"], {}, BEGINS),
        (["train_lib.py"], {}, BEGINS),
        (["-m", "smp.train"], RANK, ""),
        (["-m", "smp.train"], RANK | {"RANK": "0", "LOCAL_RANK": "0"}, BEGINS),
        (["-m", "smp.train"], {"TORCHELASTIC_RUN_ID": str(os.getpid())}, ""),  # the launcher, as here, has said it
        (["-m", "smp.train", "--help"], {}, ""),
        (["-m", "smp.launch.local", "-m", "smp.train"], {}, BEGINS),
        (["-m", "smp.launch.local", "--nnodes", "2", "--node_rank", "1", "-m", "smp.train"], {}, ""),
        (["-m", "smp.launch.local", "mine.py"], {}, ""),
        (["-c", "import smp"], {}, ""),
    ],
)
def test_a_job_says_that_it_begins_before_it_waits_for_torch(words, environment, says, tmp_path):
    (tmp_path / "torch.py").write_text(f"raise SystemExit({TORCH!r})\n")
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=path | environment, capture_output=True, text=True)
    assert done.stderr == f"{says}{TORCH}\n" and done.stdout == ""


@pytest.mark.full
def test_smp_train_is_the_job():
    started = [[sys.executable, *words, "--version"] for words in (["-m", "smp", "train"], ["-m", "smp.train"])]
    outputs = {subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout for words in started}
    assert outputs == {f"smp {smp.__version__}\n"}


def test_smp_alone_prints_the_commands_and_how_to_train():
    done = subprocess.run([sys.executable, "-m", "smp"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and all(f"    {name} " in done.stdout for name in smp.cli.COMMANDS), done.stderr
    assert "To train: smp train --model llama_tiny --use_synthetic_data 1" in done.stdout


def test_no_public_name_is_also_a_modules():
    for name in set(smp.__all__) - {"comm"}:
        assert importlib.util.find_spec(f"smp.{name}") is None, name
    assert sorted(smp.__all__) == sorted(set(smp.__all__)) and all(hasattr(smp, name) for name in smp.__all__)


def imports_shown() -> set[str]:
    """Return the imports of smp in README.md, docs/ and examples/, as statements."""
    found = set()
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.*")]:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"\b(?:import smp[\w.]*|from smp[\w.]* import (?:\([^)]*\)|\w+(?:, \w+)*))", text):
            found.add(ast.unparse(ast.parse(match[0])))
    return found


@pytest.mark.full
def test_every_import_that_the_pages_show_works():
    shown = imports_shown()
    assert {"import smp", "import smp.sagemaker", "from smp import FullyShardedDataParallel"} <= shown
    script = "\n".join(sorted(shown))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_name_is_newer_than_the_oldest_supported_torch_and_transformers():
    """``python -m tests.names`` lists what they have; a newer name is asked for by ``getattr``, or the floor raised."""
    used = names.used_by_smp()
    assert "torch.nn.functional.scaled_dot_product_attention" in used
    assert used - set(names.FLOOR.read_text().split()) == set()


@pytest.mark.full
def test_all_names_are_in_the_installed_torch_and_transformers():
    found = {name for name in names.used_by_smp() if names.missing(name)}
    if not torch.distributed.is_nccl_available():  # a build for CPUs
        found = {name for name in found if not name.startswith("torch.distributed.ProcessGroupNCCL")}
    assert found == set()
