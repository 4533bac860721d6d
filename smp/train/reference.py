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


_REFERENCE, _PAIRS = f"{OF_DATA}reference", f"{OF_DATA}pairs"


def _by_order(data: DataPipeline) -> str:
    """Return the name under which checkpoints of earlier versions have the reference, in the order of the pairs."""
    return f"{_REFERENCE}.{data.fingerprint}"


def _data(job: CheckedJob) -> dict[str, DataPipeline]:
    """Return the data that needs references, by what it is called in messages."""
    validation = {"validation data": job.validation_data} if job.validation_data is not None else {}
    return validation if job.config.data.evaluate_only else {"training data": job.train_data, **validation}


def _refusal(job: CheckedJob, start: Candidate, what: str) -> UserError:
    anew = "" if job.config.data.evaluate_only else ", or begin another from it with --reset_progress 1"
    return UserError(
        f"checkpoint {start.checkpoint} has no reference of {what}, which --dpo 1 computes before the first step: take "
        f"the data and its settings from the run that wrote it{anew}"
    )


def _keeps_reference(job: CheckedJob, start: Candidate) -> bool:
    """Tell whether there are references in addition to the model, and not the policy without its adapters."""
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
    for what, data in _data(job).items():
        if _PAIRS not in found and _by_order(data) not in found:
            raise _refusal(job, start, f"this {what}")
    set_tensors_of_data(model, found)


def attach_references(job: CheckedJob, start: Candidate, model: nn.Module) -> None:
    """Give the pairs of the data the references that a checkpoint has filled, by their tokens.

    Raises:
        UserError: it has none of a pair.
    """
    if not (found := tensors_of_data(model)):
        return
    if _PAIRS not in found:
        logger.warning(
            "Checkpoint %s is of an earlier version, and has references by the order of the pairs alone: if that has "
            "changed since, they go to other pairs.", start.checkpoint,
        )  # fmt: skip
        _keep(model, [(data, found[_by_order(data)]) for data in _data(job).values()])
    for what, data in _data(job).items():
        if missing := _attach(data, tensors_of_data(model)):
            raise _refusal(job, start, f"{missing} of the {data.samples} pairs of this {what}")


def _keep(model: nn.Module, references: list[tuple[DataPipeline, torch.Tensor]]) -> None:
    """Let checkpoints have the references of all pairs, and what they are of."""
    pairs, found = zip(*((data.keys, reference) for data, reference in references), strict=True)
    set_tensors_of_data(model, {_PAIRS: torch.cat(pairs), _REFERENCE: torch.cat(found)})


def _attach(data: DataPipeline, tensors: dict[str, torch.Tensor]) -> int:
    """Give each pair the first reference of its tokens; returns how many have none, and then gives none."""
    pairs, order = tensors[_PAIRS].sort(stable=True)
    at = torch.searchsorted(pairs, data.keys).clamp(max=len(pairs) - 1)
    if missing := int((pairs[at] != data.keys).sum()):
        return missing
    data.attach(tensors[_REFERENCE][order[at]])
    return 0


def give_references(
    job: CheckedJob, start: Candidate, model: nn.Module, setup: Setup, *, enter: Callable[[str], None]
) -> None:
    """Give the data the references of its pairs, computing them if none have been restored; collective.

    Args:
        enter: called after each batch, for the watchdog.
    """
    if not _keeps_reference(job, start) or tensors_of_data(model):
        return
    found = []
    for what, data in _data(job).items():
        logger.info("Computing the reference of %d pairs of the %s, once", data.samples, what)
        found.append((data, compute_reference(data, model, setup, job.device, enter=enter)))
    _keep(model, found)
    for data, _ in found:
        _attach(data, tensors_of_data(model))


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
