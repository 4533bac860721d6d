"""The ``smddp`` backend of torch.distributed; importing this registers it."""

from torch.distributed import Backend

from smp.comm.fsdp import use_shared_buffers
from smp.comm.group import create
from smp.comm.report import last_operations, nccl_operations, report, reset_report

__all__ = ["last_operations", "nccl_operations", "report", "reset_report", "use_shared_buffers"]

if "SMDDP" not in Backend._plugins:
    Backend.register_backend("smddp", create, extended_api=True, devices=["cpu", "cuda"])
