"""The text model in a vision-language directory: read, trained and written back."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2ForCausalLM

import smp
import smp.cli
from smp.checkpoint.hf_export import export_hf
from smp.errors import ConfigError, UserError
from smp.models.model_config import ModelConfig, resolve_model
from smp.models.registry import build_model, family_of
from smp.models.text_part import names_in
from smp.pretrained import load_pretrained_
from tests import wholes
from tests.job import losses, run_job

peft = pytest.importorskip("peft")
IDS = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(1))


def _read(directory, **changes):
    model = resolve_model(ModelConfig(hf_pretrained_model_name_or_dir=str(directory), **changes))
    text = build_model(model.hf_config, attn_implementation=None)
    load_pretrained_(text, directory, hf_config=model.hf_config)
    return text


def _logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", wholes.KINDS)
def test_the_text_model_computes_as_the_larger_one_and_is_written_back_into_it(tmp_path, kind):
    directory = wholes.save_whole(kind, tmp_path / "whole")
    text = _read(directory)
    whole = AutoModelForImageTextToText.from_pretrained(directory)
    assert torch.equal(_logits(text), _logits(whole))
    with torch.no_grad():
        for parameter in text.parameters():
            parameter.add_(0.01)
    export_hf(text, tmp_path / "out", weights=directory)
    again, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(_logits(again), _logits(text))
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert before.keys() == after.keys()
    same = {key for key in before if torch.equal(before[key], after[key])}
    buffers = {key for key in same if key.endswith("layer_scalar")}  # Gemma 4's, of the text model
    assert same - buffers and all("vis" in key or "multi_modal" in key for key in same - buffers), same
    assert (tmp_path / "out/preprocessor_config.json").read_bytes() == (
        directory / "preprocessor_config.json"
    ).read_bytes()
    config, original = (json.loads((d / "config.json").read_text()) for d in (tmp_path / "out", directory))
    assert config["architectures"] == original["architectures"] and config["vision_config"] == original["vision_config"]


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_gradients_are_the_larger_ones_where_the_text_model_is_of_another_type(tmp_path, kind):
    directory = wholes.save_whole(kind, tmp_path / "whole")
    text, whole = _read(directory), AutoModelForImageTextToText.from_pretrained(directory).train()
    for model in (text.train(), whole):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    names = names_in(directory, family_of(text.config))
    theirs = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    mine = {names.in_whole(name): parameter.grad for name, parameter in text.named_parameters()}
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("changes", [{}, {"rotary_emb_base": 1e4}])
def test_values_of_a_text_model_that_are_among_the_larger_ones_stay_there(tmp_path, changes):
    """Qwen2.5-VL as it is published: its config is flat and of an older form, as are the keys of its tensors."""
    directory = wholes.save_whole("qwen2_5_vl", tmp_path / "whole")
    config = json.loads((directory / "config.json").read_text())
    text = {key: value for key, value in config.pop("text_config").items() if key not in ("model_type", "layer_types")}
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    (directory / "config.json").write_text(json.dumps(config | text | {"model_type": "qwen2_5_vl"}))
    file = directory / "model.safetensors"
    tensors = {
        key.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for key, value in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    model = _read(directory, **changes)
    for name, kind in (("out", AutoModelForImageTextToText), ("text", Qwen2ForCausalLM)):
        export_hf(model, tmp_path / name, weights=directory, text_only=name == "text")
        again, report = kind.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(report.values()), report
        assert torch.equal(_logits(again), _logits(model))
    assert again.config.model_type == "qwen2"
    assert json.loads((tmp_path / "out/config.json").read_text()).keys().isdisjoint({"text_config"})
    after = load_file(tmp_path / "out/model.safetensors")
    assert after.keys() == tensors.keys() and all(torch.equal(after[key], tensors[key]) for key in after)
    whole = _logits(AutoModelForImageTextToText.from_pretrained(directory))
    assert torch.equal(_logits(model), whole) == (not changes)


def test_experts_that_the_files_have_transposed_are_read_and_written_so(tmp_path):
    """Qwen3-VL as it is published, and not as transformers writes it."""
    directory = wholes.save_whole("qwen3_vl_moe", tmp_path / "whole")
    before = _logits(_read(directory))
    tensors = load_file(directory / "model.safetensors")
    tensors |= {key: value.mT.contiguous() for key, value in tensors.items() if ".experts." in key}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text = _read(directory)
    assert torch.equal(_logits(text), before)
    export_hf(text, tmp_path / "out", weights=directory)
    after = load_file(tmp_path / "out/model.safetensors")
    assert after.keys() == tensors.keys() and all(torch.equal(after[key], tensors[key]) for key in after)
    export_hf(text, tmp_path / "text", weights=directory, text_only=True)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(report.values()) and torch.equal(_logits(again), before)


def test_the_text_model_alone_is_written_where_that_is_asked_for(tmp_path):
    directory = wholes.save_whole("gemma3", tmp_path / "whole")
    text = _read(directory)
    export_hf(text, tmp_path / "out", weights=directory, text_only=True)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()) and type(again) is type(text)
    assert torch.equal(_logits(again), _logits(text))
    assert not (tmp_path / "out/preprocessor_config.json").exists()


def test_a_script_reads_and_writes_the_larger_model(tmp_path):
    directory = wholes.save_whole("mistral3", tmp_path / "whole")
    text = smp.meta_init(AutoConfig.from_pretrained(directory))
    again = smp.load_pretrained(build_model(text.config, attn_implementation=None), directory)
    assert torch.equal(_logits(again), _logits(_read(directory)))
    smp.export_hf(again, tmp_path / "out")
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_files_of_an_older_form_keep_their_keys_and_tensors_that_no_model_reads(tmp_path):
    directory = wholes.save_whole("qwen3_5", tmp_path / "whole")
    tensors = load_file(directory / "model.safetensors")
    tensors["mtp.norm.weight"] = torch.arange(4.0)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    export_hf(_read(directory), tmp_path / "out", weights=directory)
    after = load_file(tmp_path / "out/model.safetensors")
    assert after.keys() == tensors.keys() and all(torch.equal(after[key], tensors[key]) for key in after)


def test_what_flags_change_of_the_text_model_is_in_the_larger_ones_config(tmp_path):
    directory = wholes.save_whole("mistral3", tmp_path / "whole")
    text = _read(directory, rotary_emb_base=1e6, sliding_window=4)
    export_hf(text, tmp_path / "out", weights=directory)
    assert torch.equal(_logits(AutoModelForImageTextToText.from_pretrained(tmp_path / "out")), _logits(text))
    assert not torch.allclose(_logits(_read(directory)), _logits(text))


def test_a_head_that_is_tied_is_tied_in_the_larger_model(tmp_path):
    directory = wholes.save_whole("qwen3_5", tmp_path / "whole")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text = _read(directory, tie_word_embeddings=True)
    with torch.no_grad():
        text.lm_head.weight.mul_(1.5)
    export_hf(text, tmp_path / "out", weights=directory)
    whole, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(_logits(whole), _logits(text))


GEMMA3_4B = {  # as it is published
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip


def test_a_preset_takes_the_weights_of_a_larger_model_with_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_4B))
    save_file({}, tmp_path / "model.safetensors")
    found = resolve_model(ModelConfig(model="gemma3_4b", hf_pretrained_model_name_or_dir=str(tmp_path)))
    assert (found.name, found.sequence_length, found.weights) == ("gemma3_4b", 8192, tmp_path)
    assert found.hf_config.smp_part_of == "gemma3" and found.hf_config.rope_parameters["full_attention"]["factor"] == 8
    for name, words in (
        ("gemma3_12b", r"says \(hidden_size 3840 instead of 2560, .* and \d+ more\): give --hf_pre\w+ \S+ alone"),
        ("llama7b", r"llama7b is another model than .* \(model_type llama instead of gemma3_text\): give"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            resolve_model(ModelConfig(model=name, hf_pretrained_model_name_or_dir=str(tmp_path)))
        assert len(caught.value.problems) == 1


@pytest.mark.full
def test_a_job_of_a_preset_trains_and_writes_the_larger_model(tmp_path):
    directory = wholes.save_whole("llava", tmp_path / "whole")
    run_job(
        "--model", "llama_tiny", "--hf_pretrained_model_name_or_dir", directory, "--use_synthetic_data", 1, "--lr", 0.1,
        "--max_steps", 1, "--train_batch_size", 1, "--save_final_model", 1, "--output_dir", tmp_path / "run",
    ).succeeded()  # fmt: skip
    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "run/final", output_loading_info=True)
    assert not any(report.values()), report
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "run/final/model.safetensors")
    assert before.keys() == after.keys()
    assert {key for key in before if "language_model" not in key and "lm_head" not in key} == {
        key for key in before if torch.equal(before[key], after[key])
    }


def test_a_larger_model_that_has_gone_is_missed(tmp_path):
    directory = wholes.save_whole("gemma3", tmp_path / "whole")
    text = _read(directory)
    (directory / "config.json").unlink()
    for weights in (tmp_path / "gone", directory / "model.safetensors"):
        with pytest.raises(UserError, match=r"found in a gemma3 model, whose config.json is not at .*: bring that"):
            export_hf(text, tmp_path / "out", weights=weights)
    export_hf(text, tmp_path / "out", weights=directory, text_only=True)
    assert "smp_part_of" not in json.loads((tmp_path / "out/config.json").read_text())


def test_files_of_the_tokenizer_and_the_weights_are_not_those_of_the_base(tmp_path):
    directory = wholes.save_whole("gemma3", tmp_path / "whole")
    for name in ("chat_template.jinja", "notes.txt", "model.safetensors.index.json"):  # the last one of an older save
        (directory / name).write_text("{}")
    text = _read(directory)
    export_hf(text, tmp_path / "out", weights=directory, tokenizer_dir=tmp_path)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json", "smp_export.json"
    }  # fmt: skip
    with pytest.raises(UserError, match="weights"):
        export_hf(text, tmp_path / "out", weights=tmp_path / "out")


def test_a_larger_model_with_another_text_model_is_refused(tmp_path):
    directory = wholes.save_whole("mistral3", tmp_path / "whole")
    text = build_model(wholes.build_whole("gemma3").config.text_config, attn_implementation=None)
    with pytest.raises(UserError, match="is of a mistral3 model, whose text model is of type 'mistral'"):
        smp.load_pretrained(text, directory)


@pytest.mark.parametrize(
    "kind, alone", [("gemma3", 0), *(pytest.param("qwen3_vl", each, marks=pytest.mark.full) for each in (0, 1))]
)
def test_a_job_trains_the_text_model_and_writes_the_larger_one(tmp_path, kind, alone):
    directory, rows = wholes.save_whole(kind, tmp_path / "whole"), IDS.repeat(2, 1).tolist()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    outcome = run_job(
        "--hf_pretrained_model_name_or_dir", directory, "--training_dir", tmp_path / "data", "--max_context_width", 12,
        "--output_dir", tmp_path / "run", "--max_steps", 2, "--train_batch_size", 2, "--lr", 0.01,
        "--checkpoint_freq", 2, "--save_final_model", 1, "--export_text_only", alone, world_size=2,
    ).succeeded()  # fmt: skip
    loads = AutoModelForCausalLM if alone else AutoModelForImageTextToText
    assert f"{loads.__name__}.from_pretrained loads it" in outcome.output
    whole = AutoModelForImageTextToText.from_pretrained(directory)
    assert losses(tmp_path / "run")[0] == pytest.approx(_loss(whole), rel=1e-5)
    trained, report = loads.from_pretrained(tmp_path / "run/final", output_loading_info=True)
    assert not any(report.values()) and _loss(trained) < losses(tmp_path / "run")[1]
    words = ["export", str(tmp_path / "run/checkpoints/latest"), str(tmp_path / "again"), *["--text_only"][:alone]]
    assert smp.cli.main(words) == 0
    first, second = load_file(tmp_path / "run/final/model.safetensors"), load_file(tmp_path / "again/model.safetensors")
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def _loss(model) -> float:
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten()).item()


@pytest.mark.parametrize(
    "kind", ["gemma3", *(pytest.param(each, marks=pytest.mark.full) for each in ("qwen3_5", "qwen2_5_vl", "qwen3_vl"))]
)
def test_an_adapter_of_the_text_model_is_loaded_by_peft_on_the_larger_one_and_again(tmp_path, kind, capsys):
    directory = wholes.save_whole(kind, tmp_path / "whole")
    rows = [json.dumps({"input_ids": row}) + "\n" for row in IDS.repeat(2, 1).tolist()]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.jsonl").write_text("".join(rows))
    job = [
        "--hf_pretrained_model_name_or_dir", directory, "--training_dir", tmp_path / "data", "--max_context_width", 12,
        "--max_steps", 2, "--train_batch_size", 2, "--lr", 0.05, "--save_final_model", 1,
    ]  # fmt: skip
    lora = [*job, "--lora_rank", 2, "--save_merged_model"]
    run_job(*lora, 0, "--checkpoint_freq", 2, "--output_dir", tmp_path / "run", world_size=2).succeeded()
    run_job(*lora, 1, "--output_dir", tmp_path / "merged").succeeded()
    whole = AutoModelForImageTextToText.from_pretrained(directory)
    adapted = peft.PeftModel.from_pretrained(whole, tmp_path / "run/final")
    assert not [name for name, _ in adapted.named_parameters() if "lora_" in name and "vis" in name]
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged/final")
    torch.testing.assert_close(_logits(adapted), _logits(merged), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(_logits(AutoModelForImageTextToText.from_pretrained(directory)), _logits(merged))
    assert (
        smp.cli.main(["export", str(tmp_path / "run/checkpoints/latest"), str(tmp_path / "again"), "--no-merge"]) == 0
    )
    first, second = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("run/final", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    words = ["export", str(tmp_path / "run/checkpoints/latest"), str(tmp_path / "text"), "--no-merge", "--text_only"]
    assert smp.cli.main(words) == 2 and "adapters are written: add --merge" in capsys.readouterr().err
    run_job(*job, "--adapter_path", tmp_path / "run/final", "--output_dir", tmp_path / "more").succeeded()
    assert losses(tmp_path / "more")[0] == pytest.approx(_loss(merged), rel=1e-4)
