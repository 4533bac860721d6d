"""GPT-NeoX: parallel residual, partial rotary embedding, two-matrix MLP with biases."""

from smp.models.family import COMMON_DEFAULTS, COMMON_SETTINGS, Family, LogitTransform
from smp.models.file_names import FileNames, Rename
from smp.models.tensor_plan import GPT_NEOX_PLAN

FAMILY = Family(
    name="gpt_neox",
    hf_model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    base="gpt_neox",
    blocks="gpt_neox.layers",
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="lm_head",
    logits=LogitTransform(),
    gated_mlp=False,
    settings={
        **COMMON_SETTINGS,
        "resid_pdrop": "hidden_dropout",
        "rotary_pct": "rope_parameters.partial_rotary_factor",
    },
    tensor_plan=GPT_NEOX_PLAN,
    defaults={
        **COMMON_DEFAULTS,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-5,
        "eos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    # The module was renamed in transformers 5; the files kept the old name.
    file_names=FileNames((Rename(r"^embed_out\.", "lm_head."),), (Rename(r"^lm_head\.", "embed_out."),)),
)
