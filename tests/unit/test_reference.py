"""References of pairs go by the pairs' tokens, whatever order they are in."""

import types

import numpy as np
import pytest
import torch
from torch import nn

from smp.checkpoint.restore import Candidate
from smp.checkpoint.state import tensors_of_data
from smp.data.data_pipeline import BatchShape, DataPipeline
from smp.data.packing import Collator
from smp.data.samples import Choice, PackedSamples
from smp.errors import UserError
from smp.train import reference
from tests.unit.test_samples import stored

PAIRS = [(".xx", ".x"), ("..x", ".xx"), (".xxx", "..xx")]


def data_of(*firsts):
    """Pairs whose tokens count on from each of ``firsts``, which says how long they are, too."""
    stores = [stored(*PAIRS[first % len(PAIRS)], first=10 * first) for first in firsts]
    packed = PackedSamples(stores, 8, "f", Choice(), what="pairs", origins=["a"] * len(stores), pairs=True)
    batch = BatchShape(
        sequence_length=8, vocab_size=99, global_batch_size=1, micro_batch_size=1, data_rank=0, data_size=1, seed=0
    )
    return DataPipeline(packed, Collator(sequence_length=8, pad_token_id=0), batch, shuffle=False, workers=0)


def job_of(data, validation=None):
    preference = types.SimpleNamespace(keeps_reference=lambda adapters: True)
    config = types.SimpleNamespace(data=types.SimpleNamespace(evaluate_only=False), preference=preference)
    return types.SimpleNamespace(train_data=data, validation_data=validation, config=config)


def given(data):
    """The reference of each pair, by its first token."""
    batches = [step.microbatches[0] for _, step in zip(range(data.steps_per_epoch), data, strict=False)]
    return {int(batch["input_ids"][0, 0]): batch["reference"][0].tolist() for batch in batches}


def test_references_follow_their_pairs():
    model, first, validation = nn.Linear(1, 1), data_of(1, 2, 3), data_of(5, 1)
    packed = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    reference._keep(model, [(first, packed), (validation, torch.tensor([[7.0, 8], [9, 10]]))])
    start = Candidate("m-3steps", None)
    for order in ((3, 1, 2), (2, 3), (1, 1, 5)):
        data = data_of(*order)
        reference.attach_references(job_of(data, validation), start, model)
        found = given(data)
        of = {10: [1.0, 2.0], 20: [3.0, 4.0], 30: [5.0, 6.0], 50: [7.0, 8.0]}
        assert found == {10 * each: of[10 * each] for each in order}
    for other in (data_of(1, 4), data_of(4)):
        with pytest.raises(UserError, match=r"m-3steps has no reference of 1 of the [12] pairs of this training data"):
            reference.attach_references(job_of(other), start, model)


def test_references_of_earlier_versions_go_by_order(caplog):
    model, data = nn.Linear(1, 1), data_of(2, 1)
    reference.set_tensors_of_data(model, {f"data.reference.{data.fingerprint}": torch.tensor([[1.0, 2], [3, 4]])})
    reference.attach_references(job_of(data), Candidate("m-3steps", None), model)
    assert given(data) == {20: [1, 2], 10: [3, 4]} and "by the order of the pairs alone" in caplog.text
    assert tensors_of_data(model).keys() == {"data.reference", "data.pairs"}  # of the next checkpoint
    assert np.unique(tensors_of_data(model)["data.pairs"]).size == 2
