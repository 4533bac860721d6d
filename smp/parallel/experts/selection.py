"""Another selection of experts than the router's own while training: by normalised logits, or by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from smp.errors import UserError
from smp.parallel.experts.tokens import Tokens

Choose = Callable[[torch.Tensor, int, Tokens], torch.Tensor]
# So many, whatever the values, that ranks reduce alike, and that the host reads none of them.
_ITERATIONS, _EPSILON = 32, 1e-8


def sinkhorn(logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return exponentiated logits whose rows and columns sum up alike, each sequence by itself; collective.

    Megatron-LM normalises a micro-batch, whose sequences the layout decides, until columns change by little.

    Args:
        logits: ``(tokens, experts)``.

    Source: ``sinkhorn`` of Megatron-LM's ``megatron/core/transformer/moe/moe_utils.py``.
    """
    cost = (logits - logits.amax(-1, keepdim=True)).exp()
    scaled = cost
    for _ in range(_ITERATIONS):
        rows = 1 / (scaled.sum(1, keepdim=True) + _EPSILON) / tokens.length
        columns = 1 / (tokens.add_up_over_ranks(rows * cost) + _EPSILON) / cost.shape[1]
        scaled = columns[tokens.sequences] * cost
    return 1 / (scaled.sum(1, keepdim=True) + _EPSILON) / tokens.length * scaled


def by_sinkhorn(logits: torch.Tensor, top: int, tokens: Tokens) -> torch.Tensor:
    """Return the experts of each token by normalised logits, ``(tokens, top)``; collective."""
    return sinkhorn(logits, tokens).topk(top, dim=-1).indices


def by_position(logits: torch.Tensor, top: int, tokens: Tokens) -> torch.Tensor:
    """Return the experts from that of a token's position in its sequence on, modulo their number."""
    return (tokens.positions.unsqueeze(1) + torch.arange(top, device=logits.device)) % logits.shape[1]


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


def replace(router: Any, choose: Choose, experts: int, tokens: Callable[[], Tokens]) -> None:
    """Let a router in training choose otherwise; in evaluation, and what it exports, nothing changes.

    Args:
        experts: their number.
        tokens: returns those of the running forward.

    Raises:
        UserError: in a forward, of a router that does not choose by ``topk``.
    """
    forward = router.forward

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if not router.training:
            return forward(*args, **kwargs)
        with torch.no_grad():
            logits = forward(*args, **kwargs)[0]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).view(-1, experts)
            # An operation whose result recomputation keeps.
            index = torch.ops.smp.chosen_experts(choose(logits, router.top_k, tokens()))
        with _Chosen(index, experts) as mode:
            found = forward(*args, **kwargs)
        if not mode.was_asked:
            raise UserError(
                f"a {type(router).__name__} does not choose experts by topk, so that it cannot choose otherwise: use "
                f"--moe_load_balancing sequence"
            )
        return found

    router.forward = chosen
