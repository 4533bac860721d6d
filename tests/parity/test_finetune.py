"""Finetuning starts from the given weights, and what is exported is what was trained."""

from __future__ import annotations

import json
import pathlib
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from smp.checkpoint.directory import find_checkpoints
from smp.data import packing
from smp.data.config import DataConfig
from smp.data.data_pipeline import BatchShape, DataPipeline, open_samples
from smp.data.packing import Collator, columns_for
from smp.data.samples import Choice, PackedSamples
from smp.data.token_cache import Columns
from tests.distributed import run_distributed
from tests.job import assert_resumes, losses, read_metrics, run_job
from tests.model_checks import assert_same_training
from tests.model_checks import build_reference as build_zoo_reference
from tests.reference import VOCABULARY, Layout, build_reference
from tests.zoo import VOCABULARY as ZOO_VOCABULARY

SAMPLE_TOKENIZER = pathlib.Path(__file__).parents[2] / "data" / "sample" / "tokenizer"


@pytest.fixture
def rows(tmp_path):
    """A file of rows, the samples of the first step in order (unshuffled)."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCABULARY, (4, 12), generator=generator).tolist()
    rows[1] = rows[1][:7]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return rows


def flags(tmp_path, run="run"):
    return [
        "--training_dir", tmp_path / "data", "--data_cache_dir", tmp_path / "cache", "--shuffle_data", 0,
        "--max_context_width", 12, "--output_dir", tmp_path / run,
    ]  # fmt: skip


def hugging_face_loss(model, rows) -> float:
    """Mean over all predicted tokens of the batch, by plain cross entropy on each row alone."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            total += F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
            count += len(row) - 1
    return total / count


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_neox"])
def test_first_loss_is_hugging_faces_own(name, rows, tmp_path):
    reference = build_reference(name, torch.float32).eval()
    reference.save_pretrained(tmp_path / "pretrained")
    finetune = ["--hf_pretrained_model_name_or_dir", tmp_path / "pretrained", "--max_steps", 1]
    run_job(*flags(tmp_path), *finetune, "--train_batch_size", 2, world_size=2).succeeded()
    assert losses(tmp_path / "run") == pytest.approx([hugging_face_loss(reference, rows)], rel=1e-5)


def test_a_tokenizer_that_contradicts_the_weights_own_is_warned_of_once(rows, tmp_path):
    build_reference("llama_gqa", torch.float32).save_pretrained(tmp_path / "pretrained")
    for file in SAMPLE_TOKENIZER.iterdir():
        shutil.copy(file, tmp_path / "pretrained")
    spec = json.loads((SAMPLE_TOKENIZER / "tokenizer.json").read_text())
    ids = spec["model"]["vocab"]
    one, two = sorted(ids, key=ids.get)[-2:]
    ids[one], ids[two] = ids[two], ids[one]
    (tmp_path / "pretrained" / "tokenizer.json").write_text(json.dumps(spec))
    job = [*flags(tmp_path), "--hf_pretrained_model_name_or_dir", tmp_path / "pretrained", "--max_steps", 1]
    outcome = run_job(*job, "--tokenizer_name_or_dir", SAMPLE_TOKENIZER, "--train_batch_size", 2, world_size=2)
    outcome.succeeded()
    assert outcome.output.count("--tokenizer_name_or_dir contradicts the tokenizer of the pretrained weights (") == 1


@pytest.mark.parametrize(
    "spelling",
    [
        ["--pretrained_model_name", "{dir}", "--finetune_checkpoint_load_dir", "{dir}"],
        ["--model", "{dir}", "--pretrained_checkpoint_file", "{dir}/model.safetensors"],
    ],
)
def test_the_seeds_spellings(spelling, rows, tmp_path):
    reference = build_reference("gpt_neox", torch.float32).eval()
    reference.save_pretrained(tmp_path / "pretrained")
    words = [word.format(dir=tmp_path / "pretrained") for word in spelling]
    run_job(*flags(tmp_path), "--finetune", 1, *words, "--max_steps", 1, "--train_batch_size", 4).succeeded()
    assert losses(tmp_path / "run") == pytest.approx([hugging_face_loss(reference, rows)], rel=1e-5)


