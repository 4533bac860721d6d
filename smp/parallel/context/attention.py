"""The attention function of transformers that a block calls, for each ``--cp_comm_type``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smp.errors import UserError
from smp.parallel.context.functions import CP_COMM_TYPES, Attention, SequenceShard, copies_of_heads
from smp.parallel.context.kernels import GPU_DTYPES, Scores

# Keyword that a model hands on to its attention function.
SHARD = "sequence_shard"


def name_of(comm_type: str) -> str:
    """Return the name in transformers' registry."""
    return f"smp_context_{comm_type}"


def splits_sequences(module: nn.Module) -> bool:
    """Return whether a module calls one of these functions."""
    configs = (getattr(each, "config", None) for each in module.modules())
    return any(str(getattr(config, "_attn_implementation", None)).startswith(name_of("")) for config in configs)


def no_part() -> UserError:
    """Return the refusal of a batch that was not cut."""
    return UserError(
        "under context parallelism a model takes a rank's part of a batch: call "
        "model(**smp.shard_sequence(batch)) in the training step and in the validation, with a batch such as "
        "{'input_ids': ids, 'labels': ids}; to generate, export the model, or use context_parallel_degree 1"
    )


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    extra = width - tensor.shape[-1]
    return F.pad(tensor, (0, extra)) if extra else tensor


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequence_shard: SequenceShard | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    *,
    comm_type: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over the ranks of a sequence.

    Args:
        query: ``(batch, heads, tokens of this rank, width)``; ``key`` and ``value`` may have fewer heads, and values
            another width, up to which the narrower are padded: kernels and collectives take one.
        s_aux: sinks, ``(heads,)``.

    Returns:
        ``(batch, tokens of this rank, heads, width of values)``, as transformers' attention functions.

    Raises:
        UserError: the model was not given a part of a batch, or computes in a dtype that the kernels do not have.
    """
    if sequence_shard is None:
        raise no_part()
    if attention_mask is not None:
        raise UserError("under context parallelism a model takes no attention_mask: leave it out")
    if query.is_cuda and query.dtype not in GPU_DTYPES:
        raise UserError(
            f"under context parallelism attention's kernels on GPUs compute in bf16, and the model's queries are "
            f"{query.dtype}: call smp.parallelize(model, dtype=torch.bfloat16)"
        )
    local = sum(last - first for first, last in sequence_shard.own)
    if (query.shape[2], key.shape[2]) != (local, local):
        raise UserError(
            f"under context parallelism a model takes the {local} tokens that smp.shard_sequence gave, and no "
            f"past_key_values: got {query.shape[2]} queries and {key.shape[2]} keys"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention = Attention(sequence_shard, Scores(scale, softcap), sliding_window)
    of_values = value.shape[-1]
    widest = max(query.shape[-1], of_values)
    query, key, value = (_padded(each, widest) for each in (query, key, value))
    if comm_type == "all_to_all" and (copies := copies_of_heads(key.shape[1], sequence_shard.role.size)) > 1:
        key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))
    out = CP_COMM_TYPES[comm_type].apply(query, key, value, attention, s_aux)
    return out[..., :of_values].transpose(1, 2), None


@functools.cache
def register() -> None:
    """Register the functions; transformers makes no masks for them."""
    from transformers import AttentionInterface

    for comm_type in CP_COMM_TYPES:
        AttentionInterface.register(name_of(comm_type), functools.partial(_attend, comm_type=comm_type))
