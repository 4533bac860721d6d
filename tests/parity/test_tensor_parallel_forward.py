"""The forward of a split model answers as Hugging Face's does: loss, tuples, logits, refusals."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from smp.errors import UserError
from tests.distributed import run_distributed
from tests.reference import Layout
from tests.tensor_parallel import batch_of, build, config_of, split, whole

LAYOUTS = [Layout("full_shard", tp=2), Layout("full_shard", tp=2, sequence=False)]


def _check_labels():
    for name in ("llama_gqa", "gpt_neox"):
        reference = build(config_of(name, vocab_size=97)).eval()
        batch = batch_of(reference.config, 11)
        for layout in LAYOUTS:
            model = split(reference, layout).eval()
            for items in ({}, {"num_items_in_batch": 17}, {"num_items_in_batch": torch.tensor(17)}):
                expected, found = reference(**batch, **items), model(**batch, **items)
                # Hugging Face computes the loss in fp32.
                torch.testing.assert_close(found.loss, expected.loss.double(), rtol=1e-6, atol=0)
                torch.testing.assert_close(found.logits.full_tensor(), expected.logits, rtol=1e-10, atol=1e-12)
            assert model(input_ids=batch["input_ids"]).loss is None


def test_loss_and_logits_equal_hugging_face():
    run_distributed(_check_labels, world_size=2)


def _check_tuples():
    reference = build(config_of("llama_gqa"))
    batch = batch_of(reference.config)
    for layout in LAYOUTS:
        model = split(reference, layout)
        for given in ({"return_dict": False}, {"return_dict": None}, {"return_dict": True}):
            expected = reference(**batch, **given, use_cache=False)
            found = model(**batch, **given)
            assert type(found) is type(expected)
            for mine, theirs in zip(found[:2], expected[:2], strict=True):
                torch.testing.assert_close(whole(mine), theirs.double(), rtol=1e-6, atol=1e-9)
            assert len(found) == len(expected)


def test_tuples_on_demand():
    run_distributed(_check_tuples, world_size=2)


def _check_refusals():
    ids = torch.zeros(1, 5, dtype=torch.int64)
    for layout in LAYOUTS:
        model = split(build(config_of("llama_gqa")), layout)
        cache = transformers.DynamicCache(config=model.config)
        for name, value in (
            ("past_key_values", cache), ("inputs_embeds", torch.zeros(1, 5, 32)), ("logits_to_keep", 1),
            ("logits_to_keep", torch.tensor([4])), ("output_hidden_states", True), ("output_attentions", True),
        ):  # fmt: skip
            with pytest.raises(UserError, match=name):
                model(input_ids=ids, **{name: value})
        assert model(input_ids=ids, past_key_values=None, logits_to_keep=0).logits.shape == (1, 5, 96)
    model = split(build(config_of("llama_gqa")), LAYOUTS[0])
    with pytest.raises(UserError, match="4-D attention_mask"):
        model(input_ids=ids, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool))


def test_what_cannot_be_answered_is_refused():
    run_distributed(_check_refusals, world_size=2)


def _check_ids():
    for layout in LAYOUTS:
        model = split(build(config_of("llama_gqa")), layout)
        assert model(input_ids=torch.tensor([[0, 95]])).logits.isfinite().all()
        for wrong in (96, -1, -100):
            with pytest.raises(ValueError, match=f"input id {wrong} is outside the vocabulary of 96$"):
                model(input_ids=torch.tensor([[3, wrong, 4]]))
        look_up = model.get_input_embeddings().forward
        with pytest.raises(RuntimeError, match="Expected"):  # what GPUs and compiled code do; on a CPU it is at once
            torch.compile(look_up, backend="eager", fullgraph=True)(torch.tensor([[3, 96, 4]]))
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert look_up(torch.tensor([[3, 96, 4]])).shape[-1] == 32


def test_an_input_id_outside_the_vocabulary_is_refused_and_not_looked_up_as_zeros():
    run_distributed(_check_ids, world_size=2)


def _check_own_mask():
    reference = build(config_of("gpt_neox"))
    batch = batch_of(reference.config)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None].expand(4, 1, 12, 12).clone()
    mask[:, :, 6:, 2:4] = False
    for layout in LAYOUTS:
        found = split(reference, layout)(**batch, attention_mask=mask).logits.full_tensor()
        expected = reference(**batch, attention_mask=mask).logits
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_mask_of_ones_own():
    run_distributed(_check_own_mask, world_size=2)
