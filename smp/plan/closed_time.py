"""Seconds of a step by a closed form: products, attention, bytes moved and communication of a decoder, without a trace.

It is compared with published runs on GPUs (``benchmarks/plan.py published``). A block's kernels are a roofline:
products and attention by their FLOPs, everything else by the bytes that it moves. On GPUs a block's collectives are
hidden under its compute, as FSDP2 overlaps them, and so is the host, which issues operations ahead. On CPUs everything
takes its turn on the same cores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from smp.memory.shape import ModelShape
from smp.plan.devices import DeviceRow
from smp.plan.exchange import Exchange, exchange_seconds, ring_seconds, sent_bytes

NONE, SELECTIVE, FULL = "none", "selective", "full"

# Hidden states (of `hidden`) and inner states (of `intermediate`) that a block's element-wise kernels read or write in
# a forward pass: two norms in fp32 steps, rotary embedding, two residuals; activation and gate. Eager transformers
# blocks dispatch each step alone; compiled ones, and written-out fused blocks, read and write once.
HIDDEN_MOVED, INNER_MOVED = 26, 7
FUSED_HIDDEN_MOVED, FUSED_INNER_MOVED = 12, 4
# Bytes that a forward pass of attention over the ranks of a sequence moves of each value of queries and of keys and
# values that they see: packed, merged in fp32, put back. From a trace of Llama 3 8B.
MERGED_BYTES = 25
# Bytes of a logit: in bf16 written, cast to fp32, log-softmax and its gradient, cast back, read by two products.
LOGIT_BYTES = 24
# AdamW in fp32: reads parameter, gradient and two moments, writes three; the norm reads the gradient, clipping
# reads and writes it; zeroing writes it.
UPDATE_BYTES = 4 * (7 + 3 + 1)
REDUCE_BYTES = 4  # gradients are reduced in fp32
# Exchanges of hidden states between tensor-parallel ranks in a block: a gather and a reduction of attention and of the
# MLP, forward and backward. Recomputation repeats them, selective recomputation the gathers only.
CROSSINGS = {NONE: 8, SELECTIVE: 10, FULL: 12}
# Operations of an eager block, forward and backward, as the host issues them; those of selective recomputation pass two
# dispatch modes, taken as twice the time. Counted on Llama: 34 forward, 67 backward.
FORWARD_OPERATIONS = 34
OPERATIONS = {NONE: 101, SELECTIVE: 270, FULL: 135}


@dataclasses.dataclass(frozen=True)
class ClosedLayout:
    """How a step is laid out.

    Attributes:
        sequence, batch: tokens of a sample, samples of a micro-batch of a data rank.
        accumulation: micro-batches of a step.
        shard, replicas, tp: degrees; ``local``: devices of a host.
        cp: ranks of a sequence, which are of one sharding group; ``exchange``: theirs, as ``--cp_comm_type``.
        recompute: ``none``, ``selective`` (products are recomputed by half, attention is kept) or ``full``.
        fused: whether element-wise operations are compiled or written as fused kernels.
        keep_gathered: whether parameters stay gathered between forward and backward (ZeRO-2).
        value_bytes: of a parameter and an activation in computation: 2 for bf16, 4 for fp32.
        offloaded: bytes of activations that go to the host's memory and come back, in a step.
        pairs: whether the loss is that of pairs, whose backward makes the logits again.
        reference: whether their reference is computed beside the policy, by a forward pass more.
    """

    sequence: int
    batch: int
    accumulation: int = 1
    shard: int = 1
    replicas: int = 1
    tp: int = 1
    local: int = 8
    recompute: str = NONE
    fused: bool = False
    keep_gathered: bool = False
    cp: int = 1
    exchange: str = "all_gather"
    value_bytes: int = 2
    weight_bytes: float | None = None  # None: as values
    offloaded: int = 0
    pairs: bool = False
    reference: bool = False

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.batch * self.sequence / self.cp

    @property
    def forwards(self) -> int:
        """Forward passes of a block for each of its backward passes."""
        return 1 + (self.recompute != NONE) + self.reference


class ClosedTime(NamedTuple):
    """Seconds of a step of one rank, and by part; bytes that it sends inside a host and between hosts."""

    seconds: float
    parts: dict[str, float]
    inside: int
    between: int


class _Sent(NamedTuple):
    """A collective, and how often it takes place."""

    exchange: Exchange
    times: int


class _Block(NamedTuple):
    """Seconds of one block's kernels; ``again``: those of attention that selective recomputation repeats."""

    products: float
    attention_forward: float
    attention_backward: float
    moved: float
    again: float
    gradients: int  # products in backward of each in forward: of the input, and of weights that are trained

    @property
    def forward(self) -> float:
        return self.products + self.attention_forward + self.moved

    def backward(self, recompute: str) -> float:
        again = {NONE: 0.0, SELECTIVE: self.products / 2 + self.moved + self.again, FULL: self.forward}[recompute]
        return self.gradients * self.products + self.attention_backward + 2 * self.moved + again


