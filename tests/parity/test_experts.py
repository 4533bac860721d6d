"""Mixtures of experts at every layout are trained like the plain single-process Hugging Face model.

``make test`` has each type and each layout, ``make test-slow`` each type at each layout, also with a balance of the
experts, and with all tokens sent to one of them.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn

from smp.models.registry import family_of
from smp.parallel.experts.config import ExpertsConfig
from tests import experts
from tests.distributed import run_distributed
from tests.model_checks import in_double
from tests.parity.test_expert_balance import CASES, SIGMOID, loss_with, loss_with_biases
from tests.reference import Layout, Trajectory, reference_trajectory, relative, train_parallel

STEPS = 3
BESIDE = ["mixtral", "qwen3_moe", "glm4_moe"]  # that transformers has a tensor-parallel plan for
TWO = [Layout("full_shard", ep=2, checkpointing=True)]
FOUR = [
    Layout("full_shard", ep=2),
    Layout("full_shard", ep=4, accumulation=2, checkpointing=True, mode="selective"),
    Layout("hybrid_shard", 2, ep=2, checkpointing=True),
]
CROSSED = [
    Layout("full_shard", cp=2, ep=2, checkpointing=True),
    Layout("full_shard", tp=2, ep=2, checkpointing=True),
    Layout("hybrid_shard", 1, tp=2, ep=2),  # replicas
    Layout("full_shard", tp=2, ep=4, accumulation=2),
    Layout("full_shard", cp=2, ep=4, accumulation=2, checkpointing=True, mode="selective"),
]
# Experts beside tensor parallelism that are not split themselves.
TENSOR = Layout("full_shard", tp=4, checkpointing=True, mode="selective")
# Of a type, layouts that `make test` has.
SOME = {
    "mixtral": [FOUR[0], CROSSED[0], CROSSED[3]],
    "qwen3_moe": [FOUR[1], CROSSED[1], TENSOR],
    "glm4_moe": [FOUR[2], CROSSED[2], CROSSED[4]],
    "gpt_oss": [FOUR[1]],
    "deepseek_v3": [FOUR[0]],
    "qwen3_5_moe_text": [FOUR[2]],
    "nemotron_h": [FOUR[1]],
}


def check(kind: str, layouts: list[Layout]) -> None:
    model = experts.build(kind)
    family_of(model.config)  # derived in fp32, as always
    with in_double():  # routers compute in fp32, which would round a last digit either way
        _check(model, kind, layouts)


def _check(
    model: nn.Module,
    kind: str,
    layouts: list[Layout],
    expected: Trajectory | None = None,
    config: ExpertsConfig | None = None,
) -> None:
    expected = expected or reference_trajectory(model, STEPS)
    more = () if config is None else (config,)
    for layout in layouts:
        for step, (loss, norm, gradients) in enumerate(train_parallel(model, layout, STEPS, more=more)):
            assert abs(loss - expected.losses[step]) <= 1e-9 * expected.losses[step], (kind, layout, step)
            assert abs(norm - expected.norms[step]) <= 1e-9 * expected.norms[step], (kind, layout, step)
            for name, gradient in gradients.items() if step == 0 else ():
                wrong = relative(gradient - expected.gradients[name], expected.gradients[name])
                assert wrong <= 1e-9, (kind, layout, name, wrong)
            assert step or gradients.keys() == expected.gradients.keys()


@contextlib.contextmanager
def all_sent_to(chosen: list[int]):
    """Let all routers choose these experts for each token."""
    topk = torch.topk

    def always(scores, k, *args, **kwargs):
        if scores.shape[-1] != experts.EXPERTS:
            return topk(scores, k, *args, **kwargs)
        index = torch.tensor(chosen * k)[:k].expand(*scores.shape[:-1], k)
        return scores.gather(-1, index), index

    with mock.patch("torch.topk", always):
        yield


def check_balance(kind: str, layouts: list[Layout], method: str, chosen: list[int] | None) -> None:
    model = experts.build(kind)
    family_of(model.config)
    with in_double(), contextlib.nullcontext() if chosen is None else all_sent_to(chosen):
        if method == "bias":
            config = ExpertsConfig(moe_load_balancing="bias", moe_bias_update_rate=0.05)
            expected = reference_trajectory(model, STEPS, loss_with_biases(0.05))
        else:
            config, extra = CASES[method]
            losses: list[float] = []  # without that of the balance, as a job logs them
            expected = reference_trajectory(model, STEPS, loss_with(kind, extra, losses))
            expected.losses = losses
        _check(model, kind, layouts, expected, config)


@pytest.mark.parametrize("kind", [*experts.KINDS, "llama4_text"])
def test_two_ranks_train_like_one_process(kind):
    run_distributed(check, kind, TWO, world_size=2)


@pytest.mark.parametrize("kind", experts.KINDS)
def test_four_ranks_train_like_one_process(kind):
    run_distributed(check, kind, SOME[kind], world_size=4)


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("glm4_moe", marks=pytest.mark.slow)])
def test_four_ranks_over_smddp_train_like_one_process(kind):
    layouts = [FOUR[0]] if kind == "mixtral" else layouts_of(kind)
    run_distributed(check, kind, layouts, world_size=4, backend="smddp")


def layouts_of(kind: str) -> list[Layout]:
    return [*FOUR, *(CROSSED if kind in BESIDE else [])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", experts.KINDS)
def test_every_type_at_every_layout(kind):
    others = [each for each in [*layouts_of(kind), *([TENSOR] if kind in BESIDE else [])] if each not in SOME[kind]]
    run_distributed(check, kind, others, world_size=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "chosen", "kind"),
    [
        *(("sequence", chosen, kind) for chosen in (None, [5]) for kind in experts.KINDS),
        *(("bias", None, kind) for kind in SIGMOID),
    ],
)
def test_every_type_at_every_layout_with_a_balance(method, chosen, kind):
    """Also with one expert for all tokens, which leaves all ranks but its own without any."""
    run_distributed(check_balance, kind, layouts_of(kind), method, chosen, world_size=4)
