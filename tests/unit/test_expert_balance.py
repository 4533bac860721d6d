"""Balance of experts: what is refused, in one sentence each."""

from __future__ import annotations

import json
import re

import pytest
import torch

from smp.errors import ConfigError
from smp.train.checked_job import _needs_of_settings
from tests import experts
from tests.flags import SYNTHETIC, parse, plan_of
from tests.job import LLAMA, run_job

ACCUMULATED = ["--gradient_accumulation_steps", 2]
CASES = {
    "aux_loss over micro-batches": (
        "mixtral", ["--moe_load_balancing", "aux_loss", *ACCUMULATED], "2 forward passes in a step.*balancing sequence"
    ),
    "a bias that the export would lose": ("mixtral", ["--moe_load_balancing", "bias"], "lose it: use.*sequence"),
    "no experts": (None, ["--moe_load_balancing", "sequence"], "'llama' has no experts.*leave it out"),
    "an unknown balance": ("mixtral", ["--moe_load_balancing", "even"], "takes auto, none, .*, got 'even'"),
    "a factor without a loss": ("mixtral", ["--moe_aux_loss_coeff", 0.1], "only with --moe_load_balancing sequence or"),
    "a rate without a bias": ("mixtral", ["--moe_bias_update_rate", 0.1], "only with --moe_load_balancing bias: add"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused_by_one_sentence(case, tmp_path):
    kind, words, sentence = CASES[case]
    if kind is not None:
        experts.config_of(kind).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=sentence) as refused:
        plan_of(words, tmp_path, model=LLAMA if kind is None else ["--model", tmp_path / "model"])
    assert len(refused.value.problems) == 1


def test_pairs_have_no_loss_of_tokens():
    words = ["--dpo", 1, "--moe_z_loss_coeff", 0.1]
    found = _needs_of_settings(parse([*LLAMA, *SYNTHETIC, *words]), torch.device("cpu"))
    assert any(re.search("moe_z_loss_coeff 0.1 is of tokens.*balancing bias or none", each) for each in found)


def test_a_job_logs_the_tokens_of_each_expert(tmp_path):
    experts.config_of("mixtral").save_pretrained(tmp_path / "model")
    words = ["--model", tmp_path / "model", *SYNTHETIC, "--max_steps", 2, "--max_context_width", 16]
    run_job(
        *words, "--logging_freq", 1, "--output_dir", tmp_path / "run", "--moe_load_balancing", "sequence"
    ).succeeded()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        tokens = line["experts/tokens"]
        assert len(tokens) == 3 and all(len(layer) == experts.EXPERTS for layer in tokens)
        assert {sum(layer) for layer in tokens} == {2 * 16 * 2}  # samples, tokens and experts of each
        assert line["experts/busiest_share"] == pytest.approx(max(map(max, tokens)) / 64)
        assert 0 < line["experts/entropy"] <= 1
