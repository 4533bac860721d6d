"""Weights in 4 bits: torchao's values, and at any layout the steps of peft's adapters beside these weights."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import smp
from smp.checkpoint import lora_merge
from smp.comm.gloo import DirectAllGather
from smp.errors import UserError
from smp.models.registry import family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel import lora, nf4
from smp.parallel.parallelize import apply_techniques
from smp.parallel.technique import Setup
from smp.train.step import train_step
from tests.distributed import run_distributed
from tests.parity.test_lora import STEPS, our_name, peft, peft_of, settings_with
from tests.reference import CLIP, LR, VOCABULARY, Layout, rank_batch, reference_trajectory, relative
from tests.tensor_parallel import whole

pytest.importorskip("torchao")
LAYOUTS = {
    1: [Layout("no_shard", checkpointing=True)],
    2: [Layout("full_shard"), Layout("full_shard", cp=2, mode="selective", checkpointing=True)],
    4: [Layout("full_shard", accumulation=2)],
}


def build(dtype=torch.float64, **changes):
    """A model whose layers are made of blocks; 24 rows of keys and values are no multiple of 4 ranks' parts."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 12} | changes
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)


def torchaos(weight):
    """The weight as torchao has it."""
    return nf4._to_nf4(weight.float()).get_original_weight().to(weight.dtype)


def quantised(model):
    """The plain model with the linear layers' weights as torchao has them."""
    with torch.no_grad():
        for module in model.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(torchaos(module.weight))
    return model


def test_a_packed_weight_is_torchaos():
    for shape in ((512, 128), (24, 192), (1, 64), (3, 320)):
        weight = torch.randn(shape) * torch.rand(shape[0], 1)
        packed, scales = nf4.pack(weight)
        values = weight.numel()
        assert torch.equal(nf4.unpack(packed, scales, shape[1]), torchaos(weight))
        assert packed.nbytes <= values // 2 + values // 64 + shape[0] and packed.dtype == torch.bfloat16
        assert scales.numel() <= 17 + values // 64


def check_layouts(layouts, folder):
    theirs = peft.PeftModel.from_pretrained(quantised(build()), folder / "adapter", is_trainable=True)
    expected = reference_trajectory(theirs, STEPS)
    gradients = {our_name(key): gradient for key, gradient in expected.gradients.items()}
    for layout in layouts:
        model, mesh = build(), layout.mesh()
        settings = settings_with(layout, adapter_path=str(folder / "adapter"), qlora=True)
        setup = Setup(family_of(model.config), mesh, settings)
        apply_techniques(model, setup)
        parameters, of = lora_merge.merged(model, settings)
        plain = theirs_merged(folder)
        assert all(parameters[name].shape == plain[name].shape for name in parameters)
        assert all(torch.equal(of(name), plain[name]) for name in parameters), layout
        optimizer, sizes, call = build_optimizer(model, OptimConfig(), lr=LR), set(), DirectAllGather.__call__

        def gather(self, output_tensor, input_tensor, *args, call=call, sizes=sizes, **kwargs):
            sizes.add(input_tensor.nbytes)
            return call(self, output_tensor, input_tensor, *args, **kwargs)

        for step in range(STEPS):
            found = {}
            hook = optimizer.register_step_pre_hook(
                lambda *_, m=model, f=found: f.update(
                    {n: whole(p.grad) for n, p in m.named_parameters() if p.requires_grad}
                )
            )
            batch = rank_batch(step, mesh.data_rank, mesh.data_size, layout.accumulation)
            with mock.patch.object(DirectAllGather, "__call__", gather):
                result = train_step(model, optimizer, batch, setup=setup, device=torch.device("cpu"), grad_clip=CLIP)
            hook.remove()
            assert abs(result.loss() - expected.losses[step]) <= 1e-9 * expected.losses[step], (layout, step)
            for key, gradient in found.items() if step == 0 else ():
                assert relative(gradient - gradients[key], gradients[key]) <= 1e-9, (layout, key)
        if layout == Layout("full_shard"):
            assert gathered_bytes(model) in sizes, (gathered_bytes(model), sizes)


