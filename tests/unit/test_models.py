import importlib.util
import json
import logging
import pathlib
import shutil
import types

import pytest
import torch

from smp.errors import ConfigError, UserError
from smp.models.families import list_presets, preset_path
from smp.models.hf_values import new_config
from smp.models.meta_model import count_parameters
from smp.models.model_config import ModelConfig, resolve_model
from smp.models.registry import FAMILIES, build_model, family_of
from smp.models.weight_files import find_weights, generation_dir_of, stops_of

# From the models' cards; gpt_neox_65b has no published weights (12 h^2 L + 13 h L + 2 V h + 2 h worked out by hand).
PUBLISHED = {
    "llama7b": 6_738_415_616,
    "llama13b": 13_015_864_320,
    "llama70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mistral7b": 7_241_732_096,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "smollm3_3b": 3_075_098_624,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "gemma3_1b": 999_885_952,
    # Published with the vision tower and its projection, of 416,866,032 and 1152 (hidden + 1) parameters.
    "gemma3_4b": 4_300_079_472 - 416_866_032 - 1152 * 2561,
    "gemma3_12b": 12_187_325_040 - 416_866_032 - 1152 * 3841,
    "gemma3_27b": 27_432_406_640 - 416_866_032 - 1152 * 5377,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "deepseek_v3": 671_026_404_352,
    "glm_4_5_air": 106_852_245_504,
    "gpt_neox_20b": 20_554_567_680,
    "gpt_neox_65b": 12 * 8192**2 * 80 + 13 * 8192 * 80 + 2 * 50432 * 8192 + 2 * 8192,
}
TINY = ["llama_tiny", "gpt_neox_tiny", "mixtral_tiny"]
SMALL = {"hidden_width": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "max_context_width": 32}


SMALL_HF = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def resolve(**settings):
    return resolve_model(ModelConfig(**settings))


def refusal(**settings):
    with pytest.raises(UserError) as caught:
        resolve(**settings)
    return str(caught.value)


def save_config(directory, **changes):
    config = resolve(model="llama_tiny").hf_config.to_dict() | changes
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_weights(directory):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, directory / "model.safetensors")
    return directory


# Derived families of many blocks take seconds each.
QUICK = [
    name
    for name in PUBLISHED
    if not name.startswith(("qwen3", "gemma3", "smollm3", "mixtral", "gpt_oss", "deepseek", "glm"))
]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in PUBLISHED if name not in QUICK)]
)
def test_parameter_count_is_the_published_one(name):
    assert count_parameters(resolve(model=name).hf_config) == PUBLISHED[name]


def test_presets_are_listed_and_complete():
    assert set(list_presets()) == {*PUBLISHED, *TINY}
    assert all(preset_path(name).is_file() for name in list_presets())
    for name in TINY:
        config = resolve(model=name)
        assert config.name == name and config.sequence_length == 128
        assert 1_500_000 < count_parameters(config.hf_config) < 2_500_000


@pytest.mark.parametrize("name", TINY)
def test_tiny_presets_fit_the_bundled_tokenizer(name):
    file = pathlib.Path(__file__).parents[2] / "data" / "sample" / "tokenizer" / "tokenizer.json"
    vocabulary = json.loads(file.read_text())["model"]["vocab"]
    config = resolve(model=name).hf_config
    assert config.vocab_size == len(vocabulary) and config.eos_token_id == vocabulary["<|endoftext|>"]


def test_published_details():
    llama, mistral, neox = (resolve(model=name).hf_config for name in ("llama3_8b", "mistral7b", "gpt_neox_20b"))
    assert llama.rope_parameters["rope_type"] == "llama3" and llama.rope_parameters["rope_theta"] == 500000.0
    assert mistral.sliding_window == 4096
    assert neox.rope_parameters["partial_rotary_factor"] == 0.25 and neox.hidden_act == "gelu_fast"
    assert resolve(model="llama70b").hf_config.num_key_value_heads == 8
    assert resolve(model="llama3_405b").sequence_length == 8192


