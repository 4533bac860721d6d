"""Files of derived families, both ways: what Hugging Face writes is read here, and what is written here it reads."""

import dataclasses
import json
import pathlib
import pickle
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping

import smp.cli
from smp.checkpoint.hf_export import export_hf
from smp.delayed_init import build_on_meta
from smp.errors import ConfigError, UserError
from smp.models.checked_config import checked_config
from smp.models.families import FAMILIES
from smp.models.file_names import buffers_of, file_names_of
from smp.models.model_config import ModelConfig, resolve_model
from smp.models.registry import build_model, family_of
from smp.pretrained import load_pretrained_
from tests import experts
from tests.job import run_job

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0}
CASES = {
    "gpt2": GPT2,
    "gemma2": SHAPE,
    "phi3": SHAPE,
    "qwen2": SHAPE,
    "qwen3": SHAPE,
    "gemma3_text": SHAPE,
    "olmo2": SHAPE,
    "granite": SHAPE,
    "cohere": SHAPE,
    "starcoder2": SHAPE,
    "falcon": {key: SHAPE[key] for key in SHAPE if key != "head_dim"},
    "gptj": {**GPT2, "rotary_dim": 8},
    "smollm3": SHAPE,
    "phi": SHAPE,  # its head has a bias
    "apertus": SHAPE,  # its files hold buffers
}
TIED = {"gpt2", "gemma2", "gemma3_text", "cohere", "starcoder2", "falcon", "smollm3"}
FAST = ("gpt2", "gemma2")
EVERY = [case if case in FAST else pytest.param(case, marks=pytest.mark.full) for case in CASES]


def config_of(case, **changes):
    return CONFIG_MAPPING[case].from_dict({**CASES[case], **changes})


def model_of(case, **changes):
    """A model of which no parameter has its initial value."""
    torch.manual_seed(3)
    model = build_model(config_of(case, **changes), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def empty(case, **changes):
    model = build_model(config_of(case, **changes), attn_implementation="eager").eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(torch.nan)
    return model


def keys_of(directory):
    return {key for file in pathlib.Path(directory).glob("*.safetensors") for key in load_file(file)}


def assert_same(model, expected):
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("case", EVERY)
def test_files_of_either_are_those_of_the_other(tmp_path, case):
    reference, model = model_of(case), empty(case)
    head, embedding = reference.get_output_embeddings(), reference.get_input_embeddings()
    assert (head.weight is embedding.weight) == (case in TIED)
    reference.save_pretrained(tmp_path / "theirs", max_shard_size=20_000)
    checked_config("config.json", json.loads((tmp_path / "theirs" / "config.json").read_text()))

    load_pretrained_(model, tmp_path / "theirs", hf_config=model.config)
    assert_same(model, reference)

    export_hf(model, tmp_path / "ours", max_shard_bytes=20_000)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    assert keys_of(tmp_path / "ours") == keys_of(tmp_path / "theirs")
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert_same(back, reference)
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((tmp_path / whose / name).read_text()) for whose in ("ours", "theirs"))
        assert ours == theirs | {"use_cache": True}


@pytest.mark.parametrize("case", EVERY)
def test_names_are_data_of_the_family_and_agree_both_ways(case):
    config = config_of(case)
    names = family_of(config).file_names
    twin = build_on_meta(lambda: build_model(config, attn_implementation="eager"))
    assert names == file_names_of(twin) == pickle.loads(pickle.dumps(names)) and hash(names) and not names.problem
    for name, _ in (*twin.named_parameters(), *buffers_of(twin)):
        assert names.module_key(names.file_key(name)) == name


@pytest.mark.parametrize("case", ["llama", "mistral", "gpt_neox"])
def test_names_written_by_hand_are_those_of_transformers(case):
    config = CONFIG_MAPPING[case](num_hidden_layers=1, hidden_size=32, num_attention_heads=4)
    model = build_on_meta(lambda: build_model(config, attn_implementation="eager"))
    ours, derived = family_of(config).file_names, file_names_of(model)
    assert len(ours.to_module) == len(ours.to_file) == len(get_model_conversion_mapping(model, add_legacy=False))
    for name, _ in model.named_parameters():
        assert ours.file_key(name) == derived.file_key(name)
        assert ours.module_key(ours.file_key(name)) == name == derived.module_key(derived.file_key(name))


def test_files_as_openai_wrote_them_load(tmp_path):
    """Without the base model's prefix, without a head, and with the masks that the modules once kept."""
    reference, model = model_of("gpt2"), empty("gpt2")
    reference.transformer.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "h.0.attn.c_attn.weight" in tensors
    for layer in range(2):
        tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64), f"h.{layer}.attn.masked_bias": torch.ones(1)}
    save_file(tensors, file, metadata={"format": "pt"})
    load_pretrained_(model, tmp_path, hf_config=model.config)
    assert_same(model, reference)


