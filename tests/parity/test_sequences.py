"""Log-probabilities of sequences: those of the plain model's log_softmax, and their gradients, at any layout."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import smp
from smp.errors import UserError
from tests.distributed import run_distributed
from tests.reference import VOCABULARY, build_reference, relative, tiny_config
from tests.tensor_parallel import whole

ROWS, LENGTH = 4, 12
DOCUMENTS = [[12], [5, 7], [4, 4, 4], [1, 11]]  # of each row
LAYOUTS: dict[int, list[dict]] = {
    1: [{}],
    2: [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"cp": 2}, {"cp": 2, "cp_load_balance": False}],
    4: [{"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}],
}


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, labels and positions ``(ROWS, LENGTH)``; a document has no label, and others some."""
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :6] = -100
    labels[1, 5:] = -100
    labels[2, 7] = -100
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    return ids, labels, positions


def loss_of(sums: torch.Tensor) -> torch.Tensor:
    """Something that is not linear in the sums."""
    return -F.logsigmoid(0.1 * sums).sum() / sum(map(len, DOCUMENTS))


def reference(*, packed: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sums and gradients of the plain model, document by document."""
    model, (ids, labels, _) = build_reference("llama_gqa", torch.float64), data()
    sums = []
    for row, lengths in enumerate(DOCUMENTS if packed else [[LENGTH]] * ROWS):
        for part, label in zip(ids[row].split(lengths), labels[row].split(lengths), strict=True):
            of_token = model(input_ids=part[None]).logits[0, :-1].log_softmax(-1)
            valid = label[1:] != -100
            sums.append(of_token[valid].gather(-1, label[1:][valid, None]).sum())
    loss_of(torch.stack(sums)).backward()
    return torch.stack(sums).detach(), {key: p.grad for key, p in model.named_parameters()}


PADDING = (0, 5, 2, 7)  # tokens before each row's first


def padded() -> dict[str, torch.Tensor]:
    """Rows as a tokenizer with ``padding_side='left'`` makes them; some padding has labels, which do not count."""
    ids, labels, _ = data()
    mask = torch.ones_like(ids)
    for row, count in enumerate(PADDING):
        mask[row, :count] = 0
    return {"input_ids": ids * mask, "labels": labels * mask, "attention_mask": mask}


def padded_reference(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sums and gradients of the plain model, given the mask, and positions that count from a row's first token."""
    batch = padded()
    mask, labels = batch["attention_mask"], batch["labels"]
    logits = model(batch["input_ids"], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    valid = (labels[:, 1:] != -100) & mask[:, :-1].bool()
    of_label = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
    sums = of_label.masked_fill(~valid, 0).sum(1)
    loss_of(sums).backward()
    return sums.detach(), {key: p.grad for key, p in model.named_parameters()}


def check_padded(expected):
    sums, gradients = expected
    for layout in LAYOUTS[dist.get_world_size()]:
        mesh = smp.init(**layout)
        model = smp.parallelize(build_reference("llama_gqa", torch.float64), loss=smp.LossConfig(loss_chunk_tokens=3))
        rows = slice(*(ROWS * at // mesh.data_size for at in (mesh.data_rank, mesh.data_rank + 1)))
        found = smp.sequence_log_probs(model, {key: value[rows] for key, value in padded().items()})
        assert relative(found.detach() - sums[rows], sums[rows]) <= 1e-9, layout
        loss_of(found).backward()
        for key, p in model.named_parameters():
            assert relative(whole(p.grad) - gradients[key], gradients[key]) <= 1e-9, (layout, key)


def test_padding_on_the_left_is_that_of_the_plain_model():
    expected = padded_reference(build_reference("llama_gqa", torch.float64))
    run_distributed(check_padded, expected, world_size=2)


def test_learned_positions_count_from_the_first_token_behind_padding():
    torch.manual_seed(7)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2)).double()
    sums, _ = padded_reference(model.eval())
    found = smp.sequence_log_probs(smp.chunk_loss(model), padded())
    assert relative(found.detach() - sums, sums) <= 1e-9


def check(expected):
    ids, labels, positions = data()
    for layout in LAYOUTS[dist.get_world_size()]:
        mesh = smp.init(**layout)
        model = smp.parallelize(build_reference("llama_gqa", torch.float64), loss=smp.LossConfig(loss_chunk_tokens=3))
        rows = slice(*(ROWS * at // mesh.data_size for at in (mesh.data_rank, mesh.data_rank + 1)))
        counts = [len(each) for each in DOCUMENTS]
        bounds = torch.tensor([0, *(n for each in DOCUMENTS[rows] for n in each)]).cumsum(0).int()
        for packed, more in (
            (False, {}),
            (True, {"position_ids": positions[rows]}),
            (True, {"document_bounds": bounds}),
        ):
            sums, gradients = expected[packed]
            own = slice(sum(counts[: rows.start]), sum(counts[: rows.stop])) if packed else rows
            model.zero_grad()
            with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduced:
                found = smp.sequence_log_probs(model, {"input_ids": ids[rows], "labels": labels[rows], **more})
            if mesh.tp.size == 1:
                assert reduced.call_count == (mesh.cp.size > 1), layout
            assert relative(found.detach() - sums[own], sums[own]) <= 1e-9, (layout, more)
            loss_of(found).backward()
            for key, p in model.named_parameters():
                assert relative(whole(p.grad) - gradients[key], gradients[key]) <= 1e-9, (layout, more.keys(), key)
        with torch.no_grad():
            again = smp.sequence_log_probs(model, {"input_ids": ids[rows], "labels": labels[rows], **more})
        assert torch.equal(again, found.detach())


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_sums_and_gradients_are_those_of_log_softmax(world_size):
    expected = {packed: reference(packed=packed) for packed in (False, True)}
    run_distributed(check, expected, world_size=world_size)


def check_averaged(expected):
    """Where gradients are averaged over ranks, a loss is divided by the data rank's own sequences."""
    sums, gradients = expected
    ids, labels, _ = data()
    for layout in ({"tp": 2}, {"cp": 2}):
        mesh = smp.init(**layout)
        for shard in (
            lambda model: smp.parallelize(model, gradient_reduction="mean"),
            lambda model: smp.FSDP(smp.transform(model)),
        ):
            model = smp.chunk_loss(shard(build_reference("llama_gqa", torch.float64)))
            rows = slice(*(ROWS * at // mesh.data_size for at in (mesh.data_rank, mesh.data_rank + 1)))
            found = smp.sequence_log_probs(model, {"input_ids": ids[rows], "labels": labels[rows]})
            assert relative(found.detach() - sums[rows], sums[rows]) <= 1e-9, layout
            (loss_of(found) * mesh.data_size).backward()
            for key, p in model.named_parameters():
                assert relative(whole(p.grad) - gradients[key], gradients[key]) <= 1e-9, (layout, key)


@pytest.mark.full
def test_gradients_that_are_averaged():
    run_distributed(check_averaged, reference(packed=False), world_size=4)


def test_one_process_without_a_mesh_and_what_is_refused():
    model = build_reference("llama_gqa", torch.float64)
    ids, labels, positions = data()
    with pytest.raises(UserError, match=r"call smp\.parallelize\(model, loss=smp\.LossConfig\(\)\), or smp\.chunk"):
        smp.sequence_log_probs(model, {"input_ids": ids, "labels": labels})
    smp.chunk_loss(model)
    with pytest.raises(UserError, match="the batch has no labels"):
        smp.sequence_log_probs(model, {"input_ids": ids})
    with pytest.raises(UserError, match="pixel_values cannot be cut"):
        smp.sequence_log_probs(model, {"input_ids": ids, "labels": ids, "pixel_values": ids})
    mask = torch.ones_like(ids)
    mask[1, 3] = mask[2, 0] = 0
    for change, sentence in (
        ({"attention_mask": mask}, "smp.sequence_log_probs: attention_mask hides tokens between ones that it shows"),
        ({**padded(), "position_ids": positions}, "pads on the left, with position_ids, which are of packed"),
        ({"attention_mask": mask[:, None, None]}, "has 4 axes, and smp.sequence_log_probs takes one of"),
    ):
        with pytest.raises(UserError, match=sentence):
            smp.sequence_log_probs(model, {"input_ids": ids, "labels": labels, **change})
    found = smp.sequence_log_probs(model, {"input_ids": ids, "labels": labels})
    sums, _ = reference(packed=False)
    assert relative(found.detach() - sums, sums) <= 1e-12


ROPES = {
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 8},
    "dynamic": {"factor": 2.0},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_embeddings_by_the_longest_of_a_batch(kind):
    """Sequences whose log-probabilities would depend on the others are refused; those of the others are as alone."""
    config = tiny_config("llama_gqa")
    config.max_position_embeddings = 8 if kind == "dynamic" else 64
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    torch.manual_seed(7)
    model = smp.chunk_loss(LlamaForCausalLM(config).double())

    def sums(rows: slice, columns: int, lengths: list[int], **more) -> torch.Tensor:
        ids, mask = data()[0][rows, :columns], torch.arange(columns) < torch.tensor(lengths)[rows, None]
        more = more or {"attention_mask": mask.long()}
        batch = {"input_ids": ids, "labels": ids.masked_fill(~mask, -100), **more}
        return smp.sequence_log_probs(model, batch).detach()

    def each_alone(lengths: list[int]) -> torch.Tensor:
        return torch.cat([sums(slice(row, row + 1), length, lengths) for row, length in enumerate(lengths)])

    every, fits = slice(0, 2), [5, 8]
    assert relative(sums(every, 8, fits) - each_alone(fits), each_alone(fits)) <= 1e-12
    with pytest.raises(UserError, match=rf"beyond 8 tokens the rotary embedding \({kind}\) .* has 12 tokens"):
        sums(every, 12, [5, 12])
    refused = [(fits, {}), ([5, 5], {}), ([12, 12], {"document_bounds": torch.tensor([0, 3, 12, 24])})]
    longer = [12, 9]
    if kind == "dynamic":
        refused.append((longer, {}))
    else:
        assert relative(sums(every, 12, longer) - each_alone(longer), each_alone(longer)) <= 1e-12
    for lengths, more in refused:
        with pytest.raises(UserError, match="give at most 8" + ", or longer sequences" * (kind == "longrope")):
            sums(every, 12, lengths, **more)
    shifted = {"position_ids": torch.arange(12).remainder(6).expand(2, 12)}  # documents of 6 tokens
    assert len(sums(every, 12, [12, 12], **shifted)) == 4
    assert sums(every, 12, [0, 0]).tolist() == [0, 0]