def test_settings_override_a_preset_and_dependent_values_follow():
    config = resolve(model="llama7b", num_layers=2, hidden_width=512, num_heads=8, rotary_emb_base=500.0).hf_config
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (2, 512, 64)
    assert config.num_key_value_heads == 8 and config.rope_parameters["rope_theta"] == 500.0
    assert resolve(model="gpt_neox_tiny", hidden_width=64).hf_config.intermediate_size == 256
    assert resolve(model="llama_tiny", num_heads=8).hf_config.num_key_value_heads == 2
    assert resolve(num_layers=3).name == "gpt_neox"  # as SMP v2's


@pytest.mark.parametrize(
    ("kind", "experts", "top"),
    [
        ("mixtral", "num_local_experts", "num_experts_per_tok"),
        ("olmoe", "num_experts", "num_experts_per_tok"),
        ("glm4_moe", "n_routed_experts", "num_experts_per_tok"),
        ("aria_text", "moe_num_experts", "moe_topk"),
    ],
)
def test_experts_are_set_under_the_types_own_keys(tmp_path, kind, experts, top):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    new_config(kind, {**sizes, **heads}).save_pretrained(tmp_path)
    plain = resolve(model=str(tmp_path), moe=True).hf_config.to_dict()
    made = resolve(model=str(tmp_path), num_local_experts=24, num_experts_per_tok=3).hf_config.to_dict()
    assert {key: made[key] for key in made if made[key] != plain[key]} == {experts: 24, top: 3}


def test_mixtral_has_smp_v2s_defaults():
    made = resolve(model_type="mixtral", moe=True, num_heads=4).hf_config
    assert (made.num_local_experts, made.num_experts_per_tok, made.num_key_value_heads) == (8, 2, 4)
    assert (made.vocab_size, made.hidden_size, made.intermediate_size, made.num_hidden_layers) == (
        50432,
        768,
        14336,
        12,
    )


def test_scaling_can_be_taken_off_a_preset():
    rope = resolve(model="llama3_8b", rope_scaling_type="default").hf_config.rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 500000.0}
    assert resolve(model="mistral7b", sliding_window=0).hf_config.sliding_window is None


def test_tied_weights_count_once_and_longer_context_raises_positions():
    tied = resolve(model="llama_tiny", tie_word_embeddings=True, max_context_width=1024)
    untied = resolve(model="llama_tiny").hf_config
    assert count_parameters(untied) - count_parameters(tied.hf_config) == untied.vocab_size * untied.hidden_size
    assert tied.sequence_length == 1024 and tied.hf_config.max_position_embeddings == 1024


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "lama7b"}, "did you mean llama7b"),
        ({}, "smollm3_3b, or to a local Hugging Face directory; or --model_type with sizes such as --num_layers"),
        ({"max_context_width": 64}, "no model: set --model to one of deepseek_v3"),
        ({"hf_pretrained_model_name_or_dir": "qwen3_4b"}, "; --model qwen3_4b trains the preset from initial values"),
        ({"model": "llama_tiny", "num_heads": 3}, "--num_heads 3 does not divide --hidden_width 160"),
        ({"model": "llama_tiny", "num_key_value_heads": 3}, "3 does not divide --num_heads 4: choose a divisor"),
        ({"model": "llama_tiny", "num_layers": 0}, "--num_layers must be at least 1"),
        ({"model": "llama_tiny", "sliding_window": 4}, "--sliding_window is no setting of the llama family"),
        ({"model": "gpt_neox_tiny", "num_key_value_heads": 2}, "no setting of the gpt_neox family"),
        ({"model": "gpt_neox_tiny", "rotary_pct": 0.03}, "turns 1 of each head's 40 dimensions"),
        ({"model": "llama_tiny", "rope_scaling_factor": 2.0}, "add --rope_scaling_type llama3"),
        ({"model": "mistral7b", "model_type": "llama_v2"}, "contradicts mistral7b"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "9 is more than the 8 experts of a layer: lower it"),
        ({"model": "deepseek_v3", "num_local_experts": 8}, "8 groups (n_group) of this model, each of two"),
        ({"model_type": "llama_v2", "num_local_experts": 4}, "--num_local_experts is no setting of the llama family"),
        ({"model_type": "llama_v2", "intermediate_size": 8, "llama_intermediate_size": 9}, "give one of them"),
        ({"embd_pdrop": 0.1}, "no setting of the gpt_neox family"),
        ({"model": "llama_tiny", "moe": True}, "llama_tiny is none: leave it out, or choose one with --model_type mix"),
        ({"finetune": True}, "--finetune 1 needs --pretrained_model_name"),
        ({"finetune": True, "pretrained_model_name": "llama7b"}, "needs --finetune_checkpoint_load_dir"),
        ({"finetune": True, "finetune_checkpoint_load_dir": "x"}, "--pretrained_model_name"),
        ({"pretrained_checkpoint_file": "x"}, "add --finetune 1"),
        ({"hf_pretrained_model_name_or_dir": "x", "model": "y"}, "both name the model: give one of them, or a preset"),
        ({"hf_pretrained_model_name_or_dir": "x", "pretrained_checkpoint_file": "y"}, "both name the weights"),
        (
            {"hf_pretrained_model_name_or_dir": "a/Qwen3-0.6B"},
            "is no directory: give a local one with a model's config.json and safetensors weights; hubs are never "
            "asked: download it first, `hf download a/Qwen3-0.6B --local-dir DIR`, then give DIR",
        ),
    ],
)
def test_bad_settings_say_what_to_do(settings, words):
    assert words in refusal(**settings)


