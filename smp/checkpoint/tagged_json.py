"""Python values as JSON and back, unchanged: what JSON has no word for is written as an object with a tag.

The ``state_dict()`` of a scheduler has integer keys (``MultiStepLR``), infinities (``ReduceLROnPlateau``) and counters.
"""

from __future__ import annotations

import collections
import math
from typing import Any

_TAG = "__smp__"
_DICTS: dict[type, str] = {
    dict: "dict", collections.OrderedDict: "dict", collections.defaultdict: "dict", collections.Counter: "Counter",
}  # fmt: skip


def encode(value: Any, where: str = "value") -> Any:
    """Make a value of what JSON has.

    Args:
        value: None, bools, ints, floats, texts, and lists, tuples, dicts and counters of them.
        where: its name, for messages.

    Raises:
        ValueError: something else is in it; the text says where.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "text": repr(value)}
    if type(value) is list:
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, dict):
        kind = _DICTS.get(type(value))
        if kind is not None:
            if kind == "dict" and _TAG not in value and all(type(key) is str for key in value):
                return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
            items = [[encode(k, f"a key of {where}"), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
            return {_TAG: kind, "items": items}
    raise ValueError(f"{where} is a {type(value).__name__}")


def decode(value: Any) -> Any:
    """The inverse of :func:`encode`.

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
        case "dict":
            return {decode(key): decode(item) for key, item in value["items"]}
        case "Counter":
            return collections.Counter({decode(key): decode(item) for key, item in value["items"]})
        case other:
            raise ValueError(f"unknown tag {other!r}")
