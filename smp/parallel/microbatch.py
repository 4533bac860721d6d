"""The form of a micro-batch, from the data to the loss, and its copies on a device."""

from __future__ import annotations

from typing import Any, TypedDict

import torch


class Microbatch(TypedDict, total=False):
    """The samples of one forward pass, on the host.

    The data makes the first nine; each technique's ``own_part`` then takes what its rank computes, and may add an
    argument of the model. Nothing after the data looks at token ids to find a document's end or a trained token.

    Attributes:
        input_ids: ``(batch, sequence)`` int64.
        targets: ``(batch, sequence)`` int64, the id that each token predicts. -100 where no loss is made: what comes
            next is padding, masked, another document, or (a chat's prompt) only read.
        attention_mask: ``(batch, sequence)``, only where a token is hidden before one that is shown.
        position_ids: ``(batch, sequence)``, which restart at each document; where documents are kept apart.
        document_bounds: ``(documents + 1,)`` int32, where documents begin in the flattened batch, and its end: as who
            packed the rows knows, be it by end-of-sequence tokens. The answers of a pair are two.
        longest_document: its tokens, or more.
        row_tokens: ``(batch,)`` int64, the tokens of each row before its padding; where some are padded.
        sample_ids: ``(batch,)`` positions in the stream, -1 for a padding row.
        reference: ``(pairs, 2)``, of preferences what the data was given of each pair.
        sequences: ``(batch, sequence)`` int64, the number of each token's sequence, where sums of each are wanted.
        sequence_tokens: ``(sequences,)`` int64, how many of each one's tokens are trained on, on all ranks.
        chosen: row and column of each token that gets logits, ``(2, tokens)``; without it, all do.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    document_bounds: torch.Tensor
    longest_document: int
    row_tokens: torch.Tensor
    sample_ids: torch.Tensor
    reference: torch.Tensor
    sequences: torch.Tensor
    sequence_tokens: torch.Tensor
    chosen: torch.Tensor
    sequence_shard: Any


# What is not an argument of the model.
FOR_THE_STEP = (
    "targets", "document_bounds", "longest_document", "row_tokens", "sample_ids", "reference", "sequences",
    "sequence_tokens", "chosen",
)  # fmt: skip


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; the host does not wait, and may change the original only if that is not pinned."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # else the copy would wait for the GPU; what is pinned remains as it is
    return tensor.to(device, non_blocking=True)
