"""Context parallelism in a user's own script: ``smp.shard_sequence``, whatever shards the parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import BatchEncoding

import smp
from smp.config import LossConfig
from smp.loss import shift_labels
from smp.parallel.context.layout import split_columns
from tests.distributed import run_distributed
from tests.reference import LR, VOCABULARY, build_reference, global_batch, relative
from tests.tensor_parallel import whole

STEPS = 2
LENGTH = 11  # four parts, of which the last has one token less
BATCHES = ("rows", "documents")


def batch_of(kind: str, step: int = 0) -> dict[str, torch.Tensor]:
    """The samples of all ranks: whole rows, or rows of documents that are cut at odd places."""
    ids, labels = (part[:, :LENGTH].clone() for part in global_batch(step))
    batch = {"input_ids": ids, "labels": labels}
    if kind == "documents":
        starts = torch.zeros_like(ids, dtype=torch.bool)
        for row in range(len(ids)):
            starts[row, [1 + row % 4, 7 - row % 3]] = True
        labels[starts] = -100
        columns = torch.arange(LENGTH).expand(ids.shape)
        batch["position_ids"] = columns - torch.where(starts, columns, 0).cummax(1).values
    return batch


def expected_steps(name: str, kind: str) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of the plain model of transformers, which sees documents in positions that restart."""
    model, losses, gradients = build_reference(name, torch.float64), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        batch = batch_of(kind, step)
        labels = shift_labels(batch.pop("labels"))
        # Its own loss is in fp32; with a cache it would not look at the positions.
        logits = model(**batch, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def _shard_by_parallelize(model: nn.Module) -> nn.Module:
    return smp.parallelize(model)


def _average_by_parallelize(model: nn.Module) -> nn.Module:
    return smp.parallelize(model, gradient_reduction="mean", activation_checkpointing=True)


def _chunked(model: nn.Module) -> nn.Module:
    return smp.parallelize(model, loss=LossConfig(loss_chunk_tokens=3))


def _wrap(model: nn.Module) -> nn.Module:
    return smp.FullyShardedDataParallel(model, use_orig_params=True)


def _fully_shard(model: nn.Module) -> nn.Module:
    for block in model.model.layers:
        smp.fully_shard(block)
    return smp.fully_shard(model)


SHARDED = {
    "sum": _shard_by_parallelize, "alone": _shard_by_parallelize, "mean": _average_by_parallelize, "chunks": _chunked,
    "FSDP": _wrap, "fully_shard": _fully_shard,
}  # fmt: skip
SUMS = ("sum", "alone", "chunks")


def _script(expected, settings, how, name, kind, exchange):
    losses, gradients = expected
    mesh = smp.init(**settings)
    assert smp.state.cp_size == mesh.cp.size
    model = build_reference(name, torch.float64)
    model = SHARDED[how](model if how == "alone" else smp.transform(model, cp_comm_type=exchange))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step, wanted in enumerate(losses):
        rows = {key: part.chunk(mesh.data_size)[mesh.data_rank] for key, part in batch_of(kind, step).items()}
        own = smp.shard_sequence(rows)
        tokens = torch.tensor(smp.count_valid_tokens(own["labels"], shifted=True))
        dist.all_reduce(tokens, group=mesh.data_group)
        ranks = 1 if how in SUMS else dist.get_world_size(mesh.data_group)
        found = model(**own, num_items_in_batch=tokens / ranks)
        loss = found.loss
        if how != "chunks":  # in fp32, by transformers
            loss = smp.causal_lm_loss_sum(found.logits, own["labels"], shifted=True) * ranks / tokens
            assert found.loss.item() == pytest.approx(loss.item(), rel=1e-6)
        loss.backward()
        for name, parameter in model.named_parameters():
            gradient, reference = whole(parameter.grad), gradients[step][name.removeprefix("_fsdp_wrapped_module.")]
            assert relative(gradient - reference, reference) < 1e-9, (step, name)
        loss = loss.detach().clone()
        dist.all_reduce(loss, group=mesh.data_group)
        assert loss.item() / ranks == pytest.approx(wanted, rel=1e-9)
        optimizer.step()
        optimizer.zero_grad()


def run_script(settings, how, *, name="llama_gqa", kind="documents", exchange=None):
    world = settings.get("dp_shard", 2) * settings.get("tp", 1) * settings.get("dp_replicate", 1)
    run_distributed(_script, expected_steps(name, kind), settings, how, name, kind, exchange, world_size=world)


@pytest.mark.parametrize("how", SHARDED)
def test_a_script_trains_as_one_process(how):
    run_script({"cp": 2, "dp_shard": 2}, how)


@pytest.mark.parametrize(
    ("settings", "how", "more"),
    [
        ({"context_parallel_degree": 2, "hybrid_shard_degree": 2}, "sum", {"kind": "rows", "exchange": "p2p"}),
        ({"cp": 2, "dp_shard": 4}, "FSDP", {"exchange": "all_to_all"}),
        ({"cp": 2, "dp_shard": 2, "dp_replicate": 2}, "mean", {"name": "mistral"}),
        ({"cp": 4, "dp_shard": 4, "cp_load_balance": False}, "sum", {"name": "gpt_neox", "exchange": "all_gather"}),
        ({"cp": 2, "dp_shard": 2, "tp": 2}, "chunks", {"name": "llama_tied", "kind": "rows"}),
        ({"cp": 1, "dp_shard": 2}, "chunks", {}),
    ],
    ids=str,
)
def test_a_script_trains_as_one_process_in_other_layouts(settings, how, more):
    run_script(settings, how, **more)


def _mean_of_means(expected, how):
    mesh = smp.init(cp=2, dp_shard=2)
    model = SHARDED[how](smp.transform(build_reference("llama_gqa", torch.float64)))
    rows = {key: part.chunk(mesh.data_size)[mesh.data_rank] for key, part in batch_of("rows").items()}
    model(**smp.shard_sequence(rows)).loss.backward()
    for name, parameter in model.named_parameters():
        name = name.removeprefix("_fsdp_wrapped_module.")
        # transformers computes its loss in fp32.
        assert relative(whole(parameter.grad) - expected[name], expected[name]) < 1e-6, name


@pytest.mark.parametrize("how", ["mean", "FSDP"])
def test_the_mean_is_of_the_means_of_the_ranks_own_tokens(how):
    """Of the tokens that a rank holds, not of its rows: what the docs say a loss without ``num_items_in_batch`` is."""
    model, (world, cp) = build_reference("llama_gqa", torch.float64), (4, 2)
    batch = batch_of("rows")
    by_rank = split_columns(LENGTH, cp, balanced=True).ranges
    shifted = shift_labels(batch["labels"])
    for rows, labels in zip(batch["input_ids"].chunk(world // cp), shifted.chunk(world // cp), strict=True):
        for ranges in by_rank:
            own = torch.full_like(labels, -100)
            for first, last in ranges:
                own[:, first:last] = labels[:, first:last]
            (model(input_ids=rows, labels=own, shift_labels=own).loss / world).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    run_distributed(_mean_of_means, expected, how, world_size=world)


def _batches():
    ids = torch.arange(2 * 8).view(2, 8)
    smp.init(dp_shard=1)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    whole = smp.shard_sequence(batch)
    assert whole.keys() == batch.keys() | {"shift_labels"} and whole["input_ids"] is ids
    assert torch.equal(whole["labels"], shift_labels(ids)) and whole["shift_labels"] is whole["labels"]
    assert smp.count_valid_tokens(whole["labels"], shifted=True) == smp.count_valid_tokens(ids) == 14

    mesh = smp.init(cp=2)
    rank = mesh.cp.rank
    smp.transform(build_reference("llama_gqa", torch.float64))
    own = smp.shard_sequence(BatchEncoding(batch))
    columns = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
    assert torch.equal(own["input_ids"], ids[:, columns]) and own["position_ids"].tolist() == [columns] * 2
    assert torch.equal(own["labels"], shift_labels(ids)[:, columns])
    assert own.keys() == {"input_ids", "position_ids", "labels", "shift_labels", "sequence_shard"}
    assert smp.shard_sequence({"input_ids": ids}).keys() == {"input_ids", "position_ids", "sequence_shard"}

    smp.init({"context_parallel_degree": 2, "cp_load_balance": False})
    smp.parallelize(build_reference("llama_gqa", torch.float64))
    own = smp.shard_sequence({"input_ids": ids[:, :7], "shift_labels": ids[:, :7]})
    columns = [[0, 1, 2, 3], [4, 5, 6]][rank]
    assert torch.equal(own["input_ids"][:, : len(columns)], ids[:, columns])
    assert own["labels"].tolist() == [[*row, -100][:4] for row in ids[:, columns].tolist()]  # padded on the right
    right = torch.ones_like(ids)
    right[1, 5:] = 0
    smp.shard_sequence({"input_ids": ids, "attention_mask": right})
    for change, sentence in (
        (
            {"attention_mask": torch.ones(2, 1, 8, 8)},
            r"attention_mask has 4 axes, .*leave it out, and give position_ids",
        ),
        (
            {"attention_mask": right.flip(1)},
            r"hides a token before one .*pad there \(a tokenizer's padding_side='right'",
        ),
        ({"past_key_values": object()}, "past_key_values cannot be cut by tokens: give input_ids, labels,"),
        ({"input_ids": None, "inputs_embeds": torch.ones(2, 8, 4)}, "inputs_embeds cannot be cut by tokens"),
        ({"input_ids": None}, "the batch has no input_ids"),
    ):
        with pytest.raises(smp.UserError, match=sentence):
            smp.shard_sequence({"input_ids": ids, **change})


@pytest.mark.smoke
def test_a_rank_gets_its_tokens_of_a_batch():
    run_distributed(_batches, world_size=2)


def _misuse():
    with pytest.raises(smp.UserError, match=r"smp.shard_sequence needs a mesh: call smp.init"):
        smp.shard_sequence({})
    for settings, sentence in (
        ({"cp": 4}, "smp.init: cp 4 does not divide the sharding degree of 2, .* from 1, 2$"),
        ({"cp": 2, "dp_shard": 1}, "smp.init: cp 2 does not divide the sharding degree of 1"),
        (
            {"cp": 2, "cp_comm_type": "ring"},
            "smp.init: cp_comm_type takes auto, p2p, all_gather, all_to_all, got 'ring'",
        ),
    ):
        with pytest.raises(smp.UserError, match=sentence):
            smp.init(**settings)
    smp.init(cp=2)
    model = build_reference("llama_gqa", torch.float64)
    with pytest.raises(
        smp.UserError, match="cp_comm_type 'ring' is not allowed: give auto, all_gather, p2p, all_to_all"
    ):
        smp.transform(model, cp_comm_type="ring")
    for change, sentence in (
        ({"attention_dropout": 0.1}, "attention dropout is 0.1, .*use --context_parallel_degree 1"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary embedding .dynamic."),
    ):
        unfit = build_reference("llama_gqa", torch.float64)
        unfit.config.update(change)
        for apply in (smp.transform, smp.parallelize):
            with pytest.raises(smp.UserError, match=sentence):
                apply(unfit)
    ids = torch.randint(0, VOCABULARY, (2, 8))
    with pytest.raises(smp.UserError, match=r"needs a model that takes a part: call smp.transform before it"):
        smp.shard_sequence({"input_ids": ids})
    smp.transform(model)
    with pytest.raises(smp.UserError, match=r"have different ones, .* \(2, 8\), \(2, 8\): read .* mesh.data_rank 0 on"):
        smp.shard_sequence({"input_ids": ids + dist.get_rank()})
    own = smp.shard_sequence({"input_ids": ids})
    for call in (lambda: model(input_ids=ids), lambda: model.generate(ids, max_new_tokens=2)):
        with pytest.raises(
            smp.UserError, match=r"a rank's part of a batch: call model\(\*\*smp.shard_sequence\(batch\)\)"
        ):
            call()
    assert model(**own).past_key_values is None
    cache = model(**own, use_cache=True).past_key_values
    with pytest.raises(smp.UserError, match=r"takes the 4 tokens .* and no past_key_values: got 4 queries and 8 keys"):
        model(**own, past_key_values=cache)
    with pytest.raises(smp.UserError, match=r"takes the 4 tokens .*: got 3 queries and 3 keys"):
        model(**{name: part[:, 1:] if isinstance(part, torch.Tensor) else part for name, part in own.items()})
    with pytest.raises(smp.UserError, match="takes no attention_mask: leave it out"):
        model(**own, attention_mask=torch.ones(2, 1, 4, 4))


def test_misuse_is_told_in_a_sentence():
    run_distributed(_misuse, world_size=2)


def _state():
    smp.init({"context_parallel_degree": 2, "tensor_parallel_degree": 2, "hybrid_shard_degree": 2})
    state, rank = smp.state, dist.get_rank()
    assert (state.context_parallel_degree, state.cp_size, state.cp_rank) == (2, 2, rank // 2 % 2)
    assert dist.get_process_group_ranks(state.cp_process_group) == [
        4 * (rank // 4) + rank % 2 + step for step in (0, 2)
    ]
    assert state.hybrid_shard_degree == 2 and "context_parallel_degree=2" in str(state)
    smp.init(tp=2)
    assert (state.cp_size, state.cp_rank, state.cp_process_group) == (1, 0, None)


def test_state_tells_the_ranks_of_a_sequence():
    run_distributed(_state, world_size=8)
