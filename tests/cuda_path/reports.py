"""Runs of the job on fake CUDA tensors, each in a process of its own, and what they have counted."""

from __future__ import annotations

import atexit
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
BLOCKS = 2
LLAMA3_8B = ("--model", "llama3_8b", "--max_context_width", "8192", "--train_batch_size", "1")
LLAMA = (*LLAMA3_8B, "--num_layers", str(BLOCKS))
MISTRAL = (
    *("--model", "mistral7b", "--num_layers", str(BLOCKS), "--max_context_width", "8192", "--train_batch_size", "2"),
)  # fmt: skip
GPT_NEOX = (
    *("--model_type", "gpt_neox", "--hidden_width", "6144", "--num_heads", "64", "--num_layers", str(BLOCKS)),
    *("--max_context_width", "2048", "--train_batch_size", "1"),
)  # fmt: skip
# A small vocabulary, of which random tokens are often the one that ends a document.
DOCUMENTS = ("--document_mask", "1", "--tokenizer_name_or_dir", "data/sample/tokenizer", "--vocab_size", "1024")
FUSED = ("--attn_implementation", "fused")


@functools.cache
def shim() -> pathlib.Path:
    """Build the shim, or skip the test where there is no compiler, or torch has CUDA of its own."""
    if torch.version.cuda is not None:
        pytest.skip(f"torch {torch.__version__} is built for CUDA: the shim is for a build for CPUs")
    if compiler() is None:
        pytest.skip("no C++ compiler (g++ or c++): fake CUDA tensors need a small shim")
    return build_shim(ROOT / "build", pathlib.Path(__file__).with_name("shim.cpp"))


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the process that runs all jobs of this one, each in a fork, which has the imports."""
    pipe = subprocess.PIPE
    server = subprocess.Popen(python_with(shim(), "tests.cuda_path.job"), cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)
    return server


@functools.cache
def report(*flags: str, world: int = 8) -> dict[str, Any]:
    """Run the job for three steps as ``world`` ranks on fake CUDA tensors.

    Returns:
        ``mesh``; ``state``: devices of the optimizer's state; ``allocator``: its settings; ``log``: what the job
        printed; ``steps``: of each step counts by description and line of ``syncs``, ``copies`` and ``collectives``,
        and of all ``operations``.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [*flags, "--use_synthetic_data", "1", "--output_dir", f"{folder}/run"]
        server = _server()
        print(json.dumps([folder, world, words]), file=server.stdin, flush=True)
        status, log = server.stdout.readline(), pathlib.Path(folder, "log").read_text()  # type: ignore[union-attr]
        assert status == "0\n", log[-6000:]
        return {**json.loads(pathlib.Path(folder, "report").read_text()), "log": log}


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
