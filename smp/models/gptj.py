"""GPT-J: plain layers, of which transformers has no tensor-parallel plan."""

from typing import Any

from smp.models.tensor_plan import Part, TensorPlan


def plan(hf_config: Any) -> TensorPlan:
    """Return the tensor-parallel plan of a config."""
    heads = hf_config.num_attention_heads
    return TensorPlan(
        parts=(
            Part("attn", ("q_proj", "k_proj", "v_proj"), "out_proj", heads=True, counts=("num_attention_heads",)),
            Part("mlp", ("fc_in",), "fc_out"),
        ),
        heads=heads,
        key_value_heads=heads,
        width=hf_config.n_inner or 4 * hf_config.hidden_size,
    )
