"""``adapter_config.json``: each field of peft is obeyed or refused, and targets are the same layers as in peft."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import smp
import smp.cli
from smp.checkpoint.disk_forecast import state_bytes
from smp.checkpoint.hf_export import export_hf
from smp.errors import UserError
from smp.models import added
from smp.models.file_names import FileNames
from smp.models.model_config import ModelConfig, resolve_model
from smp.models.registry import build_model
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel.adapter_config import read_settings, target_names
from tests import experts, zoo
from tests.flags import parse
from tests.reference import build_reference, global_batch, relative
from tests.unit.test_pretrained import reference_model

peft = pytest.importorskip("peft")
OBEYED = {
    "peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "init_lora_weights",
    "trainable_token_indices", "modules_to_save", "target_parameters",
}  # fmt: skip
WITHOUT_EFFECT = {
    "task_type": None, "auto_mapping": {"unsloth_fixed": True}, "peft_version": "0.1", "revision": "main",
    "base_model_name_or_path": "other", "inference_mode": False, "fan_in_fan_out": True, "megatron_core": "core",
    "loftq_config": {"loftq_bits": 4}, "eva_config": {"rho": 2.0}, "corda_config": {}, "lora_ga_config": {},
    "qalora_group_size": 8, "ensure_weight_tying": True,
}  # fmt: skip
REFUSED = {
    "exclude_modules": ["q_proj"], "bias": "all", "layers_to_transform": 0,
    "layers_pattern": "layers", "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 8},
    "use_dora": True, "velora_config": {"rank": 1}, "alora_invocation_tokens": [3, 4],
    "use_qalora": True, "monteclora_config": {"a": 1}, "layer_replication": [[0, 2]], "runtime_config": {"a": 1},
    "lora_bias": True, "use_bdlora": {"a": 1}, "arrow_config": {"a": 1},
    "kasa_config": {"a": 1}, "megatron_config": {"a": 1}, "an_option_of_tomorrow": 0.5,
}  # fmt: skip


def saved(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """An adapter of peft, with changes of its file."""
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(build_reference("llama_gqa", torch.float64), config).save_pretrained(folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def adapted(folder: pathlib.Path) -> nn.Module:
    return smp.lora(build_reference("llama_gqa", torch.float64), adapter_path=folder)


def check_like_peft(model: nn.Module, folder: pathlib.Path) -> set[str]:
    """Compare with peft's own, and return the layers that it adapts."""
    theirs = peft.PeftModel.from_pretrained(build_reference("llama_gqa", torch.float64), folder)
    inputs, _ = global_batch(0)
    wanted = theirs(input_ids=inputs).logits
    assert relative(model(input_ids=inputs).logits - wanted, wanted) <= 1e-9
    return {
        name.removeprefix("base_model.model.") for name, module in theirs.named_modules() if hasattr(module, "lora_A")
    }


def test_every_field_of_peft_is_known():
    """One that a new peft has is named here, where it belongs: what changes the computation is refused."""
    unknown = {field.name for field in dataclasses.fields(peft.LoraConfig)} - OBEYED - WITHOUT_EFFECT.keys()
    assert unknown - REFUSED.keys() == set()


@pytest.mark.filterwarnings("ignore")
def test_fields_are_without_effect_or_refused_by_name(tmp_path):
    folder = saved(tmp_path)
    file, config = folder / "adapter_config.json", json.loads((folder / "adapter_config.json").read_text())
    for name, value in WITHOUT_EFFECT.items():
        file.write_text(json.dumps({**config, name: value}))
        check_like_peft(adapted(folder), folder)
    for name, value in REFUSED.items():
        file.write_text(json.dumps({**config, name: value}))
        with pytest.raises(UserError, match=rf"adapter_config.json: {name} is .*, which is not known here and would"):
            read_settings(folder)
        for left_out in (None, False, [], {}, ""):
            file.write_text(json.dumps({**config, name: left_out}))
            read_settings(folder)


@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig", "IA3Config", "AdaLoraConfig", "PrefixTuningConfig"])
def test_adapters_of_other_types_are_refused_by_their_type(tmp_path, kind):
    more = {"total_step": 9} if kind == "AdaLoraConfig" else {}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **more)
    config.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=rf"adapter_config.json: peft_type is '{config.peft_type.value}', and only LORA is known here"
    ):
        read_settings(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [True, False, "gaussian", "orthogonal", "eva"])
def test_initial_values_beside_the_same_base_are_read(tmp_path, kind):
    folder = saved(tmp_path, init_lora_weights=kind)
    check_like_peft(adapted(folder), folder)


