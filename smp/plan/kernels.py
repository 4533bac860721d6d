"""What an operation computes and moves, from its shapes, and its seconds on a device by its data sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from smp.plan.devices import DeviceRow
from smp.plan.records import Operation, TensorShape

# Operations that neither compute nor move anything on the device.
VIEWS = (
    "view", "t", "transpose", "slice", "expand", "unsqueeze", "squeeze", "detach", "as_strided", "alias", "split",
    "_unsafe_view", "split_with_sizes", "select", "permute", "unbind", "empty", "empty_like", "empty_strided",
    "new_empty", "new_empty_strided", "_reshape_alias", "lift_fresh", "resize_", "set_", "_local_scalar_dense",
    "record_stream", "is_pinned",
)  # fmt: skip
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_")
_LOOK_UPS = ("embedding", "gather", "index", "index_select", "nll_loss_forward")
_PLACED = ("scatter_",)  # writes a value to each index of what is larger
_FILLED = ("copy_", "_foreach_copy_", "chunk_cat")  # what they write is the first or the last of what they are given
# Of a card's bf16 peak, roughly (A100 19.5 of 312, H100 67 of 989): smp leaves TF32 off, as torch does.
SLOWER = {"float32": 1 / 16, "float64": 1 / 16}
# The end of the name of an operation that is attention of all queries to all keys.
UNMASKED = ".unmasked"
# Multiply-adds of a backward pass of attention for each of the forward pass: five products for two.
ATTENTION_BACKWARD = 2.5


class Product(NamedTuple):
    """``batch`` products of rows x inner and inner x columns."""

    rows: int
    inner: int
    columns: int
    batch: int
    dtype: str

    @property
    def flops(self) -> int:
        """Return a multiply and an add for each of the elements' terms."""
        return 2 * self.rows * self.inner * self.columns * self.batch


class Attention(NamedTuple):
    """``scores`` elements of all score matrices that are computed: a causal mask hides half of a square one."""

    scores: float
    width: int
    backward: bool
    dtype: str

    @property
    def flops(self) -> float:
        """Return those of two products forward, and of five backward."""
        return 4 * self.scores * self.width * (ATTENTION_BACKWARD if self.backward else 1)


def shape_of(tensor: torch.Tensor) -> TensorShape:
    """Return a tensor's shape and dtype."""
    return TensorShape(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def operation_of(name: str, arguments: Any, result: Any) -> Operation:
    """Return the operation of a call, by the tensors in its arguments and results."""
    inputs, outputs = (
        tuple(shape_of(each) for each in tree_leaves(tree) if isinstance(each, torch.Tensor))
        for tree in (arguments, result)
    )
    return Operation(name, inputs, outputs)


def short_name(operation: Operation) -> str:
    """Return the name without namespace and overload: ``mm`` of ``aten.mm.default``."""
    parts = operation.name.split(".")
    return parts[1] if len(parts) > 1 else operation.name


def product(operation: Operation) -> Product | None:
    """Return the product that an operation is, or None."""
    if short_name(operation) not in _PRODUCTS:
        return None
    # Before the matrices stands what they are added to, after them what the result is written to (mm.out).
    left, right = operation.inputs["add" in short_name(operation) :][:2]
    *batch, rows, inner = left.shape
    return Product(rows, inner, right.shape[-1], math.prod(batch), left.dtype)


def attention(operation: Operation) -> Attention | None:
    """Return the fused attention that an operation is, or None; of packed sequences as if all were as long."""
    name = short_name(operation)
    if "attention" not in name and "varlen_attn" not in name:
        return None
    backward, whole = "backward" in name, operation.name.endswith(UNMASKED)
    heads = [t for t in operation.inputs if len(t.shape) == 4][int(backward) :]  # after the gradient of the output
    if len(heads) >= 2:
        batch, count, length, width = heads[0].shape
        keys = heads[1].shape[2]
        hidden = 0.5 if length == keys and not whole else 1.0
        return Attention(batch * count * length * keys * hidden, width, backward, heads[0].dtype)
    heads = [t for t in operation.inputs if len(t.shape) == 3][int(backward) :]
    bounds = next((t.shape[0] for t in operation.inputs if len(t.shape) == 1), 0)
    if len(heads) < 2 or bounds < 2:
        return None
    tokens, count, width = heads[0].shape
    queries = tokens / (bounds - 1)  # of a sequence; the last query sees its last key
    scores = queries * heads[1].shape[0] - (0.0 if whole else tokens * queries / 2)
    return Attention(count * scores, width, backward, heads[0].dtype)


def masks_nothing(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is attention of all queries to all keys."""
    names = [argument.name for argument in operation._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    masks = (given.get(name) for name in ("attn_mask", "attn_bias", "window_size_left", "window_size_right"))
    return (
        "is_causal" in names
        and not given.get("is_causal")
        and all(mask is None or (isinstance(mask, int) and mask == -1) for mask in masks)
    )


def bytes_of(tensors: Iterable[TensorShape]) -> int:
    """Return the bytes of several tensors."""
    return sum(math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in tensors)


def moved_bytes(operation: Operation) -> int:
    """Return the bytes that an operation reads and writes.

    A look-up reads what it returns; a copy reads what it writes. One without outputs writes in place: all of its
    inputs, but AdamW's gradients.
    """
    name = short_name(operation)
    inputs, outputs = bytes_of(operation.inputs), bytes_of(operation.outputs)
    if name in _LOOK_UPS:
        return 2 * outputs
    if name in _PLACED:
        return 2 * bytes_of(operation.inputs[1:])
    if name == "all_gather_copy_in":
        return 2 * bytes_of(operation.outputs[:1])  # a rank's part; the others are the second output's
    if name in _FILLED or (name == "split_with_sizes_copy" and not operation.outputs):
        return inputs
    if operation.outputs:
        return inputs + outputs
    return inputs * 7 // 4 if "adam" in name else 2 * inputs


def sheet_seconds(operation: Operation, row: DeviceRow) -> float:
    """Return the seconds of an operation on a device that only its data sheet is known of: a roofline.

    Source: Williams et al., CACM 2009.
    """
    share, peak = row.efficiency, row.peak * 1e12
    moved = moved_bytes(operation) / (row.bandwidth * 1e12 * share.memory)
    if found := product(operation):
        return max(moved, found.flops / (peak * share.products * SLOWER.get(found.dtype, 1.0)))
    if fused := attention(operation):
        reached = share.attention_backward if fused.backward else share.attention_forward
        return max(moved, fused.flops / (peak * reached * SLOWER.get(fused.dtype, 1.0)))
    return moved
