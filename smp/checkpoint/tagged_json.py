"""Python values as JSON and back, unchanged: what JSON has no word for is written as an object with a tag.

The ``state_dict()`` of a scheduler has integer keys (``MultiStepLR``), infinities (``ReduceLROnPlateau``), counters,
and tensors without axes where the learning rate is one: their numbers are Python numbers, too, and come back exactly.
"""

from __future__ import annotations

import collections
import functools
import math
from typing import Any

import torch

from smp.checkpoint.safetensors_io import DTYPE_NAMES, DTYPES
from smp.errors import a_type

# Python's reader takes JSON that is about 1000 deep, and a dict with other keys than texts takes four of them.
MAX_DEPTH = 100
_TAG = "__smp__"
_DICTS: dict[type, str] = {
    dict: "dict", collections.OrderedDict: "dict", collections.defaultdict: "dict", collections.Counter: "Counter",
}  # fmt: skip


def encode(value: Any, where: str = "value", *, depth: int = 0) -> Any:
    """Return a value in types that JSON has.

    Args:
        value: None, bools, ints, floats, texts, tensors without axes, and lists, tuples, dicts and counters of them.
        where: its name, for messages.
        depth: in how many others it lies.

    Raises:
        ValueError: something else is in it, or it is nested too deep; the text says where.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{where[:60]}... is nested more than {MAX_DEPTH} deep")
    inner = functools.partial(encode, depth=depth + 1)
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "text": repr(value)}
    if type(value) is list:
        return [inner(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [inner(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if type(value) is torch.Tensor and value.dim() == 0 and value.dtype in DTYPE_NAMES:
        return {_TAG: "tensor", "dtype": DTYPE_NAMES[value.dtype], "value": inner(value.item(), where)}
    if isinstance(value, dict):
        kind = _DICTS.get(type(value))
        if kind is not None:
            if kind == "dict" and _TAG not in value and all(type(key) is str for key in value):
                return {key: inner(item, f"{where}[{key!r}]") for key, item in value.items()}
            items = [[inner(k, f"a key of {where}"), inner(v, f"{where}[{k!r}]")] for k, v in value.items()]
            return {_TAG: kind, "items": items}
    raise ValueError(f"{where} is {a_type(value)}")


def decode(value: Any) -> Any:
    """Return the inverse of :func:`encode`.

    Raises:
        ValueError: a tag is none of its.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: decode(item) for key, item in value.items()}
        case "float":
            return float(value["text"])
        case "tuple":
            return tuple(decode(item) for item in value["items"])
        case "tensor":
            return torch.tensor(decode(value["value"]), dtype=DTYPES[value["dtype"]])
        case "dict":
            return {decode(key): decode(item) for key, item in value["items"]}
        case "Counter":
            return collections.Counter({decode(key): decode(item) for key, item in value["items"]})
        case other:
            raise ValueError(f"unknown tag {other!r}")
