"""Settings: the base of every configuration section, and the sections that several parts read.

A setting is written once, as a field made by :func:`setting`: its name is the flag and the YAML key, its
annotation the type, and its metadata the help text and the checks. ``smp.train.arguments`` derives the command line
from it. A section with a single reader lives in that reader's file; those with several live here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from typing import Any, Literal, TypeVar, cast

from smp.compat.absent import ABSENT
from smp.errors import ConfigError


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    only: tuple = (),
    otherwise: str = "",
    no_effect: str = "",
    plain: Any = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare one field of a :class:`Section`.

    Args:
        default: the value when neither a flag nor a YAML key gives one.
        help: one sentence, in the terms of the field.
        minimum, above, maximum: bounds of a number (``above`` excludes the bound); of each item of a tuple.
        only: the accepted values; any other is refused with ``otherwise``, which names the alternative.
        no_effect: why the setting changes nothing here by construction (it is accepted, and logged when given).
        plain: what ``auto`` means where ``smp.parallel.choices`` has chosen nothing.
        aliases: further flag names.
    """
    metadata = {**locals()}
    return dataclasses.field(default=metadata.pop("default"), metadata=metadata)


def _bound_problem(name: str, value: Any, metadata: Any) -> str | None:
    minimum, above, maximum = metadata["minimum"], metadata["above"], metadata["maximum"]
    for item in value if isinstance(value, tuple) else (value,):
        if item is None or isinstance(item, (str, bool)):
            continue
        # NaN, which compares false with everything, is outside every bound.
        if minimum is not None and not item >= minimum:
            return f"--{name} must be at least {minimum}, got {item}"
        if above is not None and not item > above:
            return f"--{name} must be greater than {above}, got {item}"
        if maximum is not None and not item <= maximum:
            return f"--{name} must be at most {maximum}, got {item}"
    return None


@functools.cache
def _choices(section: type) -> dict[str, tuple[str, ...]]:
    """Return the values of the settings that take one of some texts."""
    hints = typing.get_type_hints(section)
    return {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is Literal}


