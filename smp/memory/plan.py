"""What a job needs on each rank, predicted from shapes before anything is allocated.

An estimate, on purpose a simple one: every term is written out below, and the largest ones (parameters, gradients,
optimizer state, gathered units, logits) follow exactly from the shapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from smp.errors import UserError
from smp.mesh import Mesh, lay_out

GIB = 1024**3

# What a process holds before it has a model: interpreter, torch and transformers. Measured on Linux, CPU build.
BASE_HOST_BYTES = int(0.45 * GIB)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes that decide memory, counted on the meta device."""

    parameters: int  # all of them, tied ones once
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

    def of_rank(self, parameters: int, blocks: int, tp: int) -> int:
        """What a tensor-parallel rank holds of ``parameters``, which contain so many blocks.

        Each holds all key and value projections where there are fewer heads than ranks.
        """
        whole = blocks * self.key_value if 0 < self.key_value_heads < tp else 0
        return whole + -(-(parameters - whole) // tp)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one forward pass holds."""

    sequence_length: int
    micro_batch_size: int
    compute_bytes: int  # per element: 4 for fp32, 2 for bf16
    activation_checkpointing: bool
    sequence_parallel: bool = True  # under tensor parallelism
    save_gathered: bool = False  # under sequence parallelism, whether gathered inputs are kept for backward
    loss_chunk: int = 0  # tokens whose logits exist at one time; 0: all
    recomputed_every: int = 1  # with activation checkpointing: every n-th block is recomputed
    selective: bool = False  # with activation checkpointing: every other product and attention are kept
    offload_horizon: int = 0  # with activation offloading: blocks whose activations stay; 0: no offloading
    cpu_offload: bool = False  # parameters, gradients and optimizer state are in host memory, the device being another
    checkpoint_copy: bool = False  # whether parameters and optimizer state are copied, on the device, to be saved
    attention_matrix: bool = False  # whether scores of the whole sequence exist (eager attention)
    unused_heap: float = 0.0  # what the C library holds in free blocks, of the tensors' bytes: malloc.unused_heap()


def model_shape(model: torch.nn.Module, hf_config: Any, *, embedding: str, blocks: str, gated_mlp: bool) -> ModelShape:
    """Count a model built on the meta device."""

    def count(module: torch.nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    total = count(model)
    block_counts = [count(block) for block in model.get_submodule(blocks).children()]
    table = count(model.get_submodule(embedding))
    heads = hf_config.num_attention_heads
    key_value_heads = getattr(hf_config, "num_key_value_heads", 0)
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    return ModelShape(
        parameters=total,
        largest_unit=max(table, max(block_counts), total - table - sum(block_counts)),
        block=max(block_counts),
        layers=len(block_counts),
        hidden=hf_config.hidden_size,
        intermediate=hf_config.intermediate_size,
        heads=heads,
        vocabulary=hf_config.vocab_size,
        gated_mlp=gated_mlp,
        key_value_heads=key_value_heads,
        key_value=2 * key_value_heads * head_dim * hf_config.hidden_size,
    )


def _kept_activations(shape: ModelShape, work: Workload, *, block_input: int, inside_block: int, tp: int) -> int:
    """Bytes of activations that wait on the device for backward, besides those of the block that computes."""
    kept_in_all = 0
    if not work.activation_checkpointing:
        per_block = float(inside_block)
    else:
        recomputed = -(-shape.layers // work.recomputed_every)
        whole = shape.layers - recomputed
        per_block = (recomputed * block_input + whole * inside_block) / shape.layers
        if work.selective:  # attention's output, and of each part's products every other one; these are not offloaded
            tokens = work.micro_batch_size * work.sequence_length
            kept = tokens * (3 * shape.hidden + shape.intermediate) // tp * work.compute_bytes
            kept_in_all = recomputed * kept
    # Offloading holds those that stay, the one that computes, and two that are leaving.
    blocks = min(shape.layers, work.offload_horizon + 3) if work.offload_horizon else shape.layers
    return int(blocks * per_block) + kept_in_all


def estimate_memory(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Predicted peak bytes of one rank, by category.

    Parameters, gradients and AdamW's two moments are fp32, and split over sharding and tensor-parallel ranks.
    Gathered parameters: two units at a time (the current one and the one fetched ahead) when they are freed after
    forward, all of them otherwise.
    Activations follow Korthikanti et al., arXiv:2205.05198, section 4, without the attention matrix, which fused
    attention does not store.
    """
    fp32, tp = 4, mesh.tp.size
    held = shape.of_rank(shape.parameters, shape.layers, tp)
    shard = -(-held // mesh.shard.size)
    unit = shape.of_rank(shape.largest_unit, int(shape.largest_unit == shape.block), tp)
    gathered = min(2 * unit, held) if mesh.reshard_after_forward else held
    tokens = work.micro_batch_size * work.sequence_length
    mlp = (4 if shape.gated_mlp else 3) * shape.intermediate
    # Of a block's ten hidden states (norms, residuals, projections' inputs and outputs), four lie between split layers.
    split_tokens = tp > 1 and work.sequence_parallel
    between = 4 * shape.hidden // (tp if split_tokens else 1)
    # The inputs of attention and MLP, of all tokens.
    gathered_inputs = 2 * shape.hidden if split_tokens and work.save_gathered else 0
    inside_block = tokens * (between + gathered_inputs + (6 * shape.hidden + mlp) // tp) * work.compute_bytes
    if work.attention_matrix:
        matrix = work.micro_batch_size * shape.heads * work.sequence_length**2
        inside_block += 3 * matrix * work.compute_bytes // tp
    hidden_state = tokens * shape.hidden * work.compute_bytes
    block_input = hidden_state // (tp if split_tokens else 1)
    kept = _kept_activations(shape, work, block_input=block_input, inside_block=inside_block, tp=tp)
    on_device = 0 if work.cpu_offload else shard * fp32
    logit_tokens = min(tokens, work.loss_chunk or tokens)
    of_logit = fp32 + (work.compute_bytes if work.compute_bytes < fp32 else 0)
    needed = {
        "parameters": on_device,
        "gradients": on_device,
        "optimizer state": 2 * on_device,
        "checkpoint copy": 3 * on_device if work.checkpoint_copy else 0,
        # Also in a group of one, where gathering is a copy.
        "gathered parameters": gathered * work.compute_bytes,
        "gradients before reduction": 2 * unit * fp32,
        # Under sequence parallelism the input of the running layer exists whole for a moment.
        "activations": kept + inside_block + (hidden_state if split_tokens else 0),
        # Logits, their log-softmax and their gradient, in fp32; in chunks they turn into their gradient in place.
        "logits and loss": logit_tokens * -(-shape.vocabulary // tp) * (of_logit if work.loss_chunk else 3 * fp32),
    }
    if work.unused_heap:
        needed["free blocks of the heap"] = int(work.unused_heap * sum(needed.values()))
    return {**needed, "process": BASE_HOST_BYTES}


# The folder, the name of its line in /proc/self/cgroup, and its files: version 2 and version 1.
_GROUPS = (
    ("sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def control_group(root: Path = Path("/"), controller: str = "") -> PurePosixPath:
    """This process's control group below ``root``: of version 2, or of a controller of version 1."""
    top = PurePosixPath("sys/fs/cgroup") / controller
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = top / path.lstrip("/")
            if controller in controllers.split(",") and (root / own).is_dir():
                return own
    return top  # a container sees its own there


def memory_limit(root: Path = Path("/")) -> tuple[int, int] | None:
    """Bytes that this process's control group may use and bytes that are left, where one limits it.

    Of it and those above it, the one with the least left. File contents that nobody has read lately do not count as
    used: the kernel drops them first.
    """
    found = []
    for top, controller, limit, used, cached in _GROUPS:
        own = control_group(root, controller)
        for group in (own, *own.parents):
            if not group.is_relative_to(top):
                break
            with contextlib.suppress(OSError, ValueError):  # no limit is the word `max`
                most, taken = int((root / group / limit).read_text()), 0
                with contextlib.suppress(OSError):
                    taken = int((root / group / used).read_text())
                    lines = (line.split() for line in (root / group / "memory.stat").read_text().splitlines())
                    taken -= sum(int(size) for name, size in lines if name == cached)
                found.append((most, max(0, most - max(0, taken))))
    return min(found, key=lambda each: each[1], default=None)


def _host_free() -> int | None:
    """Bytes the host has left; all of its memory where the system does not say, as on macOS."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass  # not Linux
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    return total if total > 0 else None


def available_memory(device: torch.device, local_world_size: int) -> int:
    """Bytes that one process may use: its GPU's free memory, or its share of what the host has left.

    Where no limit can be read, the largest number.
    """
    if device.type == "cuda":
        # The least of the host's GPUs, so that all its ranks come to the same answer.
        return min(torch.cuda.mem_get_info(index)[0] for index in range(local_world_size))
    group = memory_limit()
    limits = [_host_free(), None if group is None else group[1]]
    share = min((limit for limit in limits if limit is not None), default=sys.maxsize) // local_world_size
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return share if soft == resource.RLIM_INFINITY else min(share, soft)


def check_fits(needed: dict[str, int], available: int, *, model: str, processes: int, advice: str) -> None:
    """Refuse a job whose predicted peak is more than there is.

    Raises:
        UserError: saying what each process needs, what there is, and what would help.
    """
    total = sum(needed.values())
    if total > available:
        raise UserError(
            f"{model} on {processes} process(es) needs about {total / GIB:.1f} GiB in each process and there are "
            f"{available / GIB:.1f} GiB for each: {advice}"
        )


def processes_that_fit(shape: ModelShape, work: Workload, available: int, *, tp: int = 1) -> int | None:
    """The fewest fully sharded processes, ``tp`` times a power of two, whose predicted peak fits in ``available``."""
    for exponent in range(15):
        mesh = lay_out(1, 2**exponent, tp)
        if sum(estimate_memory(shape, mesh, work).values()) <= available:
            return mesh.world_size
    return None


def memory_table(needed: dict[str, int], available: int | None) -> str:
    """The estimate as text, one category a line."""
    lines = [f"{name:>28} {size / GIB:10.3f} GiB" for name, size in needed.items()]
    lines.append(f"{'sum':>28} {sum(needed.values()) / GIB:10.3f} GiB")
    if available is not None:
        lines.append(f"{'available here':>28} {available / GIB:10.3f} GiB")
    return "\n".join(lines)
