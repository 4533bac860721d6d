"""Packed documents in hybrids at several layouts: as each document alone in one process; of one: test_documents.py."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
import transformers  # noqa: F401  imported before the ranks are forked

from smp.data.data_pipeline import StepBatch
from smp.loss import IGNORE_INDEX, shift_labels
from smp.models.registry import family_of
from tests.distributed import run_distributed
from tests.model_checks import Reference, assert_same_training, build_plain, in_double
from tests.reference import LENGTH, ROWS, Layout, global_batch, reference_trajectory

CUTS = [(4, 9), (7, 8), (), (1,)]  # where documents begin in a row besides at 0, in turn
LAYOUTS = [
    Layout("full_shard", checkpointing=True),
    Layout("full_shard", checkpointing=True, mode="selective", accumulation=2, chunk=0),
    Layout("full_shard", cp=2, exchange="all_gather", checkpointing=True),
    Layout("full_shard", tp=2, checkpointing=True),
    Layout("full_shard", tp=2, sequence=False),
]


def bounds_of_row(row: int) -> list[int]:
    return [0, *CUTS[row % len(CUTS)], LENGTH]


def mean_loss_alone(model, step):
    ids, labels = global_batch(step)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(ROWS):
        bounds = bounds_of_row(row)
        for first, last in itertools.pairwise(bounds):
            logits = model(input_ids=ids[row : row + 1, first:last], use_cache=False).logits[0, :-1]
            wanted = labels[row, first + 1 : last]
            total = total + F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
            count += int((wanted != IGNORE_INDEX).sum())
    return total / count


def packed_batch(step, rank, size, accumulation):
    ids, labels = global_batch(step)
    targets, positions = shift_labels(labels), torch.empty_like(ids)
    for row in range(ROWS):
        bounds = bounds_of_row(row)
        for first, last in itertools.pairwise(bounds):
            positions[row, first:last] = torch.arange(last - first)
            targets[row, last - 1] = IGNORE_INDEX
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    batches = []
    for each in zip(*(tensor[own].chunk(accumulation) for tensor in (ids, targets, positions)), strict=True):
        bounds = torch.cat([(each[2] == 0).flatten().nonzero().flatten(), torch.tensor([each[2].numel()])])
        names = ("input_ids", "targets", "position_ids")
        more = {"document_bounds": bounds.to(torch.int32), "longest_document": int(bounds.diff().max())}
        batches.append({**dict(zip(names, each, strict=True)), **more})
    return StepBatch(batches, torch.arange(ROWS // size))


def check(reference: Reference, layouts: list[Layout]) -> None:
    for layout in layouts:
        assert_same_training(reference, layout, packed_batch)


@pytest.mark.parametrize(("model_type", "layouts"), [
    ("qwen3_next", LAYOUTS[2:4]),  # linear attention and convolutions, by heads and channels
    pytest.param("qwen3_next", [*LAYOUTS[:2], *LAYOUTS[4:]], marks=pytest.mark.full),
    pytest.param("granitemoehybrid", LAYOUTS, marks=pytest.mark.full),
    pytest.param("lfm2", LAYOUTS, marks=pytest.mark.full),
    pytest.param("minimax", LAYOUTS, marks=pytest.mark.full),  # linear attention of all tokens
    pytest.param("recurrent_gemma", LAYOUTS, marks=pytest.mark.full),  # the same, with positions
])  # fmt: skip
def test_documents_of_a_hybrid_at_every_layout(model_type, layouts):
    model = build_plain(model_type).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    family_of(model.config)  # derived once, in fp32, before the ranks are forked
    with in_double():
        reference = Reference(model, reference_trajectory(model, 1, mean_loss_alone))
    run_distributed(check, reference, layouts, world_size=2)
