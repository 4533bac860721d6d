"""Make a script that was written for SMP v2 run unchanged: ``import smp.sagemaker`` before its own imports.

It makes ``import torch.sagemaker as tsm``, the modules below it, and
``import smdistributed.dataparallel.torch.torch_smddp`` work, by the table of :mod:`smp.compat.names`. A name that
nothing here can stand in for says what to use instead when it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch

from smp.compat.names import NAMES, Name
from smp.errors import UserError

ROOTS = ("torch.sagemaker", "smdistributed")


def _ours(dotted: str) -> Any:
    """Return the object of a dotted name."""
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(_ours(module), name)


class _Module(types.ModuleType):
    """A module of the originals: has the names that work as they are, and refuses the others with their replacement."""

    def __init__(self, name: str):
        super().__init__(name, "Stands in for SMP v2's module of this name; see smp.sagemaker.")
        self.__path__: list[str] = []  # a package, so that modules below it can be imported
        # Others ask whether there is a module of this name (importlib.util.find_spec), which fails without one.
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self._missing: dict[str, Name] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (entry := self._missing.get(name)) is not None:
            raise UserError(f"{entry.original} is not here: {entry.note}")
        raise AttributeError(f"{self.__name__} has no {name} here: docs/smp_v2_names.md lists what takes its place")


def install() -> None:
    """Put the modules into ``sys.modules``, once.

    Raises:
        UserError: the original is installed.
    """
    if isinstance(sys.modules.get("torch.sagemaker"), _Module):
        return
    for root in ROOTS:
        if root in sys.modules or importlib.util.find_spec(root) is not None:
            raise UserError(f"{root} itself is installed here: use it, or leave it out of the environment")
    for entry in NAMES:
        if entry.original.startswith(ROOTS):
            module, _, name = entry.original.rpartition(".")
            if entry.same:
                setattr(_module(module), name, _ours(entry.ours))
            elif entry.original.startswith("smdistributed"):
                _module(entry.original)  # importing it is all there is to do
            else:
                _module(module)._missing[name] = entry


def _module(name: str) -> _Module:
    """Return a module of the originals, made with those above it."""
    found = sys.modules.get(name)
    if isinstance(found, _Module):
        return found
    made = sys.modules[name] = _Module(name)
    parent, _, last = name.rpartition(".")
    if parent == "torch":
        torch.sagemaker = made  # type: ignore[attr-defined]
    elif parent:
        setattr(_module(parent), last, made)
    return made


install()
