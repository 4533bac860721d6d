"""GPT-2: queries, keys and values fused one after the other, in layers whose weight is (inputs, outputs)."""

from typing import Any

from smp.models.tensor_plan import Part, TensorPlan


def plan(hf_config: Any) -> TensorPlan:
    """Return the tensor-parallel plan of a config."""
    return TensorPlan(
        parts=(
            Part(
                "attn", ("c_attn",), "c_proj",
                heads=True, fused={"c_attn": ("heads",) * 3}, counts=("num_heads", "split_size"),
            ),
            Part("mlp", ("c_fc",), "c_proj"),
        ),
        width=hf_config.n_inner or 4 * hf_config.hidden_size,
    )  # fmt: skip