def _type_problem(name: str, value: Any, default: Any, choices: tuple[str, ...]) -> str | None:
    """Return what is wrong with a value where the default is a number or a switch, or there are ``choices``."""
    if choices and value not in choices:
        return f"--{name} takes {', '.join(choices)}, got {value!r}"
    if type(default) is int and type(value) is not int:
        return f"--{name} must be an integer, got {value!r}"
    if type(default) is float and type(value) not in (int, float):
        return f"--{name} must be a number, got {value!r}"
    if type(default) is bool and not (isinstance(value, int) and value in (0, 1)):
        return f"--{name} must be 0 or 1, got {value!r}"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A frozen group of settings that checks itself.

    Raises:
        ConfigError: on construction, naming every problem of the section at once.
    """

    def __init_subclass__(cls) -> None:
        """Add the flags of what is not here, each behind its setting."""
        fields: dict[str, Any] = {}
        for name, kind in inspect.get_annotations(cls).items():
            fields[name] = kind
            for flag in ABSENT.get(name, ()):
                fields[flag.name] = flag.kind or type(flag.default)
                only = (flag.default,) if flag.otherwise else ()
                added = setting(flag.default, flag.help, only=only, otherwise=flag.otherwise, no_effect=flag.no_effect)
                setattr(cls, flag.name, added)
        cls.__annotations__ = fields

    def __post_init__(self) -> None:
        fields = [field for field in dataclasses.fields(self) if field.metadata]
        for field in fields:
            value = getattr(self, field.name)
            if isinstance(field.default, tuple) and isinstance(value, list):  # as JSON has it
                object.__setattr__(self, field.name, tuple(value))
            if isinstance(field.default, float) and value == "inf":
                object.__setattr__(self, field.name, float(value))
        choices = _choices(cast(Any, type(self)))
        wrong = [_type_problem(f.name, getattr(self, f.name), f.default, choices.get(f.name, ())) for f in fields]
        if found := [text for text in wrong if text]:
            raise ConfigError(found)
        alone = Section.problems(self)
        if found := alone + self.independent([text for text in self.problems() if text not in alone], alone):
            raise ConfigError(found)

    @staticmethod
    def independent(found: list[str], earlier: list[str]) -> list[str]:
        """Return the problems without those that name a flag which ``earlier`` ones refuse: they follow from it.

        From a file of ``--config`` that was not read any may follow.
        """
        refused = {text.split()[0] for text in earlier}
        if "--config" in refused:
            return []
        return [text for text in found if refused.isdisjoint(re.findall(r"--\w+", text))]

    def problems(self) -> list[str]:
        """Return one sentence for each setting that cannot be used; subclasses add checks across fields."""
        found = []
        for field in dataclasses.fields(self):
            value, metadata = getattr(self, field.name), field.metadata
            if not metadata:
                continue
            if problem := _bound_problem(field.name, value, metadata):
                found.append(problem)
            if metadata["only"] and value not in metadata["only"]:
                found.append(f"--{field.name} {flag_text(value)} is not available: {metadata['otherwise']}")
        return found


S = TypeVar("S", bound=Section)
AUTO = "auto"
Auto = Literal["auto"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sections by their type; one that is not given has its defaults. ``auto`` reads as the plain value.

    Attributes:
        chosen: settings that were ``auto`` and have a value by :meth:`changed`.
    """

    sections: tuple[Section, ...] = ()
    chosen: frozenset[str] = frozenset()

    def __getitem__(self, kind: type[S]) -> S:
        if kind not in self._plain:  # a section checks itself anew, and a search reads thousands
            found = next((section for section in self.sections if type(section) is kind), None) or kind()
            self._plain[kind] = dataclasses.replace(found, **_plain_values(found))
        return cast(S, self._plain[kind])

    @functools.cached_property
    def _plain(self) -> dict[type[Section], Section]:
        return {}

    def changed(self, **values: Any) -> Settings:
        """Return a copy with other values, by name.

        Raises:
            ValueError: no section has a setting of that name.
        """
        sections, chosen = [], self.chosen | (values.keys() & self.undecided().keys())
        for section in self.sections:
            own = {field.name: values.pop(field.name) for field in dataclasses.fields(section) if field.name in values}
            sections.append(dataclasses.replace(section, **own))
        if values:
            raise ValueError(f"no section has a setting {next(iter(values))}")
        return Settings(tuple(sections), chosen)

    def undecided(self) -> dict[str, Any]:
        """Return the plain values of the settings that are ``auto``, by name."""
        return {name: value for section in self.sections for name, value in _plain_values(section).items()}


def _plain_values(section: Section) -> dict[str, Any]:
    fields = (field for field in dataclasses.fields(section) if getattr(section, field.name) == AUTO)
    return {field.name: field.metadata["plain"] for field in fields if field.metadata.get("plain") is not None}


