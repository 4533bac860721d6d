"""Packed documents under tensor parallelism: the logits and gradients of each document alone in the plain model."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
import transformers  # noqa: F401  imported before the ranks are forked
from torch.distributed.tensor import DTensor

from smp.data.packing import Collator, Row
from smp.loss import causal_lm_loss_sum
from smp.parallel import attention
from smp.train import step as one_step
from tests.distributed import run_distributed
from tests.reference import Layout, relative
from tests.tensor_parallel import build, config_of, split, whole

END = 1
DOCUMENTS = [[[5, 6, END], [7, 8, 9, END], [4, 3, 2, 6]], [list(range(2, 12)), [3]]]
TP2, TP2_WHOLE = Layout("full_shard", tp=2), Layout("full_shard", tp=2, sequence=False)


def batch_of_documents(length):
    rows = [Row(np.array([token for document in row for token in document])) for row in DOCUMENTS]
    for row, documents in zip(rows, DOCUMENTS, strict=True):
        row.tokens[len(documents[0]) - 1] = documents[0][-1] = END
    return Collator(sequence_length=length, pad_token_id=0, document_end=END)(rows)


def assert_as_apart(cases: list[tuple[str, Layout, int]]) -> None:
    """Collective."""
    for name, layout, length in cases:
        reference = build(config_of(name))
        model, batch = split(reference, layout), batch_of_documents(length)

        def logits_of(model, inputs, *_):
            return model(**inputs).logits

        with mock.patch.object(one_step, "model_loss_sum", logits_of):
            made = mock.Mock(side_effect=attention._documents_mask)
            with mock.patch.object(attention, "_documents_mask", made):
                logits = one_step.forward(model, batch, torch.device("cpu"))
        assert made.call_count == 1  # for all blocks
        assert isinstance(logits, DTensor)
        causal_lm_loss_sum(logits, batch["targets"], shifted=True).backward()
        full = logits.full_tensor()
        for row, documents in enumerate(DOCUMENTS):
            begin = 0
            for document in documents:
                ids = torch.tensor(document)[None]
                apart = reference(ids, use_cache=False).logits
                error = relative(full[row, begin : begin + len(document)] - apart[0], apart)
                assert error <= 1e-9, (name, layout, length, row, begin, error)
                if len(document) > 1:
                    causal_lm_loss_sum(apart, ids).backward()
                begin += len(document)
        wanted = {name: p.grad for name, p in reference.named_parameters()}
        for key, parameter in model.named_parameters():
            error = relative(whole(parameter.grad) - wanted[key], wanted[key])
            assert error <= 1e-9, (name, layout, length, key, error)


def test_documents_under_tensor_parallelism():
    run_distributed(assert_as_apart, [("mistral", TP2, 13)], world_size=2)


@pytest.mark.full
def test_documents_under_tensor_parallelism_in_every_family():
    cases = [
        (name, layout, length)
        for name in ("llama_gqa", "mistral", "gpt_neox")
        for layout, length in ((TP2, 12), (TP2, 13), (TP2_WHOLE, 13))
    ]
    run_distributed(assert_as_apart, cases, world_size=2)
