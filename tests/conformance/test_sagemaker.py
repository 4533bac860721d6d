"""The table of SMP v2's names: every row is true, and the page made of it is current."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

import smp
from docs import make_tables
from smp.compat.names import FLAGS, KEYS, NAMES, VARIABLES
from smp.errors import ConfigError, UserError
from smp.train import arguments
from tests.distributed import run_distributed

ROOT = pathlib.Path(__file__).parents[2]


def found(dotted: str):
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(found(module), name)


@pytest.mark.parametrize("row", [row for row in NAMES if row.ours], ids=lambda row: row.original)
def test_what_takes_a_names_place_is_there(row):
    assert found(row.ours) is not None


@pytest.mark.parametrize("row", [row for row in NAMES if not row.same], ids=lambda row: row.original)
def test_a_name_that_differs_says_what_to_do(row):
    assert len(row.note) > 10
    for name in re.findall(r"--(\w+)", row.note):
        assert name in arguments.FLAGS
    for dotted in re.findall(r"\bsmp\.[A-Za-z_.]*[A-Za-z_]", row.note):
        assert found(dotted) is not None


def _keys() -> None:
    for key in KEYS:
        mesh = smp.init({key.name: key.default})
        assert mesh is not None
        if key.refused:
            with pytest.raises(UserError, match=key.name):
                smp.init({key.name: key.given})
        else:
            smp.init({key.name: key.given})
    with pytest.raises(UserError, match="unknown key hybrid_shard_degre:"):
        smp.init({"hybrid_shard_degre": 2})
    assert dist.get_world_size() == 2


def test_every_key_is_taken_or_refused():
    run_distributed(_keys, world_size=2)


def test_every_variable_is_read():
    paths = [path for path in (ROOT / "smp").rglob("*.py") if path.parent.name != "compat"]
    sources = "".join(path.read_text() for path in paths)
    for variable in VARIABLES:
        assert variable.note and f'"{variable.ours}' in sources


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_has_the_status_that_the_page_says(name):
    status = make_tables.status(name)
    value = FLAGS[name] if FLAGS[name] not in (None, "") and not str(FLAGS[name]).startswith("$") else "1"
    try:
        arguments.parse_args(["--use_synthetic_data", "1", f"--{name}", str(value)])
        refusals = []
    except ConfigError as error:
        refusals = [problem for problem in error.problems if f"--{name}" in problem]
    if status in ("live", "no effect"):
        assert not any("unknown" in problem or "is not available" in problem for problem in refusals), refusals
    else:
        assert status == "limited"


@pytest.mark.smoke
def test_the_page_is_current():
    assert (ROOT / "docs" / "smp_v2_names.md").read_text() == make_tables.names_page(), "run `make docs`"


SCRIPT = """
import smp.sagemaker
import torch
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
import torch.sagemaker as tsm
from torch.sagemaker.grad_norm import clip_grad_norm_
from torch.sagemaker.delayed_param import DelayedParamIniter

dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
tsm.init({"hybrid_shard_degree": 1, "sm_activation_offloading": False})
assert tsm.is_initialized() and tsm.state.hybrid_shard_degree == 1 and not tsm.state.sm_activation_offloading
layer = torch.nn.Linear(2, 2)
layer(torch.ones(1, 2)).sum().backward()
assert clip_grad_norm_(layer, 1.0) > 1
assert torch.sagemaker.transform is tsm.transform
for line in (
    "from torch.sagemaker.moe.moe_config import MoEConfig",
    "from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save",
):
    try:
        exec(line)
    except smp.UserError as error:
        print(error)
try:
    tsm.nothing_of_the_kind
except AttributeError as error:
    print(error)
import importlib.util
assert importlib.util.find_spec("torch.sagemaker") and importlib.util.find_spec("smdistributed")  # as others ask
import smp.sagemaker  # again
dist.destroy_process_group()
"""


def test_a_script_of_smp_v2_runs_unchanged(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "torch.sagemaker.moe.moe_config.MoEConfig is not here: mixture-of-experts models are out of scope for now",
        "torch.sagemaker.distributed.checkpoint.state_dict_saver.async_save is not here: "
        "smp.Checkpointer(...).save(step, wait=False)",
        "torch.sagemaker has no nothing_of_the_kind here: docs/smp_v2_names.md lists what takes its place",
    ]
