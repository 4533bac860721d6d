"""Another product in the place of a linear layer's, at any tensor-parallel degree."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn
from torch.distributed.tensor import DTensor

from smp.errors import UserError
from smp.loss import causal_lm_loss_sum
from smp.models.registry import family_of
from smp.parallel.linear import replace_product
from smp.parallel.loss import chunk_loss
from smp.parallel.tensor.split import split_model
from smp.parallel.tensor.technique import build_tp_group
from tests.distributed import run_distributed
from tests.reference import Layout, relative
from tests.tensor_parallel import ROWS, batch_of, build, config_of, split, whole

STEP = 1 / 64  # of the rounded weights: as large as most of them are


def rounded(weight):
    """The weights that are multiplied with; their gradient goes to what they were made of."""
    return weight + ((weight / STEP).round() * STEP - weight).detach()


class Rounding:
    """A product that rounds its weights, and counts."""

    def __init__(self):
        self.calls = 0

    def __deepcopy__(self, memo):
        return self

    def __call__(self, module, x, weight, bias):
        assert isinstance(module, nn.Linear) and not isinstance(weight, DTensor)
        self.calls += 1
        return F.linear(x, rounded(weight), bias)


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def gradients(model, batch):
    """Logits, and the gradients of all parameters; collective."""
    batch = dict(batch)
    labels = batch.pop("labels")
    logits = model(**batch, use_cache=False).logits
    causal_lm_loss_sum(logits, labels).backward()
    return whole(logits).detach(), {name: whole(p.grad) for name, p in model.named_parameters()}


def rounded_model(plain):
    """Hugging Face's model with rounded weights in its linear layers, by nothing of ours."""
    model = copy.deepcopy(plain)
    for module in linears(model):
        module.forward = lambda x, module=module: F.linear(x, rounded(module.weight), module.bias)
    return model


def check(cases) -> None:
    for name, layout in cases:
        config = config_of(name)
        plain, batch = build(config), batch_of(config)
        expected, wanted = gradients(rounded_model(plain), batch)
        unrounded, _ = gradients(copy.deepcopy(plain), batch)
        product = Rounding()
        for module in linears(plain):
            replace_product(module, product)
        model, mesh = split(plain, layout), layout.mesh()
        rows = slice(mesh.data.rank * ROWS // mesh.data.size, (mesh.data.rank + 1) * ROWS // mesh.data.size)
        own = {key: value[rows] for key, value in batch.items()}
        logits, found = gradients(model, own)
        # With checkpointing, blocks multiply twice; the head never does.
        times = 2 if layout.checkpointing else 1
        assert product.calls == times * (len(linears(model)) - 1) + 1, (name, layout, product.calls)
        assert relative(logits - expected[rows], expected[rows]) <= 1e-9, (name, layout)
        assert relative(logits - unrounded[rows], unrounded[rows]) > 1e-3
        for key, gradient in found.items():
            assert relative(gradient - wanted[key], wanted[key]) <= 1e-9, (name, layout, key)


def split_first() -> None:
    """The product of a layer that is split already."""
    plain, layout = build(config_of("gpt_neox")), Layout("no_shard", tp=2)
    batch = batch_of(plain.config)
    expected, wanted = gradients(rounded_model(plain), batch)
    model = split_model(plain, family_of(plain.config), build_tp_group(layout.mesh(), layout.parallel()))
    for module in linears(model):
        replace_product(module, Rounding())
    logits, found = gradients(model, batch)
    assert relative(logits - expected, expected) <= 1e-9
    for key, gradient in found.items():
        assert relative(gradient - wanted[key], wanted[key]) <= 1e-9, key


CASES = {
    1: [("llama_gqa", Layout("full_shard")), ("gpt_neox_tied", Layout("full_shard", checkpointing=True))],
    2: [
        ("llama_gqa", Layout("full_shard")),
        ("llama_gqa", Layout("full_shard", tp=2)),
        ("gpt_neox", Layout("full_shard", tp=2, sequence=False)),
        ("llama_tied", Layout("full_shard", tp=2, checkpointing=True)),
    ],
    4: [
        ("llama_gqa", Layout("full_shard", tp=4)),
        ("llama_gqa", Layout("full_shard", tp=4, sequence=False)),
        ("gpt_neox", Layout("full_shard", tp=2)),
    ],
}


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_another_product(world_size):
    run_distributed(check, CASES[world_size], world_size=world_size)


def test_another_product_of_a_split_layer():
    run_distributed(split_first, world_size=2)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_the_loss_in_chunks_knows_no_other_product_of_the_head():
    model, other = build(config_of("llama_gqa")), build(config_of("llama_gqa"))
    other.lm_head = Scaled(32, 96, bias=False)
    chunk_loss(model)
    chunk_loss(other)
    replace_product(model.lm_head, Rounding())
    for each in (model, other):
        with pytest.raises(UserError, match=r"lm_head multiplies by a product of its own.*--loss_chunk_tokens 0"):
            each(**batch_of(each.config))


def refused() -> None:
    model = build(config_of("llama_gqa"))
    model.model.layers[0].mlp.down_proj = Scaled(48, 32, bias=False)
    layout = Layout("no_shard", tp=2)
    with pytest.raises(UserError, match=r"down_proj of LlamaDecoderLayer.mlp, which is a Scaled: only nn.Linear"):
        split_model(model, family_of(model.config), build_tp_group(layout.mesh(), layout.parallel()))


def test_a_linear_layer_with_a_forward_of_its_own_is_not_split():
    run_distributed(refused, world_size=2)