def _block_weights(shape: ModelShape) -> int:
    """Count the weights of a block's products."""
    width = shape.attention or shape.hidden
    key_value = width * (shape.key_value_heads or shape.heads) // shape.heads
    mlp = (3 if shape.gated_mlp else 2) * shape.intermediate
    return shape.hidden * (2 * width + 2 * key_value + mlp)


def _block(shape: ModelShape, layout: ClosedLayout, row: DeviceRow) -> _Block:
    tokens, share, peak = layout.tokens, row.efficiency, row.flops(layout.value_bytes)
    width = shape.attention or shape.hidden
    # Two products over the half of the scores that the causal mask leaves.
    scores = 2 * 2 * tokens * layout.sequence * width / 2 / layout.tp
    hidden, inner = (FUSED_HIDDEN_MOVED, FUSED_INNER_MOVED) if layout.fused else (HIDDEN_MOVED, INNER_MOVED)
    gates = 1.0 if shape.gated_mlp else 0.5  # without a gate half of the inner states
    moved = layout.value_bytes * tokens * (hidden * shape.hidden + gates * inner * shape.intermediate) / layout.tp
    if layout.cp > 1:
        seen = layout.cp if layout.exchange == "all_gather" else 1
        turns = layout.cp / 2 if layout.exchange == "p2p" else 1
        keys = 2 * width * (shape.key_value_heads or shape.heads) / shape.heads
        moved += MERGED_BYTES * tokens * turns * (width + seen * keys) / layout.tp
    attention_forward = scores / (peak * share.attention_forward)
    return _Block(
        products=2 * tokens * _block_weights(shape) / layout.tp / (peak * share.products),
        attention_forward=attention_forward,
        attention_backward=2.5 * scores / (peak * share.attention_backward),
        moved=moved / (row.bandwidth * 1e12 * share.memory),
        again=attention_forward if layout.cp > 1 else 0.0,
        gradients=2 if shape.frozen_but is None else 1,
    )