def gathered_bytes(model):
    """What two ranks gather of a block: 33 bytes for 64 values of its layers, and the factors and norms."""
    found = 0
    for name, parameter in model.model.layers[0].named_parameters():
        rows, *columns = parameter.shape
        if parameter.dtype == torch.float64:
            found += -(-rows // 2) * math.prod(columns) * 8
        else:
            bytes_of_row = model.model.layers[0].get_submodule(name.removesuffix(".weight")).in_features * 33 // 64
            found += rows // 2 * (bytes_of_row + bytes_of_row % 2)
    return found


def theirs_merged(folder):
    theirs = peft.PeftModel.from_pretrained(quantised(build()), folder / "adapter")
    return theirs.merge_and_unload().state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_are_those_of_the_quantised_model(world_size, tmp_path):
    peft_of(build()).save_pretrained(tmp_path / "adapter")
    run_distributed(check_layouts, LAYOUTS[world_size], tmp_path, world_size=world_size)


def test_what_cannot_be_held_in_4_bits_is_one_sentence():
    with pytest.raises(UserError, match=r"down_proj has 96 inputs, and must be a torch\.nn\.Linear"):
        smp.lora(build(intermediate_size=96), 2, quantize="nf4")
    with pytest.raises(UserError, match="quantize is 'int4'; it is None or 'nf4'"):
        smp.lora(build(), 2, quantize="int4")
    with pytest.raises(UserError, match=r"were cast to torch.float64: do not cast the model after smp\.lora"):
        smp.lora(build(), 2, quantize="nf4").double()(input_ids=torch.arange(4)[None])
    with mock.patch.object(nf4, "is_installed", return_value=False):
        with pytest.raises(UserError, match="not installed: pip install torchao"):
            smp.lora(build(), 2, quantize="nf4")
        assert nf4.problems(2) == [
            "--qlora 1 quantises with torchao, which is not installed: pip install torchao",
            "--qlora 1 with --tensor_parallel_degree 2: weights in 4 bits are sharded, and not split: leave the degree "
            "at 1, or train with --qlora 0",
        ]


def test_the_base_alone_is_computed():
    """As the reference of preferences is."""
    model = smp.lora(build(), 2, quantize="nf4")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    inputs = torch.arange(24).reshape(2, 12)
    wanted = quantised(build())(input_ids=inputs).logits
    assert relative(model(input_ids=inputs).logits - wanted, wanted) > 1e-3
    with lora.left_out(model):
        assert relative(model(input_ids=inputs).logits - wanted, wanted) <= 1e-9


def script(folder):
    """A script's model computes what peft's does beside the same weights, and its files are of peft."""
    smp.init()
    model = smp.parallelize(smp.lora(build(), adapter_path=folder / "adapter", quantize="nf4"))
    theirs = peft.PeftModel.from_pretrained(quantised(build()), folder / "adapter")
    inputs = torch.arange(24).reshape(2, 12)
    wanted = theirs(input_ids=inputs).logits
    assert relative(model(input_ids=inputs).logits - wanted, wanted) <= 1e-9
    smp.export_hf(model, folder / "again")
    again, first = (load_file(folder / name / "adapter_model.safetensors") for name in ("again", "adapter"))
    assert again.keys() == first.keys() and all(torch.equal(again[key], first[key]) for key in first)
    assert not list((folder / "again").glob("model*.safetensors"))


def refused(folder):
    smp.init(tensor_parallel_degree=2)
    with pytest.raises(UserError, match="weights in 4 bits are sharded, and not split"):
        smp.parallelize(smp.lora(build(), 2, quantize="nf4"))


def test_a_script(tmp_path):
    peft_of(build()).save_pretrained(tmp_path / "adapter")
    run_distributed(script, tmp_path, world_size=2)
    run_distributed(refused, tmp_path, world_size=2)
