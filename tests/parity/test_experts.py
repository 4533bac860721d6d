"""Mixtures of experts at every layout are trained like the plain single-process Hugging Face model."""

from __future__ import annotations

import pytest
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn

from smp.models.registry import family_of
from tests import experts
from tests.distributed import run_distributed
from tests.model_checks import in_double
from tests.reference import Layout, reference_trajectory, relative, train_parallel

STEPS = 3
BESIDE = ["mixtral", "qwen3_moe", "glm4_moe"]  # that transformers has a tensor-parallel plan for
TWO = [Layout("full_shard", ep=2, checkpointing=True)]
FOUR = [
    Layout("full_shard", ep=2),
    Layout("full_shard", ep=4, accumulation=2, checkpointing=True, mode="selective"),
    Layout("hybrid_shard", 2, ep=2, checkpointing=True),
]

OTHERS = [
    Layout("full_shard", cp=2, ep=2, checkpointing=True),
    Layout("full_shard", tp=2, ep=2, checkpointing=True),
    Layout("hybrid_shard", 1, tp=2, ep=2),  # replicas
    Layout("full_shard", tp=2, ep=4),
    Layout("full_shard", tp=4, checkpointing=True, mode="selective"),
]


def check(kind: str, layouts: list[Layout]) -> None:
    model = experts.build(kind)
    family_of(model.config)  # derived in fp32, as always
    with in_double():  # routers compute in fp32, which would round a last digit either way
        _check(model, kind, layouts)


def _check(model: nn.Module, kind: str, layouts: list[Layout]) -> None:
    expected = reference_trajectory(model, STEPS)
    for layout in layouts:
        for step, (loss, norm, gradients) in enumerate(train_parallel(model, layout, STEPS)):
            assert abs(loss - expected.losses[step]) <= 1e-9 * expected.losses[step], (kind, layout, step)
            assert abs(norm - expected.norms[step]) <= 1e-9 * expected.norms[step], (kind, layout, step)
            for name, gradient in gradients.items() if step == 0 else ():
                wrong = relative(gradient - expected.gradients[name], expected.gradients[name])
                assert wrong <= 1e-9, (kind, layout, name, wrong)
            assert step or gradients.keys() == expected.gradients.keys()


@pytest.mark.parametrize("kind", [*experts.KINDS, "llama4_text"])
def test_two_ranks_train_like_one_process(kind):
    run_distributed(check, kind, TWO, world_size=2)


@pytest.mark.parametrize("kind", BESIDE)
def test_tensor_and_context_parallel_ranks_train_like_one_process(kind):
    run_distributed(check, kind, OTHERS, world_size=4)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_four_ranks_train_like_one_process(kind):
    run_distributed(check, kind, FOUR, world_size=4)
