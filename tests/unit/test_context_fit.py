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


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "gpt2",
        "gemma3_text",
        "diffllama",
        "gpt_oss",
        "minicpm3",
        "gemma2",
        "lfm2",
        "minimax",
        "recurrent_gemma",
    ],
)
def test_attention_of_the_registry_is_taken(model_type):
    assert misfit(tiny_config(model_type)) is None


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8, "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "changes", "sentence"),
    [
        ("gptj", {}, "its blocks call none of the attention functions in transformers' registry"),
        ("bloom", {}, "its blocks call none of the attention functions in transformers' registry"),
        ("falcon", {"alibi": True}, "its blocks call none of the attention functions in transformers' registry"),
        ("doge", {}, "it makes masks of its own"),
        ("nemotron", {}, "its blocks do not hand on keywords to the attention function"),
        ("stablelm", {}, "its blocks do not hand on keywords to the attention function"),
        ("mamba", {}, "its blocks are not given the keywords of its forward"),
        (
            "llama",
            {"layer_types": ["compressed", "full_attention"] * 2},
            "tokens meet outside of attention (it has compressed layers)",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "its rotary embedding (dynamic) is another for each length of a rank's tokens",
        ),
        (
            "phi3",
            {"rope_parameters": LONGROPE},
            "its rotary embedding (longrope) is another for each length of a rank's tokens",
        ),
        (
            "roberta",
            {},
            "its positions are counted from behind its padding token's id (roberta.embeddings.position_embeddings)",
        ),
    ],
)
def test_others_are_refused_with_a_reason(model_type, changes, sentence):
    config = tiny_config(model_type)
    config.update(changes)
    assert misfit(config) == sentence


def refusals(hf_config, *, device="cuda", dtype=torch.bfloat16):
    settings = Settings((ParallelConfig(context_parallel_degree=2, cp_comm_type="all_gather"),))
    return problems(hf_config, Setup(family_of(hf_config), lay_out(1, 2, cp=2), settings, dtype, device))


def test_layers_that_mix_tokens_are_refused_beside_tensor_parallelism():
    settings = Settings((ParallelConfig(context_parallel_degree=2, cp_comm_type="all_gather"),))
    config = tiny_config("lfm2")
    setup = Setup(family_of(config), lay_out(1, 2, cp=2, tp=2), settings, torch.float32, "cpu")
    assert problems(config, setup) == [
        "--context_parallel_degree 2: layers that mix tokens outside of attention (it has conv layers) are not split "
        "by tensor parallelism as well: use --tensor_parallel_degree 1"
    ]


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
