"""Attention of families that are derived: masks are the model's own, made without a read from the device."""

import copy

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from smp.config import PrecisionConfig, Settings
from smp.errors import ConfigError, UserError
from smp.mesh import lay_out
from smp.models.model_config import ModelConfig, resolve_model
from smp.models.registry import build_model, family_of
from smp.parallel import attention, choices, documents
from smp.parallel.documents import check_documents
from smp.parallel.technique import Setup, draws
from tests.unit.test_attention import Reads

SHAPE = {
    "vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
WIDE = {**SHAPE, "intermediate_size": 32, "num_key_value_heads": 2}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
HEADS = {"head_dim": 8, "query_pre_attn_scalar": 8}
MODELS = {
    "gemma2": ("gemma2", {**WIDE, **MIXED, **HEADS}),
    "gemma3": ("gemma3_text", {**WIDE, **MIXED, **HEADS}),
    "qwen2 with a window": ("qwen2", {**WIDE, **MIXED, "use_sliding_window": True}),
    "qwen2 with a window that no block has": ("qwen2", {**WIDE, "sliding_window": 4}),
    "gpt2": ("gpt2", {**SHAPE, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}),
    "starcoder2": ("starcoder2", {**WIDE, "sliding_window": 4, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "olmo3": ("olmo3", {**WIDE, **MIXED}),
    "cohere2": ("cohere2", {**WIDE, **MIXED}),
    "exaone4": ("exaone4", {**WIDE, **MIXED}),
    "smollm3": ("smollm3", WIDE),
    "phi3": ("phi3", {**WIDE, "sliding_window": 4}),
    "gptj": ("gptj", {**SHAPE, "rotary_dim": 4}),
    "falcon": ("falcon", SHAPE),
}
APART = [name for name in MODELS if name != "falcon"]  # whose masks do not depend on positions
IDS = (torch.arange(24).reshape(2, 12) * 7) % 37 + 3
# Documents of 7 and 5 tokens in each row.
POSITIONS = torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1)
LENGTHS = attention.document_lengths(torch.tensor([0, 7, 12, 19, 24], dtype=torch.int32), 7)


def config_of(name, **changes):
    model_type, values = MODELS[name]
    return CONFIG_MAPPING[model_type](**{**values, **changes})


def built(config):
    torch.manual_seed(0)
    return build_model(config, attn_implementation=None).double().eval()


def applied(model, chosen="sdpa"):
    model = copy.deepcopy(model)
    settings = Settings((ModelConfig(),)).changed(attn_implementation=chosen)
    setup = Setup(family_of(model.config), lay_out(), settings)
    documents.apply(model, setup)
    attention.apply(model, setup)
    return model


def logits(model, ids=IDS, **inputs):
    return model(input_ids=ids, use_cache=False, **inputs).logits


@pytest.mark.full
@pytest.mark.parametrize("name", APART)
def test_the_same_bits_as_transformers_without_a_read(name):
    model = built(config_of(name))
    ours = applied(model)
    with Reads() as reads:
        plain, packed = logits(ours), logits(ours, position_ids=POSITIONS, **LENGTHS)
    assert reads.found == []
    assert torch.equal(plain, logits(model)) and torch.equal(packed, logits(model, position_ids=POSITIONS))


@pytest.mark.full
@pytest.mark.parametrize("name", APART)
def test_documents_see_nothing_of_one_another(name):
    config = config_of(name)
    model = built(config)
    ours = applied(model)
    check_documents(config)
    found = logits(ours, position_ids=POSITIONS, **LENGTHS)
    for place, kept in ((3, slice(7, None)), (9, slice(None, 7))):
        other = IDS.clone()
        other[:, place] += 1
        changed = logits(ours, other, position_ids=POSITIONS, **LENGTHS)
        assert torch.equal(changed[:, kept], found[:, kept]) and not torch.equal(changed, found)
    alone = logits(model, IDS[:, 7:])
    torch.testing.assert_close(found[:, 7:], alone, rtol=1e-6, atol=1e-6)  # some rotate or normalise in fp32


@pytest.mark.full
def test_lengths_alone_tell_the_documents():
    ours = applied(built(config_of("gemma3")))
    assert torch.equal(logits(ours, **LENGTHS), logits(ours, position_ids=POSITIONS, **LENGTHS))


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma3", "starcoder2", "gpt2"])
def test_fused_attention_goes_by_the_model_s_masks(name):
    model = built(config_of(name))
    ours = applied(model, "fused")
    kinds = {module.config._attn_implementation for module in ours.modules() if hasattr(module, "layer_idx")}
    assert kinds == {attention.MASKED} and ours.config._attn_implementation == "sdpa"
    for inputs in ({}, {"position_ids": POSITIONS, **LENGTHS}):
        wanted = logits(model, **{key: value for key, value in inputs.items() if key == "position_ids"})
        torch.testing.assert_close(logits(ours, **inputs), wanted, rtol=1e-9, atol=1e-11)


def saved(directory, config):
    config.save_pretrained(directory)
    return str(directory)


def test_scores_that_are_capped_are_not_for_sdpa(tmp_path, caplog):
    where = saved(tmp_path, config_of("gemma2"))
    with caplog.at_level("INFO"):
        assert resolve_model(ModelConfig(model=where)).attn_implementation == "eager"
    assert "eager, and not sdpa: the model caps the scores of attention (attn_logit_softcapping 50.0)" in caplog.text
    with pytest.raises(ConfigError, match=r"--attn_implementation sdpa: the model caps .*: use eager"):
        resolve_model(ModelConfig(model=where, attn_implementation="sdpa"))
    with pytest.raises(UserError, match="attn_implementation sdpa: the model caps"):
        build_model(config_of("gemma3", attn_logit_softcapping=30.0), attn_implementation="sdpa")


@pytest.mark.parametrize(("name", "asked", "words"), [
    ("gptj", "sdpa", "GPTJForCausalLM does not support it: use eager"),
    ("gptj", "flex_attention", "GPTJForCausalLM does not support it: use eager"),
    ("falcon", "fused", "FalconForCausalLM calls its own attention functions: use sdpa"),
])  # fmt: skip
def test_what_transformers_does_not_support_is_refused(tmp_path, name, asked, words):
    with pytest.raises(ConfigError, match=words):
        resolve_model(ModelConfig(model=saved(tmp_path, config_of(name)), attn_implementation=asked))


@pytest.mark.full
@pytest.mark.parametrize(("model_type", "values", "words"), [
    ("falcon", SHAPE, "do not depend on positions"),
    ("bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": 48}, "takes no positions|do not depend"),
    ("mamba", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 48, "state_size": 4}, "keywords|takes no"),
    ("rwkv", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 48}, "do not depend|takes no positions"),
])  # fmt: skip
def test_documents_of_a_model_that_mixes_them_are_refused(model_type, values, words):
    config = CONFIG_MAPPING[model_type](**values)
    with pytest.raises(
        UserError, match=f"({words}).*, as --document_mask 1 and --dataset_type chat do: use --document_mask 0"
    ):
        check_documents(config)
    with pytest.raises((UserError, TypeError), match=r"--document_mask 1|position_ids"):
        logits(applied(built(config)), position_ids=POSITIONS, **LENGTHS)


