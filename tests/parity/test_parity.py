"""Every layout trains like the plain Hugging Face model: gradients and losses."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers  # noqa: F401  imported before the ranks are forked

from tests.distributed import run_distributed
from tests.reference import Layout, assert_parity, build_reference, reference_trajectory, train_parallel

STEPS = 4
MODELS = ["llama_gqa", "llama_tied", "mistral", "gpt_neox", "gpt_neox_tied"]
LAYOUTS = {
    1: [Layout("full_shard"), Layout("no_shard", accumulation=4)],
    2: [
        Layout("full_shard", checkpointing=True),
        Layout("full_shard", accumulation=4),
        Layout("shard_grad_op", accumulation=4, checkpointing=True),
        Layout("no_shard"),
        Layout("no_shard", accumulation=4, defer=True),
        # The first size makes units of attention and MLP, the second of the base model (blocks, where tied: none).
        Layout("hybrid_shard", 2, wrap="size_based_auto_wrap_policy", min_unit=3_000, checkpointing=True),
        Layout("full_shard", wrap="size_based_auto_wrap_policy", min_unit=10_000),
    ],
    4: [
        Layout("full_shard", accumulation=4),
        Layout("full_shard", shared=False),
        Layout("shard_grad_op"),
        Layout("no_shard", accumulation=2),
        Layout("hybrid_shard", 2, checkpointing=True),
        Layout("hybrid_shard", 2, accumulation=2),
        Layout("_hybrid_shard_zero2", 2, accumulation=2, defer=True),
    ],
}


def _check(references, tolerance, layouts):
    for reference, expected in references:
        for layout in layouts:
            assert_parity(reference, expected, layout, tolerance)


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [
        (1, "smddp"),
        pytest.param(2, "smddp", marks=pytest.mark.full),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((4, "smddp"), (2, "gloo"))),
    ],
)
def test_fp64_gradients_and_losses_equal_hugging_face(world_size, backend):
    references = [build_reference(name, torch.float64) for name in MODELS]
    pairs = [(model, reference_trajectory(model, STEPS)) for model in references]
    run_distributed(_check, pairs, 1e-9, LAYOUTS[world_size], world_size=world_size, backend=backend)


def _check_losses(references, layouts):
    for number, (reference, expected) in enumerate(references):
        for layout in layouts[number :: len(references)]:  # all of them with every model: in fp64
            for step, (loss, _, _) in enumerate(train_parallel(reference, layout, STEPS)):
                assert abs(loss - expected.losses[step]) <= 1e-5 * expected.losses[step], (layout, step, loss)


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [(1, "gloo"), (2, "smddp"), *(pytest.param(4, backend, marks=pytest.mark.slow) for backend in ("gloo", "smddp"))],
)
def test_fp32_losses_equal_hugging_face(world_size, backend):
    references = [build_reference(name, torch.float32) for name in ("llama_gqa", "gpt_neox")]
    pairs = [(model, reference_trajectory(model, STEPS)) for model in references]
    run_distributed(_check_losses, pairs, LAYOUTS[world_size], world_size=world_size, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_of_every_model(name, world_size):
    strategies = [("no_shard", 0), ("shard_grad_op", 0), ("full_shard", 0)]
    if world_size == 4:
        strategies += [("hybrid_shard", 2), ("_hybrid_shard_zero2", 2)]
    layouts = [
        Layout(strategy, degree, accumulation, checkpointing, defer)
        for strategy, degree in strategies
        for accumulation in (1, 4)
        for checkpointing in (False, True)
        for defer in (False, True)
    ]
    reference = build_reference(name, torch.float64)
    run_distributed(_check, [(reference, reference_trajectory(reference, STEPS))], 1e-9, layouts, world_size=world_size)


def test_parity_notices_a_wrong_weight():
    reference = build_reference("llama_gqa", torch.float64)
    expected = reference_trajectory(reference, STEPS)
    spoilt = copy.deepcopy(reference)
    with torch.no_grad():
        spoilt.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    with pytest.raises(AssertionError):
        run_distributed(_check, [(spoilt, expected)], 1e-9, [Layout("full_shard")], world_size=2)
