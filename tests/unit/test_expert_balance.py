"""Balance of experts: what is refused, in one sentence each."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from smp.config import Settings
from smp.errors import ConfigError
from smp.mesh import Role, lay_out
from smp.models.experts import expert_modules
from smp.models.registry import family_of
from smp.parallel.experts import after_update, check_and_apply, extra_loss, metrics, problems
from smp.parallel.experts.balance import router_of
from smp.parallel.experts.config import ExpertsConfig
from smp.parallel.experts.selection import CHOOSE, by_position, replace, sinkhorn
from smp.parallel.experts.tokens import Tokens, find_tokens, told_row_tokens
from smp.parallel.technique import Setup
from smp.train.checked_job import _needs_of_settings
from tests import experts
from tests.flags import SYNTHETIC, parse, plan_of
from tests.job import LLAMA, run_job
from tests.zoo import tiny_config

ONE = Role(1)
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


def setup_of(config: Any, method: str) -> Setup:
    return Setup(family_of(config), lay_out(), Settings((ExpertsConfig(moe_load_balancing=method),)))


@pytest.mark.parametrize(
    ("kind", "found"),
    [("gemma4_text", {"balanced": "kind that is not known", "bias": "kind that is not known"}), ("lfm2_moe", {}),
     ("afmoe", {"bias": "no buffer for it"}), ("ernie4_5_moe", {"bias": "no buffer for it"}), ("minimax_m2", {})],
)  # fmt: skip
def test_routers_of_other_forms_are_balanced_or_refused(kind, found):
    config = tiny_config(kind)
    for method in ("balanced", "bias"):
        setup = setup_of(config, method)
        if method in found:
            (sentence,) = problems(config, setup)
            assert found[method] in sentence
            continue
        model = AutoModelForCausalLM.from_config(config).train()
        check_and_apply(model, setup)
        model(input_ids=torch.zeros(1, 5, dtype=torch.int64))
        assert extra_loss(model, setup) is None
        tokens = metrics(model, setup)["experts/tokens"]
        assert method == "bias" or tokens[0].tolist() == [1, 2, 2, 2, 2, 1, 0, 0]  # two of each token
        after_update(model, setup, torch.tensor(False))
        biases = [each for name, each in model.named_buffers() if name.endswith(("expert_bias", "correction_bias"))]
        assert method == "balanced" or (biases and all(bias.abs().max() > 0 for bias in biases))


def test_affinities_of_a_router_whose_function_is_a_module_are_normalised_sigmoids():
    pytest.importorskip("transformers.models.inkling2", reason="not in the oldest supported transformers")
    config = tiny_config("inkling2_text")
    model, setup, seen = AutoModelForCausalLM.from_config(config).train(), setup_of(config, "sequence"), []
    check_and_apply(model, setup)
    for module in model.modules():
        if type(module).__name__ == "Inkling2TopKRouter":
            module.register_forward_hook(lambda _, __, output: seen.append(output))
    model(input_ids=torch.arange(6).view(1, 6))
    expected = torch.zeros(())
    for logits, _, index in seen:
        shares = index.flatten().bincount(minlength=logits.shape[1]) / index.numel()
        scores = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
        expected = expected + 0.001 * logits.shape[1] * (shares * scores.sum(0)).sum()
    found = extra_loss(model, setup)
    assert seen and found.item() == pytest.approx(expected.item())


def test_a_step_that_is_left_out_changes_no_bias_and_its_tokens_are_not_counted_again():
    model = experts.build("glm4_moe", torch.float32).train()
    setup = setup_of(model.config, "bias")
    check_and_apply(model, setup)
    biases = [each for name, each in model.named_buffers() if name.endswith("correction_bias")]
    before, ids = [each.clone() for each in biases], torch.arange(12).view(2, 6)
    for skipped in (True, False):
        model(input_ids=ids)
        extra_loss(model, setup)
        assert set(metrics(model, setup)["experts/tokens"].sum(1).tolist()) == {2 * ids.numel()}
        after_update(model, setup, torch.tensor(skipped))
        assert [torch.equal(*each) for each in zip(biases, before, strict=True)] == [skipped] * len(before)


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


def tokens_of(batch: int, length: int, tp: Role = ONE) -> Tokens:
    return find_tokens(torch.zeros(batch, length), None, ONE, tp)


def test_sinkhorn_normalises_each_sequence_by_itself():
    logits = torch.randn(3, 16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    three = torch.stack([logits[0], 5 * logits[1], logits[2] / 9])
    found = sinkhorn(three.view(-1, 4), tokens_of(3, 16)).view(3, 16, 4)
    torch.testing.assert_close(found[1], sinkhorn(three[1], tokens_of(1, 16)), rtol=0, atol=0)
    assert found.sum(1) == pytest.approx(torch.full((3, 4), 0.25), abs=1e-3)


def test_a_token_has_the_experts_of_its_position():
    assert by_position(torch.zeros(6, 4), 2, tokens_of(2, 3)).tolist() == [[0, 1], [1, 2], [2, 3]] * 2


def test_tensor_parallel_ranks_have_consecutive_tokens_of_the_flattened_batch():
    """Of 3 sequences of 3 tokens, and one of padding."""
    ranks = [tokens_of(3, 3, Role(2, rank)) for rank in range(2)]
    assert [each.sequences.tolist() for each in ranks] == [[0, 0, 0, 0, 1, 1], [1, 1, 2, 2, 2, 2]]
    assert torch.cat([each.positions for each in ranks]).tolist() == [0, 1, 2, 3] * 3
    assert torch.cat([each.counted for each in ranks]).tolist() == [True, True, True, False] * 3
    values = torch.arange(6.0).unsqueeze(1)
    assert [each.add_up(values).flatten().tolist() for each in ranks] == [[3, 9, 0], [0, 0, 9]]
    assert tokens_of(3, 4, Role(2, 1)).counted is None


@pytest.mark.parametrize("kind", experts.KINDS)
@pytest.mark.parametrize("method", CHOOSE)
def test_every_router_weighs_what_is_chosen_for_it(kind, method):
    model = experts.build(kind, torch.float32).train()
    path, module = expert_modules(model)[0]
    router = router_of(model.get_submodule(path.rpartition(".")[0]), module)
    hidden = torch.randn(12, 32)
    own_logits, own_weights, own = router(hidden)
    replace(router, lambda logits, top, tokens: own, experts.EXPERTS, lambda: tokens_of(2, 6))
    logits, weights, index = router(hidden)
    assert torch.equal(logits, own_logits) and torch.equal(weights, own_weights) and torch.equal(index, own)
    del router.forward
    replace(router, CHOOSE[method], experts.EXPERTS, lambda: tokens_of(2, 6))
    assert not torch.equal(router(hidden)[2], own)
    assert torch.equal(router.eval()(hidden)[2], own)


def test_padding_of_rows_is_not_counted():
    ids = torch.zeros(2, 4, dtype=torch.long)
    with told_row_tokens(torch.tensor([3, 0])):
        tokens = find_tokens(ids, None, Role(1), Role(1))
    assert tokens.counted.tolist() == [True, True, True, False, False, False, False, False]
    assert tokens.add_up(torch.ones(8, 1)).tolist() == [[3.0], [0.0]]
    assert find_tokens(ids, None, Role(1), Role(1)).counted is None
