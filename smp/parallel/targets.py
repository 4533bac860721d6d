"""What the loss compares with, and which tokens it is computed of."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch

from smp.host_copies import to_device
from smp.loss import IGNORE_INDEX, shift_labels


class Targets(NamedTuple):
    """What the loss compares with.

    Attributes:
        labels: shifted, ``(batch, sequence)``; or of the chosen tokens, ``(tokens,)``.
        chosen: row and column of each token that has a valid label, ``(2, tokens)``; None: all tokens.
    """

    labels: torch.Tensor
    chosen: torch.Tensor | None = None

    @classmethod
    def at(cls, targets: torch.Tensor, chosen: torch.Tensor | None) -> Targets:
        """Return those of the chosen tokens of ``targets``, ``(batch, sequence)``."""
        return cls(targets if chosen is None else targets[tuple(chosen)], chosen)

    def to(self, device: torch.device) -> Targets:
        """Return them on a device, for which the host does not wait."""
        return Targets(to_device(self.labels, device), None if self.chosen is None else to_device(self.chosen, device))


def chosen_tokens(targets: torch.Tensor, *, part: bool) -> torch.Tensor | None:
    """Choose the tokens that need logits, where that is known without asking a GPU: where ``targets`` are on the host.

    Where none is ignored nothing is chosen: the last token of each sequence is not worth a copy of the others.

    Args:
        targets: ``(batch, sequence)``, what each token predicts.
        part: rows may go on elsewhere: their last token counts as the others.

    Returns:
        Row and column of each, ``(2, tokens)``; None: all tokens.
    """
    valid = targets != IGNORE_INDEX
    if targets.device.type != "cpu" or valid[:, : None if part else -1].all():
        return None
    return valid.nonzero().T.contiguous()


def targets_of(labels: torch.Tensor | Targets | None, shifted: torch.Tensor | None = None) -> Targets:
    """Return what Hugging Face's arguments ``labels`` or ``shift_labels`` name, each ``(batch, sequence)``."""
    if isinstance(labels, Targets):
        return labels
    targets = shift_labels(cast(torch.Tensor, labels)) if shifted is None else shifted
    return Targets.at(targets, chosen_tokens(targets, part=shifted is not None))
