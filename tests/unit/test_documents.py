"""Packed documents in models with layers that mix tokens outside of attention: as each alone in the plain model."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F

from smp.config import Settings
from smp.errors import UserError
from smp.mesh import lay_out
from smp.models.experts import expert_modules
from smp.models.registry import family_of
from smp.parallel import attention, compile_blocks, documents
from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.documents import mixes_documents
from smp.parallel.technique import Setup, model_blocks
from tests.model_checks import build_plain, in_double
from tests.reference import relative

ROWS = [[4, 5, 3], [7, 1, 4], [12]]  # lengths of documents
IDS = torch.randint(3, 90, (3, 12), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS])
KINDS = ["qwen3_5_text", "nemotron_h", "granitemoehybrid", "lfm2"]  # linear attention, Mamba, the same, convolutions
MORE = [
    "bailing_hybrid", "bamba", "falcon_h1", "jamba", "kimi_linear", "lfm2_moe", "lfm3", "minimax", "olmo_hybrid",
    "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "zaya",
]  # fmt: skip


def plain(model_type):
    model = build_plain(model_type).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def applied(model):
    model = copy.deepcopy(model)
    setup = Setup(family_of(model.config), lay_out(), Settings())
    documents.apply(model, setup)
    return model, setup


def parts(rows):
    """The documents of a tensor ``(rows, columns, ...)``."""
    return [part for row, lengths in zip(rows, ROWS, strict=True) for part in row.split(lengths)]


def logits(model, ids=IDS, positions=POSITIONS):
    return model(input_ids=ids, position_ids=positions).logits


def backward(model, per_document):
    loss = sum(
        F.cross_entropy(found[:-1], ids[1:], reduction="sum")
        for found, ids in zip(per_document, parts(IDS), strict=True)
    )
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", [*KINDS, *(pytest.param(each, marks=pytest.mark.full) for each in MORE)])
def test_samples_packed_together_are_those_alone_and_a_neighbour_moves_no_bit(model_type):
    model = plain(model_type)
    assert mixes_documents(model.config) is None
    ours, setup = applied(model)
    apply_activation_checkpointing(model_blocks(ours, setup.family))
    with in_double():
        packed = logits(ours)
        other = IDS.clone()
        other[0, 5] += 1
        changed = logits(ours, other)
        # An expert multiplies the tokens of all documents together, and their number changes how a product rounds.
        most = 1e-12 if expert_modules(model) else 0.0
        same = [relative(b - a, a) <= most for a, b in zip(parts(packed), parts(changed), strict=True)]
        assert same == [True, False, True, True, True, True, True]
        loss, gradients = backward(ours, parts(packed))
        wanted_loss, wanted = backward(model, [model(input_ids=ids[None]).logits[0] for ids in parts(IDS)])
    assert abs(loss - wanted_loss) <= 1e-9 * wanted_loss
    least = 1e-6 * max(float(gradient.norm()) for gradient in wanted.values())
    for name in gradients.keys() | wanted.keys():
        error = float((gradients[name] - wanted[name]).norm()) / max(float(wanted[name].norm()), least)
        assert error <= 1e-9, (name, error)


def test_a_job_s_lengths_and_a_script_s_positions_give_the_same_bits():
    ours, setup = applied(plain("granitemoehybrid"))
    by_positions = logits(ours)
    assert torch.equal(
        ours(inputs_embeds=ours.get_input_embeddings()(IDS), position_ids=POSITIONS).logits, by_positions
    )
    alone = logits(ours, IDS[2:], POSITIONS[2:])
    attention.apply(ours, Setup(setup.family, lay_out(), Settings((attention.Config(),))))
    bounds = torch.tensor([0, 4, 9, 12, 19, 20, 24, 36], dtype=torch.int32)
    found = ours(input_ids=IDS, **attention.document_lengths(bounds, 12)).logits
    assert torch.equal(found, by_positions)
    torch.testing.assert_close(found[2:], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("model_type", "why"), [
    ("deepseek_v32", "it has indexed_attention layers"), ("mamba", "its forward takes no positions"),
])  # fmt: skip
def test_a_layer_that_cannot_be_called_on_each_document_refuses_positions_that_restart(model_type, why):
    ours, _ = applied(build_plain(model_type))
    assert mixes_documents(ours.config) is not None
    logits(ours, positions=torch.arange(12)[None])
    with pytest.raises(UserError, match=rf"does not keep packed documents apart \({why}\)"):
        logits(ours)


def test_blocks_that_are_compiled_refuse_positions_that_restart(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # traces them as a whole
    model = build_plain("lfm2")
    ours, setup = applied(model)
    activation = compile_blocks.Config(compile=True)
    compile_blocks.apply(ours, Setup(setup.family, lay_out(), Settings((activation,))))
    with pytest.raises(UserError, match="cannot be compiled, as every batch has others: leave --compile 1 out"):
        logits(ours)
    rows = torch.arange(12)[None]
    torch.testing.assert_close(logits(ours, positions=rows), logits(model, positions=rows))


def test_padding_is_no_document_and_a_single_token_is():
    assert documents.rows_of(torch.tensor([[0, 1, 2, 2, 2]])) is None
    assert documents.rows_of(torch.tensor([[0, 1, 0, 0], [0, 1, 2, 3]])) == ((0, 2, 3, 4), (0, 4))
