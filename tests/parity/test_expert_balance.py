"""Losses, bias, counts and selections of the balance of experts are those of their formulas at every layout.

Sequences have 11 tokens, which neither context nor tensor-parallel ranks divide: padding counts nowhere.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn

from smp.models.registry import family_of
from smp.parallel.experts.config import ExpertsConfig
from smp.parallel.technique import metrics
from tests import experts, reference
from tests.distributed import run_distributed
from tests.flags import SYNTHETIC, parse
from tests.job import LLAMA
from tests.model_checks import in_double
from tests.reference import (
    ROWS,
    Layout,
    Trajectory,
    global_batch,
    mean_loss,
    reference_trajectory,
    relative,
    train_parallel,
)

STEPS, LENGTH = 2, 11
SIGMOID = ("deepseek_v3", "glm4_moe", "nemotron_h")  # their routers' scores, to which a bias is added


@pytest.fixture(autouse=True)
def length(monkeypatch):
    monkeypatch.setattr(reference, "LENGTH", LENGTH)  # of the ranks, too, which are forked


def valid(step: int) -> int:
    return int((global_batch(step)[1][:, 1:] != -100).sum())


def routers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def routed(model: nn.Module, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The plain model's loss; logits and choices of its routers, ``(layers, rows, length, experts)``."""
    seen: list[Any] = []
    hooks = [each.register_forward_hook(lambda *a: seen.append(a[-1])) for each in routers(model)]
    loss = mean_loss(model, step)
    for hook in hooks:
        hook.remove()
    logits = torch.stack([logits.view(ROWS, LENGTH, -1) for logits, _, _ in seen])
    chosen = torch.stack([F.one_hot(index.view(ROWS, LENGTH, -1), experts.EXPERTS).sum(-2) for *_, index in seen])
    return loss, logits, chosen


def loss_with(kind: str, extra: Any, plain: list[float] | None = None) -> Any:
    """The plain model's loss with another one; ``plain`` receives that without it."""

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        loss, logits, chosen = routed(model, step)
        if plain is not None:
            plain.append(loss.item())
        scores = logits.sigmoid() if kind in SIGMOID else logits.softmax(-1)
        return loss + extra(logits, scores / scores.sum(-1, keepdim=True), chosen.double()) / valid(step)

    return loss_of


def loss_with_biases(rate: float) -> Any:
    """The plain model's loss, with biases that change after each step by the choices of all of its tokens."""
    last: list[torch.Tensor] = []

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        for router, counts in zip(routers(model), last, strict=bool(step)):
            router.e_score_correction_bias += rate * (counts.mean() - counts).sign()
        loss, _, chosen = routed(model, step)
        last[:] = chosen.sum((1, 2)).double()
        return loss

    return loss_of


