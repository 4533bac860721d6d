"""Families that are derived train like the plain Hugging Face model, sharded and split; their files fit."""

from __future__ import annotations

import traceback

import pytest
import torch
import transformers  # noqa: F401  imported before the ranks are forked

from tests.distributed import run_distributed
from tests.model_checks import (
    SHARDED,
    SPLIT,
    assert_files_fit,
    assert_initial_values,
    assert_same_training,
    build_reference,
)

QUICK = ["gemma2", "gpt2", "qwen3"]
REST = [
    "cohere", "falcon", "gemma3_text", "gptj", "granite", "olmo2", "phi3", "qwen2", "smollm3", "starcoder2",
]  # fmt: skip
# Blocks that differ, layers that are not split beside such that are, compressed keys and values, sinks.
HYBRIDS = ["deepseek_v3", "gemma4_text", "gpt_oss", "nemotron_h", "qwen3_5_text"]
GEMMA4_E2B = {
    "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
    "attention_k_eq_v": False, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}  # fmt: skip


def _check_training(references, layouts):
    failed = []
    for name, reference in references.items():
        for layout in layouts:
            try:
                assert_same_training(reference, layout)
            except Exception:  # the other ranks fail too: gradients and losses are of all
                failed.append(f"{name}, tensor parallel degree {layout.tp}: {traceback.format_exc(limit=-3)}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("names", [QUICK, REST, HYBRIDS], ids=["quick", "rest", "hybrids"])
@pytest.mark.full
def test_derived_families_train_like_hugging_face(names):
    references = {name: build_reference(name) for name in names}
    run_distributed(_check_training, references, (SHARDED, SPLIT), world_size=2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bert", {}),  # the head shares its bias
        ("inkling_text", {}),  # the embedding has a norm, whose weight its backward reads
        ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0}),  # Granite 4, dense
        ("gemma4_text", GEMMA4_E2B),
        ("gemma3n_text", {"num_kv_shared_layers": 2}),  # four hidden states of each token
        ("hy_v4", {}),  # of hyper-connections, too
    ],
)
@pytest.mark.full
def test_odd_models_train_like_hugging_face(name, changes):
    run_distributed(_check_training, {name: build_reference(name, **changes)}, (SHARDED,), world_size=2)


@pytest.mark.full
def test_the_comparison_notices_a_wrong_weight():
    reference = build_reference("qwen3")
    with torch.no_grad():
        reference.model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-5
    with pytest.raises(AssertionError, match="differs by"):
        run_distributed(assert_same_training, reference, SHARDED, world_size=2)


def _check_files(references, folder):
    for name, reference in references.items():
        assert_initial_values(reference, name)
        assert_files_fit(reference, f"{folder}/{name}")


@pytest.mark.full
def test_files_and_initial_values_of_derived_families(tmp_path):
    names = [*QUICK, *REST, "gpt_oss", "mixtral"]
    run_distributed(_check_files, {name: build_reference(name) for name in names}, str(tmp_path), world_size=2)