def test_several_problems_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        resolve(model="llama_tiny", num_heads=3, sliding_window=4, rotary_pct=0.5)
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention", "fused"])
def test_attention_that_cannot_run_here_is_refused(name):
    if torch.cuda.is_available() or importlib.util.find_spec("flash_attn"):
        pytest.skip("this machine can run it")
    assert "use sdpa" in refusal(model="llama_tiny", attn_implementation=name)


def test_a_directory_gives_architecture_name_and_tokenizer(tmp_path):
    directory = save_config(tmp_path / "my_model", num_hidden_layers=3, quantization_config=None)
    (directory / "tokenizer.json").write_text("{}")
    resolved = resolve(model=str(directory))
    assert resolved.name == "my_model" and resolved.hf_config.num_hidden_layers == 3
    assert resolved.sequence_length == 512 and resolved.weights is None and resolved.tokenizer_dir == directory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert"}, "it is an encoder"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_size": "wide"}, "hidden_size must be an integer"),
    ],
)
def test_bad_directories_are_refused(tmp_path, changes, words):
    assert words in refusal(model=str(save_config(tmp_path / "m", **changes)))


@pytest.mark.parametrize(
    ("found", "stops"), [(None, [7]), ({"eos_token_id": [2, 3]}, [2, 3]), ({"eos_token_id": 0}, [0]), ({}, [])]
)
def test_generation_stops_where_its_file_says_else_the_config(tmp_path, found, stops):
    if found is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(found))
    assert stops_of(generation_dir_of(tmp_path), types.SimpleNamespace(eos_token_id=7)) == stops


def test_directories_without_usable_config_are_refused(tmp_path):
    assert "without config.json" in refusal(model=str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "no readable Hugging Face config" in refusal(model=str(tmp_path))


def test_every_spelling_of_finetuning_finds_config_and_weights(tmp_path):
    directory = save_weights(save_config(tmp_path / "base", num_hidden_layers=3))
    text, file = str(directory), str(directory / "model.safetensors")
    hub_name = {"pretrained_model_name": "org/base", "finetune_checkpoint_load_dir": text}
    spellings = [
        {"hf_pretrained_model_name_or_dir": text},
        {"finetune": True, "pretrained_checkpoint_file": file},
        {"finetune": True, "pretrained_model_name": text, "finetune_checkpoint_load_dir": text},
        {"finetune": True, **hub_name},
    ]
    for spelling in spellings:
        resolved = resolve(**spelling)
        assert resolved.name == "base" and resolved.weights is not None and resolved.hf_config.num_hidden_layers == 3
    directory = save_weights(save_config(tmp_path / "tiny"))
    preset = resolve(finetune=True, pretrained_model_name="llama_tiny", finetune_checkpoint_load_dir=str(directory))
    assert preset.name == "llama_tiny" and preset.weights == directory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            "rope_parameters.rope_theta 10000.0 instead of 5.0",
        ),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps 1e-05 instead of 0.5"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings False instead of True"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.0 instead of 0.1"),
        ({"model_type": "mistral"}, "model_type llama instead of mistral"),
    ],
)
def test_a_preset_that_contradicts_the_config_of_the_weights_is_refused(tmp_path, changes, words):
    directory = save_weights(save_config(tmp_path / "w", **changes))
    by_name = {"pretrained_model_name": "llama_tiny", "finetune_checkpoint_load_dir": str(directory)}
    said = refusal(finetune=True, **by_name)
    assert words in said and f"--hf_pretrained_model_name_or_dir {directory} alone" in said
    by_file = {"finetune": True, "pretrained_checkpoint_file": str(directory / "model.safetensors")}
    assert words in (said := refusal(model="llama_tiny", **by_file)) and "leave --model out" in said
    for followed in ({"hf_pretrained_model_name_or_dir": str(directory)}, by_file):
        values = resolve(**followed).hf_config.to_dict()
        assert values | changes == values


