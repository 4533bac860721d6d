"""Validation: the loss of the model on data that it is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from smp.loss import IGNORE_INDEX
from smp.parallel.sharding import reshard
from smp.parallel.technique import Setup
from smp.train.checked_job import CheckedJob
from smp.train.preference import loss_of

# Of a validation during training, unless --validation_batches is given.
BATCHES = 10


class Validation(NamedTuple):
    """Mean loss, the number of valid tokens and that of sequences, and means of the loss's metrics; of all ranks."""

    loss: float
    tokens: int
    samples: int
    metrics: Mapping[str, float] = MappingProxyType({})


@torch.no_grad()
def validate(job: CheckedJob, model: nn.Module, setup: Setup, *, enter: Callable[[str], None]) -> Validation:
    """Return the loss on the first ``validation_batches``, or on all with ``evaluate_only``; collective.

    Args:
        setup: the model's, on a joined mesh.
        enter: called after each batch, for the watchdog.
    """
    assert job.validation_data is not None  # what needs validation data is refused without
    settings = job.config.data
    # The stream is endless; rows past its end would count twice, and are masked.
    rows = settings.val_batch_size * job.mesh.data.size
    samples = job.validation_data.samples_per_epoch
    limit = settings.validation_batches or (samples if settings.evaluate_only else BATCHES)
    batches = min(limit, -(-samples // rows))
    model.eval()
    objective = loss_of(setup)
    sums = torch.zeros(1 + len(objective.metrics), dtype=torch.float64, device=job.device)
    counts = objective.count([], job.device)
    for _, batch in zip(range(batches), job.validation_data, strict=False):
        for microbatch in batch.microbatches:
            microbatch["targets"][microbatch["sample_ids"] >= samples] = IGNORE_INDEX
            own = objective.own_part(microbatch)
            sums += objective.compute(model, own, job.device)[1]
            counts += objective.count([own], job.device)
        enter("validation")  # each batch has the time of a phase
    model.train()
    reshard(model)
    total = torch.cat([counts.view(-1).to(sums), sums])
    dist.all_reduce(total, group=setup.mesh.loss.group)
    loss, *others = (total[counts.numel() :] / total[0]).tolist()
    tokens = int(total[counts.numel() - 1])
    return Validation(loss, tokens, min(samples, batches * rows), dict(zip(objective.metrics, others, strict=True)))
