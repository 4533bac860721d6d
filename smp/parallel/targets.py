"""What the loss compares with, and which tokens it is computed of."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch

from smp.loss import IGNORE_INDEX, shift_labels
from smp.parallel.microbatch import to_device


class Targets(NamedTuple):
    """What the loss compares with.

    Attributes:
        labels: shifted, ``(batch, sequence)``; or of the chosen tokens, ``(tokens,)``.
        chosen: row and column of each token that has a valid label, ``(2, tokens)``; None: all tokens.
        of_token: the sequence of each token, in the shape of ``labels``, int64; None: all tokens are summed.
        sequences: their number.
    """

    labels: torch.Tensor
    chosen: torch.Tensor | None = None
    of_token: torch.Tensor | None = None
    sequences: int = 0

    @classmethod
    def at(
        cls, targets: torch.Tensor, chosen: torch.Tensor | None, sequences: tuple[torch.Tensor, int] | None = None
    ) -> Targets:
        """Return those of the chosen tokens of ``targets``, ``(batch, sequence)``, as the sequences are."""
        of_token, number = sequences or (None, 0)
        if chosen is not None:
            targets, of_token = targets[tuple(chosen)], None if of_token is None else of_token[tuple(chosen)]
        return cls(targets, chosen, of_token, number)

    def to(self, device: torch.device) -> Targets:
        """Return them on a device, for which the host does not wait."""
        labels, chosen, of_token = (
            None if each is None else to_device(each, device) for each in (self.labels, self.chosen, self.of_token)
        )
        return Targets(cast(torch.Tensor, labels), chosen, of_token, self.sequences)


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
