"""What a job exports loads in lm-evaluation-harness, as a model and as an adapter beside its base."""

from __future__ import annotations

import pathlib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.job import LLAMA, run_job

huggingface = pytest.importorskip("lm_eval.models.huggingface")
SAMPLE = pathlib.Path(__file__).parents[2] / "data" / "sample"
TEXTS = [("Emma Woodhouse,", " handsome, clever"), ("It is", " a truth")]
WORDS = [
    "--training_dir", SAMPLE / "validation.txt", "--tokenizer_name_or_dir", SAMPLE / "tokenizer",
    "--max_context_width", 64, "--max_steps", 2, "--lr", 0.05, "--save_final_model", 1,
]  # fmt: skip


def scores(folder, **options):
    from lm_eval.api.instance import Instance

    model = huggingface.HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2, **options)
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in TEXTS]
    return [score for score, _ in model.loglikelihood(asked, disable_tqdm=True)]


def by_hand(folder):
    """The log-probability of each continuation."""
    model, tokenizer, found = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), []
    for context, continuation in TEXTS:
        ids = torch.tensor([tokenizer(context + continuation, add_special_tokens=False).input_ids])
        given = len(tokenizer(context, add_special_tokens=False).input_ids)
        with torch.no_grad():
            logits = model(ids).logits[0, given - 1 : -1].log_softmax(-1)
        found.append(logits.gather(-1, ids[0, given:, None]).sum().item())
    return found


def test_what_is_exported_is_evaluated(tmp_path):
    sizes = [*LLAMA, "--vocab_size", 2048]
    common = [*WORDS, "--data_cache_dir", tmp_path / "cache"]
    run_job(*sizes, *common, "--output_dir", tmp_path / "run", world_size=1).succeeded()
    base = tmp_path / "run" / "final"
    adapters = ["--hf_pretrained_model_name_or_dir", base, "--lora_rank", 2, *common, "--output_dir"]
    run_job(*adapters, tmp_path / "lora", world_size=1).succeeded()
    run_job(*adapters, tmp_path / "merged", "--save_merged_model", 1, world_size=1).succeeded()
    plain, merged = scores(base), scores(tmp_path / "merged" / "final")
    assert plain == pytest.approx(by_hand(base), rel=1e-5)
    assert merged == pytest.approx(by_hand(tmp_path / "merged" / "final"), rel=1e-5) and merged != plain
    assert scores(base, peft=str(tmp_path / "lora" / "final")) == pytest.approx(merged, rel=1e-4)
