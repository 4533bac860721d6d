"""Families that are derived from what transformers knows of a model."""

import dataclasses

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import smp
from smp.errors import ConfigError, UserError
from smp.models import registry
from smp.models.model_config import ModelConfig, resolve_model
from smp.models.registry import family_of
from smp.models.tensor_plan import LLAMA_PLAN

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}


def config_of(model_type, **values):
    return CONFIG_MAPPING[model_type](**values)


def plan_of(model_type, **values):
    """Parts of the plan of a small model, by module; or why it has none."""
    family = family_of(config_of(model_type, **{**WIDE, "pad_token_id": 0, **values}))
    return {part.module: part for part in family.tensor_plan.parts} if family.tensor_plan else family.no_tensor_plan


@pytest.mark.parametrize(
    ("model_type", "paths"),
    [
        ("qwen3", ("model", "model.layers", "model.embed_tokens", "model.norm", "lm_head")),
        ("gpt2", ("transformer", "transformer.h", "transformer.wte", "transformer.ln_f", "lm_head")),
        ("olmo", ("model", "model.layers", "model.embed_tokens", None, "lm_head")),  # its norms have no parameters
        ("mixtral", ("model", "model.layers", "model.embed_tokens", "model.norm", "lm_head")),
    ],
)
def test_paths_are_those_of_the_model(model_type, paths):
    family = family_of(config_of(model_type, **SMALL))
    assert (family.base, family.blocks, family.embedding, family.final_norm, family.head) == paths
    assert family.name == family.hf_model_type == model_type and family.full_sequence_embedding


def test_a_family_is_derived_once_for_each_config(monkeypatch):
    config = config_of("qwen2", **WIDE)
    found = family_of(config)
    monkeypatch.setattr(registry, "derive_family", lambda *_: pytest.fail("derived again"))
    assert family_of(config_of("qwen2", **WIDE)) is found


def test_settings_are_those_that_the_config_has():
    assert family_of(config_of("gpt2", **SMALL)).settings["hidden_width"] == "n_embd"
    settings = family_of(config_of("qwen3", **WIDE)).settings
    assert settings["num_key_value_heads"] == "num_key_value_heads" and "embd_pdrop" not in settings


def test_fused_layers_and_what_counts_heads_are_found():
    parts = plan_of("phi3")
    attention, mlp = parts["self_attn"], parts["mlp"]
    assert attention.fused == {"qkv_proj": ("heads", "key_value", "key_value")} and attention.row == "o_proj"
    assert "config.num_attention_heads" in attention.counts and mlp.fused == {"gate_up_proj": ("width", "width")}


def test_norms_over_all_heads_are_told_from_those_of_each():
    assert plan_of("olmo2")["self_attn"].norms == ("q_norm", "k_norm")
    assert plan_of("qwen3", head_dim=8)["self_attn"].norms == ()
    # One key/value head: its width is that of a head.
    assert plan_of("gemma3_text", head_dim=8, num_key_value_heads=1)["self_attn"].norms == ()


@pytest.mark.parametrize(
    ("model_type", "values", "words"),
    [
        ("bloom", {}, "self_attention has no linear layer of its output"),  # but one and a residual
        ("opt", {}, "no submodule of its blocks is an MLP"),
        ("mamba", {}, "nothing tells how to split"),
        ("diffllama", {}, "nothing tells how to split lambda_q1 of self_attn"),
        ("cohere", {"use_qk_norm": True}, "q_norm"),
        ("stablelm", {"qk_layernorm": True}, "which heads those of self_attn.q_layernorm.norms are of"),
        ("falcon", {"alibi": True}, "does not run"),
    ],
)
def test_a_plan_that_cannot_be_used_says_why(model_type, values, words):
    assert words in plan_of(model_type, **values)


@pytest.mark.parametrize(
    ("model_type", "values", "words"),
    [
        ("bert", SMALL, "it is an encoder"),
        ("cpmant", SMALL, "its tokens see the ones after them"),
        ("reformer", {**SMALL, "is_decoder": True, "axial_pos_embds": False, "num_buckets": 2}, "backward is its own"),
        ("vit", {}, "transformers has no causal language model of this type"),
        ("llava", {}, "transformers has no causal language model of this type"),
    ],
)
def test_what_is_no_decoder_is_refused(model_type, values, words):
    with pytest.raises(UserError, match=words):
        family_of(config_of(model_type, **values))


def save(directory, model_type, *, weights=False, **values):
    config = config_of(model_type, **values)
    config.save_pretrained(directory)
    if weights:
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


