"""Rows of tokens, and modules, that are trained beside adapters: gradients, losses and files of peft at any layout."""

from __future__ import annotations

import copy

import pytest
import torch

import smp
from smp.errors import UserError
from smp.parallel import lora
from tests.distributed import run_distributed
from tests.parity.test_lora import Layout, check_layouts, check_script, our_name, peft_of
from tests.reference import VOCABULARY, build_reference, global_batch, relative

TOKENS = [VOCABULARY - 1, 3, 47, 50]  # of both halves of the vocabulary
BOTH = {"trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS}}
CASES = {
    "tokens": ("llama_gqa", BOTH),
    "a token of one rank": ("llama_gqa", {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [3]}}),
    "tokens of each": ("gpt_neox", {"trainable_token_indices": {"embed_in": TOKENS, "lm_head": TOKENS[:2]}}),
    "tokens of the embedding": ("llama_gqa", {"trainable_token_indices": TOKENS}),
    "tokens, tied": ("llama_tied", {"trainable_token_indices": TOKENS}),
    "modules": ("llama_gqa", {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "both": ("llama_gqa", {"trainable_token_indices": TOKENS, "modules_to_save": ["lm_head"]}),
}
LAYOUTS = [
    Layout("full_shard", accumulation=2),
    Layout("full_shard", tp=2, mode="selective", checkpointing=True),
    Layout("full_shard", tp=2, sequence=False, chunk=0),
    Layout("full_shard", chunk=0, cp=2),
]


def save(name, folder, **config):
    """An adapter of peft, with rows and modules that are not those of the base."""
    model = peft_of(build_reference(name, torch.float64), **config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" not in key:
                parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).float())  # as files are read
    model.save_pretrained(folder / "adapter")
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "world_size"), [
    ("tokens", 2), *(pytest.param(case, 2, marks=pytest.mark.full) for case in CASES if case != "tokens"),
    pytest.param("tokens", 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_steps_and_files_are_those_of_peft(case, world_size, tmp_path):
    name, config = CASES[case]
    save(name, tmp_path, **config)
    layouts = LAYOUTS if world_size == 2 else [Layout("full_shard", tp=2, accumulation=2), Layout("full_shard", tp=4)]
    run_distributed(check_layouts, name, layouts, tmp_path, world_size=world_size)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["tokens", "tokens, tied", "modules", "both"])  # others only peft's files have
def test_new_ones_begin_as_the_base_and_are_left_out_with_the_adapters(case, tmp_path):
    name, config = CASES[case]
    base = build_reference(name, torch.float64)
    inputs, _ = global_batch(0)
    wanted = base(input_ids=inputs).logits
    modules = config.get("modules_to_save", ())
    model = smp.lora(base, 2, train_tokens=() if case == "modules" else TOKENS, modules_to_save=modules)
    assert relative(model(input_ids=inputs).logits - wanted, wanted) <= 1e-12
    trained = {key for key, p in model.named_parameters() if p.requires_grad and ".lora_" not in key}
    peft_model = peft_of(build_reference(name, torch.float64), **config)
    assert trained == {our_name(k) for k, p in peft_model.named_parameters() if p.requires_grad and "lora_" not in k}
    if not modules:
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for key in trained:
                model.get_parameter(key).add_(1)
        assert relative(model(input_ids=inputs).logits - wanted, wanted) > 0.01
        assert relative(copied(input_ids=inputs).logits - wanted, wanted) <= 1e-12
        with lora.left_out(model):
            assert relative(model(input_ids=inputs).logits - wanted, wanted) <= 1e-12


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_script_trains_them_too(tmp_path):
    save("llama_gqa", tmp_path, **CASES["both"][1])
    run_distributed(check_script, tmp_path, world_size=2)


@pytest.mark.parametrize(("name", "words", "sentence"), [
    ("llama_gqa", {"train_tokens": [VOCABULARY]}, "--lora_train_tokens 96 is not below the model's vocabulary of 96"),
    ("llama_gqa", {"modules_to_save": ["lm_hed"]}, "--lora_modules_to_save lm_hed is the end of no name of a module"),
    ("llama_gqa", {"modules_to_save": ["q_proj"]}, "has model.layers.0.self_attn.q_proj, a linear layer of the blocks"),
    ("llama_gqa", {"modules_to_save": ["mlp"]}, "has model.layers.0.mlp, a linear layer of the blocks or a module"),
    ("llama_tied", {"modules_to_save": ["lm_head"]}, "embedding and head are tied, of which peft would train a copy"),
    ("llama_gqa", {"modules_to_save": ["lm_head", "embed_tokens"], "train_tokens": [1]}, "trains all rows: leave"),
])  # fmt: skip
def test_what_cannot_be_trained_so_is_refused(name, words, sentence):
    with pytest.raises(UserError, match=sentence):
        smp.lora(build_reference(name, torch.float32), 2, **words)
