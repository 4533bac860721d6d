"""Seconds of a step by a closed form: products, attention, bytes moved and communication of a decoder, without a trace.

It is compared with published runs on GPUs (``benchmarks/plan.py published``). A block's kernels are a roofline:
products and attention by their FLOPs, everything else by the bytes that it moves. On GPUs a block's collectives are
hidden under its compute, as FSDP2 overlaps them, and so is the host, which issues operations ahead. On CPUs everything
takes its turn on the same cores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from smp.axes import AXES
from smp.config import ActivationConfig, ParallelConfig
from smp.memory.estimate import peak_bytes
from smp.memory.shape import FULL, NONE, PRODUCTS, SELECTIVE, ModelShape, Workload
from smp.mesh import Mesh
from smp.optim.config import OptimConfig
from smp.optim.optimizers import gathered_bytes, moved_bytes, product_flops
from smp.parallel import parallelize
from smp.parallel.activation_checkpoint import waiting_bytes
from smp.parallel.fp8 import Config as Fp8Config
from smp.parallel.fp8 import gathered_less
from smp.parallel.lora import Config as LoraConfig
from smp.parallel.nf4 import BYTES
from smp.parallel.technique import Sent, member
from smp.plan.communication import collective_seconds, sent_bytes
from smp.plan.devices import DeviceRow
from smp.plan.layouts import Layout
from smp.plan.records import StepTime
from smp.plan.search import Estimate
from smp.train.preference import Config as PreferenceConfig

# Hidden states (of `hidden`) and inner states (of `intermediate`) that a block's element-wise kernels read or write in
# a forward pass: two norms in fp32 steps, rotary embedding, two residuals; activation and gate. Eager transformers
# blocks dispatch each step alone; compiled ones, and written-out fused blocks, read and write once.
HIDDEN_MOVED, INNER_MOVED = 26, 7
FUSED_HIDDEN_MOVED, FUSED_INNER_MOVED = 12, 4
# Bytes of a logit: in bf16 written, cast to fp32, log-softmax and its gradient, cast back, read by two products.
LOGIT_BYTES = 24
REDUCE_BYTES = 4  # gradients are reduced in fp32
HOST_MEMORY = 80e9  # bytes/s of a device's share of its host: an H200 with 16 cores, benchmarks/results/gpu
# Operations of an eager block, forward and backward, as the host issues them; those of selective recomputation pass two
# dispatch modes, taken as twice the time. Counted on Llama: 34 forward, 67 backward.
FORWARD_OPERATIONS = 34
OPERATIONS = {NONE: 101, PRODUCTS: 270, SELECTIVE: 270, FULL: 135}


class _Block(NamedTuple):
    """Seconds of one block's kernels; ``again``: those of attention that is recomputed though products are kept.

    ``gradients``: of the products in backward, those of the input, and of weights that are trained.
    """

    products: float
    attention_forward: float
    attention_backward: float
    moved: float
    again: float
    gradients: float

    @property
    def forward(self) -> float:
        return self.products + self.attention_forward + self.moved

    def backward(self, recompute: str, every: int) -> float:
        kept = self.moved + self.again
        again = {NONE: 0.0, PRODUCTS: kept, SELECTIVE: self.products / 2 + kept, FULL: self.forward}[recompute]
        return self.gradients + self.attention_backward + 2 * self.moved + again / every


def _block_weights(shape: ModelShape) -> int:
    """Count the weights of a block's products with a token."""
    if shape.experts:
        return shape.block - shape.experts + shape.active
    width = shape.attention or shape.hidden
    key_value = width * (shape.key_value_heads or shape.heads) // shape.heads
    mlp = (3 if shape.gated_mlp else 2) * shape.intermediate
    return shape.hidden * (2 * width + 2 * key_value + mlp)


def _block(shape: ModelShape, mesh: Mesh, work: Workload, row: DeviceRow, *, merged: float) -> _Block:
    """Return the seconds of a block; ``merged``: bytes that techniques move besides."""
    tokens, tp, share, peak = work.tokens(mesh), mesh.tp.size, row.efficiency, row.flops(work.compute_bytes)
    width = shape.attention or shape.hidden
    # Two products over the half of the scores that the causal mask leaves.
    scores = 2 * 2 * tokens * work.sequence_length * width / 2 / tp
    fused = work.settings[ActivationConfig].compile is True
    hidden, inner = (FUSED_HIDDEN_MOVED, FUSED_INNER_MOVED) if fused else (HIDDEN_MOVED, INNER_MOVED)
    gates = 1.0 if shape.gated_mlp else 0.5  # without a gate half of the inner states
    moved = work.compute_bytes * tokens * (hidden * shape.hidden + gates * inner * shape.intermediate) / tp + merged
    attention_forward = scores / (peak * share.attention_forward)
    weights, routed = _block_weights(shape), shape.active if shape.experts else 0
    plain = products = 2 * tokens * weights / tp / (peak * share.products)
    fp8 = work.settings[Fp8Config]
    others = routed * (not fp8.fp8_experts)  # weights whose products are not in fp8
    if fp8.fp8:
        products *= (others + (weights - others) * peak / row.flops(1)) / weights
    has_hp = {"rowwise_with_gw_hp": weights, "tensorwise": routed * fp8.fp8_experts}  # and whose gradients are not
    others = has_hp.get(fp8.fp8_recipe, 0)
    of_weights = products + (plain - products) * others / weights
    return _Block(
        products=products,
        attention_forward=attention_forward,
        attention_backward=2.5 * scores / (peak * share.attention_backward),
        moved=moved / (row.bandwidth * 1e12 * share.memory),
        again=attention_forward if mesh.cp.size > 1 else 0.0,
        gradients=products + (of_weights if shape.frozen_but is None else 0.0),
    )


