"""Stand-ins of the planned world, each undone in a process for one plan: what goes wrong without it.

Those without which another test fails, such as tests/parity/test_plan_bytes.py, are not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import masking_utils
from transformers.utils import import_utils

from smp.data.data_pipeline import StepBatch
from smp.plan import fake_cuda, trace

# As they are before the world is prepared.
_IS_TRACING = import_utils.is_tracing
_ATTENTION = F.scaled_dot_product_attention
_PROPAGATE = ShardingPropagator._propagate_tensor_meta_non_cached


def _pause() -> None:
    """Count what DTensor's propagation of shapes allocates."""
    ShardingPropagator._propagate_tensor_meta_non_cached = _PROPAGATE


def _is_tracing() -> None:
    import_utils.is_tracing = masking_utils.is_tracing = _IS_TRACING


def _attention() -> None:
    F.scaled_dot_product_attention = _ATTENTION


def _streams() -> None:
    """Allocate everything on one stream."""
    fake_cuda.Stream.__enter__ = lambda self: fake_cuda._streams.stack.append(fake_cuda.default)


WITHOUT: dict[str, Callable[[], None]] = {
    "pause": _pause, "is_tracing": _is_tracing, "attention": _attention, "streams": _streams,
}  # fmt: skip


def _new_shapes() -> None:
    """Let DTensor propagate every shape of the step anew, and not remember those of the optimizer's first."""
    allocate = trace._allocate_state

    def forgetting(optimizer: torch.optim.Optimizer) -> None:
        allocate(optimizer)
        _clear_sharding_prop_cache()

    trace._allocate_state = forgetting


def _padding_masks() -> None:
    """Give each batch a padding mask."""
    make = trace._batch

    def masked(job: Any) -> StepBatch:
        batch = make(job)
        for microbatch in batch.microbatches:
            microbatch["attention_mask"] = torch.ones_like(microbatch["input_ids"])
        return batch

    trace._batch = masked


# What a step must be like for a trap to show.
WHERE: dict[str, Callable[[], None]] = {"shapes are new": _new_shapes, "batches have padding masks": _padding_masks}
