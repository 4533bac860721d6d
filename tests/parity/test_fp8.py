"""Products in fp8: torchao's bits, the same values at any layout, and what is around them unchanged."""

from __future__ import annotations

import copy
import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, GPT2Config

import smp
from smp.config import ActivationConfig, ParallelConfig, Settings
from smp.mesh import lay_out, resolve_mesh
from smp.models.registry import family_of
from smp.parallel import activation_checkpoint, compile_blocks, fp8, lora
from smp.parallel.linear import PLAIN, Linears, product_of, replace_product
from smp.parallel.technique import Setup
from tests import experts
from tests.distributed import run_distributed
from tests.reference import build_reference, relative, tiny_config
from tests.unit.test_activation_checkpoint import Products
from tests.unit.test_compile_blocks import graphs  # noqa: F401 # a fixture

pytest.importorskip("torchao")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.fixture(autouse=True)
def torchaos():
    """torchao is imported by a test that runs, and not while tests are collected."""
    import smp.parallel.fp8_products  # noqa: F401


def results(layer, x):
    """Output, and the gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    found = layer(x)
    (found * torch.linspace(-1, 1, found.numel()).view_as(found).to(x.dtype)).sum().backward()
    weight, bias = layer.weight.grad, layer.bias.grad
    layer.weight.grad = layer.bias.grad = None
    return found.detach(), x.grad, weight, bias


def layer_and_input(dtype, *, outputs=96, tokens=32):
    torch.manual_seed(1)
    return nn.Linear(128, outputs).to(dtype), torch.randn(2, tokens, 128, dtype=dtype)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_of_float8linear(recipe, device):
    """Emulated as on a CPU, and by the operator that GPUs have, of which torch has one for CPUs."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from smp.parallel.fp8_products import Fp8, Scaled

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=device == "cpu", round_scales_to_power_of_2=True
    )
    for dtype in (torch.float32, torch.bfloat16):
        layer, x = layer_and_input(dtype)
        theirs = convert_to_float8_training(nn.Sequential(copy.deepcopy(layer)), config=config)[0]
        replace_product(layer, Fp8(Scaled(recipe, device, sizes=(96, 128))))
        ours, wanted = results(layer, x), results(theirs, x)
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
        assert relative(ours[0] - F.linear(x, layer.weight, layer.bias), ours[0]) > 1e-3


