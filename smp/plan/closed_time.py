"""Seconds of a step by a closed form: products, attention, bytes moved and exchanges of a decoder, without a trace.

It orders layouts before the better ones are traced, and is what published runs are held against
(``benchmarks/plan.py published``). A block's kernels are a roofline: products and attention by their FLOPs, everything
else by the bytes that it moves. The exchanges of a block are hidden under its compute, as FSDP2 overlaps them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from smp.memory.shape import ModelShape
from smp.plan.devices import DeviceRow
from smp.plan.exchange import exchange_seconds, ring_seconds
from smp.plan.records import Exchange

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

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.batch * self.sequence / self.cp


class ClosedTime(NamedTuple):
    """Seconds of a step of one rank, and by part."""

    seconds: float
    parts: dict[str, float]


class _Block(NamedTuple):
    """Seconds of one block's kernels; ``again``: those of attention that selective recomputation repeats."""

    products: float
    attention_forward: float
    attention_backward: float
    moved: float
    again: float

    @property
    def forward(self) -> float:
        return self.products + self.attention_forward + self.moved

    def backward(self, recompute: str) -> float:
        again = {NONE: 0.0, SELECTIVE: self.products / 2 + self.moved + self.again, FULL: self.forward}[recompute]
        return 2 * self.products + self.attention_backward + 2 * self.moved + again


def _block_weights(shape: ModelShape) -> int:
    """Count the weights of a block's products."""
    width = shape.attention or shape.hidden
    key_value = width * (shape.key_value_heads or shape.heads) // shape.heads
    mlp = (3 if shape.gated_mlp else 2) * shape.intermediate
    return shape.hidden * (2 * width + 2 * key_value + mlp)


def _block(shape: ModelShape, layout: ClosedLayout, row: DeviceRow) -> _Block:
    tokens, share, peak = layout.tokens, row.efficiency, row.peak * 1e12
    width = shape.attention or shape.hidden
    # Two products over the half of the scores that the causal mask leaves.
    scores = 2 * 2 * tokens * layout.sequence * width / 2 / layout.tp
    hidden, inner = (FUSED_HIDDEN_MOVED, FUSED_INNER_MOVED) if layout.fused else (HIDDEN_MOVED, INNER_MOVED)
    gates = 1.0 if shape.gated_mlp else 0.5  # without a gate half of the inner states
    moved = 2 * tokens * (hidden * shape.hidden + gates * inner * shape.intermediate) / layout.tp
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
    )


def _attention_exchanges(shape: ModelShape, layout: ClosedLayout, row: DeviceRow, block: _Block) -> float:
    """Return the seconds that a block waits for the exchanges of the ranks of a sequence."""
    if layout.cp == 1:
        return 0.0
    on_host = max(1, min(layout.cp, layout.local // layout.tp))
    forwards = 1 if layout.recompute == NONE else 2  # recomputation repeats its exchanges
    width = shape.attention or shape.hidden
    heads, key_value_heads = shape.heads, shape.key_value_heads or shape.heads

    def seconds(kind: str, values: float, value_bytes: int = 2) -> float:
        nbytes = round(value_bytes * values / layout.tp)
        return exchange_seconds(Exchange(kind, nbytes, layout.cp, "cp", False), on_host, row)

    own = 2 * layout.tokens * width * key_value_heads / heads  # keys and values of a rank's tokens
    if layout.exchange == "p2p":
        step, home = seconds("send", own), seconds("send", own, REDUCE_BYTES)
        forward = max(0.0, (layout.cp - 1) * step - block.attention_forward)
        backward = (layout.cp - 1) * step + layout.cp * home - block.attention_backward
        return forwards * forward + max(0.0, backward)
    if layout.exchange == "all_gather":
        whole = layout.cp * own
        return (forwards + 1) * seconds("all_gather", whole) + seconds("reduce_scatter", whole)
    copied = math.lcm(key_value_heads // layout.tp or 1, layout.cp) / (key_value_heads / layout.tp)
    queries = layout.tokens * width
    return (forwards + 1) * (seconds("all_to_all", queries + copied * own) + seconds("all_to_all", queries))


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
    inside = max(1, layout.local // layout.tp)  # ranks of the sharding group on a host

    def ring(nbytes: float, ranks: int, on_host: int) -> float:
        return ring_seconds(nbytes, ranks, min(ranks, on_host), row)

    def sharded(nbytes: float) -> float:
        return ring(nbytes, layout.shard, inside)

    crossing = ring(2 * tokens * shape.hidden, layout.tp, layout.local)  # one exchange of hidden states
    gather, scatter = sharded(2 * weights), sharded(REDUCE_BYTES * weights)
    computed = block.forward + block.backward(layout.recompute)
    again = 0.0 if layout.keep_gathered else gather
    exposed = max(0.0, gather - block.forward) + max(0.0, again + scatter - block.backward(layout.recompute))
    vocabulary = shape.hidden * shape.vocabulary / layout.tp
    head = 6 * tokens * vocabulary / (row.peak * 1e12 * row.efficiency.products)
    head += tokens * shape.vocabulary / layout.tp * LOGIT_BYTES / memory
    # What nothing hides: the embedding's gather, the first block's, and the last reductions.
    ends = sharded(2 * vocabulary) + gather + sharded(REDUCE_BYTES * vocabulary) + scatter
    held = shape.parameters / layout.tp / layout.shard
    replicas = 2 * ring(REDUCE_BYTES * held, layout.replicas, max(1, inside // layout.shard))
    parts = {
        "compute": layout.accumulation * (shape.layers * computed + head),
        "exposed gathers": layout.accumulation * (shape.layers * exposed + ends) + replicas,
        "tensor-parallel exchanges": layout.accumulation * shape.layers * CROSSINGS[layout.recompute] * crossing,
        "context-parallel exchanges": layout.accumulation
        * shape.layers
        * _attention_exchanges(shape, layout, row, block),
        "optimizer": UPDATE_BYTES * held / memory,
    }
    parts = {name: seconds / row.factor for name, seconds in parts.items()}
    return ClosedTime(sum(parts.values()), parts)
