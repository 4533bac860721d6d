"""What to change when memory runs out: the flags that would save most, by prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from smp.memory.plan import ModelShape, Workload, estimate_memory
from smp.mesh import Mesh

_MIB = 1024**2


class Change(NamedTuple):
    """Flags to set, and the bytes of each rank's predicted peak that they save."""

    flags: str
    saving: int


def changes_that_help(
    shape: ModelShape,
    mesh: Mesh,
    work: Workload,
    *,
    device_type: str,
    accumulation: int | None = 1,
    legal: Callable[[Mesh], bool] = lambda mesh: True,
    most: int = 3,
) -> list[Change]:
    """The ``most`` changes with the largest predicted saving of a rank, largest first.

    Args:
        shape, mesh, work: of the job, as for :func:`smp.memory.plan.estimate_memory`.
        device_type: "cpu" or "cuda"; offloading to host memory helps the latter alone.
        accumulation: micro-batches of a step; None: they follow from ``--global_batch_size``.
        legal: whether the model can be split so.
    """
    now = sum(estimate_memory(shape, mesh, work).values())
    found = []
    for flags, other, change in _candidates(mesh, work, device_type=device_type, accumulation=accumulation):
        if other == mesh or legal(other):
            saving = now - sum(estimate_memory(shape, other, dataclasses.replace(work, **change)).values())
            found.append(Change(flags, saving))
    # A hundredth of the whole is nothing to restart a job for.
    found = [change for change in found if change.saving > now / 100]
    return sorted(found, key=lambda change: -change.saving)[:most]


def advice_text(changes: list[Change]) -> str:
    """The changes, one a line; empty where nothing helps."""
    if not changes:
        return "No single flag would save much: use a smaller model, or more processes on more hosts."
    lines = ["What would help most, and the predicted saving of each process:"]
    return "\n".join([*lines, *(f"{change.saving / _MIB:12.1f} MiB  {change.flags}" for change in changes)])


def _candidates(
    mesh: Mesh, work: Workload, *, device_type: str, accumulation: int | None
) -> Iterator[tuple[str, Mesh, dict[str, Any]]]:
    """Flags, the layout they make, and what they change of the workload."""
    size, length = work.micro_batch_size, work.sequence_length
    if not work.activation_checkpointing:
        yield "--activation_checkpointing 1", mesh, {"activation_checkpointing": True}
    elif work.selective:
        yield "--activation_checkpointing_mode full", mesh, {"selective": False}
    if work.activation_checkpointing and work.recomputed_every > 1:
        yield "--activation_checkpointing_every 1", mesh, {"recomputed_every": 1}
    if size > 1:
        half = -(-size // 2)
        flags = f" --gradient_accumulation_steps {accumulation * -(-size // half)}" if accumulation else ""
        yield f"--train_batch_size {half}{flags}", mesh, {"micro_batch_size": half}
    if not work.loss_chunk:
        yield "--loss_chunk_tokens 1024", mesh, {"loss_chunk": 1024}
    if not work.offload_horizon:
        where = " --offload_dir DIRECTORY_ON_FAST_DISK" if device_type == "cpu" else ""
        flags = f"--offload_activations 1 --activation_loading_horizon 1{where}"
        yield flags, mesh, {"offload_horizon": 1}
    if device_type != "cpu" and not work.cpu_offload:
        yield "--cpu_offload 1", mesh, {"cpu_offload": True}
    if mesh.replicas.size > 1 or not mesh.reshard_after_forward:
        yield "--sharding_strategy full_shard --hybrid_shard_degree 0", mesh.fully_sharded(), {}
    if twice := mesh.with_tensor_parallelism(2 * mesh.tp.size):
        yield f"--tensor_parallel_degree {twice.tp.size}", twice, {}
    if device_type != "cpu":  # processes of one host share its memory
        yield "twice as many processes and --sharding_strategy full_shard", mesh.fully_sharded(times=2), {}
    shorter = {"sequence_length": length // 2}
    yield f"--max_context_width {length // 2} (trains on shorter sequences)", mesh, shorter
