"""Another product in the place of a linear layer's: the numbers of one process, in the plain product's collectives."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import torch.nn.functional as F
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from smp.errors import UserError
from smp.loss import causal_lm_loss_sum
from smp.models.registry import family_of
from smp.parallel import adapter
from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.linear import Product, replace_product
from smp.parallel.loss import chunk_loss
from smp.parallel.technique import model_blocks
from smp.parallel.tensor.split import split_model
from smp.parallel.tensor.technique import build_tp_group
from tests.adapters import RANK, Adapter
from tests.distributed import run_distributed
from tests.reference import Layout, relative
from tests.tensor_parallel import ROWS, batch_of, build, config_of, overlap_on_cpu, split, whole
from tests.unit import test_activation_checkpoint

STEP = 1 / 64  # of the rounded weights: as large as most of them are


def rounded(weight):
    return (weight / STEP).round() * STEP


class Rounding(Product):
    """Rounded weights, whose gradient goes to what they were made of."""

    def matrix(self, weight):
        return rounded(weight)

    @staticmethod
    def plain(module, x):
        weight = module.weight + (rounded(module.weight) - module.weight).detach()
        return F.linear(x, weight, module.bias)

    @staticmethod
    def layers(model):
        return [module for module in model.modules() if isinstance(module, nn.Linear)]

    @staticmethod
    def prepare(module):
        pass


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("symm_mem", "c10d", "_c10d_functional", "smp") and func._opname != "wait_tensor":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def gradients(model, batch):
    """Logits, and the gradients of all parameters; collective."""
    batch = dict(batch)
    labels = batch.pop("labels")
    with Collectives() as collectives:
        logits = model(**batch, use_cache=False).logits
        causal_lm_loss_sum(logits, labels).backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    return whole(logits).detach(), found, collectives.counts


def check_case(kind, name, layout) -> None:
    config = config_of(name)
    plain, batch, mesh = build(config), batch_of(config), layout.mesh()
    for module in kind.layers(plain):
        kind.prepare(module)
    reference = copy.deepcopy(plain)
    for module in kind.layers(reference):  # by nothing of ours
        module.forward = lambda x, module=module: kind.plain(module, x)
    expected, wanted, _ = gradients(reference, batch)
    rows = slice(mesh.data.rank * ROWS // mesh.data.size, (mesh.data.rank + 1) * ROWS // mesh.data.size)
    own = {key: value[rows] for key, value in batch.items()}
    unchanged, _, counts = gradients(split(build(config), layout), own)
    for module in kind.layers(plain):
        replace_product(module, kind())
    logits, found, counted = gradients(split(plain, layout), own)
    assert relative(logits - expected[rows], expected[rows]) <= 1e-12, (kind, name, layout)
    assert relative(logits - unchanged, unchanged) > 1e-3
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        assert relative(gradient - wanted[key], wanted[key]) <= 1e-12, (kind, name, layout, key)
    if kind is Adapter and layout.tp == 2 and not layout.sequence:  # where blocks have no other gradients to sum
        counts["allreduce_"] += config.num_hidden_layers
    assert counted == counts, (kind, name, layout)


def check(layouts) -> None:
    overlap_on_cpu()
    for layout in layouts:
        check_case(Rounding, "gpt_neox", layout)
        check_case(Adapter, "llama_gqa", layout)
    check_case(Adapter, "gpt_neox", layouts[-1])  # of a fused layer, a rank's rows are no slice


LAYOUTS = {
    1: [Layout("full_shard"), Layout("full_shard", checkpointing=True)],
    2: [
        Layout("full_shard"),
        Layout("no_shard", tp=2, sequence=False),
        Layout("no_shard", tp=2, overlap=True, checkpointing=True, mode="selective"),
        Layout("no_shard", tp=2),
    ],
    4: [
        Layout("full_shard", tp=4, sequence=False, checkpointing=True),
        Layout("full_shard", tp=4, overlap=True, save_gathered=True),
        Layout("full_shard", tp=2),
        Layout("full_shard", tp=4, checkpointing=True),
    ],
}


@pytest.mark.parametrize(("world_size", "layouts"), [
    (1, LAYOUTS[1]), (2, LAYOUTS[2][-1:]),
    *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, LAYOUTS[2][:-1]), (4, LAYOUTS[4][:2]))),
    pytest.param(4, LAYOUTS[4][2:], marks=pytest.mark.slow),
])  # fmt: skip
def test_another_product(world_size, layouts):
    run_distributed(check, layouts, world_size=world_size)


def split_first() -> None:
    """The product of a layer that is split already."""
    plain, layout = build(config_of("gpt_neox")), Layout("no_shard", tp=2)
    batch = batch_of(plain.config)
    reference = copy.deepcopy(plain)
    for module in Rounding.layers(reference):
        module.forward = lambda x, module=module: Rounding.plain(module, x)
    expected, wanted, _ = gradients(reference, batch)
    model = split_model(plain, family_of(plain.config), build_tp_group(layout.mesh(), layout.parallel()))
    for module in Rounding.layers(model):
        replace_product(module, Rounding())
    logits, found, _ = gradients(model, batch)
    assert relative(logits - expected, expected) <= 1e-12
    for key, gradient in found.items():
        assert relative(gradient - wanted[key], wanted[key]) <= 1e-12, key
    layer = Adapter.layers(model)[0]
    layer.down = layer.up = nn.Parameter(torch.zeros(1, 1))
    with pytest.raises(UserError, match=r"the layer is split or sharded already.*call it before smp.transform"):
        replace_product(layer, Adapter())
    refused()


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def refused() -> None:
    layout = Layout("no_shard", tp=2)
    tp = build_tp_group(layout.mesh(), layout.parallel())
    model = build(config_of("llama_gqa"))
    model.model.layers[0].mlp.down_proj = Scaled(48, 32, bias=False)
    with pytest.raises(UserError, match=r"down_proj of LlamaDecoderLayer.mlp, which is a Scaled: only nn.Linear"):
        split_model(model, family_of(model.config), tp)
    model = build(config_of("llama_gqa"))
    Adapter.prepare(model.lm_head)
    replace_product(model.lm_head, Adapter())
    with pytest.raises(UserError, match=r"lm_head multiplies by a product with parameters of its own.*leave it out"):
        split_model(model, family_of(model.config), tp)


def test_a_split_layer():
    run_distributed(split_first, world_size=2)


def test_what_is_no_product_of_the_layer_is_refused():
    with pytest.raises(UserError, match=r"takes a smp.parallel.linear.Product, got a function"):
        replace_product(nn.Linear(2, 2), lambda layer, x, weight, bias: x)
    with pytest.raises(UserError, match=r"the layer has no parameter down: register it before"):
        replace_product(nn.Linear(2, 2), Adapter())


def test_a_transposed_layer():
    torch.manual_seed(1)
    layer, plain = Conv1D(6, 5).double(), nn.Linear(5, 6).double()  # outputs come first
    plain.load_state_dict({"weight": layer.weight.T, "bias": layer.bias})
    Adapter.prepare(plain)
    layer.weight.requires_grad_(False)
    layer.down, layer.up = (nn.Parameter(p.detach().clone()) for p in (plain.down, plain.up))
    replace_product(layer, Adapter())
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = [layer(inputs[0]), Adapter.plain(plain, inputs[1])]
    for out in outputs:
        out.square().sum().backward()
    pairs = [outputs, [i.grad for i in inputs], *([getattr(m, n).grad for m in (layer, plain)] for n in Adapter.own)]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


class Products(TorchDispatchMode):
    """Counts products with so many outputs, or more."""

    def __init__(self):
        super().__init__()
        self.shapes = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in ("mm", "addmm"):
            self.shapes[args[-1].shape] += 1
        return func(*args, **(kwargs or {}))


def test_selective_recomputation_keeps_what_it_keeps_of_the_plain_product():
    config, found = config_of("llama_gqa"), []
    for adapted in (False, True):
        model = build(config)
        for module in Adapter.layers(model) if adapted else ():
            Adapter.prepare(module)
            module.weight.requires_grad_(True)
            replace_product(module, Adapter())
        model.requires_grad_(False)
        model.get_input_embeddings().weight.requires_grad_(True)  # what remains in backward are gradients of inputs
        apply_activation_checkpointing(model_blocks(model, family_of(config)), mode="selective")
        loss = model(input_ids=batch_of(config)["input_ids"], use_cache=False).logits.square().sum()
        with Products() as products:
            loss.backward()
        found.append({shape: n for shape, n in products.shapes.items() if RANK not in shape})
    assert found[0] == found[1] and len(found[0]) > 3


def test_an_adapter_multiplies_no_more_than_it_needs():
    """Forward the weight's, A's and B's; backward one more of the input, and one or two of each factor."""
    product, generator = adapter.Adapter(2.0), torch.Generator().manual_seed(0)
    x, weight, a, b, *gradients = (
        torch.randn(*size, generator=generator, dtype=torch.float64)
        for size in ((5, 6), (4, 6), (2, 6), (4, 2), (5, 4), (5, 4))
    )
    with test_activation_checkpoint.Products() as counter:
        found = product.forward(x, weight, None, a, b)
    assert counter.count == 3 and torch.allclose(found, x @ (weight + 2 * b @ a).T)
    other = product.input_gradient(gradients[0], weight, a, torch.zeros_like(b))  # another layer of the same output
    assert torch.equal(other, gradients[0] @ weight)
    for gradient in gradients:
        with test_activation_checkpoint.Products() as counter:
            into = product.input_gradient(gradient, weight, a, b)
            _, of_a, of_b = product.parameter_gradients(gradient, x, weight, a, b, needs=(False, True, True))
        assert counter.count == 6
        expected = gradient @ (weight + 2 * b @ a), 2 * (gradient @ b).T @ x, 2 * gradient.T @ (x @ a.T)
        assert all(map(torch.allclose, (into, of_a, of_b), expected))


def test_the_loss_in_chunks_knows_no_other_product_of_the_head():
    model, other = build(config_of("llama_gqa")), build(config_of("llama_gqa"))
    other.lm_head = Scaled(32, 96, bias=False)
    chunk_loss(model)
    chunk_loss(other)
    replace_product(model.lm_head, Rounding())
    for each in (model, other):
        with pytest.raises(UserError, match=r"lm_head multiplies by a product of its own.*--loss_chunk_tokens 0"):
            each(**batch_of(each.config))
