"""What a job's adapters are warned of: tokens that they cannot teach, and another base model."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import smp
from smp.errors import ConfigError
from smp.parallel import lora
from smp.train import adapters
from tests.chat import chat_tokenizer
from tests.flags import plan_of

TOKENS = ["<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TURNS = [{"role": "user", "content": "Where is the whale?"}, {"role": "assistant", "content": "In the deep sea."}]


def save_base(folder, *, tied=False, rows=0.0, tables=("input", "output"), dtype=torch.float32):
    """A model whose rows of ChatML's tokens, and of one that is not used, have one value each; its tokenizer; chats."""
    tokenizer = chat_tokenizer()
    ids = tokenizer.convert_tokens_to_ids([*TOKENS, "[INST]"])
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=416, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied)
    )  # fmt: skip
    with torch.no_grad():
        for table in tables:
            getattr(model, f"get_{table}_embeddings")().weight[ids] = rows
    model.to(dtype).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "chatml.jinja").write_text(CHATML)
    (folder / "chat.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    return ids


def words_of(folder, *words):
    return [
        *("--hf_pretrained_model_name_or_dir", folder / "base", "--max_context_width", 64),
        *("--dataset_type", "chat", "--training_dir", folder / "chat.jsonl", "--data_cache_dir", folder / "cache"),
        *("--chat_template", folder / "chatml.jinja", *words),
    ]


def warn(job):
    adapters.warn_of_base(job.settings, job.model)
    adapters.warn_of_untrained(job.settings, job.model, job.train_data)


def job_of(folder, *words):
    return plan_of(words_of(folder, *words), folder, model=[], data=[])


@pytest.mark.parametrize(("case", "found"), [
    ({}, 2), ({"tied": True}, 2), ({"rows": 1e-20}, 2), ({"rows": 0.5}, 2), ({"tables": ["output"]}, 2),
    ({"tables": [], "dtype": torch.bfloat16}, 0), ({"rows": 0.5, "dtype": torch.bfloat16}, 2),
])  # fmt: skip
def test_tokens_whose_rows_are_zero_or_alike_are_named(tmp_path, case, found, caplog):
    ids = save_base(tmp_path, **case)
    job = job_of(tmp_path, "--lora_rank", 2)
    untrained = adapters.untrained_tokens(job.settings, job.model, job.train_data)
    assert untrained == dict(zip(ids[:found], TOKENS[:found], strict=True))
    warn(job)
    assert ("has <|im_start|>, <|im_end|>, untrained in" in caplog.text) == bool(found)
    caplog.clear()
    warn(job_of(tmp_path))  # all parameters are trained
    assert not caplog.text


def test_an_adapter_of_another_base_is_warned_of(tmp_path, caplog):
    save_base(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    smp.export_hf(smp.lora(model, 2), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    shutil.copytree(tmp_path / "base", tmp_path / "copies" / "base")
    (tmp_path / "other").mkdir()
    for theirs, warned in (
        (config["base_model_name_or_path"], False), ("org/base", False), ("/elsewhere/Base", False), (None, False),
        ("/elsewhere/models--org--base/snapshots/0123", False),
        ("org/other", True), (str(tmp_path / "other"), True), (str(tmp_path / "copies" / "base"), True),
    ):  # fmt: skip
        file.write_text(json.dumps({**config, "base_model_name_or_path": theirs}))
        for use in (
            lambda: warn(job_of(tmp_path, "--adapter_path", tmp_path / "adapter")),
            lambda: smp.lora(LlamaForCausalLM.from_pretrained(tmp_path / "base"), adapter_path=tmp_path / "adapter"),
        ):
            caplog.clear()
            use()
            said = [text for text in caplog.messages if "was trained with" in text]
            assert len(said) == warned and all(f"with {theirs}, as its adapter_config.json says" in t for t in said)


def test_tokens_to_train_are_found_or_named(tmp_path, caplog):
    ids = save_base(tmp_path)

    def chosen(*words):
        job = job_of(tmp_path, "--lora_rank", 2, "--lora_train_tokens", *words)
        warn(job)
        return job.settings[lora.Config].token_ids

    assert chosen("auto") == tuple(sorted(ids[:2])) and "untrained" not in caplog.text
    assert chosen(TOKENS[0], 7) == tuple(sorted([ids[0], 7]))
    assert "The data has <|im_end|>, untrained in" in caplog.text
    for words, sentence in (
        (["<|none|>"], r"--lora_train_tokens <\|none\|> is no token of the tokenizer"),
        ([416], "--lora_train_tokens 416 is not below the model's vocabulary of 416"),
        (["auto", 3], "takes auto or tokens, got auto 3"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            chosen(*words)
    with pytest.raises(ConfigError, match="--lora_train_tokens auto needs a tokenizer, and auto pretrained weights"):
        plan_of(["--lora_rank", 2, "--lora_train_tokens", "auto"], tmp_path)
    caplog.clear()
    warn(job_of(tmp_path, "--lora_rank", 2, "--lora_modules_to_save", "embed_tokens", "lm_head"))
    assert not caplog.text