@pytest.mark.parametrize("kind", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica", "tomorrow's"])
def test_initial_values_that_change_the_base_are_refused(tmp_path, kind):
    with pytest.raises(UserError, match=r"init_lora_weights is .*with peft's merge_and_unload, or convert it"):
        adapted(saved(tmp_path, init_lora_weights=kind))


def test_files_with_other_weights_than_the_factors_are_refused(tmp_path):
    """As peft writes them beside a vocabulary that was resized, of which its merge makes a model."""
    folder = saved(tmp_path)
    file = folder / "adapter_model.safetensors"
    factors = load_file(file)
    embedding = "base_model.model.model.embed_tokens.weight"
    for tensors, words in (
        ({**factors, embedding: torch.ones(2)}, f"has {embedding}, no factor but a weight, .*: merge the adapter with"),
        (dict([*factors.items()][1:]), "lacks .*: it is an adapter of another model: give the one that it was trained"),
    ):
        save_file(tensors, file)
        with pytest.raises(UserError, match=words):
            adapted(folder)
    file.unlink()
    with pytest.raises(UserError, match=r"cannot be read \(.*\): give a directory that peft's save_pretrained has"):
        adapted(folder)


def test_converted_and_merged_adapters_are_what_was_trained(tmp_path):
    """What the sentence says to do works."""
    inputs, _ = global_batch(0)
    base = build_reference("llama_gqa", torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"))
    config = model.peft_config["default"]
    config.init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    config.init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.1 * ("lora_" in name))
    wanted = model(input_ids=inputs).logits
    model.save_pretrained(tmp_path / "out", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    found = smp.lora(build_reference("llama_gqa", torch.float32), adapter_path=tmp_path / "out")
    assert relative(found(input_ids=inputs).logits - wanted, wanted) <= 1e-5
    model.save_pretrained(tmp_path / "pissa")
    again = peft.PeftModel.from_pretrained(build_reference("llama_gqa", torch.float32), tmp_path / "pissa")
    assert relative(again.merge_and_unload()(input_ids=inputs).logits - wanted, wanted) <= 1e-5


def layers(model: nn.Module) -> set[str]:
    return {name.removesuffix(".lora_A") for name, _ in model.named_parameters() if name.endswith("lora_A")}


@pytest.mark.parametrize(("targets", "written"), [
    (["layers.0.self_attn.q_proj", "v_proj"], ["model.layers.0.self_attn.q_proj", "v_proj"]),
    (["self_attn.q_proj"], ["q_proj"]),
    (["layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj"], [f"model.layers.{n}.mlp.up_proj" for n in (1, 2)]),
])  # fmt: skip
def test_targets_that_are_written_match_the_layers_alone(tmp_path, targets, written):
    model = smp.lora(build_reference("llama_gqa", torch.float64), 2, target_modules=targets)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_((parameter + 0.1).float())  # as files are read
    export_hf(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == written
    assert check_like_peft(model, tmp_path) == layers(model)
    again = adapted(tmp_path)
    assert layers(again) == layers(model)
    check_like_peft(again, tmp_path)


def test_a_layer_outside_the_blocks_of_the_same_name_is_not_matched():
    model = build_reference("llama_gqa", torch.float32)
    paths = [name for name, _ in model.named_modules() if name.endswith("_proj")]
    assert "up_proj" in target_names(model, paths, FileNames())
    model.add_module("up_proj", nn.Linear(2, 2))
    assert {"model.layers.2.mlp.up_proj", "q_proj"} < set(target_names(model, paths, FileNames()))


def test_targets_are_spelled_as_in_peft(tmp_path):
    def of(targets, **more):
        return layers(smp.lora(build_reference("llama_gqa", torch.float32), 2, target_modules=targets, **more))

    assert of("all-linear") == of(None) == of(["all-linear"])
    assert of("q_proj") == of(["q_proj"]) == {f"model.layers.{number}.self_attn.q_proj" for number in range(3)}
    for targets, sentence in (
        ([], "--lora_target_modules is empty; there are down_proj, .* or all-linear for all"),
        ("", "is the end of no linear layer's name"),
        (r".*\.(q|v)_proj", "is the end of no linear layer's name .*regular expressions are not known"),
    ):
        model = build_reference("llama_gqa", torch.float32)
        with pytest.raises(UserError, match=sentence):
            smp.lora(model, 2, target_modules=targets)
        assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(UserError, match=r"^smp.lora takes a Hugging Face causal language model, got a Linear:"):
        smp.lora(nn.Linear(2, 2), 2)
    assert parse(["--lora_rank", 2, "--lora_target_modules", "all-linear"]).lora.lora_target_modules == ("all-linear",)


@pytest.mark.parametrize(
    "targets", [r".*\.0\..*(q|v)_proj", "q_proj", None, ["q_proj", "lm_head"], ["embed_tokens"], []]
)
def test_targets_of_a_file_are_refused_in_its_name(tmp_path, targets):
    with pytest.raises(
        UserError, match=r"adapter_config.json: target_modules .*is (.* no regular|the end of|empty)"
    ) as found:
        adapted(saved(tmp_path, target_modules=targets))
    assert "--lora_target_modules" not in str(found.value)


def test_an_adapters_folder_is_one_of_pefts(tmp_path, capsys):
    """transformers finds the base by it, which takes a folder with config.json for a model's."""
    reference_model("llama_gqa").save_pretrained(tmp_path / "base")
    model = smp.lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), 2)
    smp.load_pretrained(model, tmp_path / "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    folder = tmp_path / "adapter"
    smp.export_hf(model, folder)
    assert not (folder / "config.json").exists()
    inputs = torch.arange(8)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(inputs).logits
        assert torch.allclose(theirs, model(inputs).logits, atol=1e-5)
    assert smp.cli.main(["inspect", str(folder)]) == 0
    assert f"LORA of {tmp_path / 'base'}, 2,784 parameters, float32" in capsys.readouterr().out
    other = shutil.copytree(folder, tmp_path / "other")
    assert smp.cli.main(["diff", str(folder), str(other), "--values"]) == 0
    settings = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 1}))
    capsys.readouterr()
    assert smp.cli.main(["diff", str(folder), str(other)]) == 1
    assert "adapter.lora_alpha  16.0  1" in capsys.readouterr().out
    for name in ("hf_pretrained_model_name_or_dir", "model"):
        with pytest.raises(UserError, match=rf"{folder} contains an adapter .*: give the directory of that; a train"):
            resolve_model(ModelConfig(**{name: str(folder)}))


