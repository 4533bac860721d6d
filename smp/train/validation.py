"""Validation: the loss of the model on data that it is not trained on."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from smp.loss import IGNORE_INDEX, count_valid_tokens
from smp.mesh import Mesh
from smp.parallel.sharding import reshard
from smp.train.run_plan import RunPlan
from smp.train.step import forward


@torch.no_grad()
def validate(plan: RunPlan, model: nn.Module, mesh: Mesh, *, enter: Callable[[str], None]) -> float:
    """Return the mean loss over the valid tokens of the first ``validation_batches``; collective.

    Args:
        plan: of the run, with its validation data.
        model: the prepared model.
        mesh: joined.
        enter: called after each batch, for the watchdog.
    """
    assert plan.validation_data is not None  # validation_freq is refused without validation data
    settings = plan.config.data
    # The stream is endless; rows past its end would count twice, and are masked.
    rows = settings.val_batch_size * plan.mesh.data.size
    samples = plan.validation_data.samples_per_epoch
    batches = min(settings.validation_batches, -(-samples // rows))
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=plan.device)
    for _, batch in zip(range(batches), plan.validation_data, strict=False):
        for microbatch in batch.microbatches:
            microbatch["labels"][microbatch["sample_ids"] >= samples] = IGNORE_INDEX
            total[0] += forward(model, microbatch, plan.device)
            total[1] += count_valid_tokens(microbatch["labels"])
        enter("validation")  # each batch has the time of a phase
    model.train()
    reshard(model)
    dist.all_reduce(total, group=mesh.loss.group)
    return float(total[0] / total[1])