def _gathered(shape: ModelShape, mesh: Mesh) -> float:
    """Count the weights of a block that a rank gathers."""
    if not shape.experts:
        return _block_weights(shape) / mesh.tp.size
    return shape.gathered(shape.unit_sizes(mesh.tp.size, mesh.degree("ep")), mesh).block


def _gathered_bytes(shape: ModelShape, mesh: Mesh, work: Workload) -> float:
    """Count the bytes of a block that a rank gathers."""
    of_weight = BYTES if work.settings[LoraConfig].qlora else work.compute_bytes
    return of_weight * _gathered(shape, mesh) - gathered_less(shape, mesh, work)


def _trained(shape: ModelShape, mesh: Mesh) -> tuple[float, float, float]:
    """Count a rank's trained parameters: of a block, outside of the blocks, and of its shard."""
    tp, shard = mesh.tp.size, mesh.shard.size
    if shape.frozen_but is not None:
        trained = shape.trained(tp)
        return trained.block, trained.table + trained.last, trained.parameters / shard
    own = shape.unit_sizes(tp, mesh.degree("ep")).parameters if shape.experts else shape.parameters / tp
    return _gathered(shape, mesh), shape.hidden * shape.vocabulary / tp, own / shard


class _Links:
    """Seconds of collectives, and the bytes that a rank sends in all: inside a host and between hosts.

    Args:
        local: ranks of a host.
    """

    def __init__(self, mesh: Mesh, row: DeviceRow, local: int):
        self.inside = self.between = 0
        self._row, host = row, max(1, local // mesh.tp.size)
        self._on_host = {axis.name: host if axis.inside else local for axis in AXES}
        self._on_host |= {"dp_shard": host, "dp_replicate": host // mesh.shard.size}
        self._mesh = mesh

    def send(self, kind: str, nbytes: float, axis: str, times: int) -> float:
        """Count what is sent so often among the ranks of an axis; return the seconds of one time."""
        ranks = self._mesh.degree(axis)
        if ranks == 1 or not times:
            return 0.0
        on_host = max(1, min(ranks, self._on_host[axis]))
        here, there = sent_bytes(kind, round(nbytes), ranks, on_host)
        self.inside, self.between = self.inside + times * here, self.between + times * there
        return collective_seconds(kind, nbytes, ranks, on_host, self._row)

    def waited(self, sent: Sequence[Sent], blocks: int, hiding: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds that all blocks wait for what techniques send, by part.

        Args:
            hiding: seconds of what hides it.
        """
        found = {axis.name: dict[str, float]() for axis in reversed(AXES)}
        for each in sent:
            seconds = each.times * self.send(each.kind, each.nbytes, each.axis, round(each.times * blocks))
            found[each.axis][each.hidden_by] = found[each.axis].get(each.hidden_by, 0.0) + seconds
        names = {axis.name: f"{axis.flag.partition('_')[0]}-parallel exchanges" for axis in AXES}
        return {
            names[axis]: blocks * sum(max(0.0, seconds - hiding.get(by, 0.0)) for by, seconds in groups.items())
            for axis, groups in found.items()
        }


def _to_host(row: DeviceRow) -> float:
    """Return the bytes/s between a device and its host; unknown ones are free."""
    return row.host_link * row.efficiency.links * 1e9 or math.inf


def _update(parameters: float, moved: float, row: DeviceRow, *, on_host: int, gathers: int) -> float:
    """Return the seconds of the update; on the host with copies of gradients, and of shards before each gather.

    Args:
        moved: bytes for each parameter.
        on_host: bytes of each parameter there; 0: it is on the device.
    """
    if on_host and row.is_gpu:
        return moved * parameters / HOST_MEMORY + on_host * parameters * (1 + gathers) / _to_host(row)
    return moved * parameters / (row.bandwidth * 1e12 * row.efficiency.memory)


def _matrices(shape: ModelShape, mesh: Mesh, config: OptimConfig, links: _Links, row: DeviceRow) -> float:
    """Return the seconds of what an update gathers and multiplies, of an optimizer of matrices."""
    sent, flops = gathered_bytes(shape.specs, mesh, config), product_flops(shape.specs, mesh, config)
    gathered = sum(links.send("all_gather", nbytes, axis, 1) for axis, nbytes in sent.items())
    return gathered + sum(n / (row.flops(size) * row.efficiency.products) for size, n in flops.items())


def step_time(shape: ModelShape, mesh: Mesh, work: Workload, row: DeviceRow, *, local: int) -> StepTime:
    """Return the seconds of an optimizer step, their range and parts, and the bytes that a rank sends.

    Args:
        work: of a data rank; all have equal work.
        local: ranks of a host.

    Source: roofline (Williams et al., CACM 2009) over the counts of arXiv:2204.02311, appendix B; overlap as in
    torch's ``fully_shard``.
    """
    activation, value, tokens, tp = work.settings[ActivationConfig], work.compute_bytes, work.tokens(mesh), mesh.tp.size
    preference, adapters, optim = work.settings[PreferenceConfig], work.settings[LoraConfig], work.settings[OptimConfig]
    more = preference.dpo and not preference.keeps_reference(adapters)  # the reference's forward pass
    techniques = [member(technique, "traffic") for technique in parallelize.TECHNIQUES]
    traffic = [each(shape, mesh, work) for each in techniques]
    block = _block(shape, mesh, work, row, merged=sum(each.moved for each in traffic))
    if more:
        traffic += [each(shape, mesh, dataclasses.replace(work, forward_only=True)) for each in techniques]
    memory, recompute = row.bandwidth * 1e12 * row.efficiency.memory, work.recomputation
    links, blocks = _Links(mesh, row, local), work.accumulation * shape.layers
    once = not mesh.reshard_after_forward or not work.settings[ParallelConfig].reshard_between_microbatches
    forward_gathers, backward_gathers = (1, 0) if once else (1 + more, 1)
    gathers = forward_gathers + backward_gathers
    reduced, outside, own = _trained(shape, mesh)
    gather = links.send("all_gather", _gathered_bytes(shape, mesh, work), "dp_shard", gathers * blocks)
    scatter = links.send("reduce_scatter", REDUCE_BYTES * reduced, "dp_shard", blocks)
    vocabulary = shape.hidden * shape.vocabulary / tp
    # What is not overlapped: the embedding's gather, the first block's, and the last reductions.
    ends = (1 + more) * links.send("all_gather", value * vocabulary, "dp_shard", (1 + more) * work.accumulation)
    ends += links.send("reduce_scatter", REDUCE_BYTES * outside, "dp_shard", work.accumulation)
    replicas = links.send("all_reduce", REDUCE_BYTES * own, "dp_replicate", 1)
    moved, update = moved_bytes(shape.specs, optim), _matrices(shape, mesh, optim, links, row)
    forward, backward = block.forward, block.backward(recompute, work.every)
    again = preference.dpo + more  # forward passes of the head alone: backward of pairs makes the logits again
    head = (2 * again + (6 if outside else 4)) * tokens * vocabulary / (row.flops(value) * row.efficiency.products)
    head += (1 + again / 2) * tokens * shape.vocabulary / tp * LOGIT_BYTES / memory
    compute = work.accumulation * (shape.layers * ((1 + more) * forward + backward) + head)
    operations = OPERATIONS[NONE] + (OPERATIONS[recompute] - OPERATIONS[NONE]) / work.every + more * FORWARD_OPERATIONS
    issued = row.host_us * 1e-6 * operations * blocks
    offloaded = 0
    if activation.offload_activations and (waiting := max(0, shape.layers - activation.activation_loading_horizon)):
        offloaded = waiting_bytes(shape, mesh, work, blocks=waiting) * work.accumulation
    offloading = 2 * offloaded / _to_host(row)
    hiding = dict[str, float]()
    if row.is_gpu:
        exposed = forward_gathers * max(0.0, gather - forward)
        exposed += max(0.0, backward_gathers * gather + scatter - backward)
        ends += gather + scatter
        passes = work.on_average(1, 1 + (recompute != NONE)) + more
        hiding = {"forward": passes * block.attention_forward, "backward": block.attention_backward}
        issued = 0.0 if activation.compile is True else max(0.0, issued - compute)
        offloading = max(0.0, offloading - compute)
    else:
        exposed = gathers * gather + scatter
    on_host = optim.parameter_bytes if activation.cpu_offload else 0
    parts = {
        "compute": compute,
        "exposed gathers": work.accumulation * (shape.layers * exposed + ends) + replicas,
        **links.waited([sent for each in traffic for sent in each.sent], blocks, hiding),
        "optimizer": update + _update(own, moved, row, on_host=on_host, gathers=gathers * work.accumulation),
        "host": issued,
        "offloading": offloading,
    }
    parts = {name: seconds / row.factor for name, seconds in parts.items()}
    seconds, (low, high) = sum(parts.values()), row.range
    shown = {name: value for name, value in parts.items() if value}
    return StepTime(seconds, low * seconds, high * seconds, shown, links.inside, links.between, row.described)


def estimate(shape: ModelShape, layout: Layout, row: DeviceRow, *, local: int) -> Estimate:
    """Return the bytes that a rank needs and the seconds of a step, roughly.

    Args:
        local: ranks of a host.
    """
    needed = peak_bytes(shape, layout.mesh, layout.work)
    return Estimate(layout, needed, step_time(shape, layout.mesh, layout.work, row, local=local).seconds)
