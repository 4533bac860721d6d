"""Initial values: the same at every layout, by the family's rule, and nothing left out."""

import pytest
import torch
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn

from smp import delayed_init
from smp.config import ActivationConfig
from smp.delayed_init import build_on_meta, initialize_, materialize_
from smp.errors import UserError
from smp.models.init_rules import record_rules
from smp.models.meta_model import init_rules
from smp.models.registry import build_model, family_of
from smp.parallel.parallelize import parallelize
from tests import experts
from tests.distributed import run_distributed
from tests.reference import Layout, tiny_config


def initialize(model, hf_config, seed=3):
    materialize_(model, torch.device("cpu"))
    initialize_(model, init_rules(hf_config, seed=seed), seed=seed)


def one_process(name, seed=3):
    hf_config = tiny_config(name)
    model = build_on_meta(lambda: build_model(hf_config, attn_implementation="sdpa"))
    initialize(model, hf_config, seed)
    return model


def _check_layouts(name, expected, layouts):
    for layout in layouts:
        hf_config = tiny_config(name)
        model = build_on_meta(lambda hf_config=hf_config: build_model(hf_config, attn_implementation="sdpa"))
        activation = ActivationConfig(activation_checkpointing=False)
        parallelize(
            model,
            family_of(hf_config),
            mesh=layout.mesh(),
            parallel=layout.parallel(),
            activation=activation,
            dtype=None,
        )
        assert all(p.is_meta for p in model.parameters())
        initialize(model, hf_config)
        for key, value in model.named_parameters():
            assert torch.equal(value.full_tensor(), expected[key]), (layout, key)
        for key, value in model.named_buffers():
            assert torch.equal(value, expected[key]), (layout, key)


def test_same_values_at_any_layout(monkeypatch):
    """Where it is split by tensor parallelism, too: see ``test_tensor_parallel_weights.py``."""
    # Blocks much smaller than a parameter, so that shards begin and end inside them.
    monkeypatch.setattr(delayed_init, "BLOCK", 500)
    model = one_process("llama_tied")
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    layouts = [Layout("full_shard"), Layout("no_shard")]
    run_distributed(_check_layouts, "llama_tied", expected, layouts, world_size=3)


def test_values_follow_the_rule_and_the_seed():
    model, other = one_process("gpt_neox"), one_process("gpt_neox", seed=4)
    weight = model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight
    assert abs(float(weight.std()) - 0.02) < 0.002 and abs(float(weight.mean())) < 0.002
    assert not torch.equal(weight, other.gpt_neox.layers[0].mlp.dense_h_to_4h.weight)
    assert not torch.equal(weight, model.gpt_neox.layers[1].mlp.dense_h_to_4h.weight)
    assert model.gpt_neox.final_layer_norm.weight.eq(1).all() and model.gpt_neox.final_layer_norm.bias.eq(0).all()


def test_rotary_frequencies_survive():
    reference = build_model(tiny_config("llama_gqa"), attn_implementation="sdpa")
    torch.testing.assert_close(one_process("llama_gqa").model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)


def normal_rules(shape):
    """The rules of a module with one normal ``weight``."""

    def build():
        holder = nn.Module()
        holder.weight = nn.Parameter(torch.empty(shape))
        nn.init.normal_(holder.weight)
        return holder

    return record_rules(build, seed=0).rule


def test_experts_that_no_machine_has_room_for_take_no_memory():
    config = experts.config_of("mixtral", num_local_experts=1 << 16, intermediate_size=1 << 24)
    model = build_on_meta(lambda: build_model(config, attn_implementation="sdpa"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_a_parameter_without_a_rule_is_named():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(2))

    with pytest.raises(UserError, match="scale"):
        initialize(Odd(), tiny_config("llama_gqa"))


def test_a_parameter_left_on_meta_is_named():
    model = nn.Sequential(nn.Linear(2, 2, device="meta"))
    with pytest.raises(UserError, match=r"0\.weight was left on the meta device"):
        initialize_(model, normal_rules((2, 2)), seed=0)


def test_a_lost_buffer_is_named():
    model = nn.Module()
    model.register_buffer("table", torch.zeros(2, device="meta"))
    with pytest.raises(UserError, match="buffer table"):
        materialize_(model, torch.device("cpu"))
