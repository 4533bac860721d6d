"""Exactly the exchanges that tensor parallelism needs: how many, how large, and none of the size of the logits."""

from __future__ import annotations

import collections
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported before the ranks are forked

import smp.comm
from smp.loss import causal_lm_loss_sum
from smp.models.registry import family_of
from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.technique import model_blocks
from smp.parallel.tensor import group as tp_group
from tests.distributed import run_distributed
from tests.reference import Layout
from tests.tensor_parallel import ROWS, build, config_of, split_only

LENGTH, HIDDEN, ITEM = 12, 32, 4  # fp32
WHOLE = ROWS * LENGTH * HIDDEN * ITEM  # bytes of a hidden state of all tokens
TOKEN_LOSS = [ROWS * LENGTH * ITEM, 2 * ROWS * LENGTH * ITEM]  # greatest logit; sum and label's logit


class Traffic(NamedTuple):
    """Bytes of each call by operation: what a rank gives to all_gather, gets of reduce_scatter, adds in all_reduce."""

    all_gather: list[int]
    reduce_scatter: list[int]
    all_reduce: list[int]


def recorded(patches: pytest.MonkeyPatch) -> Traffic:
    """Every call of the exchanges from here on."""
    traffic = Traffic([], [], [])

    def keep(calls: list[int], which: int, call):
        def counted(*args, **kwargs):
            calls.append(args[which].nbytes)
            return call(*args, **kwargs)

        return counted

    patches.setattr(tp_group, "all_gather_single", keep(traffic.all_gather, 1, tp_group.all_gather_single))
    patches.setattr(tp_group, "reduce_scatter_single", keep(traffic.reduce_scatter, 0, tp_group.reduce_scatter_single))
    patches.setattr(dist, "all_reduce", keep(traffic.all_reduce, 0, dist.all_reduce))
    return traffic


def taken(traffic: Traffic) -> Traffic:
    """What was recorded since the last call, which must be all that the process's groups have done."""
    report = smp.comm.report()
    smp.comm.reset_report()
    assert report.calls() == sum(map(len, traffic))
    assert sum(count.nbytes for count in report.values()) == sum(map(sum, traffic))
    found = Traffic(*map(list, traffic))
    for calls in traffic:
        calls.clear()
    return found


def traffic_of(config, layout: Layout) -> tuple[Traffic, Traffic]:
    """Of one forward with loss, and of its backward."""
    model = split_only(build(config, torch.float32), layout)
    if layout.checkpointing:
        apply_activation_checkpointing(model_blocks(model, family_of(config)))
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % config.vocab_size
    with pytest.MonkeyPatch.context() as patches:
        traffic = recorded(patches)
        smp.comm.reset_report()
        loss = causal_lm_loss_sum(model(input_ids=ids).logits, ids)
        forward = taken(traffic)
        loss.backward()
        return forward, taken(traffic)


def even(name: str):
    """As many key and value heads as ranks, or more."""
    return config_of(name, num_key_value_heads=4) if name == "llama_gqa" else config_of(name)


def held(name: str, blocks: int) -> list[int]:
    """Bytes of the summed gradients of the final norm and of each block, in the order of backward."""
    norms = {"llama_gqa": 2, "gpt_neox": 4}[name] * HIDDEN
    biases = {"llama_gqa": 0, "gpt_neox": 2}[name] * HIDDEN  # of the row-parallel layers
    final = {"llama_gqa": 1, "gpt_neox": 2}[name] * HIDDEN
    return [final * ITEM] + [(norms + biases) * ITEM] * blocks


def _check_sequence_parallel(name, tp):
    config = even(name)
    blocks, part = config.num_hidden_layers, WHOLE // tp
    for saved in (False, True):
        forward, backward = traffic_of(config, Layout("no_shard", tp=tp, save_gathered=saved))
        # Besides the blocks: the embedding's reduce_scatter and the head's all_gather.
        assert forward == Traffic([part] * (2 * blocks + 1), [part] * (2 * blocks + 1), TOKEN_LOSS)
        # Backward: in a block 4 and 2, or 2 and 2; the head 1 or none, and 1; the embedding 1.
        gathers = (2 if saved else 4) * blocks + (0 if saved else 1) + 1
        sums = held(name, blocks)
        assert backward == Traffic([part] * gathers, [part] * (2 * blocks + 1), sums)


def _check_whole_sequences(name, tp):
    config = even(name)
    blocks = config.num_hidden_layers
    forward, backward = traffic_of(config, Layout("no_shard", tp=tp, sequence=False))
    assert forward == Traffic([], [], [WHOLE] * (2 * blocks + 1) + TOKEN_LOSS)
    assert backward == Traffic([], [], [WHOLE] * (2 * blocks + 1))


def _check_checkpointing(name, tp):
    config = even(name)
    blocks, part = config.num_hidden_layers, WHOLE // tp
    forward, backward = traffic_of(config, Layout("no_shard", tp=tp, checkpointing=True))
    assert len(forward.all_gather) == len(forward.reduce_scatter) == 2 * blocks + 1
    # A block is computed again up to what its backward reads last: its second reduction is not.
    assert backward.all_gather == [part] * (6 * blocks + 2)
    assert backward.reduce_scatter == [part] * (3 * blocks + 1)
    _, backward = traffic_of(config, Layout("no_shard", tp=tp, sequence=False, checkpointing=True))
    assert backward == Traffic([], [], [WHOLE] * (3 * blocks + 1))


def _check_key_value_heads(tp):
    # One key/value head: its weights are held whole, and their gradients join the block's one exchange.
    config = config_of("llama_gqa", num_key_value_heads=1)
    for sequence in (False, True):
        _, backward = traffic_of(config, Layout("no_shard", tp=tp, sequence=sequence))
        extra = 2 * (HIDDEN // 4) * HIDDEN * ITEM
        norms = 2 * HIDDEN * ITEM if sequence else 0
        assert collections.Counter(backward.all_reduce)[extra + norms] == config.num_hidden_layers


def _check_no_logits(tp):
    # A vocabulary larger than all else: whatever exchanged logits would be seen.
    config = config_of("llama_gqa", vocab_size=5_000)
    for sequence in (True, False):
        for traffic in traffic_of(config, Layout("no_shard", tp=tp, sequence=sequence)):
            assert max(map(max, filter(None, traffic))) <= WHOLE < ROWS * LENGTH * 5_000 * ITEM // tp


def _check_all(tp):
    for name in ("llama_gqa", "gpt_neox"):
        _check_sequence_parallel(name, tp)
        _check_whole_sequences(name, tp)
        _check_checkpointing(name, tp)
    _check_key_value_heads(tp)
    _check_no_logits(tp)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exactly_the_exchanges_of_megatron(tp):
    run_distributed(_check_all, tp, world_size=tp, backend="smddp")
