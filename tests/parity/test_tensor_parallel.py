"""Tensor-parallel training equals the plain Hugging Face model: gradients, norms and losses."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import transformers  # noqa: F401  imported before the ranks are forked
from torch.autograd import Function

from tests.distributed import run_distributed
from tests.reference import Layout, assert_parity, build_reference, reference_trajectory, relative, train_parallel

STEPS = 4
MODELS = ["llama_gqa", "llama_tied", "mistral", "gpt_neox", "gpt_neox_tied"]
# bf16 keeps 8 bits; one process in bf16 is as far from fp32 as this.
BF16_LOSSES, BF16_GRADIENTS = 4e-3, 4e-2
# At four ranks three of each arrangement; one of each is for a model, so that it meets every way to exchange.
LAYOUTS = {
    2: [
        Layout("full_shard", tp=2),
        Layout("no_shard", tp=2, sequence=False, accumulation=2, checkpointing=True),
        Layout("full_shard", tp=2, sequence=False, defer=True),
        Layout("shard_grad_op", tp=2, save_gathered=True, accumulation=2, checkpointing=True, defer=True),
    ],
    4: [
        Layout("full_shard", tp=4, accumulation=2),
        Layout("full_shard", tp=4, sequence=False, checkpointing=True, defer=True),
        Layout("full_shard", tp=4, save_gathered=True),
        Layout("shard_grad_op", tp=2, save_gathered=True, checkpointing=True),
        Layout("full_shard", tp=2, accumulation=2, checkpointing=True),
        Layout("full_shard", tp=2, sequence=False, accumulation=2, defer=True),
        Layout("no_shard", tp=2, sequence=False),
        Layout("no_shard", tp=2, save_gathered=True, accumulation=2, defer=True),
        Layout("no_shard", tp=2, checkpointing=True),
    ],
    8: [
        Layout("hybrid_shard", 2, tp=2, accumulation=2),
        Layout("_hybrid_shard_zero2", 2, tp=2, sequence=False, checkpointing=True),
    ],
}


def trajectories(names, dtype, steps=STEPS):
    """Models of Hugging Face and how they train."""
    references = [build_reference(name, dtype) for name in names]
    return [(model, reference_trajectory(model, steps)) for model in references]


def _check_some(pairs, tolerance, layouts, every):
    for index, pair in enumerate(pairs):
        _check([pair], tolerance, layouts[index % every :: every])


def _check(references, tolerance, layouts):
    for reference, expected in references:
        for layout in layouts:
            assert_parity(reference, expected, layout, tolerance)


@pytest.mark.parametrize(
    ("world_size", "backend", "every"),
    [
        (2, "smddp", 2),
        pytest.param(4, "smddp", 3, marks=pytest.mark.slow),
        pytest.param(2, "gloo", 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.full
def test_fp64_gradients_and_losses_equal_hugging_face(world_size, backend, every):
    pairs = trajectories(MODELS, torch.float64)
    run_distributed(_check_some, pairs, 1e-9, LAYOUTS[world_size], every, world_size=world_size, backend=backend)


@pytest.mark.full
def test_fp64_three_dimensions_equal_hugging_face():
    run_distributed(_check, trajectories(["llama_gqa"], torch.float64), 1e-9, LAYOUTS[8], world_size=8)


def _check_losses(references, layouts, tolerance):
    for reference, expected in references:
        for layout in layouts:
            for step, (loss, _, _) in enumerate(train_parallel(reference, layout, STEPS)):
                assert abs(loss - expected.losses[step]) <= tolerance * expected.losses[step], (layout, step, loss)


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(2, ["llama_tied", "gpt_neox"]), pytest.param(4, ["llama_gqa", "gpt_neox"], marks=pytest.mark.slow)],
)
@pytest.mark.full
def test_fp32_losses_equal_hugging_face(world_size, names):
    layouts = LAYOUTS[world_size][::4]
    pairs = trajectories(names, torch.float32)
    run_distributed(_check_losses, pairs, layouts, 1e-5, world_size=world_size, backend="smddp")


def _check_bf16(references, layouts):
    for reference, expected in references:
        for layout in layouts:
            for step, (loss, _, gradients) in enumerate(train_parallel(reference, layout, STEPS)):
                assert abs(loss - expected.losses[step]) <= BF16_LOSSES * expected.losses[step], (layout, step, loss)
                if step == 0:
                    for name, gradient in gradients.items():
                        error = relative(gradient - expected.gradients[name], expected.gradients[name])
                        assert error <= BF16_GRADIENTS, (layout, name, error)


@pytest.mark.parametrize("world_size", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.full
def test_bf16_is_as_near_to_fp32_as_one_process_in_bf16(world_size):
    pairs = trajectories(MODELS, torch.float32)
    bf16 = torch.bfloat16
    split = [Layout("full_shard", tp=2, dtype=bf16), Layout("no_shard", tp=4, sequence=False, dtype=bf16)]
    layouts = [Layout("no_shard", dtype=bf16)] if world_size == 1 else split
    run_distributed(_check_bf16, pairs, layouts, world_size=world_size, backend="smddp")


class Unsummed(Function):
    """What ``SumGradients`` would be if it forgot to."""

    @staticmethod
    def forward(ctx, tp, *tensors):
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return None, *gradients


def test_parity_notices_gradients_that_are_not_summed(monkeypatch):
    pairs = trajectories(["llama_gqa"], torch.float64, 1)
    monkeypatch.setattr("smp.parallel.tensor.layers.SumGradients", Unsummed)
    with pytest.raises(AssertionError, match=r"abs\(norm - expected"):
        run_distributed(_check, pairs, 1e-9, [Layout("full_shard", tp=2)], world_size=2)


def _check_compiled(pairs, layouts):
    for layout in layouts:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        _check(pairs, 1e-9, [layout])
        counters = torch._dynamo.utils.counters
        # One for all blocks, of which there may be more than torch compiles anew.
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], (layout, counters)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.slow
def test_compiled_blocks_are_one_graph(checkpointing):
    # Llama's norms compute in fp32 at any dtype: they differ by its rounding once compiled.
    layout = Layout("full_shard", tp=2, checkpointing=checkpointing, compile=True)
    layouts = [layout, dataclasses.replace(layout, sequence=False)][checkpointing:]
    run_distributed(_check_compiled, trajectories(["gpt_neox"], torch.float64, 2), layouts, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tp", "strategy"), [(2, ""), (4, ""), (2, "full_shard"), (2, "no_shard")])
def test_every_layout_of_every_model(name, tp, strategy):
    exchanges = [(True, False), (True, True), (False, False)]
    layouts = [
        Layout(
            strategy or "full_shard",
            0,
            accumulation,
            checkpointing,
            defer,
            tp=tp,
            sequence=sequence,
            save_gathered=saved,
        )
        for (sequence, saved), accumulation, checkpointing, defer in itertools.product(
            exchanges, (1, 4), (False, True), (False, True)
        )
    ]
    pairs = trajectories([name], torch.float64)
    run_distributed(_check, pairs, 1e-9, layouts, world_size=2 * tp if strategy else tp)
