"""Old name of :mod:`smp.memory.plan`."""

from smp.memory.plan import (
    GIB,
    ModelShape,
    Workload,
    available_memory,
    check_fits,
    control_group,
    estimate_memory,
    memory_limit,
    model_shape,
    processes_that_fit,
)

__all__ = [
    "GIB",
    "ModelShape",
    "Workload",
    "available_memory",
    "check_fits",
    "control_group",
    "estimate_memory",
    "memory_limit",
    "model_shape",
    "processes_that_fit",
]
