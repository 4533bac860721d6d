"""Tensor-parallel plans, as data: the linear layers of a block that are split, by outputs or by inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple


class PlanSizes(NamedTuple):
    """Numbers of a model that a plan splits."""

    heads: int
    key_value_heads: int
    width: int


@dataclasses.dataclass(frozen=True)
class Part:
    """A submodule of a block that computes on whole sequences, between two splits of its weights.

    One without ``row`` is not split: with sequence parallelism each rank computes all tokens, and keeps its own.

    Attributes:
        module: path in the block. Its first argument (or ``hidden_states``) is gathered over the sequence.
        columns: paths in ``module`` of the linear layers that are split by their outputs.
        row: path in ``module`` of the linear layer of the output, split by its inputs.
        heads: whether the columns' outputs are attention heads, none of which is cut.
        key_value: those of ``columns`` for keys and values alone, which may have fewer heads.
        fused: those of ``columns`` with several outputs one after the other, and what each is: ``heads``,
            ``key_value`` (heads) or ``width``.
        norms: paths in ``module`` of RMS norms over all heads of a column's output together.
        counts: attributes of ``module`` that count heads or widths, which a rank has fewer of; ``config.`` before
            those of its config.
        inner: those of ``columns`` that read what other layers of ``module``, which are not split, make of its input.
        vectors: parameters of ``module`` itself with as many values for each head.
        sizes: its numbers, where they are not those of the plan.
    """

    module: str
    columns: tuple[str, ...] = ()
    row: str = ""
    heads: bool = False
    key_value: tuple[str, ...] = ()
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    norms: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    sizes: PlanSizes | None = None


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """Split of the blocks of an architecture; embedding and head are split by the vocabulary.

    Modules outside the parts (norms, dropouts, residuals) must compute each token by itself: with sequence parallelism
    they run on a rank's tokens.

    Attributes:
        parts: in the order of the forward; of blocks that differ, those of all.
        heads, key_value_heads, width: number of heads, of key and value heads, and of the columns' outputs where a
            part has no heads; or the config keys of them (absent: as many key and value heads as heads).
        by_block: of blocks that differ, the parts of each.
    """

    parts: tuple[Part, ...]
    heads: str | int = "num_attention_heads"
    key_value_heads: str | int = "num_key_value_heads"
    width: str | int = "intermediate_size"
    by_block: tuple[tuple[Part, ...], ...] = ()

    def of_block(self, index: int) -> tuple[Part, ...]:
        """Return the parts of a block."""
        return self.by_block[index] if self.by_block else self.parts

    def axes(self, index: int) -> dict[str, str]:
        """Return the axes along which the linear layers of a block are split, by path: ``outputs`` or ``inputs``."""
        split = [part for part in self.of_block(index) if part.row]
        columns = {f"{part.module}.{path}": "outputs" for part in split for path in part.columns}
        return columns | {f"{part.module}.{part.row}": "inputs" for part in split}

    def sizes(self, hf_config: Any) -> PlanSizes:
        """Return the numbers of a model."""
        heads: int
        key_value_heads: int | None
        width: int
        heads, key_value_heads, width = (  # type: ignore[assignment]
            key if isinstance(key, int) else getattr(hf_config, key, None)
            for key in (self.heads, self.key_value_heads, self.width)
        )
        return PlanSizes(heads, key_value_heads or heads, width)


LLAMA_PLAN = TensorPlan(
    parts=(
        Part("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj", heads=True, key_value=("k_proj", "v_proj")),
        Part("mlp", ("gate_proj", "up_proj"), "down_proj"),
    )
)

# Queries, keys and values of a head are neighbours in query_key_value: splitting by heads keeps them together.
GPT_NEOX_PLAN = TensorPlan(
    parts=(
        Part("attention", ("query_key_value",), "dense", heads=True),
        Part("mlp", ("dense_h_to_4h",), "dense_4h_to_h"),
    )
)


def leaves_a_rank_empty(total: int, size: int) -> bool:
    """Return whether ``torch.chunk`` of ``total`` rows gives some of ``size`` ranks none."""
    return (size - 1) * -(-total // size) >= total


def degree_reasons(plan: TensorPlan, hf_config: Any, *, degree: int, shard: int) -> list[str]:
    """Return the reasons against a degree above 1."""
    hidden, split = hf_config.hidden_size, [part for part in plan.parts if part.row]
    found = []
    for heads, key_value, _ in dict.fromkeys(part.sizes or plan.sizes(hf_config) for part in split if part.heads):
        if heads % degree:
            found.append(f"does not divide the {heads} attention heads")
        elif key_value % degree and degree % key_value:
            found.append(f"neither divides the {key_value} key/value heads nor is a multiple of them")
    widths = dict.fromkeys((part.sizes or plan.sizes(hf_config)).width for part in split if not part.heads)
    for what, size in (("vocabulary", hf_config.vocab_size), *(("MLP", width) for width in widths)):
        if leaves_a_rank_empty(size, degree):
            found.append(f"leaves a rank without any of the {what}'s {size} rows")
        elif size % degree and hidden % shard:
            found.append(
                f"does not divide the {what}'s {size} rows, and --hybrid_shard_degree {shard} does not divide the "
                f"hidden width {hidden}, along which they would be sharded then"
            )
    return list(dict.fromkeys(found))
