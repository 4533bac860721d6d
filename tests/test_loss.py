"""The summed cross entropy against its definition."""

import pytest
import torch
import torch.nn.functional as F

from smp.loss import causal_lm_loss_sum, count_valid_tokens, shift_labels


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