@pytest.mark.full
def test_resume_wins_over_finetune(rows, tmp_path):
    build_reference("llama_gqa", torch.float32).save_pretrained(tmp_path / "pretrained")
    words = [*flags(tmp_path), "--hf_pretrained_model_name_or_dir", tmp_path / "pretrained", "--lr_decay_iters", 4]
    assert_resumes(tmp_path, *words, at=2, steps=4, world_size=1)  # the weights were not loaded a second time


@pytest.mark.parametrize("name", ["llama_tied", "gpt_neox"])
@pytest.mark.full
def test_export_gives_the_trained_model(name, rows, tmp_path):
    build_reference(name, torch.float32).save_pretrained(tmp_path / "pretrained")
    words = [*flags(tmp_path), "--hf_pretrained_model_name_or_dir", tmp_path / "pretrained", "--lr", 1e-2]
    run_job(*words, "--max_steps", 3, "--save_final_model", 1, world_size=2).succeeded()
    exported, info = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    (checkpoint,) = find_checkpoints(tmp_path / "run" / "checkpoints", "pretrained")
    trained = build_reference(name, torch.float32)
    load_parameters(trained, checkpoint.path)
    ids = torch.tensor([rows[0]])
    with torch.no_grad():
        assert torch.equal(exported.eval()(ids).logits, trained.eval()(ids).logits)


def load_parameters(model, path) -> None:
    """Read a checkpoint's parameters into a plain model with torch's own reader."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


BATCH = 5


def conversations() -> PackedSamples:
    """Of many lengths, the first tokens of each read only, one in a sequence."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(2, 24, 12)
    ids = rng.integers(1, ZOO_VOCABULARY, lengths.sum())
    offsets = np.cumsum([0, *lengths])
    labels = ids.copy()
    for start, length in zip(offsets, lengths, strict=False):
        labels[start : start + length // 3] = -100
    store = Columns(ids, offsets, None, labels)
    return PackedSamples([store], 24, "f", Choice(), what="data", origins=["a.jsonl"], pack=False)


def each_alone(model, step: int) -> torch.Tensor:
    """The plain model's loss of a global batch, each conversation in a forward of its own."""
    source, total, count = conversations(), 0.0, 0
    for number in source.samples_at(np.arange(BATCH * step, BATCH * (step + 1)), seed=2, shuffle=True).tolist():
        ids, labels = (torch.from_numpy(column) for column in source.sample(number))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
        count += int((labels[1:] != -100).sum())
    return total / count


def padded(step: int, rank: int, size: int, _accumulation: int):
    """What a rank trains on of it: micro-batches of two, sorted, as wide as they need to be."""
    shape = BatchShape(
        sequence_length=24, vocab_size=ZOO_VOCABULARY, global_batch_size=BATCH, micro_batch_size=2, data_rank=rank,
        data_size=size, seed=2,
    )  # fmt: skip
    collate = Collator(sequence_length=24, pad_token_id=0, fitted=True)
    with mock.patch.object(packing, "FEWEST_COLUMNS", 4):
        data = DataPipeline(conversations(), collate, shape, shuffle=True, workers=0, sort=True)
        data.seek(BATCH * step)
        batch = next(iter(data))
    assert len(batch.microbatches) > 1
    return batch


OTHERS = ("qwen3_5_text", "nemotron_h", "granitemoehybrid")


@pytest.mark.parametrize("model_type", ["lfm2", *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS)])
def test_conversations_padded_together_are_those_alone(model_type):
    reference = build_zoo_reference(model_type, loss_of=each_alone)
    run_distributed(check_padded, reference, [Layout("no_shard", checkpointing=True)], world_size=1)
    run_distributed(check_padded, reference, [Layout("full_shard"), Layout("full_shard", cp=2)], world_size=2)


def check_padded(reference, layouts):
    for layout in layouts:
        assert_same_training(reference, layout, padded)