def test_settings_change_a_derived_model(tmp_path):
    where = save(tmp_path, "qwen2", **WIDE)
    resolved = resolve_model(ModelConfig(model=where, num_layers=3, num_heads=2))
    assert resolved.hf_config.num_hidden_layers == 3 and resolved.family.tensor_plan.heads == 2
    with pytest.raises(ConfigError, match="--rotary_pct is no setting of the qwen2 family"):
        resolve_model(ModelConfig(model=where, rotary_pct=0.5))
    with pytest.raises(ConfigError, match="--num_key_value_heads 2 does not divide --num_heads 5"):
        resolve_model(ModelConfig(model=where, num_heads=5))


def test_settings_that_no_derived_model_can_be_built_of_are_named(tmp_path):
    where = save(tmp_path, "gpt2", **SMALL)
    words = r"^--num_heads 5 cannot be used: transformers builds no .*divisible.*: change or leave out"
    with pytest.raises(ConfigError, match=words):
        resolve_model(ModelConfig(model=where, num_heads=5))


@pytest.mark.parametrize(
    ("model_type", "settings", "words"),
    [
        ("qwen2", {"rope_scaling_factor": 4.0}, "add --rope_scaling_type llama3"),
        ("qwen2", {"sliding_window": 4}, "--sliding_window 4 has no effect: .*qwen2 .* makes None of it"),
        ("gemma2", {"sliding_window": 0}, r"layer_types.*--sliding_window above 0"),
    ],
)
def test_settings_without_effect_on_a_derived_model_are_refused(tmp_path, model_type, settings, words):
    where = save(tmp_path, model_type, **WIDE)
    with pytest.raises(ConfigError, match=words):
        resolve_model(ModelConfig(model=where, **settings))


def test_scaled_positions_of_a_derived_model_begin_with_the_defaults(tmp_path):
    where = save(tmp_path, "qwen2", **WIDE)
    rope = resolve_model(ModelConfig(model=where, rope_scaling_type="llama3")).hf_config.rope_parameters
    assert (rope["factor"], rope["original_max_position_embeddings"]) == (8.0, 8192)


def test_a_falcon_without_key_value_heads_is_refused(tmp_path):
    where = save(tmp_path, "falcon", num_kv_heads=0, **SMALL)
    with pytest.raises(ConfigError, match="num_key_value_heads must be at least 1, got 0"):
        resolve_model(ModelConfig(model=where))


def test_learned_positions_end_with_those_of_the_weights(tmp_path):
    where = save(tmp_path, "gpt2", weights=True, n_positions=16, **SMALL)
    with pytest.raises(ConfigError, match="learned 16 positions: choose at most 16"):
        resolve_model(ModelConfig(hf_pretrained_model_name_or_dir=where, max_context_width=24))
    assert resolve_model(ModelConfig(model=where, max_context_width=24)).hf_config.n_positions == 24


def test_a_model_of_settings_alone(tmp_path):
    resolved = resolve_model(ModelConfig(model_type="gpt2", max_context_width=32, num_layers=1, embd_pdrop=0.0))
    assert (resolved.hf_config.n_positions, resolved.hf_config.n_layer, resolved.hf_config.embd_pdrop) == (32, 1, 0.0)
    assert resolved.hf_config.vocab_size == 50432 and resolved.family.name == "gpt2"


def test_a_plan_by_hand_takes_the_place_of_none(monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    config = config_of("diffllama", **WIDE)
    family = smp.family_of(config)
    assert family.tensor_plan is None and family.no_tensor_plan
    smp.register_family(dataclasses.replace(family, tensor_plan=LLAMA_PLAN))
    assert smp.family_of(config).tensor_plan is LLAMA_PLAN


def test_a_model_without_any_linear_order_is_refused():
    class Twice(torch.nn.Module):
        pass

    config = config_of("qwen2", **WIDE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.model.layers.append(Twice())  # a block that is never called
    with pytest.raises(UserError, match=r"model.layers.2 is called 0 times"):
        registry.derive_family(model)


def test_rotary_embeddings_that_read_the_longest_position_are_followed():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert plan_of("qwen2", rope_parameters=rope) == plan_of("qwen2")


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8}


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope", **FACTORS}])
def test_longer_sequences_leave_rotary_embeddings_that_go_by_the_number_of_positions(tmp_path, rope):
    values = {"max_position_embeddings": 16, "rope_parameters": {**rope, "rope_theta": 10000.0}}
    where = save(tmp_path, "llama", **WIDE, **values)
    longer = resolve_model(ModelConfig(model=where, max_context_width=24))
    tokens, positions = torch.zeros(1, 24, 32), torch.arange(24)[None]
    plain, ours = (
        AutoModelForCausalLM.from_config(config).model.rotary_emb(tokens, positions)
        for config in (config_of("llama", **WIDE, **values), longer.hf_config)
    )
    assert longer.sequence_length == 24 and all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