def test_bits_are_those_of_mxfp8linear():
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    from smp.parallel.fp8_products import Blocks, Fp8

    for dtype in (torch.float32, torch.bfloat16):
        layer, x = layer_and_input(dtype)
        theirs = MXFP8Linear(128, 96, kernel_preference=KernelPreference.EMULATED).to(dtype)
        theirs.load_state_dict(layer.state_dict())
        replace_product(layer, Fp8(Blocks("cpu")))
        assert all(torch.equal(a, b) for a, b in zip(results(layer, x), results(theirs, x), strict=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
def test_tokens_that_are_no_multiple_are_padded(recipe, device):
    """Zeros are added for the sum over tokens: as if they were tokens."""
    from smp.parallel.fp8_products import Blocks, Fp8, Scaled

    if recipe == "mxfp8" and device == "cuda":
        return  # its operator is for GPUs alone
    layer, x = layer_and_input(torch.float32, tokens=13)
    casts = Blocks(device) if recipe == "mxfp8" else Scaled(recipe, device, sizes=(96, 128))
    replace_product(layer, Fp8(casts))
    short = results(layer, x)[2]
    y = F.pad(x.flatten(0, 1), (0, 0, 0, 6)).requires_grad_()
    found = layer(y)
    (found[:26] * torch.linspace(-1, 1, 26 * 96).view(26, 96)).sum().backward()
    assert relative(layer.weight.grad - short, short) <= 1e-6


def data(kind):
    """The input, weights and output's gradient of an MLP."""
    torch.manual_seed(0)
    x, gradient = torch.randn(1, 128, 64), torch.randn(1, 128, 64) * 1e-3
    weights = [torch.randn(192, 64) * 0.05, torch.randn(192, 64) * 0.05, torch.randn(64, 192) * 0.05]
    if kind == "one massive token":
        x[0, 0, [7, 50]] *= 1000
    if kind == "lognormal tokens":
        x *= torch.exp(2 * torch.randn(1, 128, 1))
        gradient *= torch.exp(3 * torch.randn(1, 128, 1))
    return x, weights, gradient


def mlp(x, weights, gradient, product, total=lambda tensor: tensor):
    """Output, and the gradients of input and weights.

    Args:
        product: of an index among the layers.
        total: of the ranks' partial results.
    """
    x, weights = x.clone().requires_grad_(), [weight.clone().requires_grad_() for weight in weights]
    gate, up = Linears.apply(None, (product(0), product(1)), x.detach(), x, weights[0], None, weights[1], None)
    hidden = F.silu(gate) * up
    found = Linears.apply(None, (product(2),), hidden.detach(), hidden, weights[2], None)[0]
    found.backward(gradient)
    return total(found.detach()), x.grad, [weight.grad for weight in weights]


# The worst of output and gradients against one rank. Powers of two: no layout rounds otherwise, but values too small
# for the format, which a scale for a part that has no large value keeps better. Tensor parallelism takes the scale of
# the whole tensor; a row that it splits has one for each part.
WORST = {
    ("tensorwise", "tp"): (1e-6, 1e-6, 1e-6),
    ("tensorwise", "data"): (1e-6, 5e-4, 3e-3),
    ("rowwise", "tp"): (1e-5, 1e-5, 1e-5),
    ("rowwise", "data"): (1e-6, 3e-5, 2e-3),
    ("rowwise_with_gw_hp", "tp"): (1e-5, 1e-5, 1e-5),
    ("rowwise_with_gw_hp", "data"): (1e-5, 1e-5, 1e-5),
    ("mxfp8", "tp"): (1e-6, 1e-6, 1e-6),
    ("mxfp8", "data"): (1e-6, 1e-6, 1e-6),
}


def check_layouts(said):
    from smp.parallel.fp8_products import Blocks, Fp8, Scaled

    mesh = resolve_mesh(ParallelConfig(tensor_parallel_degree=2), world_size=2, local_world_size=2).join("cpu")
    rank, sizes = dist.get_rank(), [(192, 64), (192, 64), (64, 192)]

    def total(tensor):
        dist.all_reduce(tensor)
        return tensor

    def difference(found, wanted):
        squares = total(torch.stack([(found - wanted).square().sum(), wanted.square().sum()]).double())
        return float((squares[0] / squares[1]).sqrt())

    for (recipe, layout), worst in WORST.items():

        def product(index, recipe=recipe, tp=layout == "tp"):
            if recipe == "mxfp8":
                return Fp8(Blocks("cpu"))
            return Fp8(Scaled(recipe, "cpu", sizes=sizes[index], mesh=mesh.tp_mesh if tp else None))

        for kind, bound in zip(("normal", "one massive token", "lognormal tokens"), worst, strict=True):
            x, weights, gradient = data(kind)
            one = mlp(x, weights, gradient, lambda index, p=product: one_rank(p(index)))
            if layout == "tp":
                parts = [weights[0].chunk(2)[rank], weights[1].chunk(2)[rank], weights[2].chunk(2, 1)[rank]]
                found, of_x, of_weights = mlp(x, parts, gradient, product, total)
                total(of_x)
                wanted = [one[0], one[1], *(g.chunk(2)[rank] for g in one[2][:2]), one[2][2].chunk(2, 1)[rank]]
            else:
                half = slice(64 * rank, 64 * (rank + 1))
                found, of_x, of_weights = mlp(x[:, half], weights, gradient[:, half], product)
                of_weights = [total(each) for each in of_weights]
                wanted = [one[0][:, half], one[1][:, half], *one[2]]
            differences = [difference(a, b) for a, b in zip((found, of_x, *of_weights), wanted, strict=True)]
            said(recipe, layout, kind, max(differences))
            assert max(differences) <= bound, (recipe, layout, kind, differences)


def one_rank(product):
    """The product of a layer that is not split."""
    if hasattr(product.casts, "_mesh"):
        product.casts._mesh = None
    return product


def no_table(*_):
    """Nothing is printed."""


def table(*columns):
    if dist.get_rank() == 0:
        print(*columns, flush=True)


def test_values_hardly_depend_on_the_layout():
    run_distributed(check_layouts, no_table, world_size=2)


def prepared(model, *sections, recipe="rowwise_with_gw_hp", cast_once=False, techniques=(fp8,)):
    """Compute in fp8, with what else the sections ask for, in place; of one rank that shards nothing."""
    sections = (fp8.Config(fp8=True, fp8_recipe=recipe), *(sections or [ActivationConfig(cpu_offload=not cast_once)]))
    setup = Setup(family_of(model.config), lay_out(1, 1, 1), Settings(sections), device_type="cpu")
    model.config.use_cache = False
    for technique in techniques:
        technique.apply(model, setup)
    return model


def llama(dtype=torch.float32):
    return build_reference("llama_gqa", dtype)


IDS = torch.arange(32).reshape(2, 16)


def step(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same_bits(found, wanted):
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_all_linear_layers_of_blocks_and_nothing_of_what_is_saved(caplog):
    plain, model = llama(), llama()
    with caplog.at_level("INFO", "smp"):
        prepared(model)
    of = {path for path, module in model.named_modules() if product_of(module) is not PLAIN}
    assert of == lora.linear_layers(model, family_of(model.config)).keys()
    assert "21 of 21 linear layers of the blocks compute in fp8, rowwise_with_gw_hp" in caplog.text
    assert "--fp8 1 on CPUs is emulated" in caplog.text
    assert model.state_dict().keys() == plain.state_dict().keys()
    same_bits(model.state_dict().values(), plain.state_dict().values())
    found, wanted = step(model), step(plain)
    assert 1e-6 < relative(found[0] - wanted[0], wanted[0]) < 1e-2
    assert all(1e-6 < relative(a - b, b) < 0.3 for a, b in zip(found[1:], wanted[1:], strict=True))


def test_layers_that_do_not_fit_stay_and_are_counted(caplog):
    config = tiny_config("llama_gqa")
    config.num_key_value_heads, config.intermediate_size = 1, 40
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with caplog.at_level("INFO", "smp"):
        prepared(model)
    layer = model.model.layers[0]
    assert product_of(layer.self_attn.q_proj) is not PLAIN and product_of(layer.self_attn.k_proj) is PLAIN
    named = "3 k_proj, 3 v_proj, 3 gate_proj, 3 up_proj, 3 down_proj"
    said = "6 of 21 linear layers of the blocks compute in fp8, rowwise_with_gw_hp; not in fp8, by their sizes or"
    assert f"{said} as they are not called: {named}." in caplog.text


def test_transposed_layers():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0, attn_pdrop=0,
                        embd_pdrop=0)  # fmt: skip
    plain = AutoModelForCausalLM.from_config(config)
    model = prepared(copy.deepcopy(plain))
    assert product_of(model.transformer.h[0].attn.c_attn) is not PLAIN
    found, wanted = step(model), step(plain)
    assert all(1e-7 < relative(a - b, b) < 0.3 for a, b in zip(found, wanted, strict=True) if b.dim() == 2)


def test_routers_and_routed_experts_are_not(caplog):
    with caplog.at_level("INFO", "smp"):
        model = prepared(experts.build("qwen3_moe", torch.float32))
    assert "; the routed experts are not in fp8, as --fp8_experts is 0." in caplog.text
    found = {path.rpartition(".")[2] for path, module in model.named_modules() if product_of(module) is not PLAIN}
    assert "q_proj" in found and not {"gate", "lm_head"} & found


def test_weights_in_4_bits():
    from tests.parity.test_qlora import build

    plain = smp.lora(build(torch.float32), 2, quantize="nf4")
    model = prepared(smp.lora(build(torch.float32), 2, quantize="nf4"))
    found, wanted = step(model), step(plain)
    assert all(torch.equal(a, b) or 1e-6 < relative(a - b, b) < 0.3 for a, b in zip(found, wanted, strict=True))
    assert not torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_selective_recomputation_keeps_as_many_products(recipe):
    counts = []
    for model in (llama(), prepared(llama(), recipe=recipe)):
        wanted = step(model)
        setup = Setup(family_of(model.config), lay_out(1, 1, 1), Settings(
            (ActivationConfig(activation_checkpointing_mode="selective"),)
        ))  # fmt: skip
        activation_checkpoint.apply(model, setup)
        same_bits(step(model), wanted)
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        with Products() as counter:
            loss.backward()
        counts.append(counter.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
def test_compiled_blocks_are_one_graph_of_the_same_values(recipe, graphs):  # noqa: F811
    model = prepared(llama(), recipe=recipe)
    activation = ActivationConfig(compile=True, activation_checkpointing_mode="selective")
    techniques = (fp8, activation_checkpoint, compile_blocks)
    again = prepared(llama(), activation, recipe=recipe, techniques=techniques)
    found, wanted = step(again), step(model)
    assert len(graphs.forward) == 1 and not counters["graph_break"], counters
    assert all(relative(a - b, b) <= 1e-6 for a, b in zip(found, wanted, strict=True))


def adapted(recipe, *, cast_once, compiled=False):
    model = smp.lora(llama(), 4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    activation = ActivationConfig(compile=compiled, cpu_offload=not cast_once)
    techniques = (fp8, activation_checkpoint, compile_blocks)
    return prepared(model, activation, lora.Config(lora_rank=4), recipe=recipe, techniques=techniques)


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
def test_frozen_weights_are_cast_once(recipe, graphs):  # noqa: F811
    """Beside adapters, and the bits are those of weights that are cast for each product, also where it is compiled."""
    from smp.parallel import fp8_products

    model, calls = adapted(recipe, cast_once=True), []
    casts = fp8_products.Blocks if recipe == "mxfp8" else fp8_products.Scaled
    original = casts.weight

    def weight(self, tensor):
        calls.append(tensor.shape)
        return original(self, tensor)

    with mock.patch.object(casts, "weight", weight):
        found = [step(model) for _ in range(2)]
        layers = sum(isinstance(product_of(module), fp8_products.Fp8) for module in model.modules())
        assert len(calls) == layers
        wanted = step(adapted(recipe, cast_once=False))
        assert len(calls) == layers + 2 * layers  # in forward, and recomputed
    for each in found:
        same_bits(each, wanted)
    compiled = step(adapted(recipe, cast_once=True, compiled=True))
    # Of the first block, whose input needs no gradient, and of the others.
    assert len(graphs.forward) == 2 and not counters["graph_break"], counters
    assert all(relative(a - b, b) <= 1e-6 for a, b in zip(compiled, wanted, strict=True))
