"""One step: forward, backward, clip, update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp.config import ParallelConfig
from smp.data.data_pipeline import StepBatch
from smp.faults.nonfinite import spread_nonfinite
from smp.loss import IGNORE_INDEX
from smp.optim.optimizers import MixedOptimizer
from smp.parallel.attention import document_lengths
from smp.parallel.experts.tokens import told_row_tokens
from smp.parallel.grad_norm import clip_grad_norm_
from smp.parallel.loss import model_loss_sum
from smp.parallel.microbatch import FOR_THE_STEP, Microbatch, to_device
from smp.parallel.parallelize import own_part
from smp.parallel.sharding import set_gradient_sync
from smp.parallel.technique import Setup, after_update, extra_loss


def nothing(tag: str) -> None:
    """Do nothing: stands in for a memory tracker's function."""


class TokenLoss:
    """The loss of each valid token, of which the mean over the global batch is minimised.

    Attributes:
        metrics: names of what is logged besides the loss, means over the same.
    """

    metrics: tuple[str, ...] = ()

    def __init__(self, setup: Setup):
        self.setup = setup

    def own_part(self, microbatch: Microbatch) -> Microbatch:
        """Return what this rank computes of a micro-batch."""
        return own_part(microbatch, self.setup)

    def count(self, microbatches: Sequence[Microbatch], device: torch.device) -> torch.Tensor:
        """Count on this rank what the loss is divided by and, where that is no token, valid tokens: 0-d or ``(2,)``."""
        count = sum(map(valid_tokens, microbatches))
        return torch.full((), count, dtype=torch.int64, device=device)  # an argument of the kernel: nothing is copied

    def compute(
        self, model: nn.Module, microbatch: Microbatch, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of a micro-batch as a sum, 0-d, and for the log that and the sums of the metrics."""
        loss = forward(model, microbatch, device)
        return loss, loss.detach()[None]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Results of one step: device tensors, which the host need not wait for."""

    sums: torch.Tensor  # fp64, of losses and metrics, this rank's
    divisor: torch.Tensor  # 0-d, what the loss is divided by, of the whole global batch
    valid: torch.Tensor  # 0-d, valid tokens of the whole global batch
    grad_norm: torch.Tensor  # 0-d
    norms: dict[nn.Parameter, torch.Tensor]  # of each gradient on this rank, 0-d
    loss_group: dist.ProcessGroup | None  # the ranks over which losses are summed
    computed: torch.Tensor  # (2,), :func:`computed` of the whole global batch

    def numbers(self, *, over_all_ranks: bool) -> torch.Tensor:
        """Return this rank's sum of losses, the norm, the tokens, the divisor, the sums over all ranks or this rank's.

        ``(5,)`` fp64, and a number for each metric.
        """
        total = self.sums
        if over_all_ranks:
            total = total.clone()
            dist.all_reduce(total, group=self.loss_group)
        others = [each.to(total) for each in (self.grad_norm, self.valid, self.divisor)]
        return torch.stack([self.sums[0], *others, *total])

    def loss(self) -> float:
        """Return the mean loss over the global batch's valid tokens; collective, and waits for the device."""
        _, _, _, divisor, total, *_ = self.numbers(over_all_ranks=True).tolist()
        return total / max(divisor, 1)


def train_step(
    model: nn.Module,
    optimizer: MixedOptimizer,
    batch: StepBatch,
    *,
    setup: Setup,
    device: torch.device,
    grad_clip: float,
    objective: TokenLoss | None = None,
    record: Callable[[str], None] = nothing,
    enter: Callable[[str], None] = lambda phase: None,
) -> StepResult:
    """Run one optimizer step: count tokens, accumulate gradients, clip, update; collective.

    The device leaves the update out where the gradients are not finite, or no token of the batch is valid.

    Args:
        optimizer: of :func:`smp.optim.optimizers.build_optimizer`.
        batch: this data rank's micro-batches.
        setup: the model's, on a joined mesh.
        grad_clip: bound of the global gradient norm; 0 only measures.
        objective: what is minimised; None: the loss of tokens.
        record: called with the name of each phase, for the memory tracker.
        enter: called with the name of each phase, for the watchdog.
    """
    parallel, loss_group = setup.settings[ParallelConfig], setup.mesh.loss.group
    defer, keep = parallel.defer_gradient_sync, not parallel.reshard_between_microbatches
    objective = objective or TokenLoss(setup)
    microbatches = [objective.own_part(microbatch) for microbatch in batch.microbatches]
    sizes = computed(batch.microbatches if setup.mesh.cp.rank == 0 else [])
    more = [torch.full((1,), each, dtype=torch.int64, device=device) for each in sizes]
    counts = torch.cat([objective.count(microbatches, device).view(-1), *more])
    counted = dist.all_reduce(counts, group=loss_group, async_op=True)
    divisor, valid = counts[0], counts[-3]
    record("Before train step")
    sums = torch.zeros(1 + len(objective.metrics), device=device, dtype=torch.float64)
    for index, microbatch in enumerate(microbatches):
        last = index == len(microbatches) - 1
        set_gradient_sync(model, last=last, defer=defer, keep=keep)
        enter("forward")
        with told_row_tokens(microbatch.get("row_tokens")):
            loss, for_log = objective.compute(model, microbatch, device)
        record("After forward")
        if index == 0:
            counted.wait()  # overlaps with the first forward
        enter("backward")
        (spread_nonfinite(extra_loss(model, loss)) / divisor.clamp(min=1)).backward()
        sums += for_log
    record("After train step")
    enter("optimizer")
    norms: dict[nn.Parameter, torch.Tensor] = {}
    grad_norm = clip_grad_norm_(model, grad_clip, norms=norms)
    skipped = ~grad_norm.isfinite() | (divisor == 0)
    optimizer.step(skip=skipped)
    after_update(model, skipped)
    # Before the next forward, so that gradients are freed when activations grow.
    optimizer.zero_grad(set_to_none=True)
    record("After opt step")
    return StepResult(sums, divisor, valid, grad_norm, norms, loss_group, counts[-2:])


def computed(microbatches: Sequence[Microbatch]) -> tuple[int, int]:
    """Count the tokens of micro-batches, padding and all, and the pairs of each with one of its row."""
    shapes = [microbatch["input_ids"].shape for microbatch in microbatches]
    return sum(rows * columns for rows, columns in shapes), sum(rows * columns**2 for rows, columns in shapes)


def valid_tokens(microbatch: Microbatch) -> int:
    """Count the predictions of a micro-batch that are in the loss."""
    return int((microbatch["targets"] != IGNORE_INDEX).sum())


def forward(model: nn.Module, microbatch: Microbatch, device: torch.device) -> torch.Tensor:
    """Return the sum of the token losses of one micro-batch, 0-d, or of each of its ``sequences``."""
    inputs = {name: _moved(value, device) for name, value in microbatch.items() if name not in FOR_THE_STEP}
    if "document_bounds" in microbatch:
        inputs |= document_lengths(to_device(microbatch["document_bounds"], device), microbatch["longest_document"])
    sequences = microbatch.get("sequences")
    more = [] if sequences is None else [(sequences, len(microbatch["sequence_tokens"]))]
    return model_loss_sum(model, inputs, microbatch["targets"], microbatch.get("chosen"), *more)


def _moved(value: Any, device: torch.device) -> Any:
    return to_device(value, device) if isinstance(value, torch.Tensor) else value
