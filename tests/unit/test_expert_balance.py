"""Balance of experts: what is refused, in one sentence each."""

from __future__ import annotations

import json
import re

import pytest
import torch

from smp.config import Settings
from smp.errors import ConfigError
from smp.mesh import lay_out
from smp.models.experts import expert_modules
from smp.models.registry import family_of
from smp.parallel.experts.balance import router_of
from smp.parallel.experts.config import ExpertsConfig
from smp.parallel.experts.selection import CHOOSE, by_position, replace, sinkhorn
from smp.parallel.parallelize import find_problems
from smp.parallel.technique import Setup
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


def test_selections_over_a_sequence_refuse_to_split_it():
    config, settings = experts.config_of("mixtral"), Settings((ExpertsConfig(moe_load_balancing="sinkhorn"),))
    (sentence,) = find_problems(config, Setup(family_of(config), lay_out(1, 2, cp=2), settings))
    assert re.search("sinkhorn.*--context_parallel_degree 2 splits: use --moe_load_balancing sequence", sentence)


def test_pairs_have_no_loss_of_tokens():
    words = ["--dpo", 1, "--moe_z_loss_coeff", 0.1]
    found = _needs_of_settings(parse([*LLAMA, *SYNTHETIC, *words]), torch.device("cpu"))
    assert any(re.search("moe_z_loss_coeff 0.1 is of tokens.*balancing bias or none", each) for each in found)


def test_a_job_logs_the_tokens_of_each_expert(tmp_path):
    experts.config_of("mixtral").save_pretrained(tmp_path / "model")
    words = ["--model", tmp_path / "model", *SYNTHETIC, "--max_steps", 2, "--max_context_width", 16]
    words += ["--logging_freq", 1, "--moe_load_balancing", "sequence", "--output_dir", tmp_path / "run"]
    run_job(*words).succeeded()
    log = (tmp_path / "run/logs/rank0.log").read_text()
    assert "total parameters: 126944 (127 K), of which 44000 (44 K) are active for a token\n" in log
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        tokens = line["experts/tokens"]
        assert len(tokens) == 3 and all(len(layer) == experts.EXPERTS for layer in tokens)
        assert {sum(layer) for layer in tokens} == {2 * 16 * 2}  # samples, tokens and experts of each
        assert line["experts/busiest_share"] == pytest.approx(max(map(max, tokens)) / 64)
        assert 0 < line["experts/entropy"] <= 1


def test_sinkhorn_normalises_each_sequence_by_itself():
    logits = torch.randn(3, 16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = sinkhorn(torch.stack([logits[0], 5 * logits[1], logits[2] / 9]))
    torch.testing.assert_close(found[1:2], sinkhorn(5 * logits[1:2]), rtol=0, atol=0)
    assert found.sum(1) == pytest.approx(torch.full((3, 4), 0.25), abs=1e-3)


def test_a_token_has_the_experts_of_its_position():
    assert by_position(torch.zeros(2, 3, 4), 2).tolist() == [[[0, 1], [1, 2], [2, 3]]] * 2


@pytest.mark.parametrize("kind", experts.KINDS)
@pytest.mark.parametrize("method", CHOOSE)
def test_every_router_weighs_what_is_chosen_for_it(kind, method):
    model = experts.build(kind, torch.float32).train()
    path, module = expert_modules(model)[0]
    router = router_of(model.get_submodule(path.rpartition(".")[0]), module)
    hidden = torch.randn(12, 32)
    own_logits, own_weights, own = router(hidden)
    replace(router, lambda logits, top: own.view(2, 6, -1), experts.EXPERTS, lambda: 2)
    logits, weights, index = router(hidden)
    assert torch.equal(logits, own_logits) and torch.equal(weights, own_weights) and torch.equal(index, own)
    del router.forward
    replace(router, CHOOSE[method], experts.EXPERTS, lambda: 2)
    assert not torch.equal(router(hidden)[2], own)
    assert torch.equal(router.eval()(hidden)[2], own)
