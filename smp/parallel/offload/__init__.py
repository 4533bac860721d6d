"""Activation offloading: saved tensors leave the device in forward and return before backward uses them."""

from smp.parallel.offload.offload import apply_activation_offload
from smp.parallel.offload.stores import DiskStore, HostStore, Store, build_store, require_directory
from smp.parallel.offload.technique import Config, apply, cost, problems

__all__ = [
    "Config",
    "DiskStore",
    "HostStore",
    "Store",
    "apply",
    "apply_activation_offload",
    "build_store",
    "cost",
    "problems",
    "require_directory",
]