def test_conversations_of_a_hybrid_model_packed_and_one_in_a_sequence(tmp_path):
    config = CONFIG_MAPPING["qwen3_5_text"](
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"], max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(3)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path / "pretrained")
    turns = [{"role": "user", "content": "Who was it?"}, {"role": "assistant", "content": "Emma, she said."}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": turns * n}) + "\n" for n in (1, 2, 1, 3)))
    data = {
        "dataset_type": "chat", "training_dir": str(tmp_path / "a.jsonl"), "data_cache_dir": str(tmp_path / "cache"),
        "tokenizer_name_or_dir": str(SAMPLE_TOKENIZER),
        "chat_template": str(SAMPLE_TOKENIZER.parent / "chat_template.jinja"),
    }  # fmt: skip
    job = [word for name, value in data.items() for word in (f"--{name}", value)]
    job += ["--hf_pretrained_model_name_or_dir", tmp_path / "pretrained", "--max_context_width", 128]
    job += ["--max_steps", 1]
    alone = ["--train_batch_size", 1, "--gradient_accumulation_steps", 2, "--pack", 0]
    outcome = run_job(*job, "--output_dir", tmp_path / "alone", *alone, world_size=2).succeeded()
    batch = BatchShape(
        sequence_length=128, vocab_size=2048, global_batch_size=4, micro_batch_size=2, data_rank=0, data_size=1, seed=0
    )
    packed = open_samples(DataConfig(**data), split="train", batch=batch)
    run_job(*job, "--output_dir", tmp_path / "packed", "--train_batch_size", len(packed)).succeeded()
    source = open_samples(DataConfig(**data, pack=False), split="train", batch=batch)
    total, count = 0.0, 0
    for sample in range(4):
        ids, labels = (torch.from_numpy(column.astype("int64"))[None] for column in source.sample(sample))
        with torch.no_grad():
            logits = reference(ids, use_cache=False).logits[0, :-1]
        total += F.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
        count += int((labels[0, 1:] != -100).sum())
    for run in ("alone", "packed"):
        assert losses(tmp_path / run) == pytest.approx([total / count], rel=1e-5)
    assert len(packed) < 4
    computed = sum(columns_for(length, 128) for length in source.lengths().tolist())
    (line,) = read_metrics(tmp_path / "alone")
    assert computed < 4 * 128 and "Global batch: 4 samples, at most 512 tokens" in outcome.output
    assert 4 * line["processed_tokens_per_sec"] / line["samples_per_sec"] == pytest.approx(computed)
    assert 4 * line["tokens_per_sec"] / line["samples_per_sec"] == pytest.approx(count)
    outcome = run_job(*job, "--output_dir", tmp_path / "refused", "--compile", 1)
    assert outcome.statuses == [2] and "--compile 1: blocks that call a layer on each of their" in outcome.output
    assert not (tmp_path / "refused").exists()


def test_conversations_of_a_model_that_mixes_packed_ones_are_one_in_a_sequence(tmp_path):
    small = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 2048, "state_size": 4}
    CONFIG_MAPPING["mamba"](**small).save_pretrained(tmp_path / "model")
    turns = [{"role": "user", "content": "Who was it?"}, {"role": "assistant", "content": "Emma, she said."}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": turns * n}) + "\n" for n in (1, 2)))
    job = ["--dataset_type", "chat", "--training_dir", tmp_path / "a.jsonl", "--data_cache_dir", tmp_path / "cache"]
    job += [
        "--tokenizer_name_or_dir",
        SAMPLE_TOKENIZER,
        "--output_dir",
        tmp_path / "run",
        "--model",
        tmp_path / "model",
    ]
    job += ["--chat_template", SAMPLE_TOKENIZER.parent / "chat_template.jinja", "--max_context_width", 64]
    outcome = run_job(*job, "--max_steps", 1, "--train_batch_size", 2).succeeded()
    assert "the model does not keep packed conversations apart: its blocks are not given" in outcome.output
    outcome = run_job(*job, "--max_steps", 2, "--train_batch_size", 2, "--pack", 1)
    assert outcome.statuses == [2] and "does not keep packed documents apart" in outcome.output
