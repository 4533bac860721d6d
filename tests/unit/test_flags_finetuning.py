"""Each flag of finetuning does what it says: conversations and adapters."""

from __future__ import annotations

import json
import math
import pathlib
import re

import numpy as np
import pytest
import torch

from smp.config import Settings
from smp.errors import ConfigError
from smp.local_shards import local_tensor
from smp.models.model_config import ModelConfig
from smp.models.registry import family_of
from smp.parallel import lora, nf4
from smp.parallel.linear import product_of
from smp.train.job import sizes
from smp.train.preference import PairLoss, loss_of, pair_losses
from tests import experts
from tests.flags import check, in_child, one_process, parse, plan_of
from tests.tensor_parallel import whole

SAMPLE = pathlib.Path(__file__).parents[2] / "data" / "sample"
CHATS = ["--dataset_type", "chat", "--training_dir", SAMPLE]
TEXT = ["--dataset_type", "text", "--training_dir", SAMPLE]
TURNS = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Emma."}]


@check("train_on", "chat_template", "overlong", "pack", "show_masks", "max_samples", "validation_split")
def test_conversations(tmp_path, capfd):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"messages": TURNS * (number + 1)}) + "\n" for number in range(4)))
    data = ["--dataset_type", "chat", "--training_dir", file, "--tokenizer_name_or_dir", SAMPLE / "tokenizer",
            "--chat_template", SAMPLE / "chat_template.jinja", "--vocab_size", 2048, "--max_context_width", 128,
            "--shuffle_data", 0, "--data_cache_dir", tmp_path / "cache"]  # fmt: skip

    def trained(*words):
        pipeline = plan_of(words, tmp_path, data=data).train_data
        source = pipeline._microbatches.source
        return [int((source.sample(number)[1] != -100).sum()) for number in source.numbers]

    first, second, third, fourth = trained()
    assert (second, third, fourth) == (2 * first, 3 * first, 4 * first)
    assert trained("--train_on", "last") == [first] * 4 and trained("--train_on", "all")[0] > first
    assert trained("--max_samples", 2) == [first, second]
    assert len(trained("--overlong", "drop", "--max_context_width", 40)) < 4 == len(trained("--max_context_width", 40))
    (row,) = plan_of(["--overlong", "cut"], tmp_path, data=data).train_data._microbatches.source.rows(np.arange(1))
    alone = plan_of(["--pack", 0], tmp_path, data=data).train_data._microbatches
    assert len(row.documents) > 1 and len(alone.source) == 4 and alone.source.rows(np.arange(1))[0].documents is None
    assert alone.collate(alone.source.rows(np.arange(4))).keys() == {"input_ids", "targets", "row_tokens"}
    held_out = plan_of(["--validation_split", 0.25, "--validation_freq", 1], tmp_path, data=data)
    assert [len(each._microbatches.source.numbers) for each in (held_out.train_data, held_out.validation_data)] == [
        3,
        1,
    ]
    capfd.readouterr()
    trained("--show_masks", 2)
    assert capfd.readouterr().err.count("Assistant:⟦ Emma.") == 1 + 2
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content + m.content + eos_token }}{% endfor %}")
    assert trained("--chat_template", template)[0] > first


