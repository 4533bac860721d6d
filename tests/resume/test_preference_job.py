"""The job trains on preferences: the same curve at any layout, a margin that grows, and a resume bit for bit."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.job import read_metrics, run_job
from tests.resume.test_chat_job import CHAT, SAMPLE

NAMES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")


def flags(tmp_path, run, *more):
    return [*CHAT, "--max_context_width", 128, "--training_dir", SAMPLE / "preferences.jsonl", "--data_cache_dir",
            tmp_path / "cache", "--output_dir", tmp_path / run, "--hf_pretrained_model_name_or_dir", tmp_path / "base",
            "--global_batch_size", 8, "--lr", 0.02, "--dpo", 1, "--lora_rank", 4, "--max_steps", 6,
            "--lr_decay_iters", 6, *more]  # fmt: skip


VALIDATED = ("val_loss", *(f"val_{name}" for name in NAMES[1:]))


def evaluation(job):
    lines = job.succeeded().output.splitlines()
    return [next(json.loads(line) for line in lines if line.startswith('{"model"'))[name] for name in VALIDATED]


def curve(folder):
    return [[line[name] for name in NAMES] for line in read_metrics(folder)]


@pytest.fixture
def base(tmp_path):
    """A model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path


@pytest.mark.full
def test_the_curve_is_the_same_at_any_layout_and_goes_on_where_it_was(base):
    validation = ["--validation_split", 0.1, "--validation_freq", 3, "--checkpoint_freq", 3]
    final = ["--train_batch_size", 4, "--save_final_model", 1]
    done = run_job(*flags(base, "shard", *validation), *final, world_size=2).succeeded()
    found = curve(base / "shard")
    assert found[0][0] == pytest.approx(0.693147, rel=1e-5) and found[0][1:] == [0, 0, 0, 0]  # the policy is the base
    assert found[-1][4] > 0.01 and found[-1][0] < found[0][0], found
    assert "rewards/margins: " in done.output and "Validation loss: " in done.output
    lines = [json.loads(line) for line in (base / "shard" / "metrics.jsonl").read_text().splitlines()]
    validated = [line for line in lines if "val_loss" in line]
    assert validated[-1]["val_rewards/margins"] > 0 and "val_ppl" not in validated[-1]
    for name, layout in (("tp", ["--tensor_parallel_degree", 2]), ("cp", ["--context_parallel_degree", 2])):
        words = [*flags(base, name, *layout), *validation[:4], "--train_batch_size", 4]
        run_job(*words, world_size=2).succeeded()
        for mine, theirs in zip(curve(base / name), found, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3, abs=2e-5), name
    (checkpoint,) = (base / "shard" / "checkpoints").glob("*-3steps")
    resume = ["--resume_from_checkpoint", checkpoint, "--train_batch_size", 4]
    run_job(*flags(base, "resumed", *validation), *resume, world_size=2).succeeded()
    assert curve(base / "resumed") == found[3:]
    # In one process, what the two validated at that step, and what the adapter has in the end beside its base.
    adapter = ["--adapter_path", base / "shard" / "final"]
    for of, expected in ((["--resume_from_checkpoint", checkpoint], validated[1]), (adapter, validated[2])):
        result = evaluation(run_job(*flags(base, "shard", "--evaluate_only", 1, *of, *validation[:2]), world_size=1))
        assert result == pytest.approx([expected[name] for name in VALIDATED], rel=1e-4, abs=1e-6)
    # Training that begins from it has it as the reference.
    run_job(*flags(base, "on", *adapter, *validation[:4]), *final[:2], world_size=2).succeeded()
    assert curve(base / "on")[0] == pytest.approx([0.693147, 0, 0, 0, 0], rel=1e-5, abs=1e-5)
    # So has another run that begins from a checkpoint of it, and keeps it when it goes on.
    every = [*flags(base, "anew", *validation[:4]), *final[:2], "--checkpoint_freq", 3, "--num_kept_checkpoints", 2]
    run_job(*every, "--resume_from_checkpoint", checkpoint, "--reset_progress", 1, world_size=2).succeeded()
    found = curve(base / "anew")
    assert found[0] == pytest.approx([0.693147, 0, 0, 0, 0], rel=1e-5, abs=1e-5)
    (checkpoint,) = (base / "anew" / "checkpoints").glob("*-3steps")
    every = [*flags(base, "goes_on", *validation[:4]), *final[:2], "--resume_from_checkpoint", checkpoint]
    assert "Changed since" in run_job(*every, "--dpo_beta", 0.2, world_size=2).succeeded().output
    assert curve(base / "goes_on")[0][3:] == pytest.approx([found[3][3], 2 * found[3][4]], rel=1e-3, abs=1e-6)


