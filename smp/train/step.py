"""One step: forward, backward, clip, update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp.config import ParallelConfig
from smp.data.data_pipeline import StepBatch
from smp.faults.nonfinite import spread_nonfinite
from smp.host_copies import to_device
from smp.loss import IGNORE_INDEX
from smp.microbatch import FOR_THE_STEP, Microbatch
from smp.parallel.attention import document_lengths
from smp.parallel.grad_norm import clip_grad_norm_
from smp.parallel.loss import model_loss_sum
from smp.parallel.parallelize import own_part
from smp.parallel.sharding import set_gradient_sync
from smp.parallel.technique import Setup, after_update, extra_loss
from smp.train.optimizer import step_unless


def nothing(tag: str) -> None:
    """Do nothing: stands in for a memory tracker's function."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Results of one step: device tensors, which the host need not wait for."""

    loss_sum: torch.Tensor  # 0-d fp64, this rank's sum of token losses
    valid: torch.Tensor  # 0-d, valid tokens of the whole global batch
    grad_norm: torch.Tensor  # 0-d
    norms: dict[nn.Parameter, torch.Tensor]  # of each gradient on this rank, 0-d
    loss_group: dist.ProcessGroup | None  # the ranks over which losses are summed

    def numbers(self, *, over_all_ranks: bool) -> torch.Tensor:
        """Return the sum of losses, over all ranks or this rank's; this rank's; the norm; the tokens; ``(4,)`` fp64."""
        total = self.loss_sum
        if over_all_ranks:
            total = total.clone()
            dist.all_reduce(total, group=self.loss_group)
        return torch.stack([total, self.loss_sum, self.grad_norm.to(total), self.valid.to(total)])

    @property
    def tokens(self) -> int:
        """Valid tokens of the whole global batch; waits for the device."""
        return int(self.valid)

    def loss(self) -> float:
        """Return the mean loss over the global batch's valid tokens; collective, and waits for the device."""
        total, _, _, tokens = self.numbers(over_all_ranks=True).tolist()
        return total / max(tokens, 1)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    *,
    setup: Setup,
    device: torch.device,
    grad_clip: float,
    record: Callable[[str], None] = nothing,
    enter: Callable[[str], None] = lambda phase: None,
) -> StepResult:
    """Run one optimizer step: count tokens, accumulate gradients, clip, update; collective.

    The device leaves the update out where the gradients are not finite, or no token of the batch is valid.

    Args:
        model: the prepared model.
        optimizer: a fused AdamW.
        batch: this data rank's micro-batches.
        setup: the model's, on a joined mesh.
        grad_clip: bound of the global gradient norm; 0 only measures.
        record: called with the name of each phase, for the memory tracker.
        enter: called with the name of each phase, for the watchdog.
    """
    parallel, loss_group = setup.settings[ParallelConfig], setup.mesh.loss.group
    defer, keep = parallel.defer_gradient_sync, not parallel.reshard_between_microbatches
    microbatches = [own_part(microbatch, setup) for microbatch in batch.microbatches]
    count = sum(map(valid_tokens, microbatches))
    valid = torch.full((), count, dtype=torch.int64, device=device)  # an argument of the kernel: nothing is copied
    counted = dist.all_reduce(valid, group=loss_group, async_op=True)
    record("Before train step")
    loss_sum = torch.zeros((), device=device, dtype=torch.float64)
    for index, microbatch in enumerate(microbatches):
        last = index == len(microbatches) - 1
        set_gradient_sync(model, last=last, defer=defer, keep=keep)
        enter("forward")
        loss = forward(model, microbatch, device)
        record("After forward")
        if index == 0:
            counted.wait()  # overlaps with the first forward
        enter("backward")
        (spread_nonfinite(extra_loss(model, loss)) / valid.clamp(min=1)).backward()
        loss_sum += loss.detach()
    record("After train step")
    enter("optimizer")
    norms: dict[nn.Parameter, torch.Tensor] = {}
    grad_norm = clip_grad_norm_(model, grad_clip, norms=norms)
    skipped = ~grad_norm.isfinite() | (valid == 0)
    step_unless(optimizer, skipped)
    after_update(model, skipped)
    # Before the next forward, so that gradients are freed when activations grow.
    optimizer.zero_grad(set_to_none=True)
    record("After opt step")
    return StepResult(loss_sum, valid, grad_norm, norms, loss_group)


def valid_tokens(microbatch: Microbatch) -> int:
    """Count the predictions of a micro-batch that are in the loss."""
    return int((microbatch["targets"] != IGNORE_INDEX).sum())


def forward(model: nn.Module, microbatch: Microbatch, device: torch.device) -> torch.Tensor:
    """Return the sum of the token losses of one micro-batch, 0-d."""
    inputs = {name: _moved(value, device) for name, value in microbatch.items() if name not in FOR_THE_STEP}
    if "document_bounds" in microbatch:
        inputs |= document_lengths(to_device(microbatch["document_bounds"], device), microbatch["longest_document"])
    return model_loss_sum(model, inputs, microbatch["targets"], microbatch.get("chosen"))


def _moved(value: Any, device: torch.device) -> Any:
    return to_device(value, device) if isinstance(value, torch.Tensor) else value
