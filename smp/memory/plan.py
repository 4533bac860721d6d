"""Memory of each rank, predicted from shapes before anything is allocated.

A simple estimate: the sum of every technique's ``cost`` at each moment of a step, and of these the largest. The
largest terms (parameters, gradients, optimizer state, gathered units, logits) follow exactly from the shapes.
"""

from __future__ import annotations

import dataclasses

from smp.errors import UserError
from smp.memory.shape import ModelShape, Moment, Workload, block_bytes
from smp.mesh import Mesh
from smp.parallel import parallelize
from smp.parallel.technique import member

GIB = 1024**3

# The rest of a GPU is taken by CUDA, NCCL and fragmentation.
USABLE = 0.92

# A process on a GPU, without a model. Not measured with a GPU.
BASE_HOST_BYTES = int(0.45 * GIB)

# A process on CPUs, without a model: interpreter, torch and transformers after a step. Measured on Linux, CPU build,
# with malloc as the launcher sets it, 0.375 to 0.39 GiB by processor: 0.13 of it in the heap.
BASE_CPU_BYTES = int(0.39 * GIB)

# In the order of the table; other categories of techniques come after them.
CATEGORIES = (
    "parameters", "gradients", "optimizer state", "checkpoint copy", "gathered parameters",
    "gradients before reduction", "communication buffers", "activations", "logits and loss",
)  # fmt: skip


def estimate_memory(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Predict the bytes of one rank, by category, at the moment of a step at which they are most."""
    moments = (memory_at(shape, mesh, dataclasses.replace(work, moment=moment)) for moment in Moment)
    return max(moments, key=lambda needed: sum(needed.values()))


def memory_at(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Predict the bytes of one rank, by category, at the workload's moment: the sum of the techniques' costs."""
    needed = dict.fromkeys(CATEGORIES, 0)
    for technique in parallelize.TECHNIQUES:
        for category, size in member(technique, "cost")(shape, mesh, work).items():
            needed[category] = needed.get(category, 0) + size
    if work.forward_only:  # of activations, those of one block at a time
        needed |= dict.fromkeys(("gradients", "optimizer state", "gradients before reduction"), 0)
        needed["activations"] = min(needed["activations"], sum(block_bytes(shape, mesh, work)))
    if work.checkpoint_copy:
        needed["checkpoint copy"] = needed["optimizer state"] * 3 // 2  # with the trained parameters
    if work.unused_heap:
        needed["free blocks of the heap"] = int(work.unused_heap * sum(needed.values()))
    return {**needed, "process": BASE_CPU_BYTES if work.device_type == "cpu" else BASE_HOST_BYTES}


def peak_bytes(shape: ModelShape, mesh: Mesh, work: Workload) -> int:
    """Predict the peak bytes of one rank."""
    return sum(estimate_memory(shape, mesh, work).values())


def check_fits(needed: dict[str, int], available: int, *, model: str, processes: int, advice: str) -> None:
    """Refuse a job whose predicted peak is more than the available memory.

    Raises:
        UserError: with the memory that each process needs and has, and ``advice``.
    """
    total = sum(needed.values())
    if total > available:
        raise UserError(
            f"{model} on {processes} process(es) needs about {total / GIB:.1f} GiB in each process and there are "
            f"{available / GIB:.1f} GiB for each: {advice}"
        )


def processes_that_fit(shape: ModelShape, mesh: Mesh, work: Workload, available: int) -> int | None:
    """Return the fewest fully sharded processes whose peak fits in ``available``, or None.

    Their data ranks are a power of two; within a sample they share the work as those of ``mesh`` do.
    """
    meshes = (mesh.fully_sharded(data=2**exponent) for exponent in range(15))
    return next((each.world_size for each in meshes if peak_bytes(shape, each, work) <= available), None)


def memory_table(needed: dict[str, int], available: int | None) -> str:
    """Format the estimate, one category a line."""
    lines = [f"{name:>28} {size / GIB:10.3f} GiB" for name, size in needed.items()]
    lines.append(f"{'sum':>28} {sum(needed.values()) / GIB:10.3f} GiB")
    if available is not None:
        lines.append(f"{'available here':>28} {available / GIB:10.3f} GiB")
    return "\n".join(lines)