def test_conversations_with_more_than_text_are_counted(tmp_path):
    file, image = tmp_path / "a.jsonl", {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    rows = [TURNS, [image, TURNS[1]], TURNS, [image, TURNS[1]]]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data = ["--dataset_type", "chat", "--training_dir", file, "--tokenizer_name_or_dir", SAMPLE / "tokenizer",
            "--chat_template", SAMPLE / "chat_template.jinja", "--vocab_size", 2048]  # fmt: skip
    with pytest.raises(ConfigError, match=r"is not text, .* \(2 samples of .*a\.jsonl have more than text\)"):
        plan_of([], tmp_path, data=data)


@in_child
def test_auto_finds_conversations_and_pairs(tmp_path, caplog):
    def opened(rows, *words):
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = ["--training_dir", file, "--tokenizer_name_or_dir", SAMPLE / "tokenizer", "--vocab_size", 2048]
        return plan_of([*words, "--lora_rank", 2, "--max_context_width", 128], tmp_path, data=data)

    template = ["--chat_template", SAMPLE / "chat_template.jinja"]
    more = {"url": "x", "system": "Be brief."}
    said = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Emma."}]
    for row in (
        {"messages": TURNS}, {"conversations": said}, {"prompt": TURNS[:1], "completion": TURNS[1:]},
        {"instruction": "Who?", "input": "", "output": "Emma."},
    ):  # fmt: skip
        caplog.clear()
        job = opened([{**row, **more}] * 4, *template)
        source = job.train_data._microbatches.source
        assert job.config.data.is_chat and int((source.sample(0)[1] != -100).sum()) == 6
        told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert told[0] == "training data: not read are url" and "the column system becomes the first message" in told[1]
    assert opened([{"prompt": "Who?", "completion": " Emma."}] * 2).config.data.is_chat  # no template is needed
    pair = {"prompt": "Who?", "chosen": " Emma.", "rejected": " Ahab."}
    assert opened([pair] * 2, "--dpo", 1).config.data.is_chat
    with pytest.raises(ConfigError, match="line 1: is a pair of answers: --dpo 1 trains on such"):
        opened([pair] * 2)
    alpaca = {"instruction": "Who?", "input": "", "output": "Emma."}
    for beside, keys in (({"messages": TURNS}, "messages"), (alpaca, "instruction and output"), (pair, "chosen and")):
        caplog.clear()
        assert not opened([{"text": "Emma.", **beside}] * 40).config.data.is_chat
        assert "all of the text is trained on; --d" in caplog.text and f" reads {keys}" in caplog.text
    with pytest.raises(ConfigError, match="--train_on is for conversations, and the data has none: leave it out"):
        opened([{"text": "Emma."}] * 40, "--train_on", "last")


@in_child
def test_what_is_not_read_is_told_once(tmp_path, caplog):
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "a.csv").write_text("text\nEmma.\n")
    (folder / "a.jsonl.zst").write_bytes(b"x")
    line = json.dumps({"messages": TURNS, "url": "x", "system": "Be brief."}) + "\n"
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(line * 4)
    data = ["--training_dir", folder, "--tokenizer_name_or_dir", SAMPLE / "tokenizer", "--vocab_size", 2048]
    words = ["--chat_template", SAMPLE / "chat_template.jinja", "--max_context_width", 128, "--validation_freq", 1]
    for held_out in (["--validation_split", 0.25], ["--test_dir", folder / "test.jsonl"]):
        caplog.clear()
        assert plan_of([*words, *held_out], tmp_path, data=data).config.data.is_chat
        for part in ("other splits", "CSV file(s)", "jsonl.zst", "not read are url", "the column system becomes the"):
            assert [part in record.getMessage() for record in caplog.records].count(True) == 1, part


@in_child
def test_sequences_of_other_data_are_held_out(tmp_path):
    file = tmp_path / "a.jsonl"
    for rows in ([{"input_ids": [number, 1, 2]} for number in range(20)], [{"text": "Emma walks home. " * 200}] * 2):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = ["--training_dir", file, "--tokenizer_name_or_dir", SAMPLE / "tokenizer", "--vocab_size", 2048]
        whole = plan_of([], tmp_path, data=data).train_data
        job = plan_of(["--validation_split", 0.25, "--validation_freq", 1], tmp_path, data=data)
        parts = [job.train_data, job.validation_data]
        count = whole.samples_per_epoch
        assert [each.samples_per_epoch for each in parts] == [count - round(count / 4), round(count / 4)]
        ids = [
            sorted(row.tokens.tolist() for row in each._microbatches.source.rows(np.arange(each.samples_per_epoch)))
            for each in (whole, *parts)
        ]
        assert (
            sorted(ids[1] + ids[2]) == ids[0] and len({whole.fingerprint, *(each.fingerprint for each in parts)}) == 3
        )
    file.write_text('{"input_ids": [1]}\n')
    with pytest.raises(ConfigError, match="--validation_split keeps sequences for validation, and the data has one"):
        plan_of(["--validation_split", 0.25, "--validation_freq", 1], tmp_path, data=data)


