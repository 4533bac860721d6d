"""Memory that sharding takes: states, gathered units, and the gradients that are being reduced."""

from __future__ import annotations

from smp.comm.arena import Layout
from smp.comm.settings import read_settings
from smp.config import ActivationConfig, CommConfig, ParallelConfig
from smp.memory.shape import ModelShape, Moment, Trained, Workload
from smp.mesh import Mesh
from smp.optim.config import OptimConfig
from smp.optim.optimizers import state_bytes, working_bytes

Config = ParallelConfig


def cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Count the sharded states, the gathered units, and the gradients that are being reduced.

    Trained parameters and their gradients are of ``--param_dtype``, gradients that accumulate fp32, frozen parameters
    of the computation's dtype; all, and the optimizer's state, are sharded over sharding and tensor-parallel ranks, and
    in a group of one gathering is a cast of what does not have the dtype of the computation.
    Backward gathers a block while the one above it is computed, and reduces each unit from a copy of its gradients,
    which lives until the next unit's are reduced.
    """
    fp32, moment = 4, work.moment
    degrees = mesh.tp.size, mesh.degree("ep")
    units, (trained, table, last, block) = shape.unit_sizes(*degrees), shape.trained(*degrees)
    total = units.parameters
    offloads = work.settings[ActivationConfig].cpu_offload
    in_host_memory = offloads and work.device_type != "cpu"
    optim = work.settings[OptimConfig]
    shards = 0 if in_host_memory else optim.parameter_bytes
    state = 0.0 if in_host_memory else state_bytes(shape.specs, optim)
    frozen = -(-(total - trained) // mesh.shard.size) * (min(fp32, work.compute_bytes) if shards else 0)
    reduced = _reduced(shape, moment, last=last, block=block, total=trained)
    accumulated = work.accumulation > 1
    deferred = accumulated and work.settings[Config].defer_gradient_sync
    gradients = trained if accumulated and not deferred else reduced
    sums = 0
    if accumulated and not deferred and optim.parameter_bytes < fp32 and moment is not Moment.UPDATE:
        # In fp32, on the device, beside what the reductions leave; on a rank alone in place of the gradient.
        gradients, sums = 0 if mesh.loss.size == 1 else reduced, trained
    if shape.frozen_but is None:  # else experts are frozen, too, but for factors, which are few
        block = shape.gathered(units, mesh).block
    unreduced = _unreduced(shape, mesh, moment, table=table, last=last, block=block)
    copied = {
        Moment.LOSS: 0, Moment.LAST_BLOCK: 0 if shape.tied else last, Moment.FIRST_BLOCK: block, Moment.UPDATE: 0,
    }.get(moment, unreduced)  # fmt: skip
    copies = _copies(mesh, work, receives=copied == unreduced)
    updates = moment is Moment.UPDATE
    gathered = shape.gathered(units, mesh)
    if computes_with_shards(shape, mesh, work):
        of_other_dtype = optim.parameter_bytes != work.compute_bytes
        gathered = shape.trained(*degrees) if of_other_dtype else Trained(0, 0, 0, 0)
    gathered_by_update = working_bytes(shape.specs, mesh, work.settings[OptimConfig]) if updates else 0
    before = work.compute_bytes if mesh.loss.size == 1 else fp32  # of each parameter, as backward makes it
    if deferred:
        unreduced, before = max(unreduced, trained - reduced), fp32
    return {
        "parameters": -(-trained // mesh.shard.size) * shards + frozen,
        "gradients": -(-gradients // mesh.shard.size) * shards + -(-sums // mesh.shard.size) * fp32,
        "optimizer state": int(-(-trained // mesh.shard.size) * state),
        "gathered parameters": _gathered(gathered, shape, mesh, work) * work.compute_bytes,
        "gradients before reduction": unreduced * before,
        "communication buffers": copies * copied * fp32 + _buffer_bytes(shape, mesh, work) + gathered_by_update,
    }


def computes_with_shards(shape: ModelShape, mesh: Mesh, work: Workload) -> bool:
    """Return whether the weights of blocks are used as they are: of the computation's dtype, where one rank has them.

    Those of adapters' base are.
    """
    if mesh.shard.size > 1 or work.settings[ActivationConfig].cpu_offload:
        return False
    return shape.frozen_but is not None or work.settings[OptimConfig].parameter_bytes == work.compute_bytes


def _unreduced(shape: ModelShape, mesh: Mesh, moment: Moment, *, table: int, last: int, block: int) -> int:
    """Count the parameters whose gradients exist unsharded, before they are reduced."""
    # Activations are most when the first gradient of the block, of its last product, is made.
    of_product = min(block, shape.hidden * shape.intermediate // mesh.tp.size)
    if mesh.loss.size == 1:  # each is that of its shard as soon as it is made
        block = of_product
    return {
        Moment.LOSS: 0,  # the head's gradient is in what the loss counts
        Moment.HEAD: last, Moment.LAST_BLOCK: of_product, Moment.FIRST_BLOCK: of_product,
        Moment.LAST_REDUCTION: block, Moment.FIRST_REDUCTION: block,
        Moment.EMBEDDING: last if shape.tied else table, Moment.UPDATE: 0,
    }[moment]  # fmt: skip


def _copies(mesh: Mesh, work: Workload, *, receives: bool) -> int:
    """Count the copies of a unit's gradients that its reduction takes: torch's, and those of the backend."""
    copies = int(mesh.loss.size > 1)  # a rank alone makes none
    if work.device_type != "cpu" or not copies:
        return copies
    if work.settings[CommConfig].distributed_backend == "smddp":
        return max(copies, mesh.shard.size)  # in memory that all ranks of the host share
    return copies + (receives and mesh.loss.size > 1)  # gloo's receive buffers


def _reduced(shape: ModelShape, moment: Moment, *, last: int, block: int, total: int) -> int:
    """Count the parameters whose gradients are reduced, or being reduced, in one backward."""
    above = 0 if shape.tied else last
    return {
        Moment.LOSS: 0, Moment.HEAD: above, Moment.LAST_BLOCK: above, Moment.LAST_REDUCTION: above + block,
        Moment.FIRST_BLOCK: above + (shape.layers - 1) * block, Moment.FIRST_REDUCTION: above + shape.layers * block,
    }.get(moment, total)  # fmt: skip


def gathered_blocks(shape: ModelShape, mesh: Mesh, work: Workload) -> int:
    """Count the blocks whose parameters are gathered."""
    return _gathered(Trained(shape.layers, 0, 0, 1), shape, mesh, work)


def _gathered(sizes: Trained, shape: ModelShape, mesh: Mesh, work: Workload) -> int:
    """Count what is gathered of units of these sizes; the embedding's, unless tied, are freed after its forward."""
    moment, (total, _, last, block) = work.moment, sizes
    keeps = not (mesh.reshard_after_forward and work.settings[Config].reshard_between_microbatches)
    if not work.settings[Config].reshard_between_microbatches and (work.accumulation > 1 or moment is Moment.LOSS):
        return 0 if moment is Moment.UPDATE else total
    below = last if shape.tied else 0  # a tied unit is gathered until backward ends
    if moment in (Moment.LOSS, Moment.HEAD):
        return last + block * (shape.layers if keeps else int(moment is Moment.HEAD))
    if moment in (Moment.LAST_BLOCK, Moment.LAST_REDUCTION):
        return below + block * (shape.layers if keeps else min(2, shape.layers))
    if moment in (Moment.FIRST_BLOCK, Moment.FIRST_REDUCTION):
        return below + block
    return below if moment is Moment.EMBEDDING else 0


