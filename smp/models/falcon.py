"""Falcon: queries, keys and values fused in three ways; no plan for ALiBi, whose slopes are those of all heads."""

from typing import Any

from smp.models.tensor_plan import Part, TensorPlan


def plan(hf_config: Any) -> TensorPlan | None:
    """Return the tensor-parallel plan of a config; None: it has ALiBi."""
    if hf_config.alibi:
        return None
    heads = hf_config.num_attention_heads
    fused, groups = {}, heads
    if hf_config.new_decoder_architecture:
        groups = hf_config.num_kv_heads  # with the queries of each beside it: whole groups are split
    elif hf_config.multi_query:
        fused = {"query_key_value": ("heads", "key_value", "key_value")}
    return TensorPlan(
        parts=(
            Part(
                "self_attention", ("query_key_value",), "dense",
                heads=True, fused=fused, counts=("num_heads", "num_kv_heads"),
            ),
            Part("mlp", ("dense_h_to_4h",), "dense_4h_to_h"),
        ),
        heads=groups,
        key_value_heads=1 if fused else groups,
        width=hf_config.ffn_hidden_size,
    )  # fmt: skip
