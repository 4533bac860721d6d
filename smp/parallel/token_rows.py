"""Rows of an embedding and of a head that are trained while the others are frozen, in place of the frozen ones.

They are a parameter besides the weight, as in peft's ``TrainableTokensLayer``; a tied head has that of the embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smp.local_shards import local_tensor

ROWS = "trained_tokens"  # name of the parameter, (tokens, hidden)
_MARK = "_smp_token_rows"
_INDICES, _OWN = "trained_token_indices", "trained_token_own"


class TokenRows:
    """The trained rows of a module.

    Args:
        module: multiplies with them, or looks them up.
        owner: has the parameter: the module, or the embedding that a head is tied to.
        tokens: of each row.

    Attributes:
        left_out: whether the module computes what it does without them.
    """

    def __init__(self, module: nn.Module, owner: nn.Module, tokens: Sequence[int]):
        self.module, self.owner, self.tokens, self.left_out = module, owner, tuple(tokens), False
        self._summed: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._set(0, max(tokens) + 1)

    def _set(self, first: int, last: int) -> None:
        """Keep on the module's device the indices of the rows in a part of the vocabulary, and which are in it."""
        weight: Any = self.module.weight
        device = "cpu" if weight.is_meta else weight.device
        own = [index for index, token in enumerate(self.tokens) if first <= token < last]
        for name, values in ((_INDICES, [token - first for token in self.tokens]), (_OWN, own)):
            tensor = torch.tensor(values, dtype=torch.int64, device=device)
            self.module.register_buffer(name, tensor, persistent=False)

    def split(self, bounds: tuple[int, int], summed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compute of the rows those that are in this rank's part of the vocabulary.

        Args:
            bounds: of that part.
            summed: returns a tensor whose gradient is the sum of the ranks'.
        """
        self._set(*bounds)
        self._summed = summed

    def values(self) -> torch.Tensor:
        """Return all rows, through which gradients flow."""
        rows = local_tensor(getattr(self.owner, ROWS))
        return rows if self._summed is None else self._summed(rows)

    @property
    def indices(self) -> torch.Tensor:
        """Index of each row in this rank's part of the vocabulary; outside of it where another rank's is."""
        return self.module.get_buffer(_INDICES)

    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices in this rank's part of the vocabulary of the rows that are in it, and these rows."""
        own = self.module.get_buffer(_OWN)
        return self.indices[own], self.values()[own]


def rows_of(module: nn.Module) -> TokenRows | None:
    """Return the trained rows of an embedding or a head that are to be computed, if it has any."""
    found: TokenRows | None = getattr(module, _MARK, None)
    return None if found is None or found.left_out else found


def all_rows(model: nn.Module) -> list[TokenRows]:
    """Return the trained rows of all modules."""
    return [vars(module)[_MARK] for module in model.modules() if _MARK in vars(module)]


def train_rows_of_embedding(embedding: nn.Embedding, tokens: Sequence[int]) -> None:
    """Let an embedding look up trained rows in place of the weight's; before it is split.

    Args:
        embedding: has the parameter.
    """
    rows = TokenRows(embedding, embedding, tokens)
    setattr(embedding, _MARK, rows)
    # No closure, which a deep copy of the model would share with it.
    embedding.forward = functools.partial(_look_up, rows, embedding.forward)  # type: ignore[method-assign]


def _look_up(rows: TokenRows, forward: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    embedding, found = rows.module, forward(ids)
    if rows.left_out:
        return found
    indices = rows.indices
    order = indices.argsort()
    index = order[torch.searchsorted(indices, ids, sorter=order).clamp_(max=len(indices) - 1)]
    weight, padding = embedding._parameters["weight"], embedding.padding_idx
    own_padding = rows.tokens.index(padding) if padding in rows.tokens else None
    # By the model's own forward, which may scale.
    embedding._parameters["weight"], embedding.padding_idx = rows.values(), own_padding  # type: ignore[assignment]
    try:
        trained = forward(index)
    finally:
        embedding._parameters["weight"], embedding.padding_idx = weight, padding  # type: ignore[assignment]
    return torch.where((indices[index] == ids).unsqueeze(-1), trained, found)


def train_rows_of_head(head: nn.Linear, tokens: Sequence[int], owner: nn.Module) -> None:
    """Let a head multiply with trained rows in place of the weight's; before it is split.

    Args:
        owner: has the parameter: the head, or the embedding that it is tied to.
    """
    rows = TokenRows(head, owner, tokens)
    setattr(head, _MARK, rows)
    head.forward = functools.partial(_multiply, rows, head.forward)  # type: ignore[method-assign]


def _multiply(rows: TokenRows, forward: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    return with_rows(rows.module, hidden, forward(hidden))


def with_rows(head: Any, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the logits of hidden states with those of a head's trained rows, if it has any."""
    if (rows := rows_of(head)) is None:
        return logits
    indices, values = rows.columns()
    return logits.index_copy(-1, indices, F.linear(hidden, values, bias_at(head, indices)))


def bias_at(head: Any, indices: torch.Tensor) -> torch.Tensor | None:
    """Return the head's bias of this rank's logits at ``indices``, if it has one."""
    return None if head.bias is None else local_tensor(head.bias)[indices]