@pytest.mark.parametrize(
    ("model_type", "left_out"),
    [
        ("mamba", {"x_proj", "dt_proj", "out_proj"}),  # the last and the first are read by its kernel alone
        ("nemotron_h", {"out_proj"}),
        ("llama4_text", {"router"}),
        ("trocr", set()),  # has layers without any caller in a decoder alone
    ],
)
def test_layers_whose_weights_are_read_beside_them_get_no_adapter(model_type, left_out):
    plain = build_model(zoo.tiny_config(model_type), attn_implementation="eager")
    every = {path.rpartition(".")[2] for path, module in plain.named_modules() if isinstance(module, nn.Linear)}
    for name in left_out - {"router"}:
        with pytest.raises(UserError, match=rf"\S+{name}, whose weight the model reads without calling the layer"):
            smp.lora(plain, 2, target_modules=[name])
    reached = {path.rpartition(".")[2] for path in layers(smp.lora(plain, 2))}
    assert left_out <= every and reached and not left_out & reached


def test_adapters_of_shared_experts_are_of_weights_as_peft_takes_their_names_for_routed_ones(tmp_path, caplog):
    model = smp.lora(experts.build("glm4_moe", torch.float32), 2)
    export_hf(model, tmp_path / "adapter")
    found = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert found["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert found["target_parameters"] == ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]
    again = smp.lora(experts.build("glm4_moe", torch.float32), adapter_path=tmp_path / "adapter")
    assert layers(again) == layers(model) and "peft takes" not in caplog.text
    with caplog.at_level(logging.WARNING, "smp"):
        smp.lora(experts.build("glm4_moe", torch.float32), 2, dropout=0.1)
    assert "peft takes adapters of down_proj, gate_proj, up_proj for those of routed experts" in caplog.text


def test_a_checkpoint_of_adapters_needs_the_space_of_what_it_contains(tmp_path):
    model = build_reference("llama_gqa", torch.float32)
    model.save_pretrained(tmp_path)

    def needed() -> int:
        return state_bytes(model, build_optimizer(model, OptimConfig(), lr=0.1), own=False)

    assert needed() == 12 * sum(p.numel() for p in model.parameters())
    smp.lora(model, rank=2)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - adapters
    assert needed() == 12 * adapters + 4 * frozen
    added.leave_out_frozen(model, tmp_path)
    assert needed() == 12 * adapters
