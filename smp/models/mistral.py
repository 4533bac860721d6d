"""Mistral 7B: Llama's layout with an optional sliding attention window."""

from smp.models.family import COMMON_DEFAULTS, COMMON_SETTINGS, Family, LogitTransform
from smp.models.tensor_plan import LLAMA_PLAN

FAMILY = Family(
    name="mistral",
    hf_model_type="mistral",
    architecture="MistralForCausalLM",
    base="model",
    blocks="model.layers",
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    logits=LogitTransform(),
    gated_mlp=True,
    settings={
        **COMMON_SETTINGS,
        "num_key_value_heads": "num_key_value_heads",
        "sliding_window": "sliding_window",
    },
    tensor_plan=LLAMA_PLAN,
    defaults={
        **COMMON_DEFAULTS,
        "num_key_value_heads": 12,
        "intermediate_size": 14336,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
