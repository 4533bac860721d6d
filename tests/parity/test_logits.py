"""Scaled and capped logits on several ranks: the loss in chunks trains like the plain Hugging Face model."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers.models.cohere import modeling_cohere  # imported before the ranks are forked
from transformers.models.gemma2 import modeling_gemma2

import smp
from smp.models.family import LogitTransform
from smp.parallel.loss import SplitHead, linear_cross_entropy
from tests.distributed import run_distributed
from tests.reference import Layout, assert_parity, global_batch, reference_trajectory, relative
from tests.unit.test_logits import build, loss_of

NAMES = ["cap", "division", "product"]
STEPS = 3


@pytest.fixture
def exact(monkeypatch):
    """Let norms compute in their input's precision.

    Hugging Face's convert their weights to fp32, and so sum their gradients of each micro-batch in fp32.
    """
    monkeypatch.setattr(modeling_gemma2.Gemma2RMSNorm, "forward", lambda norm, x: _scaled(x, norm.eps, 1 + norm.weight))
    monkeypatch.setattr(
        modeling_cohere.CohereLayerNorm,
        "forward",
        lambda norm, x: _scaled(x - x.mean(-1, keepdim=True), norm.variance_epsilon, norm.weight),
    )


def _scaled(x, eps, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _train(references):
    for reference, expected in references:
        for layout in (Layout("full_shard", checkpointing=True), Layout("shard_grad_op", accumulation=2, chunk=0)):
            assert_parity(reference, expected, layout, 1e-9)


@pytest.mark.full
def test_training_is_hugging_faces(exact):
    references = [build(name) for name in NAMES]
    pairs = [(model, reference_trajectory(model, STEPS)) for model in references]
    run_distributed(_train, pairs, world_size=2)


def _units_of_backward(loss):
    """The sharding units whose hooks backward runs, in order."""
    run, units = FSDPParamGroup.pre_backward, []

    def hook(group, *args):
        units.append(group._module_fqn)
        return run(group, *args)

    with mock.patch.object(FSDPParamGroup, "pre_backward", hook):
        loss.backward()
    return units


def _script(reference, loss, gradients, after):
    """Shard and make the loss in chunks, in either order; every rank has the whole batch."""
    smp.init({"hybrid_shard_degree": 2})
    ids, labels = global_batch(0)
    whole = smp.parallelize(copy.deepcopy(reference))
    units = _units_of_backward(loss_of(whole(input_ids=ids).logits, labels))
    model = copy.deepcopy(reference)
    model = smp.chunk_loss(smp.parallelize(model)) if after else smp.parallelize(smp.chunk_loss(model))
    for _ in range(2):  # what a backward leaves behind would spoil the next
        model.zero_grad()
        found = model(input_ids=ids, labels=labels).loss
        assert abs(found - loss) <= 1e-9 * loss
        assert _units_of_backward(found / 2) == units
        for name, parameter in model.named_parameters():
            assert relative(parameter.grad.full_tensor() - gradients[name], gradients[name]) <= 1e-9, name


@pytest.mark.full
@pytest.mark.parametrize("after", [False, True])
def test_before_and_after_sharding(exact, after):
    reference = build("cap")
    ids, labels = global_batch(0)
    loss = loss_of(reference(input_ids=ids).logits, labels)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in reference.named_parameters()}
    reference.zero_grad()
    run_distributed(_script, reference, loss.detach(), gradients, after, world_size=2)


def _split_vocabulary():
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 7, 16), (30, 16), (30,)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).double() for shape in shapes)
    labels = torch.randint(0, 30, (2, 7), generator=generator)
    rank, group = dist.get_rank(), dist.group.WORLD

    def total(tensor):
        dist.all_reduce(tensor)
        return tensor

    head = SplitHead(first=15 * rank, group=group, gather=lambda tensor: tensor, reduce=total)
    rows = slice(15 * rank, 15 * (rank + 1))
    for transform in (LogitTransform(scale=1 / 3), LogitTransform(scale=0.7, cap=2.5)):
        options = {"chunk_tokens": 4, "z_loss": 1e-2, "logits": transform}
        whole = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        expected = linear_cross_entropy(*whole[:2], labels, bias=whole[2], **options)
        own = [tensor.clone().requires_grad_() for tensor in (hidden, weight[rows], bias[rows])]
        found = linear_cross_entropy(*own[:2], labels, bias=own[2], split=head, vocabulary=30, **options)
        assert found.item() == pytest.approx(expected.item(), rel=1e-12)
        of_own, of_whole = torch.autograd.grad(found, own), torch.autograd.grad(expected, whole)
        for one, other in zip(of_own, (of_whole[0], of_whole[1][rows], of_whole[2][rows]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_under_a_split_vocabulary():
    run_distributed(_split_vocabulary, world_size=2)