def sequence(_: Any, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3's: the share of choices times experts, times the mean score, of each sequence; times its tokens."""
    f = chosen.mean(2) * experts.EXPERTS / chosen[0, 0, 0].sum()
    return 0.5 * LENGTH * (f * scores.mean(2)).sum()


def z_loss(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return 0.5 * logits.logsumexp(-1).square().sum()


def aux_loss(_: Any, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Hugging Face's, of all layers' tokens, times the tokens of the batch."""
    f, p = (each.flatten(0, 2).mean(0) for each in (chosen, scores))
    return 0.5 * ROWS * LENGTH * experts.EXPERTS * (f * p).sum()


CASES = {
    "sequence": (ExpertsConfig(moe_load_balancing="sequence", moe_aux_loss_coeff=0.5), sequence),
    "aux_loss": (ExpertsConfig(moe_load_balancing="aux_loss", moe_aux_loss_coeff=0.5), aux_loss),
    "z": (ExpertsConfig(moe_z_loss_coeff=0.5), z_loss),
}
MANY = [Layout("full_shard", ep=2, checkpointing=True), Layout("full_shard", accumulation=2, ep=2, mode="selective")]
# Tokens of all sequences are split, or none are.
TENSOR = [Layout("full_shard", tp=2, ep=2, checkpointing=True), Layout("full_shard", tp=2, sequence=False)]
SPLIT = [Layout("full_shard", cp=2, ep=2), *TENSOR]
LAYOUTS = {"sequence": [*MANY, *SPLIT], "aux_loss": [MANY[0], *SPLIT], "z": [*MANY, *SPLIT]}


def train(model: nn.Module, layout: Layout, config: ExpertsConfig, expected: Trajectory) -> None:
    """Compare norms and gradients with the reference's, and losses where nothing is added to those of the tokens."""
    for step, (loss, norm, gradients) in enumerate(train_parallel(model, layout, STEPS, more=(config,))):
        assert config.adds_loss or abs(loss - expected.losses[step]) <= 1e-9 * loss, (layout, step)
        assert abs(norm - expected.norms[step]) <= 1e-9 * expected.norms[step], (layout, step, norm, expected.norms)
        for name, gradient in gradients.items() if step == 0 else ():
            wrong = relative(gradient - expected.gradients[name], expected.gradients[name])
            assert wrong <= 1e-9, (layout, name, wrong)


def check(kind: str, names: list[str], layouts: dict[str, list[Layout]]) -> None:
    model = experts.build(kind)
    family_of(model.config)  # derived in fp32, as always
    with in_double():
        for name in names:
            config, extra = CASES[name]
            expected = reference_trajectory(model, STEPS, loss_with(kind, extra))
            for layout in layouts[name]:
                train(model, layout, config, expected)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_losses_are_those_of_the_formulas_at_two_ranks(kind):
    words = {"sequence": ["--moe_load_balancing", "sequence", "--moe_aux_loss_coeff", 0.5],
             "z": ["--moe_z_loss_coeff", 0.5]}  # fmt: skip
    for name, given in words.items():
        assert parse([*LLAMA, *SYNTHETIC, *given]).experts == CASES[name][0]
    split = kind == "mixtral"  # latent attention is not split
    layouts = {name: [each for each in LAYOUTS[name] if split or each not in SPLIT] for name in CASES}
    run_distributed(check, kind, list(CASES), layouts, world_size=2)


def after_each_step(kind: str, layout: Layout, config: ExpertsConfig) -> tuple[list[Any], list[float]]:
    """Counts ``(layers, experts)`` and biases after each step; and the norms of gradients."""
    seen: list[nn.Module] = []
    found, norms = [], []
    for _, norm, _ in train_parallel(experts.build(kind), layout, STEPS, seen=seen, more=(config,)):
        biases = [buffer.tolist() for name, buffer in seen[0].named_buffers() if name.endswith("correction_bias")]
        found.append([metrics(seen[0])["experts/tokens"].tolist(), biases])
        norms.append(norm)
    return found, norms


def same_as(kind: str, path: pathlib.Path, layouts: list[Layout], config: ExpertsConfig) -> None:
    expected, expected_norms = json.loads(path.read_text())
    family_of(experts.config_of(kind))  # derived in fp32, as always
    with in_double():
        for layout in layouts:
            found, norms = after_each_step(kind, layout, config)
            assert found == expected, layout
            assert norms == pytest.approx(expected_norms, rel=1e-9), layout


def write_alone(kind: str, path: pathlib.Path, config: ExpertsConfig) -> None:
    with in_double():
        path.write_text(json.dumps(after_each_step(kind, Layout("full_shard"), config)))


def same_everywhere(kind: str, folder: pathlib.Path, layouts: list[Layout], config: ExpertsConfig) -> list[Any]:
    """Compare two ranks with one; returns the counts and biases after each step."""
    run_distributed(write_alone, kind, folder / "alone", config, world_size=1)
    run_distributed(same_as, kind, folder / "alone", layouts, config, world_size=2)
    return json.loads((folder / "alone").read_text())[0]


def test_biases_have_the_same_bits_at_every_layout(tmp_path):
    words = ["--moe_load_balancing", "bias", "--moe_bias_update_rate", 0.01]
    config = parse([*LLAMA, *SYNTHETIC, *words]).experts
    counts, biases = same_everywhere("glm4_moe", tmp_path, [*MANY, *SPLIT], config)[0]
    with in_double():
        model = experts.build("glm4_moe")
    before = [each.tolist() for name, each in model.named_buffers() if "correction_bias" in name]
    for old, new, tokens in zip(before, biases, counts, strict=True):
        mean = sum(tokens) / len(tokens)
        assert mean * len(tokens) == ROWS * LENGTH * 2
        changes = [0.01 * ((mean > count) - (mean < count)) for count in tokens]
        assert new == pytest.approx([each + change for each, change in zip(old, changes, strict=True)], abs=1e-15)
        assert 0.01 in changes and -0.01 in changes


def sinkhorn(scores: torch.Tensor) -> torch.Tensor:
    """The experts of the tokens of a sequence, ``(tokens, experts)``: rows and columns are normalised by turns."""
    for _ in range(32):
        scores = scores / scores.sum(1, keepdim=True)
        scores = scores / scores.sum(0)
    return (scores / scores.sum(1, keepdim=True)).topk(2).indices


def balanced(scores: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[token, token + 1] for token in range(len(scores))]) % experts.EXPERTS


def chosen_by(choose: Any) -> Any:
    """The plain model's loss, whose routers choose otherwise, each sequence by itself."""
    topk = torch.topk

    def chosen(scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if scores.shape != (ROWS * LENGTH, experts.EXPERTS):
            return topk(scores, *args, **kwargs)
        index = torch.cat([choose(each) for each in scores.detach().view(ROWS, LENGTH, -1)])
        return scores.gather(1, index), index

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        with mock.patch("torch.topk", chosen):
            return mean_loss(model, step)

    return loss_of


def choose_alike(kind: str, method: str, layouts: list[Layout]) -> None:
    model = experts.build(kind)
    family_of(model.config)  # derived in fp32, as always
    with in_double():
        expected = reference_trajectory(model, STEPS, chosen_by({"sinkhorn": sinkhorn, "balanced": balanced}[method]))
        for layout in layouts:
            train(model, layout, ExpertsConfig(moe_load_balancing=method), expected)


@pytest.mark.parametrize(
    ("kind", "method", "layouts"),
    [("mixtral", "sinkhorn", [*MANY, *SPLIT]), ("mixtral", "balanced", SPLIT), ("deepseek_v3", "balanced", MANY)],
)
def test_another_selection_is_the_same_at_every_layout(kind, method, layouts):
    run_distributed(choose_alike, kind, method, layouts, world_size=2)


def test_a_selection_looks_at_sequences_that_context_and_tensor_parallel_ranks_share():
    run_distributed(choose_alike, "mixtral", "sinkhorn", [Layout("full_shard", cp=2, tp=2, ep=4)], world_size=4)


def check_bf16() -> None:
    model, rate, seen = experts.build("glm4_moe", torch.float32), 0.01, []
    config = ExpertsConfig(moe_load_balancing="bias", moe_bias_update_rate=rate)
    before = [router.e_score_correction_bias.clone() for router in routers(model)]
    layout = Layout("full_shard", ep=2, dtype=torch.bfloat16, checkpointing=True)
    assert len(list(train_parallel(model, layout, 1, seen=seen, more=(config,)))) == 1
    counts = metrics(seen[0])["experts/tokens"]
    assert counts.dtype == torch.int64 and counts.sum(1).tolist() == [ROWS * LENGTH * 2] * len(before)
    for router, old, tokens in zip(routers(seen[0]), before, counts, strict=True):
        new, direction = router.e_score_correction_bias, (tokens.sum() - len(tokens) * tokens).sign()
        assert new.dtype == torch.float32 and torch.equal(new, old.add(direction.float(), alpha=rate))


def test_biases_and_counts_are_not_rounded_to_bf16():
    run_distributed(check_bf16, world_size=2)
