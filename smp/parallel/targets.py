"""What the loss compares with: labels, and where they leave out tokens the others."""

from __future__ import annotations

from typing import NamedTuple

import torch

from smp.host_copies import to_device
from smp.loss import IGNORE_INDEX, shift_labels


class Targets(NamedTuple):
    """What the loss compares with, on the device.

    Attributes:
        labels: shifted, ``(batch, sequence)``; or of the chosen tokens, ``(tokens,)``.
        chosen: row and column of each token that has a valid label, ``(2, tokens)``; None: all tokens.
    """

    labels: torch.Tensor
    chosen: torch.Tensor | None = None


def targets_of(labels: torch.Tensor, device: torch.device, *, shifted: bool = False) -> Targets:
    """Choose the tokens that need logits, where that is known without asking a GPU: where ``labels`` are on the host.

    Where no label is ignored nothing is chosen: the last token of each sequence is not worth a copy of the others.

    Args:
        labels: ``(batch, sequence)`` in Hugging Face's convention.
        device: where the loss is computed.
        shifted: each token's label is what it predicts.
    """
    predicted = labels if shifted else shift_labels(labels)
    if labels.device.type != "cpu" or not (predicted[:, : None if shifted else -1] == IGNORE_INDEX).any():
        return Targets(to_device(predicted, device))
    chosen = (predicted != IGNORE_INDEX).nonzero().T.contiguous()
    return Targets(to_device(predicted[tuple(chosen)], device), to_device(chosen, device))
