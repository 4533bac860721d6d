"""Adapters of a mixture's attention: trained beside experts that are split, merged, and what gets none is said."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported before the ranks are forked
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import smp
from smp.checkpoint import lora_merge
from smp.checkpoint.hf_export import export_hf
from smp.config import ActivationConfig, Settings
from smp.errors import UserError
from smp.mesh import lay_out
from smp.models.registry import family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel import lora
from smp.parallel.parallelize import apply_techniques
from smp.parallel.technique import Setup
from smp.train.step import train_step
from tests import experts
from tests.distributed import run_distributed
from tests.parity.test_lora import STEPS, our_name, peft, peft_of, settings_with
from tests.reference import CLIP, LR, Layout, rank_batch, reference_trajectory, relative, tiny_config
from tests.tensor_parallel import whole

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def check(folder) -> None:
    adapter = folder / "adapter"
    theirs = peft.PeftModel.from_pretrained(experts.build("mixtral"), adapter, is_trainable=True)
    expected = reference_trajectory(theirs, STEPS)
    gradients = {our_name(key): gradient for key, gradient in expected.gradients.items()}
    layout, model = Layout("full_shard", ep=2, checkpointing=True), experts.build("mixtral")
    mesh, settings = layout.mesh(), settings_with(layout, adapter_path=str(adapter))
    setup = Setup(family_of(model.config), mesh, settings)
    apply_techniques(model, setup)
    optimizer = build_optimizer(model, OptimConfig(), lr=LR)
    found = []
    optimizer.register_step_pre_hook(
        lambda *_: found.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    )
    for step in range(STEPS):
        batch = rank_batch(step, mesh.data_rank, mesh.data_size, 1)
        result = train_step(model, optimizer, batch, setup=setup, device=torch.device("cpu"), grad_clip=CLIP)
        assert abs(result.loss() - expected.losses[step]) <= 1e-9 * expected.losses[step], step
    assert found[0].keys() == gradients.keys()  # frozen experts have none
    for name, gradient in gradients.items():
        assert relative(found[0][name] - gradient, gradient) <= 1e-9, name
    assert model.get_parameter("model.layers.0.mlp.experts.down_proj").to_local().shape[0] == experts.EXPERTS // 2
    check_files(model, settings, folder)


def check_files(model, settings, folder) -> None:
    export_hf(model, folder / "trained")
    parameters, read = lora_merge.merged(model, settings)
    export_hf(parameters, folder / "merged", hf_config=model.config, read=read)
    if dist.get_rank() == 0:
        plain = peft.PeftModel.from_pretrained(experts.build("mixtral"), folder / "trained").merge_and_unload()
        merged, report = AutoModelForCausalLM.from_pretrained(
            folder / "merged", dtype=torch.float64, output_loading_info=True
        )
        assert not any(report.values())
        assert any(".experts.3.w1.weight" in key for key in load_file(folder / "merged" / "model.safetensors"))
        ours = merged.state_dict()
        assert ours.keys() == plain.state_dict().keys()
        assert all(torch.equal(ours[key], tensor) for key, tensor in plain.state_dict().items())
    dist.barrier()


def test_steps_and_merged_files_are_those_of_peft(tmp_path):
    peft_of(experts.build("mixtral"), target_modules=TARGETS).save_pretrained(tmp_path / "adapter")
    run_distributed(check, tmp_path, world_size=2)


def test_what_adapters_reach_is_said(caplog):
    with caplog.at_level(logging.INFO, "smp"):
        smp.lora(experts.build("glm4_moe"), rank=2)
    (said,) = (record.getMessage() for record in caplog.records if "adapters of" in record.getMessage())
    assert said == (
        "--lora_target_modules all-linear: adapters of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj. "
        "The routed experts (down_proj, gate_up_proj) get none and are frozen."
    )


def test_experts_in_4_bits_are_refused():
    sentence = "--qlora 1 stores linear layers in 4 bits, and routed experts are none: train a mixture with --qlora 0"
    with pytest.raises(UserError, match=sentence):
        smp.lora(experts.build("mixtral"), rank=2, quantize="nf4")
    for config, found in ((experts.config_of("mixtral"), [sentence]), (tiny_config("llama_gqa"), [])):
        setup = Setup(
            family_of(config), lay_out(), Settings((ActivationConfig(), lora.Config(lora_rank=2, qlora=True)))
        )
        assert [each for each in lora.problems(config, setup) if "torchao" not in each] == found
