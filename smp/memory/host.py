"""Host memory of a rank whose tensors are on a GPU; :mod:`smp.memory.estimate` predicts the GPU's own."""

from __future__ import annotations

from smp.config import ActivationConfig
from smp.errors import UserError
from smp.memory.estimate import BASE_HOST_BYTES
from smp.memory.shape import ModelShape, Workload
from smp.mesh import Mesh
from smp.optim.config import OptimConfig
from smp.optim.optimizers import state_bytes
from smp.parallel.activation_checkpoint import waiting_bytes
from smp.units import GIB

_WAYS_OUT = {
    "checkpoint copy": "--checkpoint_type sharded, which saves without a copy",
    "offloaded activations": "--offload_dir, a directory on a fast local disk",
    "parameters": "--cpu_offload 0",
}


def estimate_host_memory(
    shape: ModelShape, mesh: Mesh, work: Workload, *, is_async: bool, is_local: bool
) -> dict[str, int]:
    """Predict the host memory of one rank on a GPU, by category.

    Args:
        is_async: whether checkpoints are written in the background, from a copy.
        is_local: whether each rank writes all of its shards, and not its share of what is replicated.
    """
    config, optim = work.settings[ActivationConfig], work.settings[OptimConfig]
    needed: dict[str, int] = {}
    degrees = mesh.tp.size, mesh.degree("ep")
    sizes = shape.unit_sizes(*degrees), shape.trained(*degrees)
    total, trained = (-(-size.parameters // mesh.shard.size) for size in sizes)
    state = int(trained * state_bytes(shape.specs, optim))
    if config.cpu_offload:
        # torch's allocator of pinned memory rounds each tensor up to a power of two; optimizer state is not pinned.
        split = (-(-spec.size // mesh.tp.size) for spec in shape.specs)
        pinned = sum(1 << (-(-size // mesh.shard.size) * optim.parameter_bytes - 1).bit_length() for size in split)
        needed["parameters"] = pinned
        needed |= {} if work.forward_only else {"gradients": pinned * trained // total, "optimizer state": state}
    if is_async and not work.forward_only:
        writers = 1 if is_local else mesh.replicas.size
        needed["checkpoint copy"] = (optim.parameter_bytes * trained + state) // writers
    blocks = shape.layers - config.activation_loading_horizon
    if config.offload_activations and config.offload_dir is None and blocks > 0 and not work.forward_only:
        needed["offloaded activations"] = waiting_bytes(shape, mesh, work, blocks=blocks)
    return {**needed, "process": BASE_HOST_BYTES}


def check_host_memory(needed: dict[str, int], available: int) -> None:
    """Refuse a job on GPUs that needs more of the host's memory than there is.

    Raises:
        UserError: with what each process needs and has, and what needs less.
    """
    total = sum(needed.values())
    ways = [way for name, way in _WAYS_OUT.items() if name in needed]
    if ways and total > available:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in needed.items())
        raise UserError(
            f"each process needs about {total / GIB:.1f} GiB of host memory ({parts}) and there are "
            f"{available / GIB:.1f} GiB for each: use {', or '.join(ways)}"
        )