@pytest.mark.full
def test_a_prefix_that_some_files_have_is_taken_off():
    config = CONFIG_MAPPING["qwen3_5_text"](num_hidden_layers=4, hidden_size=32, vocab_size=97)
    with torch.device("meta"):
        names = file_names_of(AutoModelForCausalLM.from_config(config))
    for key in ("model.language_model.norm.weight", "model.norm.weight"):
        assert names.module_key(key) == "model.norm.weight"
    assert names.file_key("model.norm.weight") == "model.norm.weight"
    assert names.ignored("model.visual.blocks.0.weight") and not names.ignored("model.norm.weight")


def test_files_that_are_converted_when_read_are_refused_before_anything_is_read(tmp_path):
    config = CONFIG_MAPPING["olmo_hybrid"](**{**SHAPE, "num_hidden_layers": 4})
    family = family_of(config)
    assert "store linear_attn.conv1d.weight joined or split" in family.file_names.problem
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ConfigError, match=r"conv1d.weight joined or split, .*: train from initial values"):
        resolve_model(ModelConfig(hf_pretrained_model_name_or_dir=str(tmp_path)))
    model = build_on_meta(lambda: build_model(config, attn_implementation="eager"))
    with pytest.raises(UserError, match="have transformers' save_pretrained write it"):
        export_hf(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_generation_settings_stay_with_the_model(tmp_path, caplog):
    model = model_of("gpt2")
    model.generation_config = GenerationConfig(eos_token_id=[1, 5], max_new_tokens=7)
    export_hf(model, tmp_path / "own")
    assert GenerationConfig.from_pretrained(tmp_path / "own").eos_token_id == [1, 5]

    (tmp_path / "tokenizer").mkdir()
    GenerationConfig(eos_token_id=[3]).save_pretrained(tmp_path / "tokenizer")
    export_hf(model, tmp_path / "copied", tokenizer_dir=tmp_path / "tokenizer")
    assert GenerationConfig.from_pretrained(tmp_path / "copied").eos_token_id == [3]

    (tmp_path / "pretrained").mkdir()
    kept = '{"eos_token_id": [1, 5], "temperature": 0.6, "do_sample": true, "of_a_later_version": 1}'
    (tmp_path / "pretrained" / "generation_config.json").write_text(kept)
    export_hf(model, tmp_path / "kept", tokenizer_dir=tmp_path / "tokenizer", generation_dir=tmp_path / "pretrained")
    assert (tmp_path / "kept" / "generation_config.json").read_text() == kept

    model.generation_config = GenerationConfig(eos_token_id=1)
    model.generation_config.temperature = 0.5  # which transformers does not save without do_sample
    model.config.repetition_penalty = 1.5  # nor this, in the config of a model
    export_hf(model, tmp_path / "invalid")
    assert "generation_config is left out" in caplog.text
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "invalid").config.n_embd == 32


def command(*arguments):
    return smp.cli.main([str(argument) for argument in arguments])


@pytest.mark.full
def test_commands_take_directories_of_derived_models(tmp_path, capsys):
    reference = model_of("gpt2")
    reference.save_pretrained(tmp_path / "with")
    reference.transformer.save_pretrained(tmp_path / "without")
    (tmp_path / "without" / "config.json").write_bytes((tmp_path / "with" / "config.json").read_bytes())
    assert command("diff", tmp_path / "with", tmp_path / "without", "--values") == 0
    assert command("inspect", tmp_path / "without", "--tensors", "--json") == 0
    out = capsys.readouterr().out
    assert "transformer.h.0.attn.c_attn.weight" in out and '"model_type": "gpt2"' in out