def _buffer_bytes(shape: ModelShape, mesh: Mesh, work: Workload) -> int:
    """Count the buffers that units are gathered in: in forward, ``fully_shard`` keeps the last one.

    Backend smddp keeps on a GPU its workspace, and two buffers of each kind of unit; on a CPU, the memory that a host's
    ranks share: an arena for each group, taking all ranks to be on one host, and a gathered unit.
    """
    backend, parallel = work.settings[CommConfig].distributed_backend, work.settings[Config]
    gathered = shape.unit_sizes(mesh.tp.size).last * work.compute_bytes if mesh.shard.size > 1 else 0
    if backend == "smddp" and work.device_type == "cpu":
        # Measured: under tensor parallelism two groups of its ranks have one.
        gathers = parallel.cp_comm_type == "all_gather"  # gloo does the others
        roles = (mesh.shard, mesh.replicas, mesh.tp, mesh.tp, *([mesh.cp] if gathers else []), mesh.loss)
        sizes = [size for size in (*(role.size for role in roles), mesh.world_size) if size > 1]
        arenas = sum(Layout.with_scratch(read_settings().scratch, size).total for size in sizes)
        return arenas + (0 if work.moment is Moment.UPDATE else gathered)
    last = gathered if work.moment is Moment.LOSS else 0
    if backend != "smddp" or work.device_type != "cuda" or not parallel.shared_buffers or mesh.shard.size == 1:
        return last
    settings = read_settings()
    kinds = shape.of_rank(shape.parameters - (shape.layers - 1) * shape.block, 1, mesh.tp.size)
    return settings.workspace + min(2 * kinds * work.compute_bytes, settings.gpu_shared)
