"""Routers that transformers keeps in fp32 route the same as in a model that it loads in bf16."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import torch
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn

from smp.config import Settings
from smp.mesh import lay_out
from smp.models import added
from smp.models.experts import expert_modules, fp32_routers
from smp.models.registry import family_of
from smp.optim.config import OptimConfig
from smp.parallel.experts.technique import problems
from smp.parallel.parallelize import apply_techniques
from smp.parallel.technique import Setup
from smp.train.step import forward
from tests import experts
from tests.distributed import run_distributed
from tests.parity.test_sharding import collectives
from tests.reference import Layout, rank_batch, setup_of
from tests.zoo import tiny_config

KIND = "ernie4_5_moe"
LAYOUTS = [
    Layout("full_shard", ep=2, checkpointing=True),
    Layout("full_shard", tp=2, checkpointing=True, mode="selective"),
]


def build() -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(tiny_config(KIND), attn_implementation="sdpa").train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gate." in name or parameter.dim() == 3:  # a bias, too
                parameter.normal_(std=0.5)
    return model


def first_router(model: nn.Module) -> Any:
    return model.get_submodule(expert_modules(model)[0][0].rpartition(".")[0]).gate


def follow_router(model: nn.Module) -> list[Any]:
    """The dtype of the first router's matrix while it is used, its logits and its choices, of each call."""
    seen: list[Any] = []
    first_router(model).register_forward_hook(lambda module, _, out: seen.append((module.weight.dtype, out[0], out[2])))
    return seen


def parallel(layout: Layout, dtype: torch.dtype | None) -> nn.Module:
    model, mesh = build(), layout.mesh()
    setup = setup_of(model, mesh, layout.parallel(), layout.activation())
    return apply_techniques(model, dataclasses.replace(setup, dtype=dtype))


def route_alike(folder: pathlib.Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
    of_plain = follow_router(plain)
    for layout in LAYOUTS:
        model, mesh = parallel(layout, torch.bfloat16), layout.mesh()
        batch = rank_batch(0, mesh.data_rank, mesh.data_size, 1).microbatches[0]
        seen = follow_router(model)
        forward(model, batch, torch.device("cpu")).backward()
        plain(input_ids=batch["input_ids"])
        (dtype, logits, index), (_, expected, chosen) = seen[0], of_plain[-1]
        assert dtype == torch.float32 == first_router(model).weight.grad.dtype
        if layout.tp == 1:
            assert torch.equal(logits, expected) and torch.equal(index, chosen)


def count_collectives() -> None:
    routers, layout = len(fp32_routers(build())), LAYOUTS[0]
    narrow, alike = (
        collectives(parallel(layout, dtype), microbatches=1, defer=False) for dtype in (torch.bfloat16, None)
    )
    more = {name: narrow[name] - alike[name] for name in narrow if narrow[name] != alike[name]}
    assert routers > 0 and more == {"all_gather": 2 * routers, "reduce_scatter": routers}


def test_a_router_in_fp32_is_gathered_twice_and_reduced_once():
    run_distributed(count_collectives, world_size=2)


def bias_alone() -> None:
    layout, model = LAYOUTS[0], experts.build("glm4_moe", torch.float32)
    setup = setup_of(model, layout.mesh(), layout.parallel(), OptimConfig(param_dtype="bf16"))
    apply_techniques(model, dataclasses.replace(setup, dtype=torch.bfloat16), keeps_values=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    biases = [each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2 and {bias.dtype for bias in biases} == {torch.float32}


def test_a_bias_of_the_selection_stays_in_fp32():
    run_distributed(bias_alone, world_size=2)


def test_a_router_that_transformers_keeps_in_fp32_chooses_as_there(tmp_path):
    build().save_pretrained(tmp_path)
    run_distributed(route_alike, tmp_path, world_size=2)


def test_frozen_routers_are_stored_in_fp32():
    with torch.device("meta"):
        model = build()
    added.add_parameters(model, [], freezes=True)
    added.narrow_frozen_(model, torch.bfloat16)
    wide = {name.partition("layers.1.")[2] for name, each in model.named_parameters() if each.dtype == torch.float32}
    assert wide == {"", "mlp.gate.weight", "mlp.gate.moe_statics.e_score_correction_bias"}


def test_parameters_in_bf16_are_refused():
    config = tiny_config(KIND)
    setup = Setup(family_of(config), lay_out(), Settings((OptimConfig(param_dtype="bf16"),)))
    (sentence,) = problems(config, setup)
    assert sentence.startswith(f"--param_dtype bf16: a model of type '{KIND}' has routers in fp32")
