"""The job trains on conversations: the same curve at any layout, on the tokens that are marked."""

from __future__ import annotations

import json
import pathlib

import pytest
from transformers import AutoTokenizer

import smp.cli
from examples.ask import ask
from tests.job import losses, run_job

SAMPLE = pathlib.Path(__file__).parents[2] / "data" / "sample"
MODEL = (
    "--model_type llama_v2 --hidden_width 32 --num_layers 2 --num_heads 4 --num_key_value_heads 2 "
    "--llama_intermediate_size 48 --vocab_size 2048 --max_context_width 128"
).split()
ASKED = [{"role": "user", "content": "Where?"}]
CHAT = ["--dataset_type", "chat", "--tokenizer_name_or_dir", SAMPLE / "tokenizer", "--chat_template",
        SAMPLE / "chat_template.jinja"]  # fmt: skip


def words(tmp_path, run, data=SAMPLE / "conversations.jsonl"):
    return [*MODEL, *CHAT, "--training_dir", data, "--data_cache_dir", tmp_path / "cache", "--output_dir",
            tmp_path / run, "--global_batch_size", 4, "--lr", 0.01, "--max_steps", 4]  # fmt: skip


@pytest.mark.full
def test_the_curve_is_the_same_at_any_layout(tmp_path):
    more = ["--validation_split", 0.1, "--validation_freq", 2, "--show_masks", 2]
    final = ["--save_final_model", 1, "--train_batch_size", 2]
    one = run_job(*words(tmp_path, "one"), *more, *final, world_size=1).succeeded()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one" / "final")  # has the template that it was trained with
    text = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    assert text == "User: Where?\nAssistant:" and ask(tmp_path / "one" / "final", "Where?")
    assert smp.cli.main(["export", str(tmp_path / "one/checkpoints/latest"), str(tmp_path / "exported")]) == 0
    for folder in ("one/final", "exported"):  # as it was read; the file may be gone
        template = tmp_path / folder / "chat_template.jinja"
        assert template.read_text() == (SAMPLE / "chat_template.jinja").read_text()
    stops = "token 0, and generation with the final model stops at [2]: add 0 to eos_token_id"  # llama_v2's
    assert one.output.count(f"What is trained on ends with '<|endoftext|>', {stops}") == 1
    assert one.output.count("trained on between") == 2 and "Assistant:⟦ " in one.output
    for name, layout in (
        ("two", []),
        ("cp", ["--context_parallel_degree", 2]),
        ("tp", ["--tensor_parallel_degree", 2]),
    ):
        run_job(*words(tmp_path, name), *more, *layout, "--train_batch_size", 4, world_size=2).succeeded()
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=2e-5), name
    assert losses(tmp_path / "one")[-1] < losses(tmp_path / "one")[0] - 0.1


@pytest.mark.full
def test_conversations_that_cannot_be_used_are_one_sentence(tmp_path):
    data = tmp_path / "chats.jsonl"
    for lines, more, sentence in (
        ([{"texts": ASKED}], [], "chats.jsonl, line 1: has no conversation; keys found: texts; needed is messages"),
        ([{"text": "Where?"}], ["--chat_template", tmp_path], "is a directory without a chat template"),
        ([{"text": "Where?"}], ["--dataset_type", "auto", "--train_on", "last"], "--train_on is for conversations"),
    ):
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        refused = run_job(*words(tmp_path, "refused", data), *more, world_size=1)
        assert refused.statuses == [2] and sentence in refused.output and "Traceback" not in refused.output, (
            refused.output
        )
        assert not (tmp_path / "refused").exists()
