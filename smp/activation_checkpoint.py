"""Activation checkpointing of whole blocks: keep a block's input, recompute the rest in backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import nn
from torch.utils.checkpoint import checkpoint


def apply_activation_checkpointing(blocks: Iterable[nn.Module]) -> None:
    """Recompute each block in backward (non-reentrant), with the dropout masks of its forward.

    The block's ``forward`` is wrapped, not the module: parameter names stay those of Hugging Face, and the hooks of
    ``fully_shard`` stay outside, so that recomputation does not gather parameters again.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
    """
    for block in blocks:
        forward = block.forward
        block.forward = functools.wraps(forward)(  # type: ignore[method-assign]
            functools.partial(checkpoint, forward, use_reentrant=False)
        )