@pytest.mark.full
def test_all_parameters_keep_the_reference_of_the_first_start(base):
    more = ["--lora_rank", 0, "--lr", 0.002, "--validation_split", 0.1, "--checkpoint_freq", 3]
    validation = ["--validation_freq", 3]
    background = ["--train_batch_size", 4, "--checkpoint_type", "async_sharded"]
    run_job(*flags(base, "whole", *more, *validation), *background, world_size=2).succeeded()
    found = curve(base / "whole")
    assert found[0] == pytest.approx([0.693147, 0, 0, 0, 0], rel=1e-5, abs=1e-5)  # the reference is the start
    (checkpoint,) = (base / "whole" / "checkpoints").glob("*-3steps")
    resume = ["--resume_from_checkpoint", checkpoint, "--train_batch_size", 4]
    workers = ["--data_num_workers", 1]
    run_job(*flags(base, "resumed", *more, *validation), *resume, *workers, world_size=2).succeeded()
    assert curve(base / "resumed") == found[3:]
    split = ["--tensor_parallel_degree", 2]
    run_job(*flags(base, "split", *more, *validation), *resume, *split, world_size=2).succeeded()
    for mine, theirs in zip(curve(base / "split"), found[3:], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=2e-5)
    # In one process, what the two validated at that step.
    lines = [json.loads(line) for line in (base / "whole" / "metrics.jsonl").read_text().splitlines()]
    validated = [line for line in lines if "val_loss" in line]
    assert (
        validated[0]["val_loss"] == pytest.approx(0.693147, rel=1e-5)
        and abs(validated[1]["val_rewards/margins"]) > 0.01
    )
    evaluate = ["--evaluate_only", 1, "--resume_from_checkpoint", checkpoint]
    result = evaluation(run_job(*flags(base, "whole", *more[:6], *evaluate), world_size=1))
    assert result == pytest.approx([validated[1][name] for name in VALIDATED], rel=1e-4, abs=1e-6)
    shorter = [*more, "--max_context_width", 64]
    refused = run_job(*flags(base, "whole", *shorter, *evaluate), world_size=1)
    sentence = r"-3steps has no reference of \d+ of the \d+ pairs of this {} data, which --dpo 1 computes before"
    assert refused.statuses == [2] and re.search(sentence.format("validation") + ".* step: take", refused.output)
    refused = run_job(*flags(base, "other", *shorter, *validation), *resume, world_size=2)
    assert refused.statuses == [2, 2] and not (base / "other").exists()
    assert re.search(sentence.format("training"), refused.output) and "Traceback" not in refused.output
    run_job(*flags(base, "other", *shorter, *validation), *resume, "--reset_progress", 1, world_size=2).succeeded()
    assert curve(base / "other")[0] == pytest.approx([0.693147, 0, 0, 0, 0], rel=1e-5, abs=1e-5)


@pytest.mark.full
def test_a_hybrid_model_has_an_answer_in_a_row_at_any_layout(base):
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=2048, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=128, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    Lfm2ForCausalLM(config).save_pretrained(base / "base")
    validation = ["--validation_split", 0.1, "--validation_freq", 3, "--checkpoint_freq", 3]
    whole = ["--lora_rank", 0, "--lr", 0.002, "--pack", 0, *validation]
    done = run_job(*flags(base, "shard", *whole), "--train_batch_size", 2, world_size=2).succeeded()
    assert "Global batch: 8 samples, at most 2048 tokens" in done.output
    found = curve(base / "shard")
    assert found[0][:3] == pytest.approx([0.693147, 0, 0], rel=1e-5, abs=1e-5) and found[-1][4] > 0.01, found
    for name, layout in (("tp", ["--tensor_parallel_degree", 2]), ("cp", ["--context_parallel_degree", 2])):
        run_job(*flags(base, name, *whole, *layout), "--train_batch_size", 4, world_size=2).succeeded()
        for mine, theirs in zip(curve(base / name)[1:], found[1:], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3, abs=2e-5), name
    (checkpoint,) = (base / "shard" / "checkpoints").glob("*-3steps")
    resume = ["--resume_from_checkpoint", checkpoint, "--train_batch_size", 2, "--data_num_workers", 1]
    run_job(*flags(base, "resumed", *whole), *resume, world_size=2).succeeded()
    assert curve(base / "resumed") == found[3:]
    lines = [json.loads(line) for line in (base / "shard" / "metrics.jsonl").read_text().splitlines()]
    validated = [line for line in lines if "val_loss" in line]
    evaluate = ["--evaluate_only", 1, "--resume_from_checkpoint", checkpoint, "--lora_rank", 0, *validation[:2]]
    result = evaluation(run_job(*flags(base, "shard", *evaluate), world_size=1))
    assert result == pytest.approx([validated[1][name] for name in VALIDATED], rel=1e-4, abs=1e-6)
