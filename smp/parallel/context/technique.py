"""Context parallelism as a technique."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from smp.config import ActivationConfig, ParallelConfig
from smp.memory.shape import NONE, ModelShape, Moment, Workload
from smp.mesh import Mesh
from smp.models.model_config import ModelConfig
from smp.parallel import attention
from smp.parallel.choices import Choice, Situation
from smp.parallel.context.attention import name_of, register
from smp.parallel.context.batch import cut
from smp.parallel.context.fit import misfit, mixing
from smp.parallel.context.kernels import GPU_DTYPES
from smp.parallel.context.mixers import split_mixers
from smp.parallel.microbatch import Microbatch
from smp.parallel.technique import Sent, Setup, Traffic, model_blocks

Config = ParallelConfig
# Bytes that a forward pass of attention over the ranks of a sequence moves of each value of queries and of keys and
# values that they see: packed, merged in fp32, put back. From a trace of Llama 3 8B.
_MERGED_BYTES = 25
_REDUCE_BYTES = 4  # gradients are added up in fp32


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Return the reasons why sequences cannot be split over ranks."""
    cp, config = setup.mesh.cp.size, setup.settings[Config]
    if cp == 1:
        return []
    flag, found = f"--context_parallel_degree {cp}", []
    if setup.settings[ActivationConfig].compile is True:
        found.append(f"{flag}: the collectives of attention cannot be compiled: leave --compile 1 out")
    if function := _attention_given(setup):
        found.append(
            f"--attn_implementation {function} would have no effect: under {flag} attention communicates between "
            f"ranks, with kernels of its own: leave it out"
        )
    on_gpu = setup.device_type == "cuda"
    if on_gpu and setup.dtype not in (None, *GPU_DTYPES):
        found.append(f"{flag}: attention's kernels on GPUs compute in bf16, and --bf16 is 0: use --bf16 1")
    if why := misfit(hf_config, on_gpu=on_gpu):
        found.append(f"{flag}: {why}: use --context_parallel_degree 1")
    elif setup.mesh.tp.size > 1 and (why := mixing(hf_config)):
        found.append(
            f"{flag}: layers that mix tokens outside of attention ({why}) are not split by tensor parallelism as "
            f"well: use --tensor_parallel_degree 1"
        )
    heads = getattr(hf_config, "num_attention_heads", 0) or 0
    if config.cp_comm_type == "all_to_all" and heads // setup.mesh.tp.size % cp:
        found.append(
            f"--cp_comm_type all_to_all gives each of the {cp} ranks as many heads, and a tensor-parallel rank has "
            f"{heads // setup.mesh.tp.size}: use all_gather or p2p"
        )
    return found


def _attention_given(setup: Setup) -> str | None:
    """Return the attention function that was asked for; None: ``auto``, chosen, or a script."""
    settings, name = setup.settings, "attn_implementation"
    if name in settings.undecided() or name in settings.chosen:
        return None
    return next((str(getattr(each, name)) for each in settings.sections if isinstance(each, ModelConfig)), None)


def choose(situation: Situation) -> Iterator[Choice]:
    """Exchange heads where that moves less than gathering keys and values: (queries / keys + 1) / ranks below 1.

    What the collectives leave no choice for is chosen, too, before others do.
    """
    mesh, config = situation.mesh, situation.hf_config
    ranks, heads = mesh.cp.size, getattr(config, "num_attention_heads", 0) or 0
    if ranks == 1:
        return
    own = heads // mesh.tp.size
    few = heads // (getattr(config, "num_key_value_heads", None) or heads or 1)
    moves_less = own % ranks == 0 and few + 1 < ranks
    reason = f"a key has {few} queries, and a sequence is split over {ranks} ranks"
    yield Choice("cp_comm_type", "all_to_all" if moves_less else "all_gather", reason)
    yield Choice("attn_implementation", "sdpa", "unused: attention communicates between the ranks of a sequence")
    yield Choice("compile", False, "the collectives of attention cannot be compiled")


def apply(model: nn.Module, setup: Setup) -> None:
    """Let the blocks attend over the ranks of a sequence, unless they do so already."""
    if setup.mesh.cp.size > 1 and not is_split(model):
        split_mixers(model, model_blocks(model, setup.family))
        split_sequences(model, cast(str, setup.settings[Config].cp_comm_type))


