"""Adapters of a mixture, of layers and of experts that are split: steps and files of peft, and what is said."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported before the ranks are forked
from transformers import AutoModelForCausalLM

import smp
from smp.checkpoint import lora_merge
from smp.checkpoint.hf_export import export_hf
from smp.config import ActivationConfig, Settings
from smp.errors import UserError
from smp.mesh import lay_out
from smp.models.meta_model import meta_model
from smp.models.parameters import parameter_table
from smp.models.registry import family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel import lora
from smp.parallel.experts.compute import multiply
from smp.parallel.parallelize import apply_techniques
from smp.parallel.technique import Setup
from smp.train.flops import model_flops_per_token
from smp.train.step import train_step
from tests import experts
from tests.distributed import run_distributed
from tests.model_checks import in_double
from tests.parity.test_lora import STEPS, our_name, peft, peft_of, settings_with
from tests.reference import (
    CLIP,
    LR,
    Layout,
    build_reference,
    global_batch,
    rank_batch,
    reference_trajectory,
    relative,
    tiny_config,
)
from tests.tensor_parallel import whole

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
PARAMETERS = ["mlp.experts.gate_up_proj", "experts.down_proj"]
TWO = [Layout("full_shard", ep=2, checkpointing=True), Layout("full_shard")]
FOUR = [
    Layout("full_shard", ep=2, accumulation=2, checkpointing=True, mode="selective"),
    Layout("hybrid_shard", 2, ep=2),
    Layout("full_shard", ep=4),
    Layout("full_shard", tp=2, checkpointing=True),
    Layout("full_shard", tp=2, ep=2, checkpointing=True),
]


def names_and_gradients(expected) -> dict[str, torch.Tensor]:
    """Return peft's gradients by the names of the parameters here, in their shapes."""
    found = {}
    for key, gradient in expected.gradients.items():
        name = our_name(key)
        module, _, factor = name.rpartition(".")
        if ".experts" in module:
            parameter = "gate_up_proj" if module.endswith(".base_layer") else "down_proj"
            name = f"{module.removesuffix('.base_layer')}.{parameter}_{factor}"
            parts = gradient.chunk(experts.EXPERTS) if factor == "lora_A" else None
            parts = parts or [gradient[:, index :: experts.EXPERTS] for index in range(experts.EXPERTS)]
            gradient = torch.stack(list(parts))
        found[name] = gradient
    return found


def check(kind: str, layouts: list[Layout], folder) -> None:
    family_of(experts.config_of(kind))  # derived in fp32, as always
    with in_double():  # routers compute in fp32, which would round a last digit either way
        theirs = peft.PeftModel.from_pretrained(experts.build(kind), folder / "adapter", is_trainable=True)
        expected = reference_trajectory(theirs, STEPS)
        gradients = names_and_gradients(expected)
        for layout in layouts:
            check_layout(kind, layout, folder, expected.losses, gradients)


def check_layout(kind, layout, folder, losses, gradients) -> None:
    mesh, settings = layout.mesh(), settings_with(layout, adapter_path=str(folder / "adapter"))
    model = experts.build(kind)
    setup = Setup(family_of(model.config), mesh, settings)
    apply_techniques(model, setup)
    optimizer = build_optimizer(model, OptimConfig(), lr=LR)
    found = []
    optimizer.register_step_pre_hook(
        lambda *_: found.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    )
    for step in range(STEPS):
        batch = rank_batch(step, mesh.data_rank, mesh.data_size, layout.accumulation)
        result = train_step(model, optimizer, batch, setup=setup, device=torch.device("cpu"), grad_clip=CLIP)
        assert abs(result.loss() - losses[step]) <= 1e-9 * losses[step], (layout, step)
    assert found[0].keys() == gradients.keys()  # what is frozen has none
    for name, gradient in gradients.items():
        assert relative(found[0][name] - gradient, gradient) <= 1e-9, (layout, name)
    if layout.ep > 1 and layout.strategy == "full_shard":
        for name in ("down_proj", "down_proj_lora_A", "gate_up_proj_lora_B"):
            local = model.get_parameter(f"model.layers.1.mlp.experts.{name}").to_local()
            assert local.shape[0] <= experts.EXPERTS // layout.ep
    if layout == TWO[0]:
        check_files(model, settings, kind, folder)


def check_files(model, settings, kind, folder) -> None:
    export_hf(model, folder / "trained")
    parameters, read = lora_merge.merged(model, settings)
    export_hf(parameters, folder / "merged", hf_config=model.config, read=read)
    if dist.get_rank() == 0:
        theirs = peft.PeftModel.from_pretrained(experts.build(kind), folder / "trained")
        batch = global_batch(0)[0]
        logits = theirs(input_ids=batch).logits
        plain = theirs.merge_and_unload().state_dict()
        merged, report = AutoModelForCausalLM.from_pretrained(
            folder / "merged", dtype=torch.float64, experts_implementation="eager", output_loading_info=True
        )
        assert not any(report.values())
        ours = merged.state_dict()
        assert ours.keys() == plain.keys()
        for key, tensor in plain.items():
            assert relative(ours[key] - tensor, tensor) <= 1e-15, key
        assert relative(merged(input_ids=batch).logits - logits, logits) <= 1e-9
    dist.barrier()


def saved(kind: str, folder) -> None:
    torch.manual_seed(5)
    adapted = peft_of(experts.build(kind), target_modules=TARGETS, target_parameters=PARAMETERS)
    adapted.save_pretrained(folder / "adapter")


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_steps_and_files_are_those_of_peft(kind, tmp_path):
    saved(kind, tmp_path)
    run_distributed(check, kind, TWO, tmp_path, world_size=2)


