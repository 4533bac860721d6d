"""Exactly the exchanges of context parallelism, and what they leave alone: other documents, and memory."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn

import smp.comm
from smp.config import ActivationConfig
from smp.mesh import Mesh
from smp.models.registry import family_of
from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.context import functions as exchanges
from smp.parallel.context.batch import shard_batch
from smp.parallel.context.functions import copies_of_heads
from smp.parallel.context.technique import split_sequences
from smp.parallel.parallelize import parallelize
from smp.parallel.technique import model_blocks
from tests.context_parallel import (
    BLOCKS,
    CP_COMM_TYPES,
    HEADS,
    HIDDEN,
    ROWS,
    WINDOW,
    batch_of,
    build,
    config_of,
    documents_of,
)
from tests.distributed import run_distributed
from tests.reference import VOCABULARY, Layout

LENGTH, WIDTH = 32, HIDDEN // HEADS


class Traffic(NamedTuple):
    """Bytes of each call: what a rank gives, gets of a reduce_scatter, or sends to the next rank."""

    all_gather: list[int]
    reduce_scatter: list[int]
    all_to_all: list[int]
    shift: list[int]


def recorded(patches: pytest.MonkeyPatch) -> Traffic:
    """Every call of the exchanges from here on."""
    traffic = Traffic([], [], [], [])

    def keep(owner: Any, name: str, calls: list[int], sizes) -> None:
        call = getattr(owner, name)
        patches.setattr(owner, name, lambda *a, **k: (calls.extend(sizes(*a)), call(*a, **k))[1])

    keep(exchanges, "all_gather_single", traffic.all_gather, lambda output, source: [source.nbytes])
    keep(exchanges, "reduce_scatter_single", traffic.reduce_scatter, lambda output, source: [output.nbytes])
    keep(dist, "all_to_all_single", traffic.all_to_all, lambda output, source: [source.nbytes])
    keep(dist, "batch_isend_irecv", traffic.shift, lambda ops: [op.tensor.nbytes for op in ops if op.op is dist.isend])
    return traffic


def taken(traffic: Traffic) -> Traffic:
    """What was recorded since the last call, which must be all that the process's groups have done."""
    if dist.get_backend() == "smddp":
        report = smp.comm.report()
        smp.comm.reset_report()
        assert report.calls() == sum(map(len, traffic)) + len(traffic.shift), str(report)  # a shift is two
    found = Traffic(*map(list, traffic))
    for calls in traffic:
        calls.clear()
    return found


