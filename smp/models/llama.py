"""Llama 2, 3 and 3.1."""

from smp.models.family import COMMON_DEFAULTS, COMMON_SETTINGS, Family, LogitTransform
from smp.models.tensor_plan import LLAMA_PLAN

FAMILY = Family(
    name="llama",
    hf_model_type="llama",
    architecture="LlamaForCausalLM",
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
        "llama_intermediate_size": "intermediate_size",
    },
    tensor_plan=LLAMA_PLAN,
    defaults={
        **COMMON_DEFAULTS,
        "intermediate_size": 11008,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
