"""Memory of each rank, predicted from shapes before anything is allocated.

A simple estimate: the sum of every technique's ``cost`` at each moment of a step, and of these the largest. The
largest terms (parameters, gradients, optimizer state, gathered units, logits) follow exactly from the shapes.
"""

from __future__ import annotations

import dataclasses

from smp.memory.categories import CATEGORIES
from smp.memory.limits import CONTEXT_BYTES
from smp.memory.shape import ModelShape, Moment, Workload, block_bytes
from smp.mesh import Mesh
from smp.optim.config import OptimConfig
from smp.parallel import parallelize
from smp.parallel.technique import member
from smp.units import GIB

# On a GPU, of what the caching allocator reserves for a step's tensors, the part that they fill.
_FILLED = 0.92
# Each communicator of NCCL, outside of the caching allocator. Not measured with a GPU.
_COMMUNICATOR_BYTES = int(0.3 * GIB)

# Host memory of a process on a GPU, without a model. Not measured with a GPU.
BASE_HOST_BYTES = int(0.45 * GIB)

# A process on CPUs, without a model: interpreter, torch and transformers after a step. Measured on Linux, CPU build,
# with malloc as the launcher sets it, 0.375 to 0.39 GiB by processor: 0.13 of it in the heap.
BASE_CPU_BYTES = int(0.39 * GIB)


def estimate_memory(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Predict the bytes of one rank, by category, at the moment of a step at which they are most."""
    moments = (memory_at(shape, mesh, dataclasses.replace(work, moment=moment)) for moment in Moment)
    return max(moments, key=lambda needed: sum(needed.values()))


def memory_at(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Predict the bytes of one rank, by category, at the workload's moment: the sum of the techniques' costs.

    Beside the tensors these are free blocks that the allocator keeps, and what the process takes without a model.
    """
    needed = dict.fromkeys(CATEGORIES[:-1], 0)  # of other tensors nothing is known
    for technique in parallelize.TECHNIQUES:
        for category, size in member(technique, "cost")(shape, mesh, work).items():
            needed[category] = needed.get(category, 0) + size
    if work.forward_only:  # of activations, those of one block at a time
        needed |= dict.fromkeys(("gradients", "optimizer state", "gradients before reduction"), 0)
        needed["activations"] = min(needed["activations"], sum(block_bytes(shape, mesh, work)))
    if work.checkpoint_copy:
        trained = shape.trained(mesh.tp.size, mesh.degree("ep")).parameters
        each = work.settings[OptimConfig].parameter_bytes
        needed["checkpoint copy"] = needed["optimizer state"] + each * -(-trained // mesh.shard.size)
    share = work.unused_heap if work.device_type == "cpu" else 1 / _FILLED - 1
    unused = {free_blocks(work): int(share * sum(needed.values()))} if share else {}
    return {**needed, **unused, "process": process_bytes(mesh, work.device_type)}


def free_blocks(work: Workload) -> str:
    """Name the category of the blocks that are free and still reserved."""
    return f"free blocks of the {'heap' if work.device_type == 'cpu' else 'allocator'}"


def process_bytes(mesh: Mesh, device_type: str) -> int:
    """Return the bytes of the device without a model: on a CPU the process, on a GPU context and communicators."""
    if device_type == "cpu":
        return BASE_CPU_BYTES
    axes = [mesh.loss, mesh.tp, mesh.replicas, mesh.shard, mesh.cp]
    communicators = sum(role.size > 1 for role in axes) + (mesh.loss.size < mesh.world_size)
    return CONTEXT_BYTES + _COMMUNICATOR_BYTES * communicators


def peak_bytes(shape: ModelShape, mesh: Mesh, work: Workload) -> int:
    """Predict the bytes of the device that one rank needs: a job fits where it has as many."""
    return sum(estimate_memory(shape, mesh, work).values())


def worst_case_bytes(shape: ModelShape, mesh: Mesh, work: Workload) -> int:
    """Predict the bytes that a rank needs beyond balanced tokens where all are sent to its experts."""
    worst = dataclasses.replace(work, imbalance=shape.most_imbalance(mesh.degree("ep")))
    return peak_bytes(shape, mesh, worst) - peak_bytes(shape, mesh, work)


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
        headroom = available - sum(needed.values())
        lines.append(f"{'headroom' if headroom >= 0 else 'missing':>28} {abs(headroom) / GIB:10.3f} GiB")
    return "\n".join(lines)
