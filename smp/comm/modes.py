"""Show torch's dispatch modes, such as ``CommDebugMode``, the op of each collective, as gloo would.

torch calls the methods of a group that is written in Python without dispatching anything. So while a mode is on, the
inner backend's op is dispatched, and at its end, below all modes, the collective of ours is run instead of gloo's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

active: Callable[[], int] = torch._C._len_torch_dispatch_stack  # how many modes are on in this thread


_showing = False


def is_shown() -> bool:
    """Return whether the op that a mode sees is shown in place of a collective of ours."""
    return _showing


class _Instead(TorchDispatchMode):
    """The lowest mode: runs something else instead of the op that comes through the others."""

    def __init__(self, run: Callable[[], Any]):
        super().__init__()
        self._run = run
        self.work: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":  # such as the empty tensor that a barrier makes
            return func(*args, **(kwargs or {}))
        self.work = self._run()  # kept: C++ alone does not keep a work's Python side alive
        work = self.work.boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)


def _take_all() -> list[TorchDispatchMode]:
    return [_pop_mode() for _ in range(active())]


def _put_back(modes: list[TorchDispatchMode]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)


def shown(call: Callable[[], Any], run: Callable[[], Any]) -> Any:
    """Run a collective in place of the op that ``call`` dispatches, and return its work."""
    global _showing
    modes, before = _take_all(), _showing
    instead = _Instead(run)
    _put_back([*modes, instead])
    _showing = True
    try:
        result = call()
        return result if instead.work is None else instead.work
    finally:
        _showing = before
        _take_all()
        _put_back(modes)


def hidden(run: Callable[[], Any]) -> Any:
    """Run something that no mode sees."""
    modes = _take_all()
    try:
        return run()
    finally:
        _put_back(modes)