def test_weights_in_4_bits_need_torchao(monkeypatch, tmp_path):
    monkeypatch.setattr(nf4, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match="not installed: pip install torchao"):
        plan_of(["--lora_rank", 2, "--qlora", 1], tmp_path)


@check("qlora")
def test_weights_in_4_bits():
    pytest.importorskip("torchao")  # make test-qlora
    wide = ["--lora_rank", 2, "--hidden_width", 64, "--llama_intermediate_size", 64]
    for words, size in ((wide, 64 * 4), ([*wide, "--qlora", 1], 32 + 1 + 1)):
        with one_process(words) as built:
            weight = built.model.model.layers[0].mlp.up_proj.weight
            assert local_tensor(weight).nbytes == 64 * size


def test_frozen_weights_take_two_bytes_however_the_model_is_built():
    found = []
    for delayed in (1, 0):
        with one_process(["--lora_rank", 2, "--bf16", 1, "--delayed_param", delayed]) as built:
            dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in built.model.parameters()}
            assert dtypes == {(False, torch.bfloat16), (True, torch.float32)}
            found.append({name: whole(parameter.data) for name, parameter in built.model.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@check(
    "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "lora_use_rslora",
    "adapter_path", "save_merged_model", "lora_train_tokens", "lora_modules_to_save",
)  # fmt: skip
def test_adapters(tmp_path):
    def trained(*words):
        with one_process(words) as built:
            return {name: p.numel() for name, p in built.model.named_parameters() if p.requires_grad}

    base = trained()
    rank = trained("--lora_rank", 2)
    assert "model.embed_tokens.weight" in base and all(".lora_" in name for name in rank)
    assert sum(trained("--lora_rank", 4).values()) == 2 * sum(rank.values())
    assert trained("--lora_rank", 2, "--lora_train_tokens", 1, 5).items() - rank.items() == {
        ("model.embed_tokens.trained_tokens", 2 * 32), ("lm_head.trained_tokens", 2 * 32),
    }  # fmt: skip
    whole_head = trained("--lora_rank", 2, "--lora_modules_to_save", "lm_head").items() - rank.items()
    assert whole_head == {("lm_head.weight", 64 * 32)}
    only = trained("--lora_rank", 2, "--lora_target_modules", "q_proj", "v_proj")
    assert {name.split(".")[-2] for name in only} == {"q_proj", "v_proj"}
    of_experts = ["--lora_target_modules", "none", "--lora_target_parameters", "experts.down_proj"]
    mixture, config = experts.build("mixtral"), parse(["--lora_rank", 2, *of_experts]).lora
    beside = lora.parameters(mixture, family_of(mixture.config), Settings((config, ModelConfig()))).added
    assert {each.name for each in beside} == {"down_proj_lora_A", "down_proj_lora_B"}
    scale = lambda *words: parse(["--lora_rank", 4, *words]).lora.scale  # noqa: E731
    assert (scale(), scale("--lora_alpha", 8), scale("--lora_use_rslora", 1)) == (4.0, 2.0, 8.0)
    merges = lambda *words: parse(["--lora_rank", 4, *words]).lora.merges  # noqa: E731  see test_lora_job
    assert [merges(), merges("--save_merged_model", 1), merges(*of_experts)] == [False, True, True]
    assert not merges(*of_experts, "--save_merged_model", 0)
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "lora_dropout": 0.25}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    given = parse(["--adapter_path", tmp_path]).lora.with_adapter()
    assert (given.lora_rank, given.scale, given.lora_target_modules) == (3, 2.0, ("q_proj",))
    assert given.lora_dropout == 0.25
    for words, rate in (([], 0.0), (["--lora_dropout", 0.5], 0.5)):
        with one_process(["--lora_rank", 2, *words]) as built:
            assert product_of(built.model.model.layers[0].mlp.up_proj).dropout == rate
    with pytest.raises(ConfigError, match="--lora_dropout must be less than 1, got 1"):
        parse(["--lora_rank", 2, "--lora_dropout", 1])


@check("dpo", "dpo_beta", "dpo_label_smoothing", "dpo_loss")
def test_preferences(tmp_path):
    data = ["--dataset_type", "chat", "--training_dir", SAMPLE / "preferences.jsonl", "--tokenizer_name_or_dir",
            SAMPLE / "tokenizer", "--chat_template", SAMPLE / "chat_template.jinja", "--vocab_size", 2048,
            "--max_context_width", 128, "--lora_rank", 2]  # fmt: skip
    plan = plan_of(["--dpo", 1], tmp_path, data=data)
    assert len(plan.train_data._microbatches.source.numbers) == 200
    apart = plan_of(["--dpo", 1, "--pack", 0], tmp_path, data=data)
    assert [sizes(each)[1].rows_of_sample for each in (plan, apart)] == [1, 2]
    assert isinstance(loss_of(plan.setup), PairLoss)
    with pytest.raises(ConfigError, match="line 1: is a pair of answers: --dpo 1 trains on such"):
        plan_of([], tmp_path, data=data)
    policy, reference = torch.tensor([[-3.0, -5.0]]), torch.tensor([[-4.0, -4.0]])

    def loss(*words):
        config = parse(["--dpo", 1, *words]).preference
        return round(float(pair_losses(policy, reference, torch.tensor([[2, 4]]), config)[0]), 6)

    assert loss() == round(-math.log(1 / (1 + math.exp(-0.2))), 6)
    assert loss("--dpo_beta", 0.5) == round(-math.log(1 / (1 + math.exp(-1))), 6)
    assert loss("--dpo_label_smoothing", 0.25) == round(loss() + 0.25 * 0.2, 6)
    assert loss("--dpo_loss", "ipo") == round((1 / 2 + 1 / 4 - 5) ** 2, 6)


@pytest.mark.parametrize(("words", "sentence"), [
    (["--dpo_beta", 0.2], "--dpo_beta is of preferences: set --dpo 1, or leave it out"),
    (["--dpo", 1, "--dpo_loss", "ipo", "--dpo_label_smoothing", 0.1], "is of --dpo_loss sigmoid: leave one out"),
    (["--dpo", 1], "--dpo 1 trains on pairs, and --use_synthetic_data 1 has none"),
    (["--dpo", 1, *TEXT], "--dpo 1 reads pairs, not --dataset_type text: set --dataset_type chat"),
    (["--dpo", 1, *CHATS, "--train_on", "last"], "--dpo 1 compares complete answers, not --train_on last"),
    (["--dpo", 1, *CHATS, "--evaluate_only", 1], "without adapters needs the reference of a run, which its"),
    (["--dpo", 1, *CHATS, "--lora_rank", 2, "--loss_chunk_tokens", 0], "--dpo 1 needs --loss_chunk_tokens above 0"),
    (["--dpo", 1, *CHATS, "--lora_rank", 2, "--z_loss", 0.1], "--z_loss is added to the loss of tokens"),
    (["--dpo", 1, *CHATS, "--attn_pdrop", 0.2], "--dpo 1 trains without dropout, as TRL: leave --attn_pdrop out"),
    (["--dpo", 1, *CHATS, "--lora_rank", 2, "--lora_dropout", 0.1], "as TRL: leave --lora_dropout out"),
])  # fmt: skip
def test_preferences_that_do_not_fit(tmp_path, words, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        plan_of(words, tmp_path, data=[] if "chat" in words or "text" in words else ["--use_synthetic_data", 1])
