"""Validation: the loss of the model on data that it is not trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from smp.loss import IGNORE_INDEX
from smp.parallel.parallelize import own_part
from smp.parallel.sharding import reshard
from smp.parallel.technique import Setup
from smp.train.run_plan import RunPlan
from smp.train.step import forward, valid_tokens

# Of a validation during training, unless --validation_batches is given.
BATCHES = 10


class Validation(NamedTuple):
    """Mean loss over the valid tokens, their number, and the number of samples; of all ranks."""

    loss: float
    tokens: int
    samples: int


@torch.no_grad()
def validate(plan: RunPlan, model: nn.Module, setup: Setup, *, enter: Callable[[str], None]) -> Validation:
    """Return the loss on the first ``validation_batches``, or on all with ``evaluate_only``; collective.

    Args:
        plan: of the run, with its validation data.
        model: the prepared model.
        setup: the model's, on a joined mesh.
        enter: called after each batch, for the watchdog.
    """
    assert plan.validation_data is not None  # what needs validation data is refused without
    settings = plan.config.data
    # The stream is endless; rows past its end would count twice, and are masked.
    rows = settings.val_batch_size * plan.mesh.data.size
    samples = plan.validation_data.samples_per_epoch
    limit = settings.validation_batches or (samples if settings.evaluate_only else BATCHES)
    batches = min(limit, -(-samples // rows))
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=plan.device)
    for _, batch in zip(range(batches), plan.validation_data, strict=False):
        for microbatch in batch.microbatches:
            microbatch["targets"][microbatch["sample_ids"] >= samples] = IGNORE_INDEX
            own = own_part(microbatch, setup)
            total[0] += forward(model, own, plan.device)
            total[1] += valid_tokens(own)
        enter("validation")  # each batch has the time of a phase
    model.train()
    reshard(model)
    dist.all_reduce(total, group=setup.mesh.loss.group)
    return Validation(float(total[0] / total[1]), int(total[1]), min(samples, batches * rows))