def test_documents_that_change_one_another_s_rotary_embedding_are_refused():
    def llama(**rope):
        return CONFIG_MAPPING["llama"](**WIDE, rope_parameters={"rope_theta": 10000.0, **rope})

    factors = {"short_factor": [1.0] * 2, "long_factor": [2.0] * 2, "original_max_position_embeddings": 16}
    check_documents(llama(rope_type="longrope", **factors), 16)
    with pytest.raises(UserError, match=r"beyond 16 tokens .*: use --max_context_width 16, or --document_mask 0"):
        check_documents(llama(rope_type="longrope", **factors), 17)
    with pytest.raises(UserError, match=r"\(dynamic\) goes by the longest document"):
        check_documents(llama(rope_type="dynamic", factor=2.0), 16)


def problems(config):
    return attention.problems(config, Setup(None, None, Settings((ModelConfig(),))))


def test_tokens_that_see_later_ones_and_skipped_blocks_are_refused():
    (problem,) = problems(config_of("gemma3", use_bidirectional_attention=True))
    assert "use_bidirectional_attention True" in problem and "turn it off" in problem
    (problem,) = problems(CONFIG_MAPPING["big_bird"](is_decoder=True))
    assert "(attention_type block_sparse, and not original_full)" in problem
    assert not problems(CONFIG_MAPPING["big_bird"](is_decoder=True, attention_type="original_full"))
    (problem,) = problems(CONFIG_MAPPING["opt"](layerdrop=0.1))
    assert "layerdrop 0.1" in problem and "set it to 0" in problem
    assert problems(config_of("gpt2")) == []


def test_dropout_of_any_name_and_jitter_draw():
    nothing = nn.Linear(2, 2)
    for key in ("resid_pdrop", "attn_pdrop", "embd_pdrop"):
        assert draws(nothing, config_of("gpt2", **{key: 0.1}))
    assert draws(nothing, config_of("starcoder2", residual_dropout=0.1))
    mixtral = CONFIG_MAPPING["mixtral"]
    assert draws(nothing, mixtral(router_jitter_noise=0.1)) and not draws(nothing, mixtral())
    # GPT-2's summary has a dropout of 0.1, which no causal language model has.
    assert not draws(nothing, config_of("gpt2")) and draws(nn.Dropout(0.1), config_of("gpt2"))


def test_nothing_is_chosen_for_a_model_that_has_eager_attention(monkeypatch):
    settings = Settings((ModelConfig(), PrecisionConfig()))

    def chosen(name, **changes):
        situation = choices.Situation(config_of(name, **changes), settings, "cuda", 1, lambda **values: True)
        return [choice.value for choice in choices.choose(settings, situation, [attention.choose])]

    assert chosen("gemma2") == chosen("gptj") == []
    assert chosen("falcon") == ["sdpa"] and chosen("gpt2", attn_pdrop=0.1) == ["sdpa"]
    assert chosen("gemma3") == ["fused"]
