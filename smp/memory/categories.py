"""The categories of memory, and how a storage is told to be of one: by who asks for it, by shape, by place."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
GATHERED, UNREDUCED = "gathered parameters", "gradients before reduction"
COMMUNICATION, ACTIVATIONS, LOGITS, OTHER = "communication buffers", "activations", "logits and loss", "other"
CATEGORIES = (
    PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, UNREDUCED, COMMUNICATION, ACTIVATIONS, LOGITS, OTHER
)  # fmt: skip

# Who asks for memory: the end of a file's path, and the function ("": any other of the file).
_FSDP, _HERE = "torch/distributed/fsdp/_fully_shard/", "smp/"
_PLACES: dict[str, dict[str, str]] = {
    _FSDP + "_fsdp_collectives.py": {"": COMMUNICATION},
    _FSDP + "_fsdp_param.py": {
        "": GATHERED,
        "FSDPParam.all_gather_inputs": COMMUNICATION,
        "FSDPParam.to_accumulated_grad_if_needed": UNREDUCED,
        "FSDPParam.accumulate_unsharded_grad_if_needed": UNREDUCED,
        "FSDPParam.unsharded_zero_grad_data": UNREDUCED,
    },
    _FSDP + "_fsdp_param_group.py": {"FSDPParamGroup.post_backward": COMMUNICATION},
    _HERE + "comm/fsdp.py": {"": COMMUNICATION},
    _HERE + "comm/gloo.py": {"": COMMUNICATION},
    _HERE + "comm/cuda.py": {"": COMMUNICATION},
    _HERE + "comm/symmetric.py": {"": COMMUNICATION},
    _HERE + "parallel/grad_norm.py": {"": GRADIENTS},
    _HERE + "loss.py": {"": LOGITS},
    # The model itself is called from this file, too.
    _HERE + "parallel/loss.py": {
        "_LinearLoss.forward": LOGITS, "_LinearLoss.backward": LOGITS, "_add_product": LOGITS,
    },
    "torch/optim/adamw.py": {"": OPTIMIZER},
    "torch/optim/adam.py": {"": OPTIMIZER},
    "torch/optim/optimizer.py": {"Optimizer.zero_grad": GRADIENTS},
}  # fmt: skip


@functools.cache
def _place(filename: str) -> dict[str, str] | None:
    path = filename.replace("\\", "/")
    return next((functions for end, functions in _PLACES.items() if path.endswith("/" + end)), None)


def asked_by() -> str | None:
    """The category of the innermost known function that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if functions := _place(code.co_filename):
            category = functions.get(code.co_qualname) or functions.get("")
            if category:
                return category
        frame = frame.f_back  # type: ignore[assignment]
    return None


def shared_mappings() -> list[range]:
    """Memory that this process shares with others; empty where the system does not say."""
    try:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return []
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines if line[1].endswith("s")]


def lies_in(tensor: torch.Tensor, mappings: list[range]) -> bool:
    """Whether a tensor is in memory of ours that a host's ranks share; a data loader's batches are torch's own."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_shared():
        return False
    address = tensor.untyped_storage().data_ptr()
    return any(address in mapping for mapping in mappings)


def copied_inside(operation: Any, args: tuple[Any, ...]) -> int:
    """Bytes that an operation takes while it runs, and that no other operation shows.

    gloo's ReduceScatter sums into a copy of its whole input, and its AllGather copies the output from another one.
    """
    name = operation._schema.name
    if name == "smp::reduce_tokens":
        tensor, group, ranks = args
        gloo = ranks > 1 and dist.get_backend(dist.distributed_c10d._resolve_process_group(group)) == "gloo"
    elif name in ("c10d::_reduce_scatter_base_", "c10d::_allgather_base_"):
        output, tensor, *_ = args
        tensor, gloo = max(output, tensor, key=torch.Tensor.numel), True  # smddp's do not come by, NCCL's are no CPU's
    else:
        return 0
    return tensor.numel() * tensor.element_size() if gloo and tensor.device.type == "cpu" else 0


def head_rows(model: nn.Module) -> set[int]:
    """Sizes of the vocabulary: whole, and this rank's part of it."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    if weight is None:
        return set()
    rows = {weight.shape[0]}
    if isinstance(weight, DTensor):
        rows |= {-(-weight.shape[0] // size) for size in weight.device_mesh.shape}
    return rows
