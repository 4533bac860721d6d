"""Another selection of experts than the router's own while training: by normalised logits, or by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from smp.errors import UserError

Choose = Callable[[torch.Tensor, int], torch.Tensor]
_TOLERANCE, _EPSILON = 1e-4, 1e-8


def sinkhorn(logits: torch.Tensor) -> torch.Tensor:
    """Return exponentiated logits whose rows and columns sum up alike, each sequence by itself.

    Megatron-LM normalises a micro-batch, whose sequences the layout decides.

    Args:
        logits: ``(batch, sequence, experts)``.

    Source: ``sinkhorn`` of Megatron-LM's ``megatron/core/transformer/moe/moe_utils.py``.
    """
    cost = (logits - logits.amax(-1, keepdim=True)).exp()
    _, tokens, experts = cost.shape
    columns = torch.ones_like(cost[:, :1])
    done = torch.zeros_like(cost[:, :1, :1], dtype=torch.bool)

    def inverse_sums(scaled: torch.Tensor, along: int) -> torch.Tensor:
        return 1 / (scaled.sum(along, keepdim=True) + _EPSILON)

    while not bool(done.all()):
        rows = inverse_sums(columns * cost, 2) / tokens
        new = inverse_sums(rows * cost, 1) / experts
        change = (new - columns).abs().mean(2, keepdim=True)
        columns = torch.where(done, columns, new)  # how often is decided by the sequence alone
        done = done | ~(change > _TOLERANCE)
    return inverse_sums(columns * cost, 2) / tokens * columns * cost


def by_sinkhorn(logits: torch.Tensor, top: int) -> torch.Tensor:
    """Return the experts of each token by normalised logits, ``(batch, sequence, top)``."""
    return sinkhorn(logits).topk(top, dim=-1).indices


def by_position(logits: torch.Tensor, top: int) -> torch.Tensor:
    """Return the experts from that of a token's position in its sequence on, modulo their number."""
    _, tokens, experts = logits.shape
    first = torch.arange(tokens, device=logits.device).unsqueeze(1)
    return ((first + torch.arange(top, device=logits.device)) % experts).expand(len(logits), -1, -1)


CHOOSE: dict[str, Choose] = {"sinkhorn": by_sinkhorn, "balanced": by_position}


class _Chosen(TorchFunctionMode):
    """Let ``topk`` over the experts choose given ones, so that the router's own code weighs them."""

    def __init__(self, index: torch.Tensor, experts: int):
        super().__init__()
        self._index, self._experts, self.was_asked = index, experts, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, torch.Tensor.topk) and args[0].shape == (len(self._index), self._experts):
            self.was_asked = True
            return torch.return_types.topk((args[0].gather(1, self._index), self._index))  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))


def replace(router: Any, choose: Choose, experts: int, batch: Callable[[], int]) -> None:
    """Let a router in training choose otherwise; in evaluation, and what it exports, nothing changes.

    Args:
        experts: their number.
        batch: returns the sequences of the running forward.

    Raises:
        UserError: in a forward, of a router that does not choose by ``topk``.
    """
    forward = router.forward

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if not router.training:
            return forward(*args, **kwargs)
        with torch.no_grad():
            logits = forward(*args, **kwargs)[0]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).view(batch(), -1, experts)
            index = choose(logits, router.top_k).reshape(-1, router.top_k)
        with _Chosen(index, experts) as mode:
            found = forward(*args, **kwargs)
        if not mode.was_asked:
            raise UserError(
                f"a {type(router).__name__} does not choose experts by topk, so that it cannot choose otherwise: use "
                f"--moe_load_balancing sequence"
            )
        return found

    router.forward = chosen
