"""Initial values by the model's own rules: the distribution of every parameter is transformers' own."""

import copy
import functools
import math

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from smp import delayed_init
from smp.delayed_init import build_on_meta, initialize_, materialize_
from smp.errors import UserError
from smp.models.init_rules import record_rules
from smp.models.meta_model import init_rules, meta_model
from tests.distributed import run_distributed

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
}  # fmt: skip
# What each type is here for.
TYPES = {
    "qwen2": {"num_key_value_heads": 1},  # biases of some projections
    "gemma2": {"num_key_value_heads": 1, "head_dim": 16},  # norms start at zero
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 16},  # several rotary embeddings
    "gpt2": {},  # projections scaled by the depth, Conv1D
    "gptj": {"rotary_dim": 8},  # a table of positions
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32},  # a padding row
    "falcon": {"alibi": False},
    "mamba": {"state_size": 4, "rescale_prenorm_residual": True},  # computed values, and a change of drawn ones
    "cohere": {"num_key_value_heads": 1, "pad_token_id": 0},
    "starcoder2": {"num_key_value_heads": 1},
    "recurrent_gemma": {"num_key_value_heads": 1, "lru_width": 32, "block_types": ["recurrent", "attention"]},
    "bloom": {},
}


def build(model_type):
    config = CONFIG_MAPPING[model_type](**{**SMALL, **TYPES[model_type]})
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager")


def on_meta(make):
    model = build_on_meta(make)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # building on the meta device takes ties apart
    return model


def filled(make, seed=3):
    model = on_meta(make)
    materialize_(model, torch.device("cpu"))
    initialize_(model, record_rules(make, seed=seed).rule, seed=seed)
    return model


def distance(one, other):
    """Two-sample Kolmogorov-Smirnov statistic."""
    one, other = one.flatten().sort().values, other.flatten().sort().values
    every = torch.cat([one, other])
    shares = [torch.searchsorted(sample, every, right=True) / len(sample) for sample in (one, other)]
    return float((shares[0] - shares[1]).abs().max())


@pytest.mark.full
@pytest.mark.parametrize("model_type", TYPES)
def test_values_are_distributed_as_transformers_draws_them(model_type):
    torch.manual_seed(0)
    expected = build(model_type)
    model = filled(functools.partial(build, model_type))
    own = dict(model.named_parameters())
    assert own.keys() == dict(expected.named_parameters()).keys()
    for name, value in expected.named_parameters():
        if value.min() == value.max():
            assert torch.equal(own[name], value), name
        else:
            assert torch.equal(own[name] == 0, value == 0), name  # rows of padding
            assert distance(own[name], value) <= 2.4 * math.sqrt(2 / value.numel()), name
    for name, value in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), value), name


def _same_in_shards(expected):
    from torch.distributed.fsdp import fully_shard

    make = functools.partial(build, "mamba")
    model = on_meta(make)
    fully_shard(model)
    materialize_(model, torch.device("cpu"))
    initialize_(model, record_rules(make, seed=3).rule, seed=3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name]), name


@pytest.mark.full
def test_shards_hold_the_same_values(monkeypatch):
    monkeypatch.setattr(delayed_init, "BLOCK", 100)
    model = filled(functools.partial(build, "mamba"))
    run_distributed(_same_in_shards, {name: p.detach() for name, p in model.named_parameters()}, world_size=2)


def holder(fill, *, shape=(6, 4)):
    def make():
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(shape))
        with torch.no_grad():
            fill(module.weight)
        return module

    return make


def test_steps_of_a_parameter_are_replayed_in_order():
    def fill(weight):
        weight.normal_(5.0, 2.0)
        weight.uniform_(-1.0, 1.0).mul_(3.0).clamp_(-2.0, 2.0)
        weight[1].zero_()
        weight[2].copy_(torch.arange(4))

    weight = filled(holder(fill)).weight.detach()
    assert weight[1].eq(0).all() and weight[2].tolist() == [0, 1, 2, 3]
    assert weight.abs().max() <= 3 and weight[[0, 3, 4, 5]].abs().max() <= 2 and weight[[0, 3, 4, 5]].std() > 0.5


def test_truncated_normal_values_stay_in_their_range():
    make = holder(lambda weight: nn.init.trunc_normal_(weight, std=0.02, a=-0.03, b=0.03), shape=(300, 300))
    weight = filled(make).weight.detach()
    assert weight.abs().max() <= 0.03 and 0.012 < weight.std() < 0.018


@pytest.mark.parametrize(
    ("fill", "reason"),
    [
        (lambda weight: nn.init.orthogonal_(weight), "orthogonal_"),
        (lambda weight: weight[:, :2].normal_(), "not contiguous"),
        (lambda weight: weight[:3].normal_(), "nothing sets them"),
        (lambda weight: None, "nothing sets them"),
    ],
)
def test_values_that_no_shard_can_draw_alone_are_refused(fill, reason):
    with pytest.raises(UserError, match=rf"parameter weight .*{reason}.*pretrained weights"):
        filled(holder(fill))


def test_the_rules_are_those_of_a_model_with_values_whatever_device_the_first_caller_has():
    config = CONFIG_MAPPING["mamba"](**{**SMALL, **TYPES["mamba"], "vocab_size": 83})
    with torch.device("meta"):
        meta_model(config)
    assert init_rules(config, seed=0)("backbone.layers.0.mixer.A_log").steps  # else refused


def test_parameters_are_not_mapped_before_they_are_on_the_meta_device():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2**30, 2**12))  # more than any host has
            self.register_buffer("scale", torch.ones(2))

    model = build_on_meta(Experts)
    assert model.weight.is_meta and model.weight.numel() == 2**42 and model.scale.tolist() == [1, 1]
