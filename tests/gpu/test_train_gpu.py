"""The job on one GPU: ``pytest tests/gpu``. Not run where there is none."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys

import pytest
import torch

from smp.memory.limits import available_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = pathlib.Path(__file__).parent.parent.parent
SYNTHETIC = ("--use_synthetic_data", 1)
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
FP32 = ("--bf16", 0)
STEPS = ("--max_steps", 5, "--gradient_accumulation_steps", 2)
SELECTIVE = ("--activation_checkpointing_mode", "selective")


def run(command: list[object], **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def train(run_dir: pathlib.Path, *words: object, data=SYNTHETIC, **environment: str) -> list[dict]:
    options = ["--model", "llama_tiny", "--output_dir", run_dir, "--logging_freq", 1, *data, *words]
    run(["train_lib.py", *options], **environment)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def assert_close(found: list[dict], wanted: list[dict], tolerance: float, keys=("loss", "grad_norm")) -> None:
    for key in keys:
        pairs = [(one[key], two[key]) for one, two in zip(found, wanted, strict=True)]
        assert all(abs(one - two) <= tolerance * abs(two) for one, two in pairs), (key, pairs)


def test_bf16_is_the_default_and_memory_is_reported(tmp_path):
    lines = train(tmp_path / "run", "--max_steps", 5)
    assert all(line["mem_peak_gib"] > 0 and line["mem_allocated_gib"] > 0 for line in lines)
    assert "computing in bfloat16" in (tmp_path / "run" / "logs" / "rank0.log").read_text()


def test_resume_is_bit_identical(tmp_path):
    words = ["--attn_pdrop", 0.1, "--attn_implementation", "eager", "--lr_decay_iters", 8]
    whole = train(tmp_path / "whole", *words, "--max_steps", 8)
    train(tmp_path / "parts", *words, "--max_steps", 4)
    parts = train(tmp_path / "parts", *words, "--max_steps", 8, "--resume_from_checkpoint", "latest")
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]


def test_memory_lines_and_cache_release(tmp_path):
    train(tmp_path / "run", "--max_steps", 2, "--enable_memory_profiling", 1, "--clean_cache", 1)
    assert "[GPU MEMORY]@0000" in (tmp_path / "run" / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize("words", [["--compile", 1], ["--activation_checkpointing", 0]])
def test_variants_train(words, tmp_path):
    lines = train(tmp_path / "run", *words, "--max_steps", 3)
    assert len(lines) == 3 and all(line["loss"] > 0 for line in lines)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return train(tmp_path_factory.mktemp("cpu") / "run", *FP32, *STEPS, **HIDDEN)


@pytest.mark.parametrize("words", [[], SELECTIVE, ["--compile", 1], ["--compile", 1, *SELECTIVE], ["--cpu_offload", 1]])
def test_fp32_is_what_a_cpu_computes(words, on_cpu, tmp_path):
    assert_close(train(tmp_path / "run", *FP32, *STEPS, *words), on_cpu, 1e-4)


def test_bf16_stays_near_fp32(on_cpu, tmp_path):
    assert_close(train(tmp_path / "run", *STEPS), on_cpu, 1e-2, keys=("loss",))


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """The words for rows in which 0 ends a document, and what a CPU makes of them, kept apart and not."""
    folder, draw = tmp_path_factory.mktemp("documents"), random.Random(0)
    rows = [[draw.choice([0, *range(1, 21)]) for _ in range(128)] for _ in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    tokenizer = ROOT / "data" / "sample" / "tokenizer"
    data = ("--training_dir", folder / "rows.jsonl", "--tokenizer_name_or_dir", tokenizer)
    masks = {mask: ("--document_mask", mask) for mask in (0, 1)}
    return data, {mask: train(folder / str(mask), *FP32, *STEPS, *masks[mask], data=data, **HIDDEN) for mask in masks}


@pytest.mark.parametrize("words", [[], ["--compile", 1, *SELECTIVE]])
def test_documents_are_kept_apart_as_on_a_cpu(words, documents, tmp_path):
    data, expected = documents
    found = train(tmp_path / "run", *FP32, *STEPS, "--document_mask", 1, *words, data=data)
    assert_close(found, expected[1], 1e-4)
    assert all(abs(one["loss"] - two["loss"]) > 1e-4 for one, two in zip(found, expected[0], strict=True))


def test_resume_from_an_asynchronous_checkpoint(tmp_path):
    words = ["--lr_decay_iters", 8, "--checkpoint_type", "async_sharded"]
    whole = train(tmp_path / "whole", *words, "--max_steps", 8)
    train(tmp_path / "parts", *words, "--max_steps", 4, "--checkpoint_freq", 2)
    parts = train(tmp_path / "parts", *words, "--max_steps", 8, "--resume_from_checkpoint", "latest")
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]


WATCHED = """
import sys
import torch
from smp.train import trainer
from smp.train.__main__ import main

step, calls = trainer.train_step, []

def watched(*args, **kwargs):
    calls.append(1)
    torch.cuda.set_sync_debug_mode("error" if 3 <= len(calls) <= 5 else "default")
    return step(*args, **kwargs)

trainer.train_step = watched
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [[], ["--compile", 1, *SELECTIVE]])
def test_the_host_never_waits_in_steady_state(words, tmp_path):
    """Steps 3 to 5, with what is between them: batch, accumulation, update, agreement."""
    options = ["--model", "llama_tiny", *SYNTHETIC, "--output_dir", tmp_path / "run", "--logging_freq", 100]
    options += ["--max_steps", 7, "--gradient_accumulation_steps", 2, *words]
    run(["-c", WATCHED, *options])


def test_one_visible_gpu_of_a_host_of_eight_ranks():
    device = torch.device("cuda", torch.cuda.current_device())
    assert 0 < available_memory(device, local_world_size=8) <= torch.cuda.get_device_properties(device).total_memory
