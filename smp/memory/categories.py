"""Categories of memory, and the rules by which a storage is of one: allocation site, shape, address."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp.comm.modes import is_shown

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
GATHERED, UNREDUCED = "gathered parameters", "gradients before reduction"
COMMUNICATION, ACTIVATIONS, LOGITS, OTHER = "communication buffers", "activations", "logits and loss", "other"
CATEGORIES = (
    PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, UNREDUCED, COMMUNICATION, ACTIVATIONS, LOGITS, OTHER
)  # fmt: skip

# Allocation sites: a module, and the function ("": any other of the module).
_FSDP = "torch.distributed.fsdp._fully_shard."
_SITES: dict[str, dict[str, str]] = {
    _FSDP + "_fsdp_collectives": {"": COMMUNICATION},
    _FSDP + "_fsdp_param": {
        "": GATHERED,
        "FSDPParam.all_gather_inputs": COMMUNICATION,
        "FSDPParam.to_accumulated_grad_if_needed": UNREDUCED,
        "FSDPParam.accumulate_unsharded_grad_if_needed": UNREDUCED,
        "FSDPParam.unsharded_zero_grad_data": UNREDUCED,  # not of torch 2.11
    },
    _FSDP + "_fsdp_param_group": {"FSDPParamGroup.post_backward": COMMUNICATION},
    "smp.comm.fsdp": {"": COMMUNICATION},
    "smp.comm.gloo": {"": COMMUNICATION},
    "smp.comm.cuda": {"": COMMUNICATION},
    "smp.comm.symmetric": {"": COMMUNICATION},
    "smp.optim.muon": {"": COMMUNICATION},  # full matrices
    "smp.parallel.grad_norm": {"": GRADIENTS},
    "smp.parallel.gradient_sum": {"": GRADIENTS},
    "smp.parallel.one_rank": {"_set_gradient": GRADIENTS},
    "smp.loss": {"": LOGITS},
    "smp.parallel.linear_loss": {"": LOGITS},
    "torch.optim.optimizer": {"": OPTIMIZER, "Optimizer.zero_grad": GRADIENTS},  # around every step, too
}  # fmt: skip


def asked_by() -> str | None:
    """Return the category of the innermost known function on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if functions := _SITES.get(frame.f_globals.get("__name__", "")):
            category = functions.get(frame.f_code.co_qualname) or functions.get("")
            if category:
                return category
        frame = frame.f_back  # type: ignore[assignment]
    return None


def shared_mappings() -> list[range]:
    """Return the address ranges of memory shared with other processes; empty without /proc."""
    try:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return []
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines if line[1].endswith("s")]


def lies_in(tensor: torch.Tensor, mappings: list[range]) -> bool:
    """Return whether a tensor is in memory that a host's ranks share, other than torch's (a data loader's batches)."""
    if not mappings or tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_shared():
        return False
    address = tensor.untyped_storage().data_ptr()
    return any(address in mapping for mapping in mappings)


def copied_inside(operation: Any, args: tuple[Any, ...], *, backend: str | None = None) -> int:
    """Return bytes that an operation allocates internally and frees before it ends.

    gloo's ReduceScatter copies its full input, and its AllGather its full output.

    Args:
        backend: of the groups; None asks the group.
    """
    if is_shown():
        return 0
    name = operation._schema.name
    if name == "smp::reduce_tokens":
        tensor, group, ranks = args
        used = backend or dist.get_backend(dist.distributed_c10d._resolve_process_group(group))
        gloo = ranks > 1 and used == "gloo"
    elif name in ("c10d::_reduce_scatter_base_", "c10d::_allgather_base_"):
        output, tensor, *_ = args
        # NCCL's are on GPUs.
        tensor, gloo = max(output, tensor, key=torch.Tensor.numel), backend in (None, "gloo")
    else:
        return 0
    return tensor.numel() * tensor.element_size() if gloo and tensor.device.type == "cpu" else 0


def head_rows(model: nn.Module) -> set[int]:
    """Return the sizes of the vocabulary: of the model, and of this rank."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    if weight is None:
        return set()
    rows = {weight.shape[0]}
    if isinstance(weight, DTensor):
        rows |= {-(-weight.shape[0] // size) for size in weight.device_mesh.shape}
    return rows
