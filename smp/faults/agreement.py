"""What the ranks must know of each other at every step boundary, in one small exchange."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Agreement:
    """Counts flags over all ranks.

    Args:
        device: where the exchanged numbers are; the one that the process group's backend needs.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def count(self, **flags: bool) -> dict[str, int]:
        """How many ranks raised each flag; collective, with the same flags in the same order."""
        raised = torch.tensor([int(value) for value in flags.values()], dtype=torch.int64, device=self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(raised)
        return dict(zip(flags, raised.tolist(), strict=True))
