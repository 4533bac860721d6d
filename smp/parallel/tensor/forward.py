"""Forward of a split model: positions and masks of full sequences.

Hugging Face would derive them from the length of the hidden states, which are sharded by tokens with sequence
parallelism.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from smp.errors import UserError
from smp.loss import IGNORE_INDEX, causal_lm_loss_sum, shift_labels
from smp.parallel import attention
from smp.parallel.technique import draws
from smp.parallel.tensor.group import TPGroup
from smp.parallel.tensor.layers import enter_with_own_tokens, leave_with_all_tokens


def _padded(tensor: torch.Tensor | None, extra: int, value: int) -> torch.Tensor | None:
    """Pad rows ``(batch, sequence)`` by ``extra`` positions."""
    return tensor if tensor is None or not extra else F.pad(tensor, (0, extra), value=value)


def _positions(position_ids: torch.Tensor | None, ids: torch.Tensor, extra: int) -> torch.Tensor:
    """Return positions of all tokens, ``(1 or batch, sequence + extra)``; padding has its row's last one.

    One more would be another length to rotary embeddings that depend on it, and may be more than are learned.
    """
    if position_ids is None:
        position_ids = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    return torch.cat([position_ids, position_ids[:, -1:].expand(-1, extra)], dim=1) if extra else position_ids


def _mask(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> Any:
    """Make the mask of full sequences, in the format of the model's attention, unless that makes it."""
    kind = getattr(model, attention.KIND, None)
    if kind in attention.FLASH and mask is not None:
        raise UserError(
            f"attention_mask with {kind} and sequence parallelism is not available: leave the mask out (padding on "
            f"the right needs none), or use --attn_implementation sdpa or --sequence_parallel 0"
        )
    if kind is not None:
        return mask
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return attention.make_mask(model.config, given, bounds=None)


def _refuse(kwargs: dict[str, Any], config: Any) -> None:
    for name in ("past_key_values", "inputs_embeds"):
        if kwargs.pop(name, None) is not None:
            raise UserError(f"{name} is not available under tensor parallelism: give input_ids; to generate, export "
                            f"the model and load it with from_pretrained")  # fmt: skip
    keep = kwargs.pop("logits_to_keep", 0)
    if not isinstance(keep, int) or keep:
        raise UserError("logits_to_keep is not available under tensor parallelism: leave it out")
    for name in ("output_hidden_states", "output_attentions"):
        if kwargs.get(name, getattr(config, name, False)):
            raise UserError(f"{name} is not available under tensor parallelism, where each rank has a part of them: "
                            f"leave it out")  # fmt: skip


@contextlib.contextmanager
def _marking(inside: list[bool]) -> Iterator[None]:
    inside.append(True)
    try:
        yield
    finally:
        inside.pop()


def _refuse_alone(model: nn.Module, inside: list[bool]) -> None:
    """Refuse a call of the backbone without the head, whose hidden states have another gradient on each rank."""

    def refuse(module: nn.Module, *_: object) -> None:
        if not inside:
            raise UserError(
                f"a {type(module).__name__} cannot be called without its head under sequence parallelism, where "
                f"each tensor-parallel rank has a part of its tokens: give sequence_parallel=False to smp.init"
            )

    backbone = getattr(model, "base_model", model)
    if backbone is not model:
        backbone.register_forward_pre_hook(torch.compiler.disable(refuse))


def split_forward(model: nn.Module, tp: TPGroup, blocks: list[nn.Module], *, full_sequence_embedding: bool) -> None:
    """Replace the forward of a causal language model.

    Positions and masks of full sequences are made here, unless transformers makes them of all tokens' embeddings.

    It takes ``input_ids``, ``attention_mask``, ``position_ids`` ``(batch, sequence)`` and ``labels`` as Hugging Face's
    does. ``logits`` of the result is a DTensor ``(batch, sequence, vocabulary)``, split by the vocabulary: its
    ``full_tensor()`` gathers it; ``loss`` is computed without doing so.
    """
    forward, config = model.forward, cast(Any, model.config)
    random, forked = draws(model, config), contextlib.ExitStack()
    inside: list[bool] = []
    if tp.sequence_parallel:
        _refuse_alone(model, inside)
    if full_sequence_embedding and tp.sequence_parallel:
        enter_with_own_tokens(tp, blocks[0])
        leave_with_all_tokens(tp, blocks[-1], forked.close)  # what follows draws the same on all ranks

    def split(
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        _refuse(kwargs, config)
        if input_ids is None:
            raise UserError("tensor parallelism takes input_ids, and there are none: give them")
        length = input_ids.shape[1]
        ids, positions, mask = input_ids, position_ids, attention_mask
        if tp.sequence_parallel:
            extra = -length % tp.size
            ids = F.pad(input_ids, (0, extra))
            if extra or not full_sequence_embedding or position_ids is not None:
                positions = _positions(position_ids, input_ids, extra)
            if extra and "cu_seq_lens_q" in kwargs:
                kwargs |= attention.lengthened(kwargs, length, extra)
            elif position_ids is None and mask is None and positions is not None and hasattr(model, attention.KIND):
                kwargs |= attention.whole_rows(ids)
            if mask is None or mask.ndim == 2:
                mask = _padded(mask, extra, 0)
                mask = mask if full_sequence_embedding else _mask(model, ids, mask, cast(torch.Tensor, positions))
            elif extra:
                raise UserError(
                    f"a 4-D attention_mask needs a sequence length that the {tp.size} tensor-parallel ranks "
                    f"divide, got {length}: pad the batch"
                )
        items, shifted = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
        as_tuple = kwargs.pop("return_dict", True) is False
        given = {"position_ids": positions} if positions is not None or not full_sequence_embedding else {}
        with forked, _marking(inside):
            if random and model.training and tp.sequence_parallel:
                forked.enter_context(tp.fork_random(ids.device))
            found = forward(input_ids=ids, attention_mask=mask, **{**given, **kwargs, "use_cache": False})
        if not found.logits.numel():  # the head has computed the loss in chunks instead
            return found
        logits = _as_dtensor(found.logits[:, :length], config.vocab_size, tp)
        if labels is not None and shifted is None:
            shifted = shift_labels(labels)
        loss = None if shifted is None else _mean_loss(logits, shifted, items)
        found = type(found)(loss=loss, logits=logits)  # a new object, for the order in a tuple
        return found.to_tuple() if as_tuple else found

    model.forward = split  # type: ignore[method-assign]


def _as_dtensor(logits: torch.Tensor, vocabulary: int, tp: TPGroup) -> DTensor:
    logits = logits.contiguous()
    batch, length, _ = logits.shape
    shape = torch.Size((batch, length, vocabulary))
    stride = (length * vocabulary, vocabulary, 1)
    return DTensor.from_local(logits, tp.mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)


def _mean_loss(logits: DTensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
    """Return Hugging Face's loss, by shifted labels: the mean over valid ones, or the sum over the given items."""
    count = (labels != IGNORE_INDEX).sum() if items is None else items
    return causal_lm_loss_sum(logits, labels, shifted=True) / count
