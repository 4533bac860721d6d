"""Which models' sequences can be split over ranks; docs/models.md has every type."""

from __future__ import annotations

import pytest
import torch

from smp.config import ParallelConfig, Settings
from smp.mesh import lay_out
from smp.models.registry import family_of
from smp.parallel.context import problems
from smp.parallel.context.fit import misfit
from smp.parallel.technique import Setup
from tests.zoo import tiny_config


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "diffllama"])
def test_attention_of_the_registry_is_taken(model_type):
    assert misfit(tiny_config(model_type)) is None


@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [
        ("gptj", "its blocks call none of the attention functions in transformers' registry"),
        ("falcon", "its blocks call none of the attention functions in transformers' registry"),
        ("gemma2", "its attention function takes softcap, which changes the scores"),
        ("doge", "it makes masks of its own"),
        ("nemotron", "its blocks do not hand on keywords to the attention function"),
        ("minicpm3", "its values are of another width than its queries"),
        ("mamba", "tokens meet outside of attention (it has linear_attention layers)"),
        (
            "roberta",
            "its positions are counted from behind its padding token's id (roberta.embeddings.position_embeddings)",
        ),
    ],
)
def test_others_are_refused_with_a_reason(model_type, sentence):
    assert misfit(tiny_config(model_type)) == sentence


def refusals(hf_config, *, device="cuda", dtype=torch.bfloat16):
    settings = Settings((ParallelConfig(context_parallel_degree=2, cp_comm_type="all_gather"),))
    return problems(hf_config, Setup(family_of(hf_config), lay_out(1, 2, cp=2), settings, dtype, device))


@pytest.mark.parametrize("width", [12, 264])
def test_gpus_have_kernels_for_some_widths(width):
    config = tiny_config("llama")
    assert refusals(config) == []
    config.head_dim = width
    assert refusals(config, device="cpu") == []
    assert refusals(config) == [
        f"--context_parallel_degree 2: GPUs' kernels of attention take heads of a width that 8 divides, up to 256, and "
        f"it is {width}: use --context_parallel_degree 1"
    ]


def test_gpus_have_kernels_for_bf16():
    config = tiny_config("llama")
    assert refusals(config, device="cpu", dtype=torch.float32) == []
    assert refusals(config, dtype=torch.float32) == [
        "--context_parallel_degree 2: attention's kernels on GPUs compute in bf16, and --bf16 is 0: use --bf16 1"
    ]
