"""What else could be set so that a rank needs less memory: for the search of layouts, a refusal, and out of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from smp.axes import AXES
from smp.config import ActivationConfig, LossConfig, flag_text
from smp.memory.estimate import peak_bytes
from smp.memory.shape import RECOMPUTATION, ModelShape, Workload
from smp.mesh import Mesh
from smp.optim.config import OptimConfig
from smp.units import MIB

OFFLOADING: dict[str, Any] = {"offload_activations": True}
# What a search does not vary.
_OTHERS: tuple[dict[str, Any], ...] = (
    {"loss_chunk_tokens": 1024},
    {**OFFLOADING, "activation_loading_horizon": 1},
    {"optimizer_state_dtype": "bf16"},  # of other numbers, so that it is never chosen
    {"cpu_offload": True},
)


class Change(NamedTuple):
    """Flags to set, and the bytes of each rank's predicted peak that they save."""

    flags: str
    saving: int


def changes_that_help(
    shape: ModelShape,
    mesh: Mesh,
    work: Workload,
    *,
    accumulation: int | None = 1,
    legal: Callable[[Mesh], bool] = lambda mesh: True,
    most: int = 3,
) -> list[Change]:
    """Return the ``most`` changes with the largest predicted saving of a rank, largest first.

    Args:
        shape, mesh, work: of the job, as for :func:`smp.memory.estimate.estimate_memory`.
        accumulation: micro-batches of a step; None: they follow from ``--global_batch_size``.
        legal: tells whether the model can be laid out over a mesh.
    """
    now = peak_bytes(shape, mesh, work)
    found = [
        Change(flags, now - peak_bytes(shape, other, changed))
        for flags, other, changed in _alternatives(mesh, work, accumulation)
        if other == mesh or legal(other)
    ]
    # Less than a hundredth is not worth a restart.
    found = [change for change in found if change.saving > now / 100]
    return sorted(found, key=lambda change: -change.saving)[:most]


def advice_text(changes: list[Change]) -> str:
    """Format the changes, one a line."""
    if not changes:
        return "No single flag would save much: use a smaller model, or more processes on more hosts."
    lines = ["What would help most, and the predicted saving of each process:"]
    return "\n".join([*lines, *(f"{change.saving / MIB:12.1f} MiB  {change.flags}" for change in changes)])


def _alternatives(mesh: Mesh, work: Workload, accumulation: int | None) -> Iterator[tuple[str, Mesh, Workload]]:
    """Yield flags, and the layout and workload that they make."""
    on_cpu = work.device_type == "cpu"
    optim = work.settings[OptimConfig]
    now = vars(work.settings[ActivationConfig]) | vars(work.settings[LossConfig])
    now["optimizer_state_dtype"] = optim.moments
    may_narrow = OptimConfig in map(type, work.settings.sections) and optim.optimizer == "adamw"
    may_narrow &= optim.beta2 <= 1 - 1 / 256  # as OptimConfig asks
    for settings in (*RECOMPUTATION, *_OTHERS):
        flags = {name: value for name, value in settings.items() if now[name] != value}
        if "optimizer_state_dtype" in flags and not may_narrow:
            continue
        if on_cpu and "cpu_offload" in flags:
            continue
        note = " --offload_dir DIRECTORY_ON_FAST_DISK" if on_cpu and "offload_activations" in flags else ""
        text = " ".join(f"--{name} {flag_text(value)}" for name, value in flags.items())
        yield text + note, mesh, work.changed(**flags)
    size, length = work.micro_batch_size, work.sequence_length
    if size > 1:
        half = -(-size // 2)
        steps = f" --gradient_accumulation_steps {accumulation * -(-size // half)}" if accumulation else ""
        yield f"--train_batch_size {half}{steps}", mesh, dataclasses.replace(work, micro_batch_size=half)
    if mesh.replicas.size > 1 or not mesh.reshard_after_forward:
        yield "--sharding_strategy full_shard --hybrid_shard_degree 0", mesh.fully_sharded(), work
    for axis in reversed(AXES):
        if split := mesh.with_degree(axis.name, twice := 2 * mesh.degree(axis.name)):
            yield f"--{axis.flag} {twice}", split, work
    if not on_cpu:  # processes of one host share its memory
        twice_as_many = mesh.fully_sharded(data=2 * mesh.data.size)
        yield "twice as many processes and --sharding_strategy full_shard", twice_as_many, work
    shorter = dataclasses.replace(work, sequence_length=length // 2)
    yield f"--max_context_width {length // 2} (trains on shorter sequences)", mesh, shorter
