"""Cross entropy of a causal language model, as a sum, so that the caller divides by the global token count."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Move labels one place left, so that position t holds what position t predicts.

    Args:
        labels: ``(batch, sequence)`` int64 in Hugging Face's convention (equal to the inputs, -100 ignored).

    Returns:
        Same shape; the last column is ignored.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def count_valid_tokens(labels: torch.Tensor) -> int:
    """Number of predictions that count in the loss, after the shift; ``labels`` as in :func:`shift_labels`."""
    return int((labels[:, 1:] != IGNORE_INDEX).sum())


def causal_lm_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the token losses in nats, computed in at least fp32.

    The labels are shifted, not the logits: slicing the logits would copy the largest tensor of the step.

    Args:
        logits: ``(batch, sequence, vocabulary)``.
        labels: ``(batch, sequence)`` as in :func:`shift_labels`.

    Returns:
        0-d tensor; divide by the number of valid tokens of the whole global batch.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.reshape(-1, logits.shape[-1]).to(dtype)
    return F.cross_entropy(flat, shift_labels(labels).reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum")
