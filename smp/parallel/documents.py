"""Documents that transformers' masks keep apart: which token is of which, told instead of read from the device."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smp.errors import UserError
from smp.models.derive import without_values
from smp.models.hf_values import rope_limit
from smp.models.registry import build_model

# Called in place of transformers' function, which reads positions ``(batch, sequence)``.
Find = Callable[[torch.Tensor], torch.Tensor | None]

_told: contextvars.ContextVar[Find | None] = contextvars.ContextVar("smp_documents", default=None)
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


@functools.cache
def _install() -> None:
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices

    @functools.wraps(find)
    def told(position_ids: torch.Tensor) -> torch.Tensor | None:
        return (_told.get() or find)(position_ids)

    masking_utils.find_packed_sequence_indices = told


@contextlib.contextmanager
def told(find: Find | None) -> Iterator[None]:
    """Let transformers' masks take documents from a function; None: from positions, as it does itself."""
    _install()
    token = _told.set(find)
    try:
        yield
    finally:
        _told.reset(token)


def document_index(ids: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the number of every token's document, from 1 on, in the shape of ``ids``."""
    tokens = torch.arange(ids.numel(), dtype=bounds.dtype, device=bounds.device)
    return torch.bucketize(tokens, bounds, right=True).view(ids.shape)


def bounds_of(positions: torch.Tensor) -> torch.Tensor:
    """Return where documents begin in a flattened batch, and its end, ``(documents + 1,)`` int32: at rows and restarts.

    Args:
        positions: ``(batch, sequence)``.
    """
    starts = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)
    first = starts.flatten().nonzero().flatten()
    return F.pad(first, (0, 1), value=positions.numel()).to(torch.int32)


def mixes_tokens(model: nn.Module) -> str | None:
    """Return what, besides attention, carries something from one token to another, if there is such a thing."""
    types = getattr(model.config, "layer_types", None) or getattr(model.config, "layers_block_type", None) or ()
    other = next((kind for kind in types if kind not in _ATTENTION), None)
    conv = next((module for module in model.modules() if isinstance(module, nn.Conv1d)), None)
    return f"it has {other} layers" if other else "it has convolutions over tokens" if conv is not None else None


def no_documents(why: str, instead: str = "") -> UserError:
    """Return the refusal of documents that the model would not keep apart; ``instead`` is another way than rows."""
    return UserError(
        f"the model does not keep packed documents apart ({why}), as --document_mask 1 and --dataset_type chat do: use "
        f"{instead}--document_mask 0, with rows of input_ids and labels in place of conversations"
    )


def check_documents(hf_config: Any, length: int = 0) -> None:
    """Check that a model keeps packed documents apart.

    Args:
        length: of a row: rotary embeddings with two sets of factors take one of them by the longest document.

    Raises:
        UserError: it does not.
    """
    if found := mixes_documents(hf_config, length):
        raise no_documents(*found)


def mixes_documents(hf_config: Any, length: int = 0) -> tuple[str] | tuple[str, str] | None:
    """Return why a model does not keep packed documents apart, and perhaps another way; None: it does.

    A forward on the meta device tells whether its masks follow from positions that restart.
    """
    kind, most = rope_limit(hf_config) or ("", length)
    if kind == "dynamic":
        return ("its rotary embedding (dynamic) goes by the longest document of a micro-batch",)
    if length > most:
        longer = f"beyond {most} tokens its rotary embedding is another for all of a micro-batch"
        return longer, f"--max_context_width {most}, or "
    with torch.device("meta"):
        model = build_model(hf_config, attn_implementation="eager")
        ids, positions = (torch.zeros(2, 6, dtype=torch.long) for _ in range(2))
    if why := mixes_tokens(model):
        return (why,)
    asked: list[bool] = []

    def find(position_ids: torch.Tensor) -> torch.Tensor:
        asked.append(position_ids is positions)
        return positions

    try:
        with torch.no_grad(), torch.device("meta"), told(find), without_values(model):
            model(input_ids=ids, position_ids=positions, use_cache=False)
    except TypeError:
        return ("its forward takes no positions",)
    except RuntimeError as error:
        return (f"its forward cannot be followed without values: {error}",)
    return None if asked and all(asked) else ("its masks do not depend on positions",)
