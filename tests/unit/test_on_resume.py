"""What a resume takes from the checkpoint, refuses, tells, and lets pass."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GraniteConfig, LlamaConfig, LlamaForCausalLM, Mamba2Config, Qwen3Config

import smp
from smp.checkpoint.checkpointer import Checkpointer
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.same_model import check_architecture
from smp.checkpoint.state import model_entry
from smp.config import Settings
from smp.errors import UserError
from smp.models.hf_values import changed_config
from smp.models.weight_files import ADAPTER_CONFIG
from smp.parallel import lora
from smp.train import on_resume, reference
from smp.train.arguments import FLAGS
from smp.train.on_resume import ON_RESUME, TOLD, changes_evaluated, check_fits, with_saved_settings
from tests.distributed import run_distributed
from tests.flags import parse, plan_of
from tests.job import LLAMA


def test_every_setting_has_one_class():
    classified = [name for names in on_resume._ON_RESUME.values() for name in names.split()]
    assert sorted(classified) == sorted({flag.field.name for flag in FLAGS.values()})


def test_every_change_is_told_that_is_trained_with():
    job = SimpleNamespace(config=parse([*LLAMA, "--use_synthetic_data", 1]))
    now = job.config.flat()
    for name, kind in ON_RESUME.items():
        told = [f"{name} another -> {now[name]}"] if kind == TOLD else []
        assert on_resume._told({**now, name: "another"}, job) == told
    assert on_resume._told({}, job) == []  # of an earlier version
    saved = SimpleNamespace(run={"config": {**now, "dpo_beta": 5.0, "lr": 1.0, "training_dir": "elsewhere"}})
    assert changes_evaluated(SimpleNamespace(saved=saved), job) == [f"dpo_beta 5.0 -> {now['dpo_beta']}"]


def of_adapters(hf_config, **changed):
    """The manifest of a checkpoint of adapters."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "use_rslora": False, "lora_dropout": 0.0,
              "target_modules": "all-linear", **changed}  # fmt: skip
    apart = {lora.WEIGHTS: {ADAPTER_CONFIG: json.dumps(config)}}
    model = {**model_entry("m", hf_config), "apart": apart}
    return Manifest(step=3, world_size=1, degrees={}, model=model, run={}, saved_at="", versions={})


@pytest.mark.parametrize(
    ("saved", "words", "found"),
    [
        ({}, [], (8.0, False)),
        ({}, ["--lora_alpha", 8], (8.0, False)),
        ({"use_rslora": True}, [], (8.0, True)),
        ({}, ["--lora_alpha", 64], "--lora_alpha 64.0 is not that of checkpoint .*ck, 8.0: leave it out"),
        ({}, ["--lora_alpha", 16], "--lora_alpha 16.0 is not that of checkpoint .*ck, 8.0: leave it out"),
        ({"use_rslora": True}, ["--lora_use_rslora", 0], "--lora_use_rslora 0 is not that of checkpoint .*ck, True"),
        ({"r": 8}, [], "has adapters of rank 8, and --lora_rank is 4: give --lora_rank 8, or start from the model"),
        ({}, ["--lora_rank", 0], "has adapters of rank 4, and --lora_rank is 0: give --lora_rank 4, or start"),
        ({"r": math.inf}, [], "checkpoint .*ck does not say how its adapters are scaled"),
        ({"lora_alpha": None}, [], "checkpoint .*ck does not say how its adapters are scaled"),
    ],
)
def test_adapters_are_scaled_as_they_were_trained(tmp_path, saved, words, found):
    job = plan_of(["--lora_rank", 4, *words], tmp_path)
    start = SimpleNamespace(checkpoint=tmp_path / "ck", saved=of_adapters(job.model.hf_config, **saved))
    if isinstance(found, str):
        with pytest.raises(UserError, match=found):
            check_fits(job, start.checkpoint, start.saved)
        return
    check_fits(job, start.checkpoint, start.saved)
    taken = with_saved_settings(job, start)
    config, flat = taken.settings[lora.Config], taken.config.flat()
    assert (config.lora_alpha, config.lora_use_rslora) == found == (flat["lora_alpha"], flat["lora_use_rslora"])


def test_an_adapter_whose_file_was_edited_is_refused(tmp_path):
    job = plan_of([], tmp_path)
    adapter = dataclasses.replace(job.config.lora, adapter_path=str(tmp_path))
    job = dataclasses.replace(job, config=dataclasses.replace(job.config, lora=adapter))
    manifest = of_adapters(job.model.hf_config)
    (text,) = manifest.model["apart"][lora.WEIGHTS].values()
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({**json.loads(text), "target_modules": ["q_proj"]}))
    check_fits(job, tmp_path, manifest)
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({**json.loads(text), "lora_alpha": 64}))
    with pytest.raises(UserError, match=r"has adapters of lora_alpha 8.0, and .*adapter_config.json says 64.0"):
        check_fits(job, tmp_path, manifest)


SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "changed", "sentence"),
    [
        (LlamaConfig, {"hidden_act": "gelu"}, "hidden_act silu there, gelu here"),
        (LlamaConfig, {"rms_norm_eps": 0.01}, "rms_norm_eps 1e-06 there, 0.01 here"),
        (GraniteConfig, {"attention_multiplier": 0.5}, "attention_multiplier 1.0 there, 0.5 here"),
        (GraniteConfig, {"logits_scaling": 4.0}, "logits_scaling 1.0 there, 4.0 here"),
        (
            Qwen3Config,
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types\[1\] full_attention there, sliding_attention here",
        ),
        (LlamaConfig, {"of_their_own_code": 2}, "of_their_own_code 1 there, 2 here"),
        (
            LlamaConfig,
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                "max_position_embeddings": 64,
            },
            "rope_parameters.rope_type default there, dynamic here",
        ),
    ],
)
def test_a_configuration_that_computes_otherwise_is_refused(tmp_path, kind, changed, sentence):
    own = {"of_their_own_code": 1} if "of_their_own_code" in changed else {}
    saved = model_entry("m", kind(**SIZES, **own))["config"]
    check_architecture(tmp_path, saved, kind(**SIZES, **own))
    with pytest.raises(UserError, match=f"is of another model: .*{sentence}"):
        check_architecture(tmp_path, saved, kind(**{**SIZES, **own, **changed}))


def test_a_reference_is_kept_where_training_begins_from_adapters():
    def kept(names, *words):
        config = parse([*LLAMA, "--training_dir", "x", "--dataset_type", "chat", "--lora_rank", 4, *words])
        job = SimpleNamespace(config=config, settings=Settings((config.lora,)))
        return reference._keeps_reference(job, SimpleNamespace(saved=SimpleNamespace(tensors=dict.fromkeys(names))))

    begins = ["--resume_from_checkpoint", "x", "--reset_progress", 1]
    assert kept([], "--dpo", 1, *begins) and not kept([], *begins) and not kept([], "--dpo", 1)
    assert kept(["data.reference.1"], "--dpo", 1)


def test_what_computes_nothing_is_not_refused_and_dropout_is_told(tmp_path):
    now = GPT2Config(n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.2)
    saved = model_entry("m", now)["config"]
    saved |= {"transformers_version": "4.0", "use_cache": True, "eos_token_id": 3, "dtype": "bfloat16", "gone": 1}
    del saved["scale_attn_weights"]  # of a version that had no such key
    check_architecture(tmp_path, saved | {"attn_pdrop": 0.1}, now)
    assert changed_config(saved, now) == {}
    assert changed_config(saved | {"attn_pdrop": 0.1}, now) == {"attn_pdrop": (0.1, 0.2)}
    for other in ("silu", ["no", "text"]):  # the second is one that transformers refuses to read
        with pytest.raises(UserError, match="activation_function"):
            check_architecture(tmp_path, saved | {"activation_function": other}, now)
    endless = Mamba2Config(num_hidden_layers=2)  # a limit of infinity, which JSON lacks
    saved = model_entry("m", endless)["config"]
    del saved["time_step_limit"]
    assert changed_config(saved, endless) == {}


def _script(folder: str) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smp").addHandler(handler)

    def checkpoints(**settings) -> Checkpointer:
        config = LlamaConfig(**SIZES, attention_dropout=settings.pop("attention_dropout", 0.0))
        model = smp.parallelize(smp.lora(LlamaForCausalLM(config), rank=2, **settings))
        return Checkpointer(folder, model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))

    smp.init({})
    checkpoints(alpha=16).save(1)
    assert checkpoints(alpha=16).load() is not None and not [text for text in said if "Changed" in text]
    assert checkpoints(alpha=16, dropout=0.5, attention_dropout=0.1).load() is not None
    for change in ("lora_dropout 0.0 -> 0.5", "attention_dropout 0.0 -> 0.1"):
        assert f"Changed since the checkpoint: {change}" in said
    for settings, text in (({"alpha": 64}, "lora_alpha 16.0 there, 64.0"), ({"use_rslora": True}, "lora_use_rslora")):
        with pytest.raises(UserError, match=f"has adapters that are scaled otherwise: {text}"):
            checkpoints(**settings).load()


def test_a_script_is_told_and_refused_alike(tmp_path):
    run_distributed(_script, str(tmp_path), world_size=1)
