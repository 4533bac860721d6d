"""Old names of :mod:`smp.memory`."""

from typing import Any

from smp.memory import shape
from smp.memory.limits import available_memory, control_group, memory_limit
from smp.memory.plan import GIB, check_fits, estimate_memory, processes_that_fit
from smp.memory.shape import ModelShape

# Made of other arguments than they were.
Workload: Any = shape.Workload
model_shape: Any = shape.model_shape

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
