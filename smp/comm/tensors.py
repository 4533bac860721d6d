"""From the tensors of a call to plain memory and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_PLAIN = (torch.Tensor, nn.Parameter)


def plain_cpu(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all are ordinary dense CPU tensors, whose memory can be read and written directly."""
    for t in tensors:  # a loop and early answers: this runs for every call
        if type(t) not in _PLAIN or not t.is_cpu or t.layout is not torch.strided or t.is_quantized:
            return False
    return True


def plain_gpu(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all are ordinary dense GPU tensors."""
    return all(type(t) in _PLAIN and t.is_cuda and t.layout is torch.strided and not t.is_quantized for t in tensors)


def _direct(tensor: torch.Tensor) -> bool:
    """Return whether the memory holds the elements in order and unchanged (no lazy conjugate or negative)."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its memory holds the elements in order, else a copy that does."""
    if _direct(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return :func:`dense` of a tensor, 1-D and outside autograd."""
    return dense(tensor.detach()).view(-1)


class Output:
    """Memory for results: the tensor's own, or, if it is not contiguous, a buffer copied to it in the end.

    Written through ``data``: for autograd a collective is no change of its tensors, with gloo and NCCL as here.

    Args:
        tensor: the call's output.
        keep: whether its elements are also read.
    """

    def __init__(self, tensor: torch.Tensor, *, keep: bool):
        self._tensor, self._direct = tensor, _direct(tensor)
        if self._direct:
            self.memory = tensor
        elif keep:
            self.memory = dense(tensor)
        else:
            self.memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    @property
    def flat(self) -> torch.Tensor:
        """The memory as a 1-D tensor, outside autograd."""
        return self.memory.data.view(-1)

    def finish(self) -> None:
        """Bring the results into the tensor."""
        if not self._direct:
            self._tensor.data.copy_(self.memory)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two dense tensors share memory."""
    start, other = a.data_ptr(), b.data_ptr()
    return start < other + nbytes(b) and other < start + nbytes(a)


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements."""
    return tensor.numel() * tensor.element_size()


def check_single(many: torch.Tensor, one: torch.Tensor, size: int, many_name: str, one_name: str) -> str | None:
    """Return the problem of a tensor for all ranks and this rank's tensor, or None."""
    if many.dtype != one.dtype:
        return f"{many_name} is {many.dtype}, {one_name} {one.dtype}: they must be the same"
    if many.numel() != one.numel() * size:
        return (
            f"{many_name} {tuple(many.shape)} has {many.numel()} elements, {one_name} {tuple(one.shape)} has "
            f"{one.numel()}: {many_name} must have {size} (ranks) times as many"
        )
    return None


def check_outputs(tensors: Sequence[torch.Tensor]) -> str | None:
    """Return the problem of output tensors, or None."""
    for tensor in tensors:
        strides = tensor.stride()
        expanded = 0 in strides and any(s == 0 and n > 1 for s, n in zip(strides, tensor.shape, strict=True))
        if expanded and tensor.numel():
            return f"the output {tuple(tensor.shape)} is expanded: several of its elements are one number in memory"
    return None


def check_list(many: Sequence[torch.Tensor], one: torch.Tensor, size: int, rank: int, what: str) -> str | None:
    """Return the problem of a list of one tensor per rank and this rank's tensor, or None."""
    if len(many) != size:
        return f"{what} has {len(many)} tensors: give one for each of the {size} ranks"
    if any(t.dtype != one.dtype for t in many):
        return f"{what} contains {sorted({str(t.dtype) for t in many})}, the other tensor is {one.dtype}"
    if many[rank].numel() != one.numel():
        return f"{what}[{rank}] has {many[rank].numel()} elements, the other tensor {one.numel()}"
    return None
