"""Runs of the job on fake CUDA tensors, each in a process of its own, and what they have counted."""

from __future__ import annotations

import collections
import functools
import json
import pathlib
import subprocess
import tempfile
from typing import Any

import pytest
import torch

from smp.plan.shim import build_shim, compiler, python_with

ROOT = pathlib.Path(__file__).parent.parent.parent
LLAMA3_8B = ("--model", "llama3_8b", "--max_context_width", "8192", "--train_batch_size", "1")
FOUR_BLOCKS = (*LLAMA3_8B, "--num_layers", "4")
GPT_NEOX = (
    *("--model_type", "gpt_neox", "--hidden_width", "6144", "--num_heads", "64", "--num_layers", "4"),
    *("--max_context_width", "2048", "--train_batch_size", "1"),
)  # fmt: skip


@functools.cache
def shim() -> pathlib.Path:
    """Build the shim, or skip the test where there is no compiler, or torch has CUDA of its own."""
    if torch.version.cuda is not None:
        pytest.skip(f"torch {torch.__version__} is built for CUDA: the shim is for a build for CPUs")
    if compiler() is None:
        pytest.skip("no C++ compiler (g++ or c++): fake CUDA tensors need a small shim")
    return build_shim(ROOT / "build", pathlib.Path(__file__).with_name("shim.cpp"))


@functools.cache
def report(*flags: str, world: int = 8, steps: int = 3) -> dict[str, Any]:
    """Run the job as ``world`` ranks on fake CUDA tensors.

    Returns:
        ``mesh``; ``state``: devices of the optimizer's state; ``allocator``: its settings; ``log``: what the job
        printed; ``steps``: of each step counts by description and line of ``syncs``, ``copies`` and ``collectives``,
        and of all ``operations``.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = [*python_with(shim(), "tests.cuda_path.job"), f"world={world}", f"steps={steps}"]
        where = ["--use_synthetic_data", "1", "--output_dir", f"{folder}/run"]
        done = subprocess.run([*job, *flags, *where], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    return {**json.loads(done.stdout), "log": done.stderr}


def by_file(counts: dict[str, int]) -> dict[str, int]:
    """Add up counts by what was done and the innermost file of smp, else of the library."""
    found: collections.Counter[str] = collections.Counter()
    for text, count in counts.items():
        what, _, place = text.partition(" @ ")
        found[f"{what} @ {place.partition(' <- ')[0].partition(':')[0]}"] += count
    return dict(found)


def totals(counts: dict[str, int]) -> dict[str, int]:
    """Add up counts by what was done."""
    found: collections.Counter[str] = collections.Counter()
    for text, count in counts.items():
        found[text.partition(" @ ")[0]] += count
    return dict(found)
