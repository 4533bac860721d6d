"""Sizes that decide a rank's memory: of the model, counted on the meta device, and of one forward pass."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from smp.config import ActivationConfig, ParallelConfig, Settings
from smp.environment.malloc import unused_heap
from smp.mesh import Mesh
from smp.models.attention_support import number_of
from smp.models.experts import expert_layers, idle_parameters, is_experts
from smp.models.meta_model import meta_model
from smp.models.model_config import ResolvedModel
from smp.models.parameters import EMBEDDING, HEAD, ParameterSpec, ParameterTable
from smp.models.projection import projection_size
from smp.models.tensor_plan import TensorPlan

NONE, PRODUCTS, SELECTIVE, FULL = "none", "products", "selective", "full"  # recomputation
_ON, _MODE, _EVERY = (f"activation_checkpointing{word}" for word in ("", "_mode", "_every"))
# Settings by name, those that take least time first; each needs less memory than the one before.
RECOMPUTATION: tuple[dict[str, Any], ...] = (
    {_ON: False},
    {_ON: True, _MODE: PRODUCTS, _EVERY: 2},
    {_ON: True, _MODE: PRODUCTS, _EVERY: 1},
    {_ON: True, _MODE: SELECTIVE, _EVERY: 1},
    {_ON: True, _MODE: FULL, _EVERY: 1},
)


def recomputations(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what of :data:`RECOMPUTATION` is left to be chosen beside what was given, what takes least time first.

    Args:
        given: by name, of these settings. A mode, or which blocks, is only given to recompute.
    """
    if given.get(_ON) is False:
        return [{}]
    found = list[dict[str, Any]]()
    recomputes = given.get(_ON, _MODE in given or _EVERY in given or None)
    for each in RECOMPUTATION:
        known = {name: value for name, value in each.items() if name not in given}
        fits = given.get(_MODE) in (None, each.get(_MODE)) and recomputes in (None, each[_ON])
        if fits and known not in found:
            found.append(known)
    return found


# Settings of a config that give ModelShape.states: of Gemma 3n, DeepSeek V4 and Qwen4-Exp.
_STATES = ("altup_num_inputs", "hc_mult", "hc_count")