def test_a_preset_that_agrees_with_the_config_of_the_weights_is_taken(tmp_path):
    """An older file, with defaults left out, and other values of what changes no computation, which count."""
    old = {"model_type": "llama", "rope_theta": 5.0, "eos_token_id": [7, 9], "torch_dtype": "bfloat16", "_mine": 1}
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "rms_norm_eps")  # fmt: skip
    preset = resolve(model="llama_tiny")
    directory = save_weights(save_config(tmp_path / "w"))
    old |= {key: getattr(preset.hf_config, key) for key in same}
    (directory / "config.json").write_text(json.dumps(old))
    by_name = {"pretrained_model_name": "llama_tiny", "finetune_checkpoint_load_dir": str(directory)}
    assert "rope_theta" in refusal(finetune=True, **by_name)
    resolved = resolve(finetune=True, rotary_emb_base=5.0, **by_name)  # which says it
    assert (resolved.name, resolved.sequence_length) == ("llama_tiny", preset.sequence_length)
    assert resolved.hf_config.eos_token_id == [7, 9] and resolved.hf_config.rope_parameters["rope_theta"] == 5.0


def test_advice_on_pretrained_models_can_be_followed(tmp_path):
    assert "--model llama_tiny trains the preset" in refusal(hf_pretrained_model_name_or_dir="llama_tiny")
    directory = save_weights(save_config(tmp_path / "w", pad_token_id=-1))  # as the first Llama's
    assert "make it null in config.json" in refusal(hf_pretrained_model_name_or_dir=str(directory))
    save_config(directory, pad_token_id=None)
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    shutil.copy(directory / "a.safetensors", directory / "b.safetensors")
    said = refusal(hf_pretrained_model_name_or_dir=str(directory))
    assert "2 sets of weights" in said and "--finetune 1 --pretrained_checkpoint_file" in said
    assert resolve(finetune=True, pretrained_checkpoint_file=str(directory / "b.safetensors")).weights is not None
    save_config(directory, pad_token_id=None, transformers_weights="b.safetensors")
    assert resolve(hf_pretrained_model_name_or_dir=str(directory)).weights == directory
    assert find_weights(directory) == directory / "b.safetensors"


@pytest.mark.full
def test_code_of_a_type_that_transformers_has_is_left_out_of_account(tmp_path):
    from transformers import AutoModelForCausalLM, Phi3Config

    config = Phi3Config(**{**SMALL_HF, "pad_token_id": 0})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "evil.py").write_text("raise AssertionError")
    resolved = resolve(hf_pretrained_model_name_or_dir=str(tmp_path))
    assert resolved.hf_config.model_type == "phi3" and "auto_map" not in resolved.hf_config.to_dict()
    assert build_model(resolved.hf_config, attn_implementation="eager")


