"""Traps of planning on fake tensors: the plan with its stand-in, and what goes wrong without.

The right bytes are those of the plan as it is, which tests/parity/test_plan_bytes.py compares with a real step's; what
those steps fall into themselves has no test here.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from smp.plan import trace
from smp.plan.shim import SOURCE, build_shim, compiler
from smp.plan.trace import microbatch_rows
from tests.planned import ROOT, job_of, planned

BATCH, LENGTH = 2, 128
MODEL = (
    "--model_type llama_v2 --hidden_width 64 --num_layers 2 --num_heads 4 --num_key_value_heads 2 "
    f"--llama_intermediate_size 96 --vocab_size 256 --max_context_width {LENGTH} --train_batch_size {BATCH} "
)
SPLIT = "--tensor_parallel_degree 2"
KEPT = "--activation_checkpointing 0"

trial = pytest.mark.slow  # a minute of a core; the bytes of the plan as it is: tests/parity/test_plan_bytes.py
needs_compiler = pytest.mark.skipif(compiler() is None, reason="a plan for GPUs needs a C++ compiler")
of_a_cpu_build = pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
pytestmark = pytest.mark.filterwarnings("ignore")


def request(words: str = "", world: int = 2, backend: str = "gloo", *where: str) -> dict[str, Any]:
    return {"words": (MODEL + words).split(), "world": world, "rank": 0, "backend": backend, "where": list(where)}


def test_micro_batches_are_the_jobs():
    """Of 18 samples a rank of two has 9, in passes of 5 and 4, however many fit into one; of 30, the fullest has 4."""

    def rows(*words: str, world: int = 2) -> tuple[list[int], list[int]]:
        job = job_of([*MODEL.split(), *words], world, 0)
        return microbatch_rows(job), [len(each["targets"]) for each in trace._batch(job).microbatches]

    assert rows("--train_batch_size", "8", "--global_batch_size", "18") == ([5, 4], [5, 4])
    assert rows("--global_batch_size", "30", world=8) == ([2, 2], [2, 2])
    assert rows("--gradient_accumulation_steps", "5") == ([2] * 5, [2] * 3)  # the first, one between, the last
    assert rows("--global_batch_size", "22") == ([2] * 5 + [1], [2, 2, 1])


@trial
def test_shapes_of_dtensors_are_no_allocations():
    step = request(SPLIT, 4, "gloo", "shapes are new")
    plain, right, without = planned([request(SPLIT, 4), step, {**step, "without": "pause"}])
    assert right == plain  # where no shape is new
    assert without["own_peaks"]["gathered parameters"] > right["own_peaks"]["gathered parameters"]


@trial
def test_a_padding_mask_without_padding_makes_no_square():
    step = request("", 2, "gloo", "batches have padding masks")
    plain, right, without = planned([request(), step, {**step, "without": "is_tracing"}])
    assert right["total"] == plain["total"] + 8 * BATCH * LENGTH  # the padding masks
    assert without["total"] >= right["total"] + BATCH * LENGTH * LENGTH


@trial
@needs_compiler
@of_a_cpu_build
def test_attention_has_the_kernel_of_a_gpu():
    """Torch chooses by what a device has: a build for CPUs multiplies whole squares of scores."""
    step = request(KEPT, 2, "nccl")
    right, without = planned([step, {**step, "without": "attention"}], shim=build_shim())
    assert without["total"] >= right["total"] + 4 * BATCH * LENGTH * LENGTH * 4  # heads, fp32


@trial
@needs_compiler
def test_streams_do_not_share_a_pool():
    step = request("", 2, "nccl")
    right, without = planned([step, {**step, "without": "streams"}], shim=build_shim())
    assert right["total"] == without["total"]
    assert right["reserved"] > without["reserved"]


@trial
@needs_compiler
@of_a_cpu_build
def test_kernels_that_a_gpu_has_are_not_taken_apart(tmp_path: pathlib.Path):
    """Of SiLU's backward, which a build for CPUs decomposes into products of the width of the MLP."""
    source = tmp_path / "shim.cpp"
    source.write_text(f'#define CUDA_SHIM_HAS_VALUES\n#include "{SOURCE}"\n')
    step = request(f"{KEPT} --llama_intermediate_size 2048", 2, "nccl")
    (right,), (without,) = (planned([step], shim=shim) for shim in (build_shim(), build_shim(ROOT / "build", source)))
    assert without["total"] > right["total"]
