"""Tensor-parallel plans of blocks that differ, of compressed keys and values, and of what no plan splits."""

import torch
from torch import nn

from smp.memory.shape import model_shape
from smp.models.family import tensor_parallel_problems
from smp.models.flow import INPUT, Call, flow_of
from smp.models.meta_model import meta_model
from smp.models.model_config import ModelConfig, resolve_model
from smp.models.registry import family_of
from tests.parity.test_models_parity import GEMMA4_E2B
from tests.zoo import tiny_config


def blocks_of(model_type, **changes):
    """Parts of each block, by module."""
    family = family_of(tiny_config(model_type, **changes))
    assert family.tensor_plan is not None, family.no_tensor_plan
    return [{part.module: part for part in family.tensor_plan.of_block(index)} for index in range(4)]


class Block(nn.Module):
    """Layers that read each other, and one that is sliced."""

    def __init__(self):
        super().__init__()
        self.down, self.up, self.gate, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)

    def forward(self, hidden):
        left, right = self.gate(hidden).chunk(2, dim=-1)
        inner = self.up(self.norm(self.down(hidden)))
        return hidden + self.out(inner.view(2, 6, 2, 4).flatten(2) * torch.cat([left, right], -1).sigmoid())


def test_flow_follows_the_linear_layers_of_a_block():
    with torch.device("meta"):
        block, hidden = Block(), torch.empty(2, 6, 8)
    flow = flow_of(block, Call("", (hidden,), {}))
    read = {path: flow.sources(flow.calls[path].input) for path in flow.linears}
    assert read == {"gate": {INPUT}, "down": {INPUT}, "up": {"down"}, "out": {"up", "gate"}}
    assert flow.is_sliced("gate", flow.calls["out"].input) and not flow.is_sliced("up", flow.calls["out"].input)


def test_mixing_layers_are_not_split_beside_attention_that_is():
    linear, attention, *_ = blocks_of("qwen3_next", num_experts=8)
    assert not linear["linear_attn"].row and not linear["linear_attn"].columns
    assert attention["self_attn"].key_value == ("k_proj", "v_proj") and attention["self_attn"].row == "o_proj"
    family = family_of(tiny_config("lfm2"))
    assert family.split_axis("model.layers.0.conv.in_proj") is None
    assert family.split_axis("model.layers.0.feed_forward.w1") == "outputs"
    assert family.split_axis("model.layers.1.self_attn.out_proj") == "inputs"


def test_compressed_keys_and_values_are_split_where_they_are_spread_over_heads():
    dense, mixture, *_ = blocks_of("deepseek_v3")
    attention = dense["self_attn"]
    assert attention.columns == attention.inner == ("q_b_proj", "kv_b_proj") and attention.norms == ()
    assert dense["mlp"].row == "down_proj" and mixture.keys() == {"self_attn"}
    attention = blocks_of("kimi_linear")[3]["self_attn"]
    assert (attention.columns, attention.inner) == (("q_proj", "kv_b_proj"), ("kv_b_proj",))


def test_values_of_heads_are_split():
    assert blocks_of("gpt_oss")[0]["self_attn"].vectors == ("sinks",)
    assert blocks_of("beam")[0]["self_attn"].vectors == ("gate_bias",)


def test_outputs_are_taken_to_be_fused_where_they_are_sliced():
    assert blocks_of("granitemoeshared")[0]["shared_mlp"].fused == {"input_linear": ("width", "width")}


def test_blocks_have_their_own_numbers_of_heads_and_widths():
    config = tiny_config("gemma4_text", num_key_value_heads=4, num_global_key_value_heads=1)
    plan = family_of(config).tensor_plan
    heads = [next(part.sizes for part in plan.of_block(index) if part.heads)[:2] for index in range(4)]
    assert heads == [(4, 4), (4, 1)] * 2
    config = tiny_config("gemma4_text", num_attention_heads=12, num_key_value_heads=4, num_global_key_value_heads=3)
    (problem,) = tensor_parallel_problems(family_of(config), config, degree=4)
    assert "neither divides the 3 key/value heads" in problem and "choose one of 1, 12" in problem


def test_what_differs_in_the_tokens_of_a_rank_is_refused():
    why = family_of(tiny_config("gemma4_text", **GEMMA4_E2B)).no_tensor_plan
    assert why == "its blocks hand on keys and values to others"
    changes = {**GEMMA4_E2B, "num_kv_shared_layers": 0}
    assert "with a part of the tokens" in family_of(tiny_config("gemma4_text", **changes)).no_tensor_plan


def test_memory_counts_what_is_not_split_on_each_rank(tmp_path):
    config = tiny_config("lfm2")
    config.save_pretrained(tmp_path)
    shape = model_shape(resolve_model(ModelConfig(model=str(tmp_path))))
    block = meta_model(config).blocks[0]
    alone = sum(p.numel() for name, p in block.named_parameters() if "feed_forward" not in name)
    assert (shape.unsplit_layers, shape.replicated) == (2, alone)
    assert shape.of_rank(shape.parameters, 4, 2) == 2 * alone + (shape.parameters - 2 * alone) // 2