def _attention_exchanges(shape: ModelShape, layout: ClosedLayout) -> tuple[list[_Sent], list[_Sent]]:
    """Return what a block sends among the ranks of a sequence, forward (also recomputed) and backward."""
    if layout.cp == 1:
        return [], []
    forwards = layout.forwards
    width = shape.attention or shape.hidden
    heads, key_value_heads = shape.heads, shape.key_value_heads or shape.heads
    own = 2 * layout.tokens * width * key_value_heads / heads  # keys and values of a rank's tokens

    def sent(kind: str, values: float, times: int, value_bytes: int = layout.value_bytes) -> _Sent:
        return _Sent(Exchange(kind, round(value_bytes * values / layout.tp), layout.cp), times)

    if layout.exchange == "p2p":
        steps = layout.cp - 1
        return [sent("send", own, forwards * steps)], [
            sent("send", own, steps), sent("send", own, layout.cp, REDUCE_BYTES)
        ]  # fmt: skip
    if layout.exchange == "all_gather":
        whole = layout.cp * own
        return [sent("all_gather", whole, forwards)], [
            sent("all_gather", whole, 1), sent("reduce_scatter", whole, 1)
        ]  # fmt: skip
    copied = math.lcm(key_value_heads // layout.tp or 1, layout.cp) / (key_value_heads / layout.tp)
    queries = layout.tokens * width
    both = (queries + copied * own, queries)
    return [sent("all_to_all", values, forwards) for values in both], [sent("all_to_all", values, 1) for values in both]


def _trained(shape: ModelShape, layout: ClosedLayout) -> tuple[float, float, float]:
    """Count a rank's trained parameters: of a block, outside of the blocks, and of its shard."""
    if shape.frozen_but is not None:
        trained = shape.trained(layout.tp)
        return trained.block, trained.table + trained.last, trained.parameters / layout.shard
    outside = shape.hidden * shape.vocabulary / layout.tp
    return _block_weights(shape) / layout.tp, outside, shape.parameters / layout.tp / layout.shard


def _head_seconds(shape: ModelShape, layout: ClosedLayout, row: DeviceRow, *, trained: bool) -> float:
    again = layout.pairs + layout.reference  # forward passes of the head alone
    logits = layout.tokens * shape.vocabulary / layout.tp
    products = 2 * (3 if trained else 2) + 2 * again
    moved = (1 + again / 2) * LOGIT_BYTES * logits
    compute = products * logits * shape.hidden / (row.flops(layout.value_bytes) * row.efficiency.products)
    return compute + moved / (row.bandwidth * 1e12 * row.efficiency.memory)


def closed_step(shape: ModelShape, layout: ClosedLayout, row: DeviceRow) -> ClosedTime:
    """Return the seconds of one optimizer step.

    Args:
        shape: of the model.
        layout: of the job; its data ranks have equal work.
        row: of the device.

    Source: roofline (Williams et al., CACM 2009) over the counts of arXiv:2204.02311, appendix B; overlap as in
    torch's ``fully_shard``.
    """
    tokens, memory = layout.tokens, row.bandwidth * 1e12 * row.efficiency.memory
    block, weights = _block(shape, layout, row), _block_weights(shape) / layout.tp
    host = max(1, layout.local // layout.tp)  # ranks of the sharding group on a host
    blocks = layout.accumulation * shape.layers
    inside = between = 0

    def send(kind: str, nbytes: float, ranks: int, on_host: int, times: int) -> float:
        """Count what is sent; return the seconds of one time."""
        nonlocal inside, between
        exchange, on_host = Exchange(kind, round(nbytes), ranks), max(1, min(ranks, on_host))
        if ranks == 1 or not times:
            return 0.0
        here, there = sent_bytes(exchange, on_host)
        inside, between = inside + times * here, between + times * there
        if kind in ("all_gather", "reduce_scatter"):
            return ring_seconds(nbytes, ranks, on_host, row)
        return exchange_seconds(exchange, on_host, row)

    def waited(sent: Sequence[_Sent]) -> float:
        on_host = layout.local // layout.tp
        return sum(each.times * send(*each.exchange, on_host, each.times * blocks) for each in sent)

    value, shard = layout.value_bytes, layout.shard
    more = layout.reference
    forward_gathers, backward_gathers = (1, 0) if layout.keep_gathered else (1 + more, 1)
    gathers = forward_gathers + backward_gathers
    reduced, outside, held = _trained(shape, layout)
    gather = send("all_gather", (layout.weight_bytes or value) * weights, shard, host, gathers * blocks)
    scatter = send("reduce_scatter", REDUCE_BYTES * reduced, shard, host, blocks)
    crossings = CROSSINGS[layout.recompute] + more * CROSSINGS[NONE] // 2
    crossing = send("all_gather", value * tokens * shape.hidden, layout.tp, layout.local, crossings * blocks)
    vocabulary = shape.hidden * shape.vocabulary / layout.tp
    # What nothing hides: the embedding's gather, the first block's, and the last reductions.
    ends = send("all_gather", value * vocabulary, shard, host, layout.accumulation)
    ends += send("reduce_scatter", REDUCE_BYTES * outside, shard, host, layout.accumulation)
    replicas = 2 * ring_seconds(REDUCE_BYTES * held, layout.replicas, min(layout.replicas, max(1, host // shard)), row)
    send("all_reduce", REDUCE_BYTES * held, layout.replicas, host // shard, 1)
    forward, backward = block.forward, block.backward(layout.recompute)
    head = _head_seconds(shape, layout, row, trained=bool(outside))
    compute = layout.accumulation * (shape.layers * ((1 + more) * forward + backward) + head)
    attention_forward, attention_backward = (waited(sent) for sent in _attention_exchanges(shape, layout))
    issued = row.host_us * 1e-6 * (OPERATIONS[layout.recompute] + more * FORWARD_OPERATIONS) * blocks
    offloading = 2 * layout.offloaded / (row.host_link * row.efficiency.links * 1e9) if row.host_link else 0.0
    if row.is_gpu:
        exposed = forward_gathers * max(0.0, gather - forward)
        exposed += max(0.0, backward_gathers * gather + scatter - backward)
        ends += gather + scatter
        if layout.exchange == "p2p":
            attention_forward = max(0.0, attention_forward - layout.forwards * block.attention_forward)
            attention_backward = max(0.0, attention_backward - block.attention_backward)
        issued = 0.0 if layout.fused else max(0.0, issued - compute)
        offloading = max(0.0, offloading - compute)
    else:
        exposed = gathers * gather + scatter
    parts = {
        "compute": compute,
        "exposed gathers": layout.accumulation * (shape.layers * exposed + ends) + replicas,
        "tensor-parallel exchanges": blocks * crossings * crossing,
        "context-parallel exchanges": blocks * (attention_forward + attention_backward),
        "optimizer": UPDATE_BYTES * held / memory,
        "host": issued,
        "offloading": offloading,
    }
    parts = {name: seconds / row.factor for name, seconds in parts.items()}
    return ClosedTime(sum(parts.values()), parts, inside, between)
