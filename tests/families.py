"""Small models with the structure of published ones: kinds of layers and experts, ties, rotary embeddings, files.

Sizes are small; what the published ``config.json`` says of the structure is as it is there, not as transformers' class
has it by default.
"""

from __future__ import annotations

import dataclasses
from typing import Any

VOCABULARY = 2064  # the tokenizer of data/sample has 2048; the rest is what stands for images
IMAGE, VIDEO, BEGIN, END = 2050, 2051, 2052, 2053

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
_QWEN_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
_QWEN_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END,
}  # fmt: skip
_MROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
_ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_SHARED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
_MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "head_dim": 8, "image_size": 56, "patch_size": 14,
}  # fmt: skip
_MISTRAL3 = {
    "vision_config": _PIXTRAL, "image_token_index": IMAGE, "spatial_merge_size": 2, "vision_feature_layer": -1,
    "multimodal_projector_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_FIVE_TO_ONE = [*["sliding_attention"] * 5, "full_attention"]
_GEMMA4_VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 3, "position_embedding_size": 64,
}  # fmt: skip
_GEMMA4 = {
    "sliding_window": 8, "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 32, "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}  # fmt: skip
_GEMMA4_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "boi_token_id": BEGIN, "eoi_token_id": END,
    "audio_token_id": 2054, "boa_token_id": 2055, "eoa_token_index": 2056, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA4_LARGE = {
    **_TEXT, **_GEMMA4, "num_hidden_layers": 6, "layer_types": _FIVE_TO_ONE, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """A published model.

    Attributes:
        number: of the family.
        model_type: transformers' name.
        values: of the config; with ``text_config``, it is of a model of vision and language.
        stored: how the files have its matrices: as they are (""), ``fp8`` or ``mxfp4``.
        mtp: what the names of tensors of multi-token prediction begin with; transformers builds no module for them.
        experts: whether it has any.
    """

    number: int
    model_type: str
    values: dict[str, Any]
    stored: str = ""
    mtp: str = ""
    experts: bool = False

    @property
    def sees(self) -> bool:
        """Whether it takes images."""
        return "text_config" in self.values

    def predicts(self, key: str) -> bool:
        """Return whether a tensor of the files is of multi-token prediction."""
        return bool(self.mtp) and key.startswith(self.mtp)


def _moe(number: int, model_type: str, values: dict[str, Any], **more: Any) -> Family:
    return Family(number, model_type, values, experts=True, **more)


FAMILIES: dict[str, Family] = {
    "Qwen3.5-27B": Family(
        1, "qwen3_5",
        {
            "text_config": {**_TEXT, **_LINEAR, "rope_parameters": _MROPE}, "vision_config": _QWEN_VISION,
            **_QWEN_TOKENS, "tie_word_embeddings": False,
        },
        mtp="mtp.",
    ),
    "gpt-oss-20b": _moe(
        2, "gpt_oss",
        {
            **_TEXT, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "attention_bias": True, "swiglu_limit": 7.0,
            "rope_parameters": {**_YARN, "factor": 32.0, "rope_theta": 150000.0, "truncate": False},
        },
        stored="mxfp4",
    ),
    "Qwen3-30B-A3B": _moe(
        3, "qwen3_moe",
        {**_TEXT, **_ROUTED, "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1e6},
    ),
    "Gemma 4 E4B": Family(
        4, "gemma4",
        {
            "text_config": {
                **_TEXT, **_GEMMA4, "num_hidden_layers": 12, "layer_types": _FIVE_TO_ONE * 2,
                "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 6,
            },
            "vision_config": _GEMMA4_VISION,
            "audio_config": {
                "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16,
                "subsampling_conv_channels": [8, 4],
            },
            **_GEMMA4_TOKENS,
        },
    ),
    "Gemma 4 31B": Family(
        4, "gemma4",
        {
            "text_config": _GEMMA4_LARGE, "vision_config": {**_GEMMA4_VISION, "standardize": True},
            "audio_config": None, **_GEMMA4_TOKENS,
        },
    ),
    "Gemma 4 26B-A4B": _moe(
        4, "gemma4",
        {
            "text_config": {
                **_GEMMA4_LARGE, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
                "moe_intermediate_size": 16,
            },
            "vision_config": {**_GEMMA4_VISION, "standardize": True}, "audio_config": None, **_GEMMA4_TOKENS,
        },
    ),
    "Nemotron 3 Nano": _moe(
        5, "nemotron_h",
        {
            **_TEXT, **_SHARED, "first_k_dense_replace": None, "routed_scaling_factor": 2.5, "mamba_num_heads": 4,
            "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "conv_kernel": 4,
            "moe_shared_expert_intermediate_size": 32, "hybrid_override_pattern": "MEMEM*E",
            "num_hidden_layers": None, "mlp_hidden_act": "relu2",
        },
    ),
    "Mistral Small 3.1": Family(
        6, "mistral3",
        {"text_config": {**_TEXT, "model_type": "mistral", "rope_theta": 1e9, "sliding_window": None}, **_MISTRAL3},
    ),
    "Ministral 3 8B": Family(
        6, "mistral3",
        {
            "text_config": {
                **_TEXT, "model_type": "ministral3", "rope_parameters": {
                    **_YARN, "factor": 16.0, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                },
            },
            **_MISTRAL3,
        },
    ),
    "Gemma 3 27B": Family(
        7, "gemma3",
        {
            "text_config": {
                **_TEXT, "num_hidden_layers": 6, "layer_types": _FIVE_TO_ONE, "sliding_window": 6,
                "query_pre_attn_scalar": 12, "tie_word_embeddings": True,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                },
            },
            "vision_config": _SIGLIP, "mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": BEGIN,
            "eoi_token_index": END, "tie_word_embeddings": True,
        },
    ),
    "Qwen3.5-35B-A3B": _moe(
        8, "qwen3_5_moe",
        {
            "text_config": {
                **_TEXT, **_LINEAR, **_ROUTED, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 16,
                "rope_parameters": _MROPE,
            },
            "vision_config": _QWEN_VISION, **_QWEN_TOKENS, "tie_word_embeddings": False,
        },
        mtp="mtp.",
    ),
    "GLM-4.5-Air": _moe(
        9, "glm4_moe",
        {
            **_TEXT, **_SHARED, "use_qk_norm": False, "attention_bias": True, "num_nextn_predict_layers": 1,
            "routed_scaling_factor": 1.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
        mtp="model.layers.46.",
    ),
    "GLM-4.7-Flash": _moe(
        9, "glm4_moe_lite",
        {
            **_TEXT, **_SHARED, **_MLA, "v_head_dim": 16, "num_nextn_predict_layers": 1,
            "routed_scaling_factor": 1.8, "rope_theta": 1e6,
        },
        mtp="model.layers.47.",
    ),
    "DeepSeek V3": _moe(
        10, "deepseek_v3",
        {
            **_TEXT, **_SHARED, **_MLA, "num_hidden_layers": 5, "first_k_dense_replace": 3, "n_group": 4,
            "topk_group": 2, "n_routed_experts": 16, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
            "rope_parameters": {**_YARN, "factor": 40.0, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        stored="fp8", mtp="model.layers.61.",
    ),
    "Kimi K2": _moe(
        10, "deepseek_v3",
        {
            **_TEXT, **_SHARED, **_MLA, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
            "rope_parameters": {**_YARN, "factor": 32.0, "rope_theta": 5e4, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        stored="fp8",
    ),
    "Llama 4 Scout": _moe(
        11, "llama4",
        {
            "text_config": {
                **_TEXT, "intermediate_size": 16, "intermediate_size_mlp": 48, "num_local_experts": 8,
                "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4,
                "attention_chunk_size": 8, "use_qk_norm": True, "attn_temperature_tuning": True, "floor_scale": 4,
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 1.0, "original_max_position_embeddings": 64,
                },
            },
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 56, "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END, "tie_word_embeddings": False,
        },
    ),
    "Granite 4.0 Micro": Family(
        12, "granitemoehybrid",
        {
            **_TEXT, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48,
            "layer_types": ["attention"] * 4, "position_embedding_type": "rope", "embedding_multiplier": 12,
            "logits_scaling": 10, "residual_multiplier": 0.22, "attention_multiplier": 0.0625,
            "tie_word_embeddings": True, "rope_theta": 1e7, "mamba_n_heads": 8, "mamba_d_head": 8,
        },
    ),
    "Granite 4.0 H-Tiny": _moe(
        12, "granitemoehybrid",
        {
            **_TEXT, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16,
            "shared_intermediate_size": 32, "num_hidden_layers": 6,
            "layer_types": [*["mamba"] * 5, "attention"], "position_embedding_type": "nope",
            "embedding_multiplier": 12, "logits_scaling": 6, "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625, "tie_word_embeddings": True, "mamba_n_heads": 8, "mamba_d_head": 8,
            "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_expand": 2,
        },
    ),
    "Qwen3-Next-80B-A3B": _moe(
        13, "qwen3_next",
        {
            **_TEXT, **_LINEAR, **_ROUTED, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
        mtp="mtp.",
    ),
    "Qwen3-VL-8B": Family(
        13, "qwen3_vl",
        {
            "text_config": {
                **_TEXT,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
                },
            },
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0, 1]}, **_QWEN_TOKENS,
            "tie_word_embeddings": False,
        },
    ),
    "MiniMax M2": _moe(
        14, "minimax_m2",
        {
            **_TEXT, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8,
            "rope_theta": 5e6,
        },
        stored="fp8",
    ),
    "Mixtral 8x7B": _moe(
        15, "mixtral", {**_TEXT, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6}
    ),
    "OLMoE 1B-7B": _moe(
        15, "olmoe", {**_TEXT, **_ROUTED, "norm_topk_prob": False, "num_key_value_heads": 4, "head_dim": None}
    ),
    "ERNIE 4.5 21B-A3B": _moe(
        15, "ernie4_5_moe",
        {
            **_TEXT, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
            "moe_intermediate_size": 16, "tie_word_embeddings": True, "rope_theta": 5e5,
        },
    ),
    "LFM2 8B-A1B": _moe(
        15, "lfm2_moe",
        {
            **_TEXT, **_ROUTED, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 2,
            "use_expert_bias": True, "tie_word_embeddings": True,
        },
    ),
    "Jamba 1.7 Mini": _moe(
        15, "jamba",
        {
            **_TEXT, "num_experts": 8, "num_experts_per_tok": 2, "attn_layer_period": 4, "attn_layer_offset": 2,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8,
        },
    ),
}  # fmt: skip
