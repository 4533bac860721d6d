"""The reference of preferences (DPO) as numbers: log-probabilities of the model that training begins from.

They are computed once, by a forward pass over all pairs, before the first step, and are in every checkpoint, so that a
run that goes on anywhere has those of its beginning. TRL has them so with ``precompute_ref_log_probs``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint.restore import Candidate
from smp.checkpoint.state import OF_DATA, set_tensors_of_data, tensors_of_data
from smp.data.data_pipeline import DataPipeline
from smp.errors import UserError
from smp.log import get_logger
from smp.loss import IGNORE_INDEX
from smp.parallel import lora
from smp.parallel.sharding import reshard
from smp.parallel.technique import Setup
from smp.train.checked_job import CheckedJob
from smp.train.preference import PairLoss

logger = get_logger("train")


def _name(data: DataPipeline) -> str:
    return f"{OF_DATA}reference.{data.fingerprint}"


def _data(job: CheckedJob) -> dict[str, DataPipeline]:
    """Return the data that needs references, by what it is called in messages."""
    validation = {"validation data": job.validation_data} if job.validation_data is not None else {}
    return validation if job.config.data.evaluate_only else {"training data": job.train_data, **validation}


def _keeps_reference(job: CheckedJob, start: Candidate) -> bool:
    """Tell whether there are references beside the model, and not the policy without its adapters."""
    preference = job.config.preference
    if preference.keeps_reference(job.settings[lora.Config]):
        return True
    if not preference.dpo or start.saved is None:
        return False
    # A run that begins from a checkpoint begins from its adapters, too, and goes on with the references of that start.
    begins = job.config.checkpoint.reset_progress and not job.config.data.evaluate_only
    return begins or any(name.startswith(OF_DATA) for name in start.saved.tensors)


def expect_references(job: CheckedJob, start: Candidate, model: nn.Module) -> None:
    """Let a checkpoint that is about to be restored fill the references of its run, where the job needs them.

    Raises:
        UserError: it has none of this data.
    """
    if start.saved is None or not _keeps_reference(job, start):
        return
    found = {
        name: torch.empty(entry.shape, dtype=entry.dtype)
        for name, entry in start.saved.tensors.items()
        if name.startswith(OF_DATA)
    }
    anew = "" if job.config.data.evaluate_only else ", or begin another from it with --reset_progress 1"
    for what, data in _data(job).items():
        if _name(data) not in found:
            raise UserError(
                f"checkpoint {start.checkpoint} has no reference of this {what}, which --dpo 1 computes before the "
                f"first step: take the data and its settings from the run that wrote it{anew}"
            )
    set_tensors_of_data(model, found)


def give_references(
    job: CheckedJob, start: Candidate, model: nn.Module, setup: Setup, *, enter: Callable[[str], None]
) -> None:
    """Give the data the references of its pairs, computing them if none have been restored; collective.

    Args:
        enter: called after each batch, for the watchdog.
    """
    if not _keeps_reference(job, start):
        return
    if not tensors_of_data(model):
        found = {}
        for what, data in _data(job).items():
            logger.info("Computing the reference of %d pairs of the %s, once", data.samples, what)
            found[_name(data)] = compute_reference(data, model, setup, job.device, enter=enter)
        set_tensors_of_data(model, found)
    for data in _data(job).values():
        data.attach(tensors_of_data(model)[_name(data)])


@torch.no_grad()
def compute_reference(
    data: DataPipeline, model: nn.Module, setup: Setup, device: torch.device, *, enter: Callable[[str], None]
) -> torch.Tensor:
    """Return the log-probabilities of all pairs, ``(pairs, 2)``, in the order in which they are packed; on the host.

    Collective; the same bits on every rank.

    Args:
        setup: the model's, on a joined mesh.
        enter: called after each batch, for the watchdog.
    """
    objective, rows, answers = PairLoss(setup), data.samples_per_epoch, 2 * data.samples
    # In place of references, micro-batches get the numbers of their answers.
    ordered = data.in_order(torch.arange(answers).view(-1, 2))
    found = torch.zeros(answers, dtype=torch.float64, device=device)
    dtype = torch.float32
    model.eval()
    for _, batch in zip(range(ordered.steps_per_epoch), ordered, strict=False):
        for microbatch in batch.microbatches:
            microbatch["targets"][microbatch["sample_ids"] >= rows] = IGNORE_INDEX  # the stream is endless
            own = objective.own_part(microbatch)
            sums = objective.log_probs(model, own, device)
            dtype = sums.dtype
            real = own["sequence_tokens"] > 0
            if setup.mesh.cp.rank == 0:
                found[own["reference"].flatten()[real].to(device)] = sums.flatten()[real.to(device)].to(found)
        enter("validation")  # each batch has the time of a phase
    ordered.close()
    model.train()
    reshard(model)
    dist.all_reduce(found, group=setup.mesh.loss.group)
    dist.broadcast(found, 0)
    return found.to("cpu", dtype).view(-1, 2)
