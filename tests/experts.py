"""Small mixtures of experts, of the shapes that are published: a layer without experts first, shared ones, a bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.reference import VOCABULARY

EXPERTS = 8
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_ROUTED = {
    "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
_KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "norm_topk_prob": True,
        "head_dim": 8,
    },
    "gpt_oss": {
        "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "deepseek_v3": {**_ROUTED, **_MLA, "num_key_value_heads": 4, "num_nextn_predict_layers": 0},
    "glm4_moe": {**_ROUTED, "head_dim": 8, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "qwen3_5_moe_text": {
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
        "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    },
    "nemotron_h": {
        **_ROUTED, "first_k_dense_replace": None, "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "moe_shared_expert_intermediate_size": 16,
        "layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4,
    },
}  # fmt: skip
KINDS = list(_KINDS)
_KINDS["llama4_text"] = {  # whose router says nothing of what it has chosen
    "num_local_experts": EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "intermediate_size": 16,
    "interleave_moe_layer_step": 2, "num_hidden_layers": 4, "head_dim": 8, "attention_chunk_size": 6,
}  # fmt: skip


def config_of(kind: str, **changes: Any) -> Any:
    """Return the configuration of a small model of a type."""
    from transformers import CONFIG_MAPPING

    values = {key: value for key, value in (_COMMON | _KINDS[kind] | changes).items() if value is not None}
    return CONFIG_MAPPING[kind](**values)


def build(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """Return the plain Hugging Face model, with routers that send tokens to different experts."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = config_of(kind, **changes)
    config._experts_implementation = "eager"  # grouped products take no fp64
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if kind == "gpt_oss" else "sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 3 and "conv" not in name:  # experts that begin at zero judge nothing
                parameter.normal_(std=0.2)
            elif name.endswith((".gate.weight", ".router.weight")):
                parameter.normal_(std=0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(0, 0.3)
    return model.to(dtype)
