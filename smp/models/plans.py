"""Tensor-parallel plans of types of which transformers has none."""

from typing import Any

from smp.models.tensor_plan import Part, TensorPlan

_QKV = ("q_proj", "k_proj", "v_proj")
_KV = ("k_proj", "v_proj")


def llama_like(hf_config: Any) -> TensorPlan | None:
    """Return the plan of Llama's layout; None: it has a norm of its own for each head (StableLM)."""
    if getattr(hf_config, "qk_layernorm", False):
        return None
    counts = ("num_heads", "num_key_value_heads") if hf_config.model_type == "stablelm" else ()
    of_all = hf_config.model_type == "bitnet"  # norms before the output and the down projection
    return TensorPlan(
        parts=(
            Part(
                "self_attn", _QKV, "o_proj",
                heads=True, key_value=_KV, norms=("attn_sub_norm",) * of_all, counts=counts,
            ),
            Part("mlp", ("gate_proj", "up_proj"), "down_proj", norms=("ffn_sub_norm",) * of_all),
        )
    )  # fmt: skip


def gptj(hf_config: Any) -> TensorPlan:
    """Return the plan of GPT-J."""
    return TensorPlan(
        parts=(
            Part("attn", _QKV, "out_proj", heads=True, counts=("num_attention_heads",)),
            Part("mlp", ("fc_in",), "fc_out"),
        ),
        width=hf_config.n_inner or 4 * hf_config.hidden_size,
    )


def gpt_neo(hf_config: Any) -> TensorPlan:
    """Return the plan of GPT-Neo."""
    return TensorPlan(
        parts=(
            Part("attn.attention", _QKV, "out_proj", heads=True, counts=("num_heads",)),
            Part("mlp", ("c_fc",), "c_proj"),
        ),
        width=hf_config.intermediate_size or 4 * hf_config.hidden_size,
    )


def persimmon(hf_config: Any) -> TensorPlan:
    """Return the plan of Persimmon: queries, keys and values of a head are neighbours."""
    return TensorPlan(
        parts=(
            Part("self_attn", ("query_key_value",), "dense", heads=True, counts=("num_heads",)),
            Part("mlp", ("dense_h_to_4h",), "dense_4h_to_h"),
        )
    )


def gpt_bigcode(hf_config: Any) -> TensorPlan:
    """Return the plan of GPT-BigCode: one key/value head for all, or queries, keys and values of a head together."""
    multi_query = hf_config.multi_query
    fused = {"c_attn": ("heads", "key_value", "key_value")} if multi_query else {}
    return TensorPlan(
        parts=(
            Part("attn", ("c_attn",), "c_proj", heads=True, fused=fused, counts=("num_heads", "embed_dim")),
            Part("mlp", ("c_fc",), "c_proj"),
        ),
        key_value_heads=1 if multi_query else "num_attention_heads",
        width=hf_config.n_inner or 4 * hf_config.hidden_size,
    )
