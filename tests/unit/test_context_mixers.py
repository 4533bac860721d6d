"""Layers that mix tokens outside of attention, under context parallelism; in parallel: test_context_models.py."""

from __future__ import annotations

import pytest
import torch

from smp.errors import UserError
from smp.mesh import lay_out
from smp.models.registry import build_model, family_of
from smp.parallel.context.functions import SequenceShard
from smp.parallel.context.layout import split_columns
from smp.parallel.context.mixers import split_mixers
from smp.parallel.context.scans import functions_of, splitting
from smp.parallel.mixers import mixers_by_block
from smp.parallel.technique import model_blocks
from tests.model_checks import build_plain
from tests.zoo import tiny_config


def shard_of(starts):
    return SequenceShard(lay_out().cp, split_columns(4, 1, balanced=False, starts=starts))


@pytest.fixture
def model():
    built = build_plain("lfm2")
    split_mixers(built, model_blocks(built, family_of(built.config)))
    return built


def test_a_batch_that_was_not_cut_is_refused(model):
    with pytest.raises(UserError, match=r"takes a rank's part of a batch: call model\(\*\*smp\.shard_sequence"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))


CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("lfm2", {CONVOLUTION}),
        ("qwen3_next", {CONVOLUTION, DELTA_RULE}),
        ("bamba", {CONVOLUTION, "mamba2_chunk_scan"}),
        ("jamba", set()),
        ("minimax", set()),
    ],
)
def test_layers_of_known_functions_are_split_and_others_gather(model_type, names):
    config = tiny_config(model_type)
    with torch.device("meta"):
        model = build_model(config, attn_implementation="eager")
    mixers = mixers_by_block(model, model_blocks(model, family_of(config)))
    found = [functions_of(mixer) for of_block in mixers for mixer in of_block]
    assert found and all(each == names for each in found)


def test_a_layer_that_mixes_tokens_in_another_way_than_its_source_is_not_trained_silently():
    with pytest.raises(RuntimeError, match="has not called"), splitting(shard_of(((0,),)), {CONVOLUTION}):
        pass
