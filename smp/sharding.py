"""Old name of :mod:`smp.parallel.sharding`."""

from smp.parallel.sharding import fsdp_modules, install_collectives, placement, reshard, set_gradient_sync

__all__ = ["fsdp_modules", "install_collectives", "placement", "reshard", "set_gradient_sync"]
