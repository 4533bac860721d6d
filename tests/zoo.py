"""Small configurations of every causal language model that transformers knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

VOCABULARY, LAYERS, WINDOW = 128, 4, 8

# The most that a number is, by its name; the first pattern that matches the whole name counts.
_MOST: tuple[tuple[str, float], ...] = (
    (r".*drop(out)?(_prob|_p)?|dropout_p|.*jitter_noise", 0.0),
    (r"(moe_)?(num|n)_(local_|routed_)?experts", 8),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|n_group|num_expert_group", 2),
    (r"topk_group|first_k_dense_replace|num_dense_layers", 1),
    (r"zero_expert_num", 4),
    (r".*vocab_size.*|encoder_hash_byte_group_vocab", VOCABULARY),
    (r".*(key_value_heads|kv_heads|query_groups|n_?groups)", 2),
    (r"(.*_)?(attention_heads|n_heads?|num_heads|num_key_heads|num_value_heads|mamba_heads)", 4),
    (r"(.*_)?(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(de|en)coder_layers|num_blocks)", LAYERS),
    (r"(.*_)?(hidden_size|d_model|n_embd|emb_dim|embedding_size|embedding_dim|proj_dim|lru_width)", 64),
    (r"(.*_)?(rope_head_dim|rotary_dim|lora_rank|dt_rank|d_state|state_size|chunk_size|hidden_size_per.*)", 8),
    (r"(.*_)?(head_dim|headdim|d_head|dim_head|kv_channels|attention_head_dim|attention_head_size)", 16),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_inner|dff|dim_ff|feed_forward_size).*", 96),
    (r".*(max_position_embeddings|n_positions|n_ctx|max_seq_len|source_positions|target_positions)", 64),
    (r".*(sliding_window|sliding_window_size|window_size|local_attention|attention_chunk_size)", WINDOW),
)
_OPEN = {"head_dim": 16, "num_key_value_heads": 2}  # where the default is None

# Without which transformers builds no configuration of a type.
_NEEDED = {"gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}}

# What the rules above do not give, by type; where the default is a model that nobody publishes, what one has.
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
    },
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    # Its scale of a vector that is zero, as the embedding of a pad token begins, has no gradient.
    "gemma3n_text": {"num_kv_shared_layers": 0, "pad_token_id": None},
    "gemma4_text": {  # 26B-A4B
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "attention_layers": None},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "position_embedding_type": "nope",
    },
    "granitemoeshared": {"shared_intermediate_size": 96},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"] * 2, "num_buckets": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"mamba_dt_rank": 8, "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zamba2": {"num_key_value_heads": 4, "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 16},
}


def _small(name: str, value: Any) -> Any:
    """Return what a value of one layer, or of all, becomes."""
    if value is None:
        return _OPEN.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if re.fullmatch(r".*_(token_(id|index)|id|index)", name):
        return value if value < VOCABULARY else 1
    return min([value, *[most for pattern, most in _MOST if re.fullmatch(pattern, name)][:1]])


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Return a configuration of a type of ``AutoModelForCausalLM`` that trains in a second.

    What transformers derives from other values is derived anew; each kind of layer occurs, in turn; dropout and jitter
    are off. One of several models is as transformers has it.

    Args:
        changes: values of another variant.
    """
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    plain = kind(**_NEEDED.get(model_type, {}))
    if plain.get_text_config(decoder=True) is not plain:
        return plain
    layers = getattr(plain, "num_hidden_layers", None)
    changed: dict[str, Any] = {}
    for name, value in vars(plain).items():
        if name.startswith("_"):
            continue
        small = _small(name, value)
        if isinstance(value, (list, tuple)) and len(value) == layers:
            kinds = [_small(name, one) for one in dict.fromkeys(value)]
            small = (kinds * LAYERS)[:LAYERS]
        if small != value:
            changed[name] = small
    if "is_decoder" in vars(plain):
        changed["is_decoder"] = True
    if "kv_lora_rank" in vars(plain):  # compressed keys and values are spread over all heads
        changed["num_key_value_heads"] = 4
        changed.pop("qk_head_dim", None)  # the sum of two others
        if getattr(plain, "head_dim", None) == plain.qk_rope_head_dim:
            changed["head_dim"] = changed["qk_rope_head_dim"]
    changed |= _CHANGES.get(model_type, {}) | changes
    return kind(**{name: value for name, value in changed.items() if value is not None or name == "pad_token_id"})
