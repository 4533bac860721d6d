"""What a script does with a sharded model beside its training step has the results of one process, or is refused."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import smp
from tests.distributed import run_distributed
from tests.reference import VOCABULARY, build_reference
from tests.tensor_parallel import whole

BETWEEN = (
    "before the optimizer is made",
    "before clipping",
    "before the step",
    "with averaged weights",
    "in inference mode first",
)


def batch(step):
    return torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step))


def evaluate(model, mode=torch.no_grad):
    model.eval()
    with mode():
        model(input_ids=batch(99))
    model.train()


def fully_sharded(model):
    for block in model.model.layers:
        smp.fully_shard(block)
    return smp.fully_shard(model)


def swap(parameters):
    """Evaluate with other weights, written into parameters that were listed before."""
    saved = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)
    yield
    with torch.no_grad():
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.copy_(value)


def train(model, part, between, clip):
    """Return the losses and gradient norms of three steps on ``part(ids)``."""
    found = []
    if between == BETWEEN[0]:
        evaluate(model)
    if between == BETWEEN[4]:
        evaluate(model, torch.inference_mode)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        ids = part(batch(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if between == BETWEEN[1]:
            evaluate(model)
        norm = clip(model)
        if between == BETWEEN[2]:
            evaluate(model)
        optimizer.step()
        optimizer.zero_grad()
        if between == BETWEEN[3]:
            for _ in swap(parameters):
                evaluate(model)
        found.append((loss.item(), float(norm)))
    return found


def _evaluated(settings):
    mesh = smp.init(settings)
    # The loss of all ranks' tokens is the mean of theirs, which all have as many.
    expected = train(
        build_reference("llama_gqa", torch.float64),
        lambda ids: ids,
        None,
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5),
    )
    ways = [
        functools.partial(smp.parallelize, gradient_reduction="mean"),
        *([] if mesh.tp.size > 1 else [fully_sharded]),
    ]
    for shard, between in itertools.product(ways, BETWEEN):
        model = shard(build_reference("llama_gqa", torch.float64))
        found = train(
            model, lambda ids: ids.chunk(mesh.data_size)[mesh.data_rank], between, lambda m: smp.clip_grad_norm_(m, 0.5)
        )
        losses = torch.tensor([loss for loss, _ in found], dtype=torch.float64)
        torch.distributed.all_reduce(losses, group=mesh.data_group)
        losses /= mesh.data_size
        # Hugging Face computes the loss in fp32.
        assert losses.tolist() == pytest.approx([loss for loss, _ in expected], rel=1e-6), (between, shard)
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-6), (between, shard)


@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_degree": 2}], ids=["shard 2", "tp 2"])
def test_an_evaluation_between_leaves_training_as_it_is(settings):
    run_distributed(_evaluated, settings, world_size=2)


def _backbones(settings):
    mesh = smp.init(settings)
    for name in ("llama_gqa", "mistral", "gpt_neox"):
        _backbone(name, mesh)


def _backbone(name, mesh):
    reference, model = build_reference(name, torch.float64), build_reference(name, torch.float64)
    smp.parallelize(model, gradient_reduction="mean")
    ids, shown = batch(0), torch.ones(4, 12, dtype=torch.int64)
    shown[::2, :3] = 0  # padding on the left
    restarting = torch.cat([torch.arange(5), torch.arange(7)]).expand(4, 12)
    torch.manual_seed(1)
    value = nn.Linear(32, 1, dtype=torch.float64)
    for given in ({}, {"attention_mask": shown}, {"position_ids": restarting}):
        for each, rows in ((reference, slice(None)), (model, mesh.data_rank)):
            each.zero_grad()
            own = {k: v if isinstance(rows, slice) else v.chunk(mesh.data_size)[rows] for k, v in given.items()}
            tokens = ids if isinstance(rows, slice) else ids.chunk(mesh.data_size)[rows]
            hidden = each.base_model(input_ids=tokens, use_cache=False, **own).last_hidden_state
            weights = own.get("attention_mask", torch.ones_like(tokens))[..., None]
            F.mse_loss(value(hidden) * weights, torch.ones_like(weights, dtype=torch.float64)).backward()
        expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        for n, parameter in model.named_parameters():
            if n in expected:
                found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                torch.testing.assert_close(found, expected[n], rtol=1e-9, atol=1e-12, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("settings", [{}, {"tp": 2, "sequence_parallel": False}], ids=["shard 2", "tp 2"])
def test_a_value_head_on_the_backbone_sees_masks_and_has_gradients(settings):
    run_distributed(_backbones, settings, world_size=2)


def _refused():
    smp.init(tp=2)
    model = build_reference("llama_gqa", torch.float32)
    model.gradient_checkpointing_enable()
    with pytest.raises(
        smp.UserError, match="gradient checkpointing has no effect under tensor parallelism: leave it out"
    ):
        smp.transform(model)
    model = build_reference("llama_gqa", torch.float32)
    smp.transform(model)
    with pytest.raises(smp.UserError, match=r"^resize_token_embeddings cannot .*: call it before smp.transform"):
        model.resize_token_embeddings(100)
    smp.parallelize(model)
    with pytest.raises(smp.UserError, match=r"^resize_token_embeddings cannot .*: call it before smp.parallelize"):
        model.resize_token_embeddings(100)
    with pytest.raises(smp.UserError, match="gradient checkpointing has no effect"):
        model.gradient_checkpointing_enable()
    with pytest.raises(
        smp.UserError, match=r"^a LlamaModel cannot be called without its head .* sequence_parallel=False"
    ):
        model.model(input_ids=batch(0))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model(input_ids=batch(0))
        loss = model(input_ids=batch(0), labels=batch(0)).loss
    with pytest.raises(smp.UserError, match=r"^torch.autocast does not convert .* dtype=torch.bfloat16"):
        loss.backward()
    with pytest.raises(smp.UserError, match=r"^inputs_embeds is not available under tensor parallelism"):
        model(inputs_embeds=torch.zeros(4, 12, 32))
    with pytest.raises(smp.UserError, match=r"^tensor parallelism takes input_ids, and there are none"):
        model(labels=batch(0))


def test_what_a_split_model_cannot_do_is_refused():
    run_distributed(_refused, world_size=2)


def _shared_with_the_root():
    from transformers import GPT2Config, GPT2LMHeadModel

    smp.init()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    smp.parallelize(model)
    with pytest.raises(smp.UserError, match=r"^a GPT2Model has parameters that smp.parallelize shards with the model"):
        model.transformer(input_ids=batch(0))
    assert model(input_ids=batch(0), output_hidden_states=True).hidden_states[-1].shape == (4, 12, 32)


def test_a_backbone_whose_parameters_the_model_gathers_is_not_called_alone():
    run_distributed(_shared_with_the_root, world_size=2)


def _loaded(settings):
    smp.init(**settings)
    reference = build_reference("llama_gqa", torch.float32)
    for shard in (smp.parallelize, lambda model: smp.FSDP(smp.transform(model))):
        model = shard(build_reference("llama_gqa", torch.float32))
        for factor, gathered in ((0.5, False), (2.0, True)):
            full = {name: value * factor for name, value in reference.state_dict().items()}
            if gathered:  # a forward without a backward
                model(input_ids=batch(0))
            assert not any(model.load_state_dict(full))
            found = model.state_dict()
            assert all(torch.equal(whole(found[name]), value) for name, value in full.items())


@pytest.mark.parametrize("settings", [{}, {"tp": 2}], ids=str)
def test_full_tensors_are_loaded_into_a_sharded_model(settings):
    run_distributed(_loaded, settings, world_size=2)
