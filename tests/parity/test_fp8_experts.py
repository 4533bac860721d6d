"""Routed experts in fp8: each expert's bits are those of a layer in fp8, and mixtures train alike at any layout."""

from __future__ import annotations

import copy
import dataclasses
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import smp
from smp.config import ActivationConfig, Settings
from smp.mesh import lay_out
from smp.models.experts import expert_modules
from smp.models.registry import family_of
from smp.parallel import activation_checkpoint, fp8, lora
from smp.parallel import experts as mixture
from smp.parallel.experts.compute import PRODUCTS, multiply
from smp.parallel.linear import Linears
from smp.parallel.technique import Setup
from tests import experts, reference
from tests.distributed import run_distributed
from tests.reference import Layout, relative, train_parallel

pytest.importorskip("torchao")
RECIPES = ("rowwise_with_gw_hp", "rowwise", "mxfp8")
COUNTS, OUTPUTS, INPUTS = [7, 0, 33, 16, 1], 96, 64


@pytest.fixture(autouse=True)
def torchaos():
    """torchao is imported by a test that runs, and not while tests are collected."""
    import smp.parallel.fp8_products  # noqa: F401


def data(dtype):
    torch.manual_seed(0)
    rows, experts_ = sum(COUNTS), len(COUNTS)
    return (torch.randn(experts_, OUTPUTS, INPUTS, dtype=dtype), torch.randn(rows, INPUTS, dtype=dtype),
            torch.randn(rows, OUTPUTS, dtype=dtype))  # fmt: skip


def results(product, weight, rows, gradient, *, transposed=False):
    """Output, and the gradients of rows and weight."""
    weight = (weight.transpose(1, 2).contiguous() if transposed else weight.clone()).requires_grad_()
    rows = rows.clone().requires_grad_()
    found = product(rows, weight, COUNTS, transposed=transposed)
    found.backward(gradient)
    return [found.detach(), rows.grad, weight.grad.transpose(1, 2) if transposed else weight.grad]


def product_of(recipe, device="cpu"):
    from smp.parallel.fp8_experts import grouped

    return grouped(device, mx=recipe == "mxfp8", weights=recipe == "rowwise")


def by_layers(recipe, multiple):
    """Return the same of a linear layer in fp8 for each expert, whose tokens are padded as the expert's rows are."""
    from smp.parallel.fp8_products import Blocks, Fp8, Scaled

    def product(rows, weight, counts, *, transposed=False):
        sizes, found = tuple(weight.shape[1:]), []
        casts = Blocks("cpu") if recipe == "mxfp8" else Scaled(recipe, "cpu", sizes=sizes)
        if recipe == "rowwise_with_gw_hp":  # of which a layer's weight has one scale there
            casts.weight_for_input_gradient = Scaled("rowwise", "cpu", sizes=sizes).weight_for_input_gradient
        for own, matrix in zip(rows.split(counts), weight.transpose(1, 2) if transposed else weight, strict=True):
            x = F.pad(own, (0, 0, 0, -len(own) % multiple))
            if len(own):
                found.append(Linears.apply(None, (Fp8(casts),), x.detach(), x, matrix, None)[0][: len(own)])
        return torch.cat(found)

    return product


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_of_a_layer_of_each_expert(recipe, transposed):
    for dtype in (torch.float32, torch.bfloat16):
        product, given = product_of(recipe), data(dtype)
        found, wanted = (
            results(each, *given, transposed=transposed) for each in (product, by_layers(recipe, product.multiple))
        )
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        plain = results(multiply, *given, transposed=transposed)
        errors = [relative(a - b, b) for a, b in zip(found, plain, strict=True)]
        assert all(1e-2 < each < 0.1 for each in errors[:2]) and (errors[2] > 1e-2) == (recipe != RECIPES[0])