def flag_text(value: Any) -> str:
    """Format a value as the command line takes it."""
    if isinstance(value, tuple):
        return " ".join(map(flag_text, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


ShardingStrategy = Literal["auto", "no_shard", "shard_grad_op", "hybrid_shard", "_hybrid_shard_zero2", "full_shard"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """Degrees of parallelism and sharding of parameters, with SMP v2's names."""

    sharding_strategy: ShardingStrategy = setting(
        AUTO,
        "Which states are sharded, over which ranks: FSDP's names. hybrid_shard shards inside a host. auto: "
        "hybrid_shard; full_shard where tensor parallelism takes all of a host.",
        plain="hybrid_shard",
    )
    hybrid_shard_degree: int = setting(
        0,
        "Ranks per sharding group. 0: as --sharding_strategy; 1: no sharding; k: hybrid sharding over k ranks.",
        minimum=0,
        aliases=("shard_degree",),
    )
    tensor_parallel_degree: int = setting(
        1, "Ranks that split each layer; neighbours, so keep them in one host.", minimum=1
    )
    sequence_parallel: bool = setting(
        True, "Under tensor parallelism, split what lies between the split layers by tokens."
    )
    tp_save_gathered: bool = setting(
        False,
        "Under sequence parallelism, keep gathered inputs for backward instead of gathering them anew: faster, larger.",
    )
    tp_overlap: bool | Auto = setting(
        AUTO,
        "Overlap collectives of hidden states with matmuls. auto: on GPUs of one host that read each other's memory.",
        plain=False,
    )
    context_parallel_degree: int = setting(
        1, "Ranks that split each sequence; they are of one sharding group, and counted in its degree.", minimum=1
    )
    expert_parallel_degree: int = setting(
        1, "Ranks that split the experts of a mixture, folded over sharding, context and tensor ranks: it takes none "
        "of its own.", minimum=1
    )  # fmt: skip
    cp_comm_type: Literal["auto", "p2p", "all_gather", "all_to_all"] = setting(
        "auto",
        "Communication of context parallelism: keys and values in a ring (p2p) or all-gathered, or an all-to-all of "
        "tokens and heads. auto: all_gather; on GPUs all_to_all where that moves less.",
        plain="all_gather",
    )
    cp_load_balance: bool = setting(
        True, "Under context parallelism, give each rank an early and a late part of a sequence: equal attention work."
    )
    forward_prefetch: bool = setting(True, "Gather the next unit's parameters while the current one computes.")
    backward_fetch_policy: Literal["backward_pre", "backward_post"] = setting(
        "backward_pre",
        "Gather the previous unit's parameters before (pre) or after (post) the current unit's backward.",
    )
    auto_wrap_policy: Literal["transformer_auto_wrap_policy", "size_based_auto_wrap_policy"] = setting(
        "transformer_auto_wrap_policy",
        "Sharding units: embedding, each block, final norm with head; or any subtree of at least 100M parameters.",
    )
    defer_gradient_sync: bool = setting(
        False,
        "With accumulation, reduce gradients once per step instead of once per micro-batch. Keeps unsharded gradients.",
    )
    reshard_between_microbatches: bool | Auto = setting(
        AUTO,
        "0: gather each unit once a step and free it after its last backward. auto: on GPUs, 0 where that fits.",
        plain=True,
    )
    shared_buffers: bool = setting(
        True,
        "With backend smddp, gather parameters (on CPUs also reduce gradients) in memory that a host's ranks share.",
    )
    fsdp_cache_flush_warnings: bool = setting(
        True, "On GPUs: warn when memory was so short that the allocator had to flush its cache, which stalls the GPU."
    )

    def problems(self) -> list[str]:
        """Add strategies that contradict an explicit degree."""
        found = super().problems()
        strategy, degree = self.sharding_strategy, self.hybrid_shard_degree
        if strategy == "no_shard" and degree > 1:
            found.append(
                f"--sharding_strategy no_shard contradicts --hybrid_shard_degree {degree}: "
                f"leave the degree at 0 or 1, or choose hybrid_shard"
            )
        if strategy in ("full_shard", "shard_grad_op") and degree == 1:
            found.append(
                f"--sharding_strategy {strategy} contradicts --hybrid_shard_degree 1, which means no sharding: "
                f"leave the degree at 0, or choose no_shard"
            )
        if strategy == "shard_grad_op" and degree > 1:
            found.append(
                f"--sharding_strategy shard_grad_op contradicts --hybrid_shard_degree {degree}: "
                f"choose _hybrid_shard_zero2, which keeps gathered parameters until backward within {degree} ranks"
            )
        if self.tp_overlap is True and not self.sequence_parallel:
            found.append("--tp_overlap 1 needs --sequence_parallel 1: set it, or leave --tp_overlap out")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """Number formats of the computation; gradients are reduced in fp32. ``--param_dtype`` is kept between steps."""

    bf16: bool | None = setting(
        None, "Compute in bfloat16. Default: 1 on an accelerator, 0 on a CPU. SMP v2 also reduces in bf16; here fp32."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationConfig(Section):
    """Activations between forward and backward, and execution of blocks."""

    activation_checkpointing: bool | Auto = setting(
        AUTO,
        "Recompute each block's activations in backward instead of keeping them. auto: on GPUs, 0 where they fit.",
        plain=True,
    )
    activation_checkpointing_mode: Literal["auto", "full", "selective", "products"] = setting(
        AUTO, "Kept for backward: a block's input alone; or also attention, reductions and every other product, or "
        "every product. auto: on GPUs, the largest that fits.",
        plain="full",
    )  # fmt: skip
    activation_checkpointing_every: int | Auto = setting(
        AUTO, "Recompute every n-th block only. auto: on GPUs, 2 with products where that fits.", minimum=1, plain=1
    )
    offload_activations: bool = setting(
        False, "Move what backward needs off the device during forward, and back ahead of use."
    )
    activation_loading_horizon: int = setting(
        2, "Blocks ahead of the computing one whose offloaded activations may be on the device.", minimum=1
    )
    offload_dir: str | None = setting(
        None, "Directory on a fast local disk to offload activations to. Default: host memory (of a GPU's process)."
    )
    cpu_offload: bool = setting(
        False, "Keep parameters, gradients and optimizer state in host memory; each unit is copied when it is gathered."
    )
    compile: bool | Auto = setting(
        AUTO, "Compile each block with torch.compile. auto: on GPUs, where Triton and a compiler are there, and blocks "
        "neither draw nor are split nor have experts, with which 1 is refused, as with documents packed in hybrids.",
        plain=False,
    )  # fmt: skip
    clean_cache: bool = setting(False, "Return the allocator's free memory to the system after every step.")

    def problems(self) -> list[str]:
        """Add settings that need another one."""
        found = super().problems()
        mode = self.activation_checkpointing_mode
        if not self.activation_checkpointing and mode in ("selective", "products"):
            found.append(
                f"--activation_checkpointing_mode {mode} needs --activation_checkpointing 1: set it, or leave it out"
            )
        if self.offload_dir is not None and not self.offload_activations:
            found.append("--offload_dir needs --offload_activations 1: set it, or leave the directory out")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    """Cross entropy of the head."""

    loss_chunk_tokens: int | Auto = setting(
        AUTO,
        "Tokens whose logits exist at one time, forward and backward. 0: all of a micro-batch. auto: on GPUs 4096 "
        "where they fit.",
        plain=1024,
        minimum=0,
    )  # fmt: skip
    compile_loss: bool | Auto = setting(
        AUTO, "Compile what makes losses and gradients of a chunk's logits with torch.compile: fewer passes. auto: on "
        "GPUs, where Triton and a compiler are there, the vocabulary is not split, and without --deterministic 1.",
        plain=False,
    )  # fmt: skip
    z_loss: float = setting(
        0.0, "Factor of the squared log-partition that is added to each token's training loss.", minimum=0
    )

    def problems(self) -> list[str]:
        """Add a z-loss without chunks."""
        found = super().problems()
        if self.z_loss and not self.loss_chunk_tokens:
            found.append("--z_loss needs --loss_chunk_tokens above 0: leave that at its default")
        if self.compile_loss is True and not self.loss_chunk_tokens:
            found.append("--compile_loss 1 needs --loss_chunk_tokens above 0: leave that at its default")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommConfig(Section):
    """Process group."""

    distributed_backend: Literal["gloo", "nccl", "smddp"] | None = setting(
        None, "torch.distributed backend. Default: nccl on GPUs, smddp on CPUs."
    )
    distributed_timeout: float = setting(
        1800.0, "Seconds until a collective that does not finish is an error.", above=0, maximum=1e8
    )
