"""Small vision-language models, with text models of the shapes that are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from smp.models.families import load_preset
from tests.reference import VOCABULARY

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
_QWEN_TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_PIXTRAL = {"model_type": "pixtral", "head_dim": 8, **_VISION}
_GEMMA4 = {
    **_SLIDING, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "global_head_dim": 8, "num_global_key_value_heads": 2,
}  # fmt: skip
_GEMMA4_VISION = {**_VISION, "num_key_value_heads": 2, "head_dim": 8}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", {"text_config": {**_TEXT, **_LINEAR}, "vision_config": _QWEN_VISION, **_QWEN_TOKENS}),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {
            "text_config": {**_TEXT, **_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16},
            "vision_config": _QWEN_VISION, **_QWEN_TOKENS,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "text_config": {**_TEXT, **_SLIDING}, "vision_config": _VISION, "image_token_index": 90,
            "mm_tokens_per_image": 4, "boi_token_index": 91, "eoi_token_index": 92,
        },
    ),
    "mistral3": (
        "mistral3",
        {"text_config": {**_TEXT, "model_type": "mistral"}, "vision_config": _PIXTRAL, "image_token_index": 90},
    ),
    "ministral3": (
        "mistral3",
        {"text_config": {**_TEXT, "model_type": "ministral3"}, "vision_config": _PIXTRAL, "image_token_index": 90},
    ),
    "gemma4": (
        "gemma4", {"text_config": {**_TEXT, **_GEMMA4}, "vision_config": _GEMMA4_VISION, "audio_config": None},
    ),
    "gemma4_moe": (
        "gemma4",
        {
            "text_config": {
                **_TEXT, **_GEMMA4, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
                "moe_intermediate_size": 16,
            },
            "vision_config": _GEMMA4_VISION, "audio_config": None,
        },
    ),
    "llama4": (
        "llama4",
        {
            "text_config": {**_TEXT, "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 8},
            "vision_config": {
                **_VISION, "intermediate_size": 64, "vision_output_dim": 32, "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": 90,
        },
    ),
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]}
_QWEN_VL = {**_QWEN_TOKENS, "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}}
_KINDS |= {
    "qwen2_vl": ("qwen2_vl", {**_QWEN_VL, "text_config": {**_TEXT, "rope_parameters": _MROPE}}),
    "qwen2_5_vl": ("qwen2_5_vl", {**_QWEN_VL, "text_config": {**_TEXT, "rope_parameters": _MROPE}}),
    "qwen3_vl": (
        "qwen3_vl",
        {**_QWEN_VL, "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {**_QWEN_VL, "text_config": {**_TEXT, **_EXPERTS, "moe_intermediate_size": 12, "rope_parameters": _MROPE}},
    ),
}
KINDS = list(_KINDS)
_KINDS["llava"] = (
    "llava",
    {
        "text_config": {"model_type": "llama", **load_preset("llama_tiny")["config"]}, "image_token_index": 90,
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
    },
)  # fmt: skip


def build_whole(kind: str) -> nn.Module:
    """Return the plain Hugging Face model of vision and language, fp32."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    torch.manual_seed(7)
    name, values = _KINDS[kind]
    return AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name](**values), dtype=torch.float32)


def save_whole(kind: str, directory: Path) -> Path:
    """Write the model, with a processor's file beside it."""
    build_whole(kind).save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text('{"image_processor_type": "none"}\n')
    return directory