def test_finetuning_keeps_the_pretrained_shape(tmp_path, caplog):
    directory = save_weights(save_config(tmp_path / "base", hidden_size=64, num_hidden_layers=4))
    settings = {"hf_pretrained_model_name_or_dir": str(directory), "hidden_width": 64, "attn_pdrop": 0.1}
    assert resolve(**settings).hf_config.attention_dropout == 0.1
    with caplog.at_level(logging.INFO, "smp.models"):
        ours = {"num_layers": 2, "vocab_size": 50257, "llama_intermediate_size": 11008, "rotary_emb_base": 5e5}
        kept = resolve(**ours, **settings).hf_config
    assert (kept.num_hidden_layers, kept.rope_parameters["rope_theta"]) == (4, 5e5)
    assert kept.vocab_size != 50257 and kept.intermediate_size != 11008
    said = "\n".join(caplog.messages)
    assert "--num_layers 2 has no effect: the pretrained model has 4" in said and "--hidden_width" not in said
    assert "--rotary_emb_base 500000.0 replaces the pretrained model's 10000" in said
    assert said.count("has no effect") == 3


def test_weights_are_checked_before_anything_is_built(tmp_path):
    base = {"finetune": True, "model": "llama_tiny"}
    assert "no weights at" in refusal(pretrained_checkpoint_file=str(tmp_path / "none.safetensors"), **base)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "convert the model to safetensors" in refusal(pretrained_checkpoint_file=str(tmp_path), **base)
    (tmp_path / "cut.safetensors").write_bytes(b"\x10")
    assert "cannot be read as safetensors" in refusal(
        pretrained_checkpoint_file=str(tmp_path / "cut.safetensors"), **base
    )
    (tmp_path / "cut.safetensors").unlink()
    save_weights(tmp_path)
    assert "say which model they are" in refusal(finetune=True, pretrained_checkpoint_file=str(tmp_path))


def tiny(family_name):
    model_type = {"llama": "llama_v2"}.get(family_name, family_name)
    return resolve(model_type=model_type, intermediate_size=48, **SMALL)


@pytest.mark.parametrize("family_name", FAMILIES)
def test_paths_lead_to_the_named_modules(family_name):
    resolved = tiny(family_name)
    model, family = build_model(resolved.hf_config, attn_implementation="sdpa"), resolved.family
    assert type(model).__name__ == family.architecture and type(family_of(model.config)) is type(family)
    blocks = [type(block).__name__ for block in model.get_submodule(family.blocks)]
    assert len(blocks) == 2 and set(blocks) == set(model._no_split_modules)
    assert model.get_submodule(family.embedding) is model.get_input_embeddings()
    assert model.get_submodule(family.head) is model.get_output_embeddings()
    assert "Norm" in type(model.get_submodule(family.final_norm)).__name__
    assert model.base_model_prefix == family.base and {p.dtype for p in model.parameters()} == {torch.float32}
    assert any("gate_proj" in name for name, _ in model.named_modules()) == family.gated_mlp


@pytest.mark.parametrize("family_name", FAMILIES)
def test_buffers_are_real_when_parameters_are_on_meta(family_name):
    from accelerate import init_empty_weights

    resolved = tiny(family_name)
    with init_empty_weights(include_buffers=False):
        model = build_model(resolved.hf_config, attn_implementation="sdpa")
    real = build_model(resolved.hf_config, attn_implementation="sdpa")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert list(model.named_buffers())
    for (name, buffer), expected in zip(model.named_buffers(), real.buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    assert not model.config.use_cache


@pytest.mark.parametrize("family_name", FAMILIES)
def test_tied_weights_stay_tied_on_meta(family_name):
    from accelerate import init_empty_weights

    config = tiny(family_name).hf_config
    config.tie_word_embeddings = True
    with init_empty_weights(include_buffers=False):
        model = build_model(config, attn_implementation="sdpa")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.get_input_embeddings().weight.is_meta


def test_a_config_is_copied_so_that_models_do_not_change_each_other():
    resolved = resolve(model="llama_tiny")
    with torch.device("meta"):
        model = build_model(resolved.hf_config, attn_implementation="sdpa")
    count_parameters(resolved.hf_config)
    assert model.config._attn_implementation == "sdpa"


def test_the_token_that_ends_a_document_is_the_one_that_the_model_names(tmp_path):
    """Of a preset or config.json; what transformers assumes of a type is no data's."""
    assert resolve(model="llama_tiny").eos_token_id == 0
    for given, found in ((60, 60), ([60, 61], None), (None, None)):
        assert resolve(model=str(save_config(tmp_path / "m", eos_token_id=given))).eos_token_id == found
    assert resolve(model_type="llama_v2", **SMALL).eos_token_id is None