@pytest.mark.full
def test_steps_of_four_ranks_are_those_of_peft(tmp_path):
    saved("qwen3_moe", tmp_path)
    run_distributed(check, "qwen3_moe", FOUR, tmp_path, world_size=4)


@pytest.mark.parametrize(("parameters", "said"), [
    ((), "The routed experts (down_proj, gate_up_proj) get none and are frozen."),
    (("down_proj",), "The routed experts get adapters of down_proj."),
])  # fmt: skip
def test_what_adapters_reach_is_said(parameters, said, caplog):
    with caplog.at_level(logging.INFO, "smp"):
        smp.lora(experts.build("glm4_moe"), rank=2, target_parameters=parameters)
    (found,) = (record.getMessage() for record in caplog.records if "adapters of" in record.getMessage())
    reached = (
        "--lora_target_modules all-linear: adapters of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj."
    )
    assert found == f"{reached} {said}"


@pytest.mark.parametrize("targets", [["gate_up_proj"], ["mlp.experts.down_proj", "layers.1.mlp.experts.gate_up_proj"]])
def test_adapters_of_experts_alone_are_read_by_peft(targets, tmp_path):
    model = smp.lora(experts.build("gpt_oss"), rank=2, target_modules=[], target_parameters=targets)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    smp.export_hf(model, tmp_path)
    batch = global_batch(0)[0]
    wanted, base = model(input_ids=batch).logits, experts.build("gpt_oss")(input_ids=batch).logits
    assert relative(wanted - base, base) > 1e-3
    theirs = peft.PeftModel.from_pretrained(experts.build("gpt_oss"), tmp_path)
    adapted = sum(p.numel() for name, p in theirs.named_parameters() if ".lora_" in name)
    assert adapted == sum(p.numel() for p in model.parameters() if p.requires_grad)
    again = smp.lora(experts.build("gpt_oss"), adapter_path=tmp_path)
    for each in (theirs, again):
        assert relative(each(input_ids=batch).logits - wanted, wanted) <= 1e-6  # norms are of fp32
    with lora.left_out(model):
        assert relative(model(input_ids=batch).logits - base, base) <= 1e-6


@pytest.mark.parametrize("rank", [3, 4])
def test_factors_of_any_rank_are_multiplied_in_fp32(rank):
    """Of 3 rows they are none that grouped_mm takes."""
    torch.manual_seed(5)
    rows, weight = torch.randn(9, 32), torch.randn(4, rank, 32)
    found = multiply(rows, weight, [2, 0, 3, 4])
    assert (
        relative(found - torch.cat([rows[:2] @ weight[0].T, rows[2:5] @ weight[2].T, rows[5:] @ weight[3].T]), found)
        < 1e-6
    )


@pytest.mark.parametrize(("kind", "changes", "sentence"), [
    ("mixtral", {"target_parameters": ["w1"]}, "the end of no parameter's name; there are experts.down_proj, exp"),
    ("glm4_moe", {"target_parameters": ["gate.weight"]}, "is the end of model.layers.1.mlp.gate.weight, no"),
    ("gpt_oss", {"target_parameters": ["down_proj_bias"]}, "no matrices of experts; there are experts.down"),
    ("mixtral", {"target_parameters": ["down_proj"], "dropout": 0.1}, "adapters of experts have none, as in peft"),
    ("mixtral", {"target_parameters": "down_proj", "modules_to_save": ["mlp"]}, "save mlp trains as they are"),
    (None, {"target_parameters": ["down_proj.weight"]}, "the model has no experts in one parameter: leave it out"),
])  # fmt: skip
def test_what_gets_no_adapter_is_refused(kind, changes, sentence):
    model = build_reference("llama_gqa", torch.float32) if kind is None else experts.build(kind)
    with pytest.raises(UserError, match=sentence):
        smp.lora(model, rank=2, **changes)


def test_factors_of_experts_are_counted():
    """Trained are all, and a token's FLOPs are of the experts that it is sent to."""
    config = experts.config_of("mixtral")
    family, width, inner, layers, rank, top = family_of(config), 32, 48, 3, 2, 2
    settings = lora.Config(lora_rank=rank, lora_target_modules=("none",), lora_target_parameters=("experts.down_proj",))
    own = lora.parameters(meta_model(config).model, family, Settings((settings,)))
    table = meta_model(config).table.with_added(own.added, freezes=True, trained=(), family=family)
    one = layers * rank * (width + inner)
    assert table.count(lambda spec: spec.trained) == one * experts.EXPERTS
    assert f" + 6 x {one * top} trained ones" in model_flops_per_token(config, 16, table).formula
    model = smp.lora(experts.build("mixtral"), rank, target_modules=[], target_parameters=["down_proj"])
    kinds = {spec.name: spec.kind for spec in parameter_table(model, family) if spec.added}
    assert kinds == {spec.name: spec.kind for spec in table if spec.added} and set(kinds.values()) == {"experts"}


def test_experts_in_4_bits_are_refused():
    sentence = "--qlora 1 stores linear layers in 4 bits, and routed experts are none: train a mixture with --qlora 0"
    with pytest.raises(UserError, match=sentence):
        smp.lora(experts.build("mixtral"), rank=2, quantize="nf4")
    for config, found in ((experts.config_of("mixtral"), [sentence]), (tiny_config("llama_gqa"), [])):
        setup = Setup(
            family_of(config), lay_out(), Settings((ActivationConfig(), lora.Config(lora_rank=2, qlora=True)))
        )
        assert [each for each in lora.problems(config, setup) if "torchao" not in each] == found
