"""The C kernel: compiled once, kept, and done without."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import torch
import torch.distributed as dist

from smp.comm import kernel
from tests.distributed import run_distributed

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own, in which nothing has been compiled."""
    monkeypatch.setattr(pathlib.Path, "home", lambda: tmp_path)
    kernel.load.cache_clear()
    yield tmp_path
    kernel.load.cache_clear()


@needs_compiler
def test_compiled_once_and_kept(home, monkeypatch):
    assert kernel.load() is not None
    (made,) = (home / ".cache" / "smp" / "kernels").iterdir()
    kernel.load.cache_clear()
    monkeypatch.setattr(kernel, "_compile", lambda *_: pytest.fail("compiled again"))
    assert kernel.load() is not None and made.exists()


@pytest.mark.parametrize("trouble", ["no compiler", "no folder", "compiler fails", "no library"])
def test_done_without(home, monkeypatch, trouble):
    if trouble == "no compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif trouble == "no folder":
        (home / ".cache").write_text("a file in the way")
    elif trouble == "compiler fails":
        monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    else:
        monkeypatch.setattr(kernel, "_compile", lambda path: None)
    assert kernel.load() is None


def _kernel_runs() -> None:
    calls = []
    loaded = kernel.load()
    gather = loaded.gather
    loaded.gather = lambda *a: (calls.append(a), gather(*a))[1]
    out = torch.empty(2, 3)
    dist.all_gather_into_tensor(out, torch.full((3,), float(dist.get_rank())))
    assert out.tolist() == [[0.0] * 3, [1.0] * 3]
    assert calls


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_a_group_uses_it():
    run_distributed(_kernel_runs, world_size=2, backend="smddp")