def traffic_of(model: nn.Module, exchange: str, mesh: Mesh, mode: str) -> tuple[Traffic, Traffic]:
    """Of one forward, and of its backward; not sharded, so that every exchange is context parallelism's."""
    model = copy.deepcopy(model)
    split_sequences(model, exchange)
    if mode != "none":
        apply_activation_checkpointing(model_blocks(model, family_of(model.config)), mode=mode)
    (batch,) = batch_of(0, 0, 1, 1, length=LENGTH, cut=True).microbatches
    own = shard_batch({"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}, mesh)
    with pytest.MonkeyPatch.context() as patches:
        traffic = recorded(patches)
        smp.comm.reset_report()
        loss = model(**own, use_cache=False).logits.square().mean()
        forward = taken(traffic)
        loss.backward()
        return forward, taken(traffic)


def expected(exchange: str, ranks: int, key_heads: int, item: int) -> tuple[Traffic, Traffic]:
    """The table of :mod:`smp.parallel.context.functions`, for all blocks; gradients on their way round are in fp32."""
    values = ROWS * LENGTH // ranks * WIDTH
    key_value = 2 * key_heads * values * item
    if exchange == "all_gather":
        once = [key_value] * BLOCKS
        return Traffic(once, [], [], []), Traffic(once, once, [], [])
    if exchange == "p2p":
        shifts, gradients = [key_value] * (ranks - 1), [key_value // item * max(item, 4)] * ranks
        return Traffic([], [], [], shifts * BLOCKS), Traffic([], [], [], (shifts + gradients) * BLOCKS)
    copied = math.lcm(key_heads, ranks)
    both = [(HEADS + 2 * copied) * values * item, HEADS * values * item]
    return Traffic([], [], both * BLOCKS, []), Traffic([], [], both[::-1] * BLOCKS, [])


def _check_traffic(ranks: int, cases: list[tuple[str, int, torch.dtype]]) -> None:
    mesh = Layout("full_shard", cp=ranks).mesh()
    for name, key_heads, dtype in cases:
        model = build(config_of(name, key_heads), dtype)
        for exchange in CP_COMM_TYPES:
            forward, backward = expected(exchange, ranks, key_heads, dtype.itemsize)
            found = traffic_of(model, exchange, mesh, "none")
            assert [*map(sorted_, found)] == [*map(sorted_, (forward, backward))], (name, exchange, found)
            # Recomputation of a block repeats its forward's exchanges, whatever else it keeps.
            repeated = Traffic(*(a + b for a, b in zip(forward, backward, strict=True)))
            for mode in ("full", "selective"):
                found = traffic_of(model, exchange, mesh, mode)
                assert [*map(sorted_, found)] == [*map(sorted_, (forward, repeated))], (name, exchange, mode, found)


def sorted_(traffic: Traffic) -> list[list[int]]:
    """In any order: a ring's gradients travel beside its keys."""
    return [sorted(calls) for calls in traffic]


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [pytest.param(2, "smddp", marks=pytest.mark.full), pytest.param(4, "gloo", marks=pytest.mark.slow)],
)
def test_exactly_the_exchanges_of_the_table(ranks, backend):
    cases = [("mistral", 1, torch.bfloat16), ("gpt_neox", HEADS, torch.float32)]
    run_distributed(_check_traffic, ranks, cases, world_size=ranks, backend=backend)


@pytest.mark.parametrize(
    ("heads", "ranks", "copies"), [(1, 2, 2), (1, 4, 4), (2, 4, 2), (8, 2, 1), (8, 8, 1), (3, 2, 2), (6, 4, 2)]
)
def test_heads_are_copied_until_ranks_divide_them(heads, ranks, copies):
    assert copies_of_heads(heads, ranks) == copies and heads * copies % ranks == 0


def _check_probe(names: list[str], ranks: int) -> None:
    """Change a token of one document: logits and the gradients of hidden states of the others keep their bits."""
    for name, exchange, cut in ((n, e, c) for n in names for e in CP_COMM_TYPES for c in (True, False)):
        layout = Layout("full_shard", cp=ranks, exchange=exchange)
        mesh = layout.mesh()
        model = parallelize(
            build(config_of(name, 2), torch.float32), family_of(config_of(name, 2)), mesh=mesh,
            parallel=layout.parallel(), activation=ActivationConfig(activation_checkpointing=False), dtype=None,
        )  # fmt: skip
        (batch,) = batch_of(0, 0, 1, 1, length=LENGTH, cut=cut).microbatches
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        row, token = 0, 8
        changed["input_ids"][row, token] += 1
        document = next(d for d in documents_of(row, LENGTH, cut) if d.start <= token < d.stop)
        outputs, gradients = zip(*(whole(model, each, mesh) for each in (batch, changed)), strict=True)
        differs = (outputs[0] != outputs[1]).any(-1)
        inside = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
        inside[row, token : document.stop] = True
        if name == "mistral":  # each block looks back that far
            inside[row, token + BLOCKS * (WINDOW - 1) + 1 :] = False
        assert torch.equal(differs, inside), (name, exchange, cut)
        differs = (gradients[0] != gradients[1]).any(-1)
        others = torch.ones(ROWS, LENGTH, dtype=torch.bool)
        others[row, document] = False
        assert differs[row, document].any() and not differs[others].any(), (name, exchange, cut)


def whole(model: nn.Module, batch: dict[str, torch.Tensor], mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradients of embeddings, of all columns; collective."""
    embedded: list[torch.Tensor] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda *args: embedded.append(args[-1]))
    own = shard_batch({key: batch[key] for key in batch if key in ("input_ids", "position_ids")}, mesh)
    logits = model(**own, use_cache=False).logits
    hook.remove()
    found = []
    for tensor in (logits.detach(), *torch.autograd.grad(logits.square().sum(), embedded)):
        parts = [torch.empty_like(tensor) for _ in range(mesh.cp.size)]
        dist.all_gather(parts, tensor.contiguous(), group=mesh.cp.group)
        found.append(exchanges.in_order(parts, own["sequence_shard"].layout, 1)[:, :LENGTH])
    return found[0], found[1]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_token_of_one_document_changes_no_bit_of_another(ranks):
    run_distributed(_check_probe, ["llama", "mistral"], ranks, world_size=ranks, backend="smddp")


def saved_bytes(model: nn.Module, batch: dict[str, Any]) -> int:
    """What autograd keeps of one forward: distinct storages, parameters left out."""
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(**batch, use_cache=False).logits.sum()
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    del loss
    return sum(storage.nbytes() for storage in storages.values())


def _check_saved(ranks: int) -> None:
    mesh = Layout("full_shard", cp=ranks).mesh()
    length, key_heads, blocks = 256, 4, 6
    for dtype in (torch.float32, torch.bfloat16):
        config = config_of("llama", key_heads)
        config.num_hidden_layers, config.intermediate_size = blocks, 3 * HIDDEN
        plain = build(config, dtype)
        ids = torch.arange(2 * length).view(2, length) % VOCABULARY
        of_all = saved_bytes(plain, {"input_ids": ids})
        for exchange in CP_COMM_TYPES:
            model = copy.deepcopy(plain)
            split_sequences(model, exchange)
            found = saved_bytes(model, shard_batch({"input_ids": ids}, mesh))
            if mesh.cp.rank == 0:
                print(f"{exchange}, {dtype}: {found / of_all:.4f} of what one process saves, over {ranks} ranks")
            # Attention's output is there by heads, for its backward, and by tokens, for that of the next layer.
            twice = blocks * ids.numel() // ranks * HIDDEN * dtype.itemsize if exchange == "all_to_all" else 0
            assert found <= 1.02 * of_all / ranks + twice, (exchange, dtype, found, of_all)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_saves_its_part_of_the_activations(ranks):
    """No keys and values of others either: they are gathered, or come round, again."""
    run_distributed(_check_saved, ranks, world_size=ranks)
