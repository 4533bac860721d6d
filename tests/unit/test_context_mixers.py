"""Layers that mix tokens outside of attention, under context parallelism; in parallel: test_context_models.py."""

from __future__ import annotations

import pytest
import torch

from smp.errors import UserError
from smp.mesh import lay_out
from smp.models.registry import family_of
from smp.parallel.context.functions import SequenceShard
from smp.parallel.context.layout import split_columns
from smp.parallel.context.mixers import gather_for_mixers
from smp.parallel.technique import model_blocks
from tests.model_checks import build_plain


@pytest.fixture
def model():
    built = build_plain("lfm2")
    gather_for_mixers(model_blocks(built, family_of(built.config)), built.config)
    return built


def test_a_batch_that_was_not_cut_is_refused(model):
    with pytest.raises(UserError, match=r"takes a rank's part of a batch: call model\(\*\*smp\.shard_sequence"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("starts", [((0, 2),), ((0,), (0, 2))])
def test_packed_documents_are_refused(model, starts):
    shard = SequenceShard(lay_out().cp, split_columns(4, 1, balanced=False, starts=starts))
    with pytest.raises(UserError, match="does not keep packed documents apart"):
        model(input_ids=torch.zeros(len(starts), 4, dtype=torch.long), sequence_shard=shard)
