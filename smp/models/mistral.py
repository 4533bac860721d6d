"""Mistral 7B: Llama's layout with an optional sliding attention window."""

import dataclasses

from smp.models import llama
from smp.models.family import COMMON_SETTINGS

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="mistral",
    hf_model_type="mistral",
    architecture="MistralForCausalLM",
    settings={
        **COMMON_SETTINGS,
        "num_key_value_heads": "num_key_value_heads",
        "sliding_window": "sliding_window",
    },
    defaults={**llama.FAMILY.defaults, "num_key_value_heads": 12, "intermediate_size": 14336, "sliding_window": None},
)
