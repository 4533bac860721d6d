"""The job on one GPU: ``pytest tests/gpu``. Not run where there is none."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = pathlib.Path(__file__).parent.parent.parent


def train(run_dir: pathlib.Path, *words: object) -> list[dict]:
    command = [sys.executable, "train_lib.py", "--model", "llama_tiny", "--use_synthetic_data", "1"]
    command += ["--output_dir", str(run_dir), *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


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


@pytest.mark.parametrize("words", [["--compile", 1], ["--activation_checkpointing", 0], ["--bf16", 0]])
def test_variants_train(words, tmp_path):
    lines = train(tmp_path / "run", *words, "--max_steps", 3)
    assert len(lines) == 3 and all(line["loss"] > 0 for line in lines)
