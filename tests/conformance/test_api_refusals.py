"""What a script gives to smp, or asks of its models, that cannot be, is refused in a sentence."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import smp
from smp.parallel import refusals
from tests.distributed import run_distributed
from tests.reference import build_reference


def _saved(config, folder):
    smp.init(**config)
    for shard in (smp.transform, smp.parallelize) if "tp" in config else (smp.parallelize,):
        reference = build_reference("llama_gqa", torch.float32)
        full = {name: value.clone() for name, value in reference.state_dict().items()}
        model = shard(reference)
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
        for call in (model.save_pretrained, torch.compile(model, backend="eager").save_pretrained):
            with pytest.raises(smp.UserError, match=r"^save_pretrained .*: call smp.export_hf\(model, '.*saved'\) on"):
                call(str(folder / "saved"))
        assert not (folder / "saved").exists()
        own = folder / shard.__name__
        model.save_pretrained(own, state_dict=full)
        dist.barrier()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(own).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in full.items())


@pytest.mark.parametrize("config", [{}, {"tp": 2}], ids=str)
def test_save_pretrained_names_what_writes_a_sharded_model(config, tmp_path):
    run_distributed(_saved, config, tmp_path, world_size=2)


def _given():
    smp.init()
    model = build_reference("llama_gqa", torch.float32)
    for name, call in (
        ("parallelize", smp.parallelize),
        ("transform", smp.transform),
        ("load_pretrained", lambda given: smp.load_pretrained(given, "base")),
        ("export_hf", lambda given: smp.export_hf(given, "/nowhere")),
    ):
        for given in ("base", torch.nn.Linear(2, 2), None):
            sentence = f"^smp.{name} takes a Hugging Face causal language model, got a {type(given).__name__}: build"
            with pytest.raises(smp.UserError, match=sentence):
                call(given)
    for given in ("base", None, {"model_type": "llama"}):
        with pytest.raises(smp.UserError, match=r"^smp.meta_init takes a config, got .*: give AutoConfig.from_pre"):
            smp.meta_init(given)
    for name, given, example in (
        ("dtype", "bfloat16", "dtype, such as torch.bfloat16"),
        ("loss", True, r"LossConfig, such as smp.LossConfig\(\)"),
        ("activation", True, r"ActivationConfig, such as smp.ActivationConfig\(\)"),
    ):
        with pytest.raises(smp.UserError, match=f"^smp.parallelize: {name} {given!r} is not allowed: give a {example}"):
            smp.parallelize(model, **{name: given})
    smp.parallelize(model)
    with pytest.raises(smp.UserError, match=r"^smp.parallelize: the FSDPLlamaForCausalLM is sharded already: shard a"):
        smp.parallelize(model)


def test_what_is_no_model_or_no_config_or_was_given_before():
    run_distributed(_given, world_size=1)


def _other_batches():
    smp.init(tp=2)
    model = smp.parallelize(build_reference("llama_gqa", torch.float32))
    ids = torch.arange(8).view(2, 4)
    for training in (True, False):
        model.train(training)
        with pytest.raises(
            smp.UserError, match=r"^tensor parallelism: the 2 ranks .* \(2, 4\), \(2, 4\): read the samples"
        ):
            model(input_ids=ids + dist.get_rank())
        model(ids)
        with mock.patch.object(refusals, "require_same_batch", side_effect=AssertionError("once is enough")):
            model(ids)


def test_ranks_of_a_tensor_parallel_group_that_read_other_samples():
    run_distributed(_other_batches, world_size=2)


def _wrapped_or_compiled():
    smp.init()
    for shard, name in ((smp.parallelize, "smp.parallelize"), (smp.FSDP, "FSDP"), (smp.fully_shard, "smp.fully_shard")):
        model = shard(build_reference("llama_gqa", torch.float32))
        with pytest.raises(smp.UserError, match=f"^DistributedDataParallel, .* that {name} has sharded .*: train it"):
            nn.parallel.DistributedDataParallel(model)
    compiled = torch.compile(build_reference("llama_gqa", torch.float32), backend="eager")
    for change in (smp.transform, smp.parallelize, smp.lora, smp.chunk_loss):
        with pytest.raises(
            smp.UserError, match=f"^smp.{change.__name__.replace('adapt', 'lora')} changes .*: call smp"
        ):
            change(compiled)


def test_what_is_put_around_a_model_of_which_each_rank_has_a_part():
    run_distributed(_wrapped_or_compiled, world_size=2)


def _too_early():
    smp.init(tp=2)
    model, ids = build_reference("llama_gqa", torch.float32), torch.arange(8).view(2, 4)
    smp.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    loss = smp.parallelize(model)(input_ids=ids, labels=ids).loss
    with pytest.raises(smp.UserError, match=r"^tensor parallelism cannot recompute .*: call apply_activation_check"):
        loss.backward()
    with pytest.raises(smp.UserError, match=r"^generate is not available under tensor parallelism: export the model"):
        model.generate(ids, use_cache=False)


def test_recomputation_and_generation_that_tensor_parallelism_does_not_do():
    run_distributed(_too_early, world_size=2)
