"""The page on FSDP1 says something of every argument and method, and its script runs."""

from __future__ import annotations

import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import smp
from smp.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from_fsdp1.md"


def rows(heading: str) -> dict[str, str]:
    """What the table below a heading of the page says of each name: yes, no effect or refused."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([\w ]+) \| .+ \|$", section, re.MULTILINE))


def test_every_argument_is_in_the_table_and_in_the_signature():
    theirs = list(inspect.signature(TorchFSDP.__init__).parameters)[1:]
    ours = list(inspect.signature(smp.FSDP.__new__).parameters)[1:]
    assert list(rows("Arguments")) == theirs, "in FSDP1's order, which is the positional one"
    assert ours == [*theirs, "post_param_init_fn"]
    defaults = {n: p.default for n, p in inspect.signature(TorchFSDP.__init__).parameters.items() if n != "self"}
    assert defaults == {n: inspect.signature(smp.FSDP.__new__).parameters[n].default for n in defaults}


@pytest.mark.smoke
def test_every_method_is_in_the_table():
    own = {name for name in vars(TorchFSDP) if not name.startswith("_")}
    said = rows("Methods")
    named = set(said)
    assert own <= named, own - named
    assert named - own <= {"state_dict", "load_state_dict"}
    for name in own - {"forward", "named_buffers"}:  # the model's own
        assert name in vars(smp.FSDP), name
        theirs, ours = (vars(cls)[name] for cls in (TorchFSDP, smp.FSDP))
        if name in ("module", "named_parameters") or said[name] == "refused":
            continue
        theirs, ours = (list(inspect.signature(getattr(f, "__func__", f)).parameters) for f in (theirs, ours))
        assert ours == theirs, name


def test_what_the_page_calls_refused_is_refused():
    said = rows("Arguments") | rows("Methods")
    assert set(said.values()) == {"yes", "no effect", "refused"}
    refused = [name for name, kept in said.items() if kept == "refused"]
    for name in refused:
        with pytest.raises(UserError, match=f"FSDP.{name} is not available: "):
            getattr(smp.FSDP, name)(*[None] * len(inspect.signature(getattr(smp.FSDP, name)).parameters))


@pytest.mark.slow
def test_the_script_of_the_page_runs(tmp_path):
    script = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL).group(1)
    (tmp_path / "old.py").write_text(script)
    out = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "old.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-2000:]
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out.stdout)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5, out.stdout
    state = torch.load(tmp_path / "old.pt")
    layer = nn.TransformerEncoderLayer
    plain = nn.Sequential(
        nn.Embedding(64, 32), *(layer(32, 4, 64, batch_first=True) for _ in range(2)), nn.Linear(32, 64)
    )
    plain.load_state_dict(state)
