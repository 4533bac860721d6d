"""The summed cross entropy against its definition."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from smp.loss import causal_lm_loss_sum, count_valid_tokens, shift_labels
from tests.distributed import run_distributed


def test_equals_the_shifted_mean_times_the_count():
    logits = torch.randn(3, 7, 11, dtype=torch.float64)
    labels = torch.randint(0, 11, (3, 7))
    labels[0, 2:5] = -100
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1), ignore_index=-100)
    total = causal_lm_loss_sum(logits, labels)
    torch.testing.assert_close(total / count_valid_tokens(labels), expected, rtol=1e-14, atol=0)


def test_first_label_and_ignored_ones_do_not_count():
    assert count_valid_tokens(torch.tensor([[5, 6, -100, 7]])) == 2
    assert shift_labels(torch.tensor([[5, 6, -100, 7]])).tolist() == [[6, -100, 7, -100]]


@pytest.mark.parametrize(("given", "computed"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_computes_in_at_least_fp32(given, computed):
    loss = causal_lm_loss_sum(torch.randn(1, 4, 5, dtype=given), torch.ones(1, 4, dtype=torch.int64))
    assert loss.dtype == computed


def test_nothing_valid_is_zero_not_nan():
    logits = torch.randn(2, 4, 5, requires_grad=True)
    loss = causal_lm_loss_sum(logits, torch.full((2, 4), -100))
    loss.backward()
    assert loss == 0 and logits.grad.abs().max() == 0


def in_parts(whole: torch.Tensor) -> tuple[torch.Tensor, DTensor]:
    """This rank's columns, as a leaf, and all of them as a split tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = whole.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    return own, DTensor.from_local(own, mesh, [Shard(2)], run_check=False, shape=whole.shape, stride=whole.stride())


def _check_split(dtype, tolerance, vocabulary, ignored):
    torch.manual_seed(0)
    logits = (torch.randn(3, 7, vocabulary) * 20).to(dtype)
    labels = torch.randint(0, vocabulary, (3, 7))
    labels[:, -2:] = torch.tensor([0, vocabulary - 1])
    labels[0, ignored] = labels[1, ignored] = labels[2, ignored] = -100
    own, split = in_parts(logits)
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(
        reference[:, :-1].flatten(0, 1).to(torch.promote_types(dtype, torch.float32)), labels[:, 1:].flatten(),
        ignore_index=-100, reduction="sum",
    )  # fmt: skip
    loss = causal_lm_loss_sum(split, labels)
    torch.testing.assert_close(loss, expected, rtol=min(tolerance, 1e-5), atol=0)
    (loss * 0.3).backward()
    (expected * 0.3).backward()
    mine = reference.grad.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    assert own.grad.dtype == dtype
    torch.testing.assert_close(own.grad, mine, rtol=tolerance, atol=1e-7 if dtype != torch.float64 else 1e-15)


def _check_every_split():
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for vocabulary in (12, 13, 97):
            for ignored in (slice(0), slice(2, 5), slice(None)):
                _check_split(dtype, tolerance, vocabulary, ignored)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_split_logits_have_the_loss_and_gradient_of_whole_ones(world_size):
    run_distributed(_check_every_split, world_size=world_size)


def _check_extremes():
    # The greatest logit of a token is on one rank only, and far above the others' range.
    logits = torch.full((1, 2, 8), -3e4)
    logits[..., 1] = 3e4
    own, split = in_parts(logits)
    loss = causal_lm_loss_sum(split, torch.tensor([[0, 1]]))
    loss.backward()
    assert loss == 0 and own.grad.abs().max() == 0
    assert causal_lm_loss_sum(in_parts(logits)[1], torch.tensor([[0, 7]])) == 6e4
    for wrong in (8, -1):
        with pytest.raises(ValueError, match=f"label {wrong} is outside the vocabulary of 8"):
            causal_lm_loss_sum(in_parts(logits)[1], torch.tensor([[0, wrong]]))
    with pytest.raises(ValueError, match="the vocabulary must be split"):
        whole = DTensor.from_local(logits, init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
        causal_lm_loss_sum(whole, torch.tensor([[0, 1]]))


def test_split_logits_far_apart():
    run_distributed(_check_extremes, world_size=2)
