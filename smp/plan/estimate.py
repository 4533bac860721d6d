"""The closed form of a layout: bytes and seconds at once, without a trace."""

from __future__ import annotations

import dataclasses
from typing import cast

from smp.config import ActivationConfig, ParallelConfig
from smp.memory.plan import USABLE, peak_bytes
from smp.memory.shape import ModelShape
from smp.plan.closed_time import FULL, NONE, SELECTIVE, ClosedLayout, closed_step
from smp.plan.devices import DeviceRow
from smp.plan.kernels import SLOWER
from smp.plan.layouts import Layout
from smp.plan.search import Estimate

# Orders layouts on a CPU, of which no data sheet is known; its seconds are shown to nobody.
_ANY_CPU = DeviceRow("cpu", peak=0.1, bandwidth=0.02, links=4.0, network=1.0)


def estimate(shape: ModelShape, layout: Layout, row: DeviceRow, *, local: int) -> Estimate:
    """Return the bytes that a rank needs and the seconds of a step, roughly.

    Args:
        local: ranks of a host.
    """
    mesh, work = layout.mesh, layout.work
    activation, parallel = work.settings[ActivationConfig], work.settings[ParallelConfig]
    mode = SELECTIVE if activation.activation_checkpointing_mode == "selective" else FULL
    closed = ClosedLayout(
        sequence=work.sequence_length,
        batch=work.micro_batch_size,
        accumulation=layout.accumulation,
        shard=mesh.shard.size,
        replicas=mesh.replicas.size,
        tp=mesh.tp.size,
        local=local,
        recompute=mode if activation.activation_checkpointing else NONE,
        fused=work.settings[ActivationConfig].compile is True,
        keep_gathered=not mesh.reshard_after_forward or not parallel.reshard_between_microbatches,
        cp=mesh.cp.size,
        exchange=cast(str, parallel.cp_comm_type),
    )
    if row.is_gpu and work.compute_bytes == 4:
        row = dataclasses.replace(row, peak=row.peak * SLOWER["float32"])
    needed = peak_bytes(shape, mesh, work) / (USABLE if row.is_gpu else 1)
    return Estimate(layout, int(needed), closed_step(shape, closed, row if row.peak else _ANY_CPU).seconds)