@pytest.mark.full
def test_a_checkpoint_of_a_derived_model_is_exported_with_its_buffers(tmp_path, capsys):
    model_of("apertus").save_pretrained(tmp_path / "model")
    run_job(
        "--hf_pretrained_model_name_or_dir", tmp_path / "model", "--use_synthetic_data", 1, "--max_steps", 1,
        "--max_context_width", 16, "--output_dir", tmp_path / "run", "--save_final_model", 1,
    ).succeeded()  # fmt: skip
    assert keys_of(tmp_path / "run" / "final") == keys_of(tmp_path / "model")
    checkpoint = tmp_path / "run" / "checkpoints" / "model-1steps"
    assert command("verify", checkpoint) == 0 and command("export", checkpoint, tmp_path / "out") == 0
    for one in (checkpoint, tmp_path / "run" / "final"):
        assert command("diff", one, tmp_path / "out", "--values") == 0
    assert capsys.readouterr().out.count("values: all 31 tensors") == 2

    weights, family = tmp_path / "model" / "model.safetensors", family_of(config_of("apertus"))
    save_file({**load_file(weights), "vision.scale": torch.tensor(2)}, weights, metadata={"format": "pt"})
    names = dataclasses.replace(family.file_names, passed=(r"^vision\.",))
    with mock.patch.dict(FAMILIES, apertus=dataclasses.replace(family, file_names=names)):
        assert command("export", checkpoint, tmp_path / "passed") == 0
        assert keys_of(tmp_path / "passed") == {*keys_of(tmp_path / "out"), "vision.scale"}
        weights.unlink()
        assert command("export", checkpoint, tmp_path / "without") == 2
    assert not (tmp_path / "without").exists() and len(capsys.readouterr().err.splitlines()) == 1


def test_ties_are_those_of_the_model():
    """Moshi's config may say that they are, and its embedding has a row that its head has not."""
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "ffn_dim": 48}
    config = CONFIG_MAPPING["moshi"](vocab_size=97, **shape, tie_word_embeddings=True)
    model = build_on_meta(lambda: build_model(config, attn_implementation="eager"))
    assert model.get_output_embeddings().weight.shape != model.get_input_embeddings().weight.shape


BAD = {
    "unknown": ({"model_type": "nonesuch"}, r"'nonesuch' is not supported: transformers does not know it"),
    "no type": ({}, r"names no model_type: add the one"),
    "list as type": ({"model_type": ["gpt2"]}, r"is not supported"),
    "vision": ({"model_type": "vit"}, r"'vit' is not supported: it is no causal language model"),
    "parts": (
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}},
        r"num_hidden_layers must be an int",
    ),
    "parts by default": ({"model_type": "glm4v"}, r"no causal language model for its text part \('glm4v_text'\)"),
    "own width": ({"model_type": "gpt2", "n_embd": 2**40}, r"n_embd must be an integer from 1 to 1048576"),
    "own layers": ({"model_type": "gpt2", "n_layer": 10**9}, r"n_layer must be an integer from 1 to 10000"),
    "text": ({"model_type": "gpt2", "n_head": "4"}, r"n_head must be an integer"),
    "counts": ({"model_type": "qwen2", "max_window_layers": 10**12}, r"max_window_layers must be at most 65536"),
    "experts": ({"model_type": "mixtral", "num_local_experts": 10**9}, r"num_local_experts must be at most 65536"),
    "code": ({"model_type": "nonesuch", "auto_map": {}}, r"asks to run code"),
}


@pytest.mark.parametrize("name", BAD)
def test_configurations_that_cannot_be_used_are_refused_in_a_sentence(tmp_path, capsys, name):
    content, words = BAD[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=words):
        checked_config(tmp_path, content)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert command("inspect", tmp_path) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_infinite_numbers_are_read_as_transformers_writes_them(tmp_path):
    config = config_of("qwen2", rope_parameters={"rope_type": "default", "rope_theta": float("inf")})
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["rope_parameters"]["rope_theta"] == {"__float__": "Infinity"}
    assert checked_config(tmp_path, content).rope_parameters["rope_theta"] == float("inf")


def test_tensors_of_multi_token_prediction_are_exported_again(tmp_path, caplog):
    plain = experts.build("glm4_moe", torch.float32)
    plain.save_pretrained(tmp_path / "base")
    file, key = tmp_path / "base/model.safetensors", "model.layers.46.eh_proj.weight"
    tensors = load_file(file) | {key: torch.rand(4, 8)}
    save_file(tensors, file, metadata={"format": "pt"})
    model = build_model(plain.config, attn_implementation=None)
    load_pretrained_(model, tmp_path / "base", hf_config=plain.config)
    export_hf(model, tmp_path / "out", weights=tmp_path / "base")
    after = load_file(tmp_path / "out/model.safetensors")
    assert after.keys() == tensors.keys() and all(torch.equal(after[name], tensors[name]) for name in after)
    export_hf(model, tmp_path / "again", weights=tmp_path / "gone")
    assert load_file(tmp_path / "again/model.safetensors").keys() == tensors.keys() - {key}
    assert "gone has gone: its tensors of multi-token prediction, if it has any, are not written" in caplog.text
    with torch.device("meta"):
        larger = AutoModelForCausalLM.from_config(experts.config_of("glm4_moe", num_hidden_layers=47))
    assert family_of(plain.config).file_names.passes(key) and not file_names_of(larger).passes(key)