class Trained(NamedTuple):
    """Parameters that are trained, where others are frozen: all, the embedding's, the last unit's, and a block's."""

    parameters: int
    table: int
    last: int
    block: int


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of the model, counted on the meta device."""

    parameters: int  # tied ones count once
    largest_unit: int  # parameters of the largest sharding unit (embedding, a block, or norm and head)
    block: int  # parameters of one block
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    gated_mlp: bool
    key_value_heads: int = 0  # 0: as many as heads
    key_value: int = 0  # parameters of a block's key and value projections, where they may have fewer heads
    capped_logits: bool = False  # by tanh, whose slope is kept beside the logits
    attention: int = 0  # width of all heads together; 0: as hidden
    states: int = 1  # hidden states of a token between blocks: more with AltUp and hyper-connections
    saved: tuple[int, int] | None = None  # bytes that a block saves of each token, in bf16 and fp32; None: by formula
    specs: ParameterTable = ParameterTable()
    frozen_but: Trained | None = None  # None: all are trained
    own_trained: Trained = Trained(0, 0, 0, 0)  # of those, the model's own, which tensor parallelism splits
    linear: int = 0  # weights of a block's linear layers
    experts: int = 0  # parameters of a layer's experts; of a mixture, as the next five
    active: int = 0  # of these, parameters of the experts that a token is sent to
    expert_layers: int = 0  # layers that have them
    idle: int = 0  # parameters of the experts of all layers that a token is not sent to
    sent: int = 0  # values of a token's hidden states that go to experts: its experts times the hidden width
    routed: int = 0  # values that its experts save of a token, balanced
    unsplit_layers: int = 0  # with experts or others that tensor parallelism does not split
    replicated: int = 0  # parameters of such a layer that are not split

    @property
    def active_parameters(self) -> int:
        """Parameters that compute a token: of a mixture without the experts that it is not sent to."""
        return self.parameters - self.idle

    def most_imbalance(self, ep: int) -> float:
        """Return :attr:`Workload.imbalance` of a rank to which every token of ``ep`` ranks is sent.

        A token goes to different experts, of which the rank may have fewer.
        """
        return min(ep, self.experts / self.active) if self.active else 1.0

    def unit_sizes(self, tp: int, ep: int = 1) -> Trained:
        """Count a tensor-parallel rank's parameters, trained or not, before they are sharded."""
        of_blocks = ((self.parameters, self.layers), (self.table, 0), (self.last_unit, 0), (self.block, 1))
        return Trained(*(self.of_rank(count, blocks, tp, ep) for count, blocks in of_blocks))

    def trained(self, tp: int, ep: int = 1) -> Trained:
        """Count a tensor-parallel rank's parameters that are trained; it may have all of those that are added."""
        if self.frozen_but is None:
            return self.unit_sizes(tp, ep)
        counts = zip(self.frozen_but, self.own_trained, strict=True)
        return Trained(*(count - own + -(-own // tp) for count, own in counts))

    def gathered(self, sizes: Trained, mesh: Mesh) -> Trained:
        """Count what a rank gathers of units of these sizes: of experts that are split those of its part."""
        if (ep := mesh.degree("ep")) == 1:
            return sizes
        absent = self.experts // mesh.tp.size - self.experts // ep
        return sizes._replace(parameters=sizes.parameters - self.expert_layers * absent, block=sizes.block - absent)

    def of_rank(self, parameters: int, blocks: int, tp: int, ep: int = 1) -> int:
        """Count a tensor-parallel rank's share of ``parameters``, which contain so many blocks.

        Key and value projections are replicated where there are fewer heads than ranks, and so is what no plan splits,
        as experts; but those that are split over ``ep`` ranks are sharded over tensor-parallel ranks, too.
        """
        replicated = blocks * self.key_value if 0 < self.key_value_heads < tp else 0
        replicated += min(blocks, self.unsplit_layers) * self.replicated
        replicated -= min(blocks, self.expert_layers) * (self.experts if ep > 1 else 0)
        return replicated + -(-(parameters - replicated) // tp)

    @property
    def table(self) -> int:
        """Parameters of the embedding's weight."""
        return self.vocabulary * self.hidden

    @property
    def tied(self) -> bool:
        """Whether the head's weight is the embedding's."""
        return self.parameters - self.layers * self.block < 2 * self.table

    @property
    def last_unit(self) -> int:
        """Parameters of the sharding unit of the final norm and the head, with the embedding where they are tied."""
        outside = max(self.table, self.parameters - self.layers * self.block)
        return outside if self.tied else max(self.table, outside - self.table)


class Moment(enum.Enum):
    """Moments of a step at which memory may be highest; the blocks' backward runs from the last to the first."""

    LOSS = "forward of the head and the loss"
    HEAD = "reduction of the head's gradient"
    LAST_BLOCK = "backward of the last block"
    LAST_REDUCTION = "reduction of the last block's gradients"
    FIRST_BLOCK = "backward of the first block"
    FIRST_REDUCTION = "reduction of the first block's gradients"
    EMBEDDING = "reduction of the embedding's gradient"
    UPDATE = "update"


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes of one forward pass.

    Attributes:
        sequence_length: tokens of a sample.
        micro_batch_size: samples.
        rows_of_sample: sequences of each.
        compute_bytes: of an element: 4 for fp32, 2 for bf16.
        settings: of the techniques; each reads its own.
        device_type: ``cpu`` or ``cuda``.
        attention_matrix: whether all attention scores exist at once (eager attention).
        forward_only: whether there is no backward pass, as in evaluation.
        checkpoint_copy: whether parameters and optimizer state are copied, on the device, to be saved.
        accumulation: micro-batches of a step; from the second on, gradients are kept throughout.
        moment: of the step, at which techniques count their bytes.
        imbalance: rows that a rank's experts get, in multiples of those that all get if tokens are balanced.
        unused_heap: free blocks of the C library's heap, as a fraction of the tensors' bytes: ``malloc.unused_heap()``.
    """

    sequence_length: int
    micro_batch_size: int
    compute_bytes: int
    settings: Settings = Settings()
    device_type: str = "cuda"
    attention_matrix: bool = False
    forward_only: bool = False
    checkpoint_copy: bool = False
    unused_heap: float = 0.0
    accumulation: int = 1
    moment: Moment = Moment.LAST_BLOCK
    imbalance: float = 1.0
    rows_of_sample: int = 1

    def columns(self, mesh: Mesh) -> int:
        """Count the tokens of a sample on one rank: all, or its part, with padding, where ranks split a sequence."""
        if mesh.cp.size == 1:
            return self.sequence_length
        own = (2 if self.settings[ParallelConfig].cp_load_balance else 1) * mesh.tp.size
        return -(-self.sequence_length // (mesh.cp.size * own)) * own

    def tokens(self, mesh: Mesh) -> int:
        """Count the tokens of the forward pass on one rank."""
        return self.micro_batch_size * self.rows_of_sample * self.columns(mesh)

    @property
    def recomputation(self) -> str:
        """What backward recomputes of a block: ``none``, or the mode."""
        config = self.settings[ActivationConfig]
        return config.activation_checkpointing_mode if config.activation_checkpointing else NONE

    @property
    def every(self) -> int:
        """The n of "every n-th block", of which backward recomputes."""
        return cast(int, self.settings[ActivationConfig].activation_checkpointing_every)

    def on_average(self, plain: float, recomputed: float) -> float:
        """Return the mean over the blocks of what backward does for one as it is, and for one that it recomputes."""
        return plain + (recomputed - plain) / self.every

    def changed(self, **values: Any) -> Workload:
        """Return a copy with other settings of the techniques, by name."""
        return dataclasses.replace(self, settings=self.settings.changed(**values))


def workload(
    model: ResolvedModel,
    settings: Settings,
    *,
    batch: int,
    compute_bytes: int,
    device_type: str,
    forward_only: bool = False,
    is_async: bool = False,
    accumulation: int = 1,
    rows_of_sample: int = 1,
) -> Workload:
    """Return the workload of one forward pass of a job.

    Args:
        batch: samples of a forward pass.
        forward_only: whether there is no backward pass, as in evaluation.
        is_async: whether checkpoints are written in the background, which on a CPU takes a copy.
        accumulation: micro-batches of a step.
        rows_of_sample: sequences of each sample.
    """
    on_cpu, recomputes = device_type == "cpu", bool(settings[ActivationConfig].activation_checkpointing)
    return Workload(
        sequence_length=model.sequence_length,
        micro_batch_size=batch,
        compute_bytes=compute_bytes,
        settings=settings,
        device_type=device_type,
        attention_matrix=model.attn_implementation == "eager",
        forward_only=forward_only,
        checkpoint_copy=is_async and on_cpu and not forward_only,
        unused_heap=unused_heap(recomputes=recomputes) if on_cpu else 0.0,
        accumulation=accumulation,
        rows_of_sample=rows_of_sample,
    )


def _mlp_width(block: torch.nn.Module, hf_config: Any) -> int:
    """Return the MLP's inner width: the config's, or else the widest input that becomes hidden states."""
    if isinstance(width := number_of(hf_config, "intermediate_size"), int):
        return width
    sizes = [projection_size(module) for module in block.modules()]
    return max((size[0] for size in sizes if size and size[1] == hf_config.hidden_size), default=hf_config.hidden_size)


def _is_gated(block: torch.nn.Module, width: int) -> bool:
    """Return whether two projections, or a fused one, lead to the MLP's inner width."""
    outputs = [size[1] for size in map(projection_size, block.modules()) if size]
    return outputs.count(width) > 1 or 2 * width in outputs


def _trained(table: ParameterTable, counted: Callable[[ParameterSpec], bool]) -> Trained:
    """Count some of the parameters."""
    units: dict[str | int, int] = dict.fromkeys(table.blocks, 0)
    for spec in filter(counted, table):
        units[spec.unit] = units.get(spec.unit, 0) + spec.size
    most = max(units[block] for block in table.blocks)
    return Trained(sum(units.values()), units.get(EMBEDDING, 0), units.get(HEAD, 0), most)


def _unsplit(plan: TensorPlan | None, blocks: Sequence[torch.nn.Module]) -> list[int]:
    """Count the parameters outside the split parts of each block that has experts, or a part that is not split."""
    found = []
    for index, block in enumerate(blocks if plan else ()):
        parts = plan.of_block(index)  # type: ignore[union-attr]
        if any(map(is_experts, block.modules())) or not all(part.row for part in parts):
            split = [p for part in parts if part.row for p in block.get_submodule(part.module).parameters()]
            found.append(sum(p.numel() for p in block.parameters()) - sum(p.numel() for p in split))
    return found


def model_shape(model: ResolvedModel, table: ParameterTable | None = None) -> ModelShape:
    """Count the parameters of a model on the meta device.

    Args:
        table: with what techniques add and freeze; None: they do nothing.
    """
    family, config = model.family, model.hf_config
    meta = meta_model(config, model.attn_implementation)
    table = table or meta.table
    block, saved = meta.largest_block, meta.saved
    counts = _trained(table, lambda spec: True)
    intermediate = _mlp_width(block, config)
    heads = number_of(config, "num_attention_heads") or 1  # recurrent models have none
    key_value_heads = number_of(config, "num_key_value_heads") or 0
    head_dim = number_of(config, "head_dim") or config.hidden_size // heads
    all_trained = all(spec.trained for spec in table)
    layers = expert_layers(meta.model)
    experts = max(layers, key=lambda layer: layer.experts * layer.parameters, default=None)
    unsplit = _unsplit(family.tensor_plan, meta.blocks)
    return ModelShape(
        parameters=counts.parameters,
        largest_unit=max(counts.table, counts.block, counts.last),
        block=counts.block,
        layers=len(table.blocks),
        hidden=config.hidden_size,
        intermediate=intermediate,
        heads=heads,
        vocabulary=config.vocab_size,
        gated_mlp=family.gated_mlp and _is_gated(block, intermediate),
        key_value_heads=key_value_heads,
        key_value=2 * key_value_heads * head_dim * config.hidden_size,
        capped_logits=bool(family.logits and family.logits.cap),
        attention=heads * head_dim,
        states=next(filter(None, (number_of(config, name) for name in _STATES)), 1),
        saved=(saved[0], saved[1]) if saved[0] and saved[1] else None,
        specs=table,
        frozen_but=None if all_trained else _trained(table, lambda spec: spec.trained),
        own_trained=_trained(table, lambda spec: spec.trained and not spec.added and not all_trained),
        linear=sum(m.weight.numel() for m in block.modules() if isinstance(m, torch.nn.Linear)),
        experts=experts.experts * experts.parameters if experts else 0,
        active=experts.top * experts.parameters if experts else 0,
        expert_layers=len(layers),
        idle=idle_parameters(meta.model),
        sent=experts.top * config.hidden_size if experts else 0,
        # Of each expert the input and the output, and twice the widths of its matrices between.
        routed=experts.top * 2 * (config.hidden_size + experts.weights // config.hidden_size) if experts else 0,
        unsplit_layers=len(unsplit),
        replicated=-(-sum(unsplit) // len(unsplit)) if unsplit else 0,
    )


def splits_tokens(mesh: Mesh, work: Workload) -> bool:
    """Return whether sequence parallelism shards the tokens between the split layers."""
    return mesh.tp.size > 1 and work.settings[ParallelConfig].sequence_parallel


class BlockBytes(NamedTuple):
    """Bytes of activations of one block on a rank: its input, and everything saved for backward."""

    input: int
    inside: int


def block_bytes(shape: ModelShape, mesh: Mesh, work: Workload) -> BlockBytes:
    """Count the activations of a block.

    They follow Korthikanti et al., arXiv:2205.05198, section 4, without the attention matrix, which fused attention
    does not store.
    """
    split = splits_tokens(mesh, work)
    tokens = work.tokens(mesh)
    matrices = work.attention_matrix and mesh.cp.size == 1  # ranks that split a sequence have kernels of their own
    inside = tokens * _saved_values(shape, work, tp=mesh.tp.size, split=split) * work.compute_bytes
    if shape.saved and not matrices:  # what was counted, split as the formula splits
        full = _saved_values(shape, work, tp=1, split=False) * work.compute_bytes
        inside = inside * shape.saved[work.compute_bytes >= 4] // full
    inside += int(tokens * shape.routed * work.imbalance * work.compute_bytes / (mesh.tp.size if split else 1))
    if matrices:
        matrix = work.micro_batch_size * work.rows_of_sample * shape.heads * work.sequence_length**2
        inside += 3 * matrix * work.compute_bytes // mesh.tp.size
    given = tokens * shape.states * shape.hidden * work.compute_bytes
    return BlockBytes(given // (mesh.tp.size if split else 1), inside)


def _saved_values(shape: ModelShape, work: Workload, *, tp: int, split: bool) -> int:
    """Count the values that a block of the Llama kind saves of each token, without the attention matrix."""
    mlp = (4 if shape.gated_mlp else 3) * shape.intermediate
    # Of a block's ten hidden states (norms, residuals, projections' inputs and outputs), four lie between split layers.
    # Norms save what they compute in fp32, too.
    between = (4 if work.compute_bytes >= 4 else 6) * shape.hidden // (tp if split else 1)
    # The inputs of attention and MLP, of all tokens.
    gathered_inputs = 2 * shape.hidden if split and work.settings[ParallelConfig].tp_save_gathered else 0
    heads = 4 * max(shape.hidden, shape.attention)  # queries, keys, values and what attention makes of them
    return between + gathered_inputs + (2 * shape.hidden + heads + mlp) // tp
