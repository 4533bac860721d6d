"""The closed form of a layout: bytes and seconds at once, without a trace."""

from __future__ import annotations

from typing import cast

from smp.config import ActivationConfig, ParallelConfig
from smp.memory.plan import peak_bytes
from smp.memory.shape import ModelShape, Workload
from smp.mesh import Mesh
from smp.parallel.activation_checkpoint import waiting_bytes
from smp.parallel.lora import Config as LoraConfig
from smp.parallel.nf4 import BYTES
from smp.plan.closed_time import FULL, NONE, SELECTIVE, ClosedLayout, closed_step
from smp.plan.devices import DeviceRow
from smp.plan.layouts import Layout
from smp.plan.records import StepTime
from smp.plan.search import Estimate
from smp.train.preference import Config as PreferenceConfig


def estimate(shape: ModelShape, layout: Layout, row: DeviceRow, *, local: int) -> Estimate:
    """Return the bytes that a rank needs and the seconds of a step, roughly.

    Args:
        local: ranks of a host.
    """
    needed = peak_bytes(shape, layout.mesh, layout.work)
    return Estimate(layout, needed, step_time(shape, layout.mesh, layout.work, row, local=local).seconds)


def step_time(shape: ModelShape, mesh: Mesh, work: Workload, row: DeviceRow, *, local: int) -> StepTime:
    """Return the seconds of a step, their range and parts, and the bytes that a rank sends.

    Args:
        local: ranks of a host.
    """
    activation, parallel = work.settings[ActivationConfig], work.settings[ParallelConfig]
    adapters, preference = work.settings[LoraConfig], work.settings[PreferenceConfig]
    mode = SELECTIVE if activation.activation_checkpointing_mode == "selective" else FULL
    blocks = max(0, shape.layers - activation.activation_loading_horizon) if activation.offload_activations else 0
    closed = ClosedLayout(
        sequence=work.sequence_length,
        batch=work.micro_batch_size,
        accumulation=work.accumulation,
        shard=mesh.shard.size,
        replicas=mesh.replicas.size,
        tp=mesh.tp.size,
        local=local,
        recompute=mode if activation.activation_checkpointing else NONE,
        fused=activation.compile is True,
        keep_gathered=not mesh.reshard_after_forward or not parallel.reshard_between_microbatches,
        cp=mesh.cp.size,
        exchange=cast(str, parallel.cp_comm_type),
        value_bytes=work.compute_bytes,
        weight_bytes=BYTES if adapters.qlora else None,
        pairs=preference.dpo,
        reference=preference.dpo and not preference.keeps_reference(adapters),
        offloaded=waiting_bytes(shape, mesh, work, blocks=blocks) * work.accumulation if blocks else 0,
    )
    seconds, parts, inside, between = closed_step(shape, closed, row)
    low, high = row.range
    shown = {name: value for name, value in parts.items() if value}
    return StepTime(seconds, low * seconds, high * seconds, shown, inside, between, row.described)