def scaled_grouped_mm(left, right, of_left, of_right, *, offs, out_dtype, use_fast_accum):
    """torch's operator: its checks for GPUs, of sizes, strides and scales, and what it computes, in fp32."""
    with FakeTensorMode():
        fakes = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda")
                 for each in (left, right, of_left, of_right, offs)]  # fmt: skip
        shape = torch.ops.aten._scaled_grouped_mm(*fakes, out_dtype=out_dtype, use_fast_accum=use_fast_accum).shape
    sizes = offs.diff(prepend=offs.new_zeros(1))
    assert right.dim() == 3 or not (sizes % 16).any()
    if right.dim() == 3:
        left, right = left.float() * of_left.unsqueeze(1), right.float() * of_right.unsqueeze(1)
    else:
        left, right = (
            values.float() * scale.view(len(offs), -1).repeat_interleave(sizes, 0).t()
            for values, scale in ((left, of_left), (right.t(), of_right))
        )
        right = right.t()
    found = F.grouped_mm(left, right, offs=offs).to(out_dtype)
    assert found.shape == shape
    return found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_what_gpus_multiply_is_what_is_emulated(recipe, transposed, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    given = data(torch.bfloat16)
    found, wanted = (results(product_of(recipe, of), *given, transposed=transposed) for of in ("cuda", "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("transposed", [False, True])
def test_what_gpus_multiply_in_mxfp8_is_what_is_emulated(transposed, monkeypatch):
    """By torchao's functions, which have an emulation of their own for other GPUs."""
    from torchao.prototype.moe_training import mxfp8_grouped_mm
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    with pytest.raises(ImportError, match="its kernels are in builds for CUDA"):
        product_of("mxfp8", "cuda")
    monkeypatch.setattr(mxfp8_grouped_mm, "_SM100_KERNELS_AVAILABLE", True)
    given, product = data(torch.bfloat16), product_of("mxfp8", "cuda")
    product._kernels = KernelPreference.EMULATED
    found, wanted = (results(each, *given, transposed=transposed) for each in (product, product_of("mxfp8")))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def prepared(model, *sections, recipe="rowwise_with_gw_hp", device_type="cpu"):
    """Compute in fp8 in place, by one rank that shards nothing."""
    sections = (fp8.Config(fp8=True, fp8_experts=True, fp8_recipe=recipe), *(sections or [ActivationConfig()]))
    setup = Setup(family_of(model.config), lay_out(1, 1, 1), Settings(sections), device_type=device_type)
    model.config.use_cache = False
    for technique in (mixture, fp8, activation_checkpoint):
        with mock.patch.object(mixture.technique.balance, "follow"):
            technique.apply(model, setup)
    return model


IDS = torch.arange(48).reshape(2, 24)


def step(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


_SIZES = {"hidden_size": 64, "head_dim": 16}  # of which each rank's part is a multiple
CHANGES = {
    "mixtral": {**_SIZES, "intermediate_size": 64}, "qwen3_moe": {**_SIZES, "moe_intermediate_size": 32},
    "gpt_oss": {**_SIZES, "intermediate_size": 64}, "llama4_text": {**_SIZES, "intermediate_size": 64},
}  # fmt: skip


def build(kind):
    return experts.build(kind, torch.float32, **CHANGES[kind])


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("qwen3_moe", "rowwise_with_gw_hp"), ("mixtral", "tensorwise"), ("gpt_oss", "rowwise"), ("gpt_oss", "mxfp8"),
        ("llama4_text", "rowwise_with_gw_hp"),
    ],
)  # fmt: skip
def test_all_experts_and_nothing_of_what_is_saved(kind, recipe, caplog):
    plain = build(kind)
    model = copy.deepcopy(plain)
    with caplog.at_level("INFO", "smp"):
        prepared(model, recipe=recipe)
    count = 2 * len(expert_modules(model))
    said = f"compute in fp8, {recipe}; {count} of {count} grouped products of routed experts"
    assert said + ", as with rowwise_with_gw_hp" * (recipe == "tensorwise") + "." in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    found = step(model)
    multiple = {"rowwise": 16, "mxfp8": 32}.get(recipe, 1)
    layers = by_layers("rowwise_with_gw_hp" if recipe == "tensorwise" else recipe, multiple)
    for _, module in expert_modules(model):
        products = getattr(module, PRODUCTS)
        assert products.keys() == {"gate_up_proj", "down_proj"}
        setattr(module, PRODUCTS, dict.fromkeys(products, layers))
    wanted = step(model)
    assert found.keys() == wanted.keys() and torch.equal(found["loss"], wanted["loss"])
    assert all(relative(found[name] - each, each) < 1e-6 for name, each in wanted.items())
    loss = step(plain)["loss"]
    assert 1e-6 < relative(found["loss"] - loss, loss) < 1e-2


LAYOUTS = [
    Layout("full_shard"), Layout("full_shard", ep=2, checkpointing=True, mode="selective"),
    Layout("full_shard", tp=2, checkpointing=True),
]  # fmt: skip
# The worst of a step's gradients against one process, as of layers (test_fp8.py).
WORST = {"rowwise_with_gw_hp": 1e-6, "rowwise": 1e-5, "tensorwise": 1e-6, "mxfp8": 1e-3}


def check_layouts(kind, recipes):
    import smp.parallel.fp8_products  # noqa: F401

    setup_of = reference.setup_of
    reference.setup_of = lambda *given: dataclasses.replace(setup_of(*given), device_type="cpu")
    for recipe in recipes:
        config = (fp8.Config(fp8=True, fp8_experts=True, fp8_recipe=recipe),)
        expected = reference.reference_trajectory(prepared(build(kind), recipe=recipe), 1)
        for layout in LAYOUTS[: 2 if recipe == "mxfp8" else None]:  # which takes no heads of 16
            ((loss, _, gradients),) = train_parallel(build(kind), layout, 1, more=config)
            assert abs(loss - expected.losses[0]) <= 1e-6 * loss, (recipe, layout)
            assert gradients.keys() == expected.gradients.keys()
            for name, gradient in gradients.items():
                wrong = relative(gradient - expected.gradients[name], expected.gradients[name])
                assert wrong <= WORST[recipe], (recipe, layout, name, wrong)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_layouts_train_alike(kind):
    """Of later steps values differ more where one is rounded to the next of fp8, or a token has another expert."""
    run_distributed(check_layouts, kind, list(WORST) if kind == "mixtral" else list(WORST)[:1], world_size=2)


class Grouped(TorchDispatchMode):
    """Counts grouped products that are really computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._opname == "_grouped_mm"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "again"), [("selective", 6), ("products", 0)])
def test_recomputation_computes_as_many_grouped_products(mode, again):
    activation = ActivationConfig(activation_checkpointing=True, activation_checkpointing_mode=mode)
    wanted = step(prepared(build("qwen3_moe")))
    model = prepared(build("qwen3_moe"), activation)
    found = step(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    with Grouped() as counter:
        loss.backward()
    assert counter.count == 2 * 6 + again


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_frozen_experts_beside_adapters(kind):
    """The base is in fp8 and has no gradients, the factors are not in fp8."""
    from smp.parallel import fp8_experts

    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    model = smp.lora(build(kind), 4, target_modules=["q_proj"], target_parameters=parameters)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    config = lora.Config(lora_rank=4, lora_target_modules=("q_proj",), lora_target_parameters=tuple(parameters))
    plain = copy.deepcopy(model)
    wanted = step(prepared(plain, ActivationConfig(), config, device_type=None))
    with mock.patch.object(fp8_experts.Grouped, "summed") as summed:
        found = step(prepared(model, ActivationConfig(), config))
    assert not summed.called and found.keys() == wanted.keys() and any("experts" in name for name in found)
    assert all(relative(found[name] - each, each) > 0 for name, each in wanted.items())
    assert relative(found["loss"] - wanted["loss"], wanted["loss"]) < 1e-2


def test_matrices_that_do_not_fit_stay_and_are_counted(caplog):
    model = experts.build("mixtral", torch.float32, intermediate_size=40)
    with caplog.at_level("INFO", "smp"):
        prepared(model, recipe="rowwise")
    assert "; 3 of 6 grouped products of routed experts, without 3 down_proj by their sizes." in caplog.text
    assert {name for _, module in expert_modules(model) for name in getattr(module, PRODUCTS)} == {"gate_up_proj"}


@pytest.mark.parametrize(
    ("recipe", "capability", "said"),
    [
        ("rowwise", (8, 9), "needs a GPU with grouped products in fp8 (Hopper): leave --fp8_experts out"),
        ("rowwise_with_gw_hp", (10, 0), "fp8 (Hopper): "), ("mxfp8", (12, 0), "fp8 (Blackwell): "),
        ("mxfp8", (10, 0), "this torchao has no such casts where 0.18 has them (its kernels are in builds for CUDA"),
        ("rowwise_with_gw_hp", (9, 0), ""),
    ],
)  # fmt: skip
def test_gpus_without_grouped_products(recipe, capability, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    config = fp8.Config(fp8=True, fp8_experts=True, fp8_recipe=recipe)
    found = fp8.lacking(config, torch.device("cuda"))
    assert len(found) == bool(said) and said in "".join(found)
    assert fp8.lacking(dataclasses.replace(config, fp8_experts=False), torch.device("cuda")) == []