def is_split(model: nn.Module) -> bool:
    """Return whether a model takes a rank's part of sequences."""
    return str(getattr(model, attention.KIND, "")).startswith(name_of(""))


def split_sequences(model: nn.Module, comm_type: str) -> None:
    """Let a Hugging Face model's blocks attend over the ranks of a sequence, in place.

    Args:
        comm_type: a value of ``--cp_comm_type``.
    """
    register()
    attention.use(model, name_of(comm_type))
    forward = model.forward

    @functools.wraps(forward)
    def without_cache(*args: Any, **kwargs: Any) -> Any:
        # Of no use, as a rank has a part of the keys; and recomputation would add a block's once more.
        return forward(*args, **{"use_cache": False, **kwargs})

    model.forward = without_cache  # type: ignore[method-assign]


def own_part(microbatch: Microbatch, setup: Setup) -> Microbatch:
    """Take this rank's tokens."""
    if setup.mesh.cp.size == 1:
        return microbatch
    return cut(microbatch, setup.mesh, balanced=setup.settings[Config].cp_load_balance)


def cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Count the buffers of a block's attention collectives in backward beyond the memory of its MLP, by then done.

    Gradients are added up in at least fp32. What a rank's part of a sequence saves is in the other techniques' costs,
    whose tokens are that part's.
    """
    if mesh.cp.size == 1 or work.moment not in (Moment.LAST_BLOCK, Moment.FIRST_BLOCK):
        return {}
    size, wide = work.compute_bytes, max(work.compute_bytes, 4)
    queries = shape.attention or shape.hidden
    keys = shape.key_value // shape.hidden or 2 * queries  # and values
    comm_type = work.settings[Config].cp_comm_type
    if comm_type == "all_gather":  # those of the whole sequence, and their gradients
        of_token = mesh.cp.size * keys * (size + wide)
    elif comm_type == "p2p":  # those that are here and that come, and of their gradients those that leave, too
        of_token = keys * (2 * size + 3 * wide)
    else:  # gradients, and what is sent and received of them
        of_token = (queries + keys) * (wide + 3 * size)
    of_mlp = 2 * shape.intermediate * size
    return {"activations": work.tokens(mesh) * -(-max(0, of_token - of_mlp) // mesh.tp.size)}


def traffic(shape: ModelShape, mesh: Mesh, work: Workload) -> Traffic:
    """Count the communication of attention, and what its results are packed and merged with."""
    cp, tp, comm_type = mesh.cp.size, mesh.tp.size, work.settings[Config].cp_comm_type
    if cp == 1:
        return Traffic()
    tokens, heads, key_value_heads = work.tokens(mesh), shape.heads, shape.key_value_heads or shape.heads
    width, backward = shape.attention or shape.hidden, 0 if work.forward_only else 1
    forwards = 1 if work.forward_only or work.recomputation == NONE else work.on_average(1, 2)
    keys = 2 * width * key_value_heads / heads  # and values

    def sent(kind: str, values: float, times: float, hidden_by: str = "", size: int = work.compute_bytes) -> Sent:
        return Sent(kind, size * tokens * values / tp, "cp", times, hidden_by)

    if comm_type == "p2p":
        found = [
            sent("send", keys, forwards * (cp - 1), "forward"), sent("send", keys, backward * (cp - 1), "backward"),
            sent("send", keys, backward * cp, "backward", _REDUCE_BYTES),
        ]  # fmt: skip
    elif comm_type == "all_gather":
        found = [sent("all_gather", cp * keys, forwards + backward), sent("reduce_scatter", cp * keys, backward)]
    else:
        copied = math.lcm(key_value_heads // tp or 1, cp) / (key_value_heads / tp)
        found = [sent("all_to_all", values, forwards + backward) for values in (width + copied * keys, width)]
    seen, turns = cp if comm_type == "all_gather" else 1, cp / 2 if comm_type == "p2p" else 1
    return Traffic(found, _MERGED_BYTES * tokens * turns * (width + seen * keys) / tp)
