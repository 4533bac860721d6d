"""Which linear layers of a block's submodule make its output of its input, followed on the meta device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx.experimental import _config as fx

INPUT = ""  # the hidden states that a block gets, among the sources of a tensor


class Call(NamedTuple):
    """A call of a module in a forward pass."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    recorded: bool = True  # by autograd

    @property
    def input(self) -> Any:
        """The first argument, or the one that transformers' blocks call hidden_states."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    def with_input(self, hidden: torch.Tensor) -> Call:
        """Return the call with other hidden states."""
        if self.args:
            return self._replace(args=(hidden, *self.args[1:]))
        return self._replace(kwargs={**self.kwargs, "hidden_states": hidden})


@dataclasses.dataclass
class Flow:
    """A forward of a block.

    Attributes:
        calls: of each submodule, the last one, by path in the block.
        outputs: hidden states, of these.
        linears: paths of the linear layers among them.
        hidden: input of the block.
    """

    calls: dict[str, Call]
    outputs: dict[str, Any]
    linears: tuple[str, ...]
    hidden: torch.Tensor

    def __post_init__(self) -> None:
        self._nodes = {self.outputs[path].grad_fn: path for path in self.linears}
        self._nodes[self.hidden.grad_fn] = INPUT

    def sources(self, tensor: torch.Tensor) -> set[str]:
        """Return the linear layers that a tensor is computed from, with none between; ``INPUT``: or without any."""
        return {self._nodes[node] for node, _ in self._reached(tensor.grad_fn)}

    def is_sliced(self, path: str, reader: torch.Tensor) -> bool:
        """Return whether a linear layer's output is split, or sliced, along its features on the way to ``reader``."""
        found = [user for node, user in self._reached(reader.grad_fn) if self._nodes[node] == path]
        return bool(found) and all(user is not None and user.name().startswith(("Split", "Slice")) for user in found)

    def _reached(self, start: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the nodes of linear layers and of the input that a node depends on, and the node that reads each."""
        waiting, seen = [(start, None)], set()
        while waiting:
            node, user = waiting.pop()
            if node is None or (node, user) in seen:
                continue
            seen.add((node, user))
            if node in self._nodes:
                yield node, user
            else:
                waiting += [(before, node) for before, _ in node.next_functions]


def first(found: Any) -> Any:
    """Return the hidden states among what a module returns."""
    return found[0] if isinstance(found, (tuple, list)) else found


@contextlib.contextmanager
def no_reading() -> Iterator[None]:
    """Let torch read no values on the meta device: of distributions' parameters, and which elements are not zero."""
    of_all = torch.distributions.Distribution
    former = of_all._validate_args
    of_all.set_default_validate_args(False)
    try:
        with fx.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
            yield
    finally:
        of_all.set_default_validate_args(former)


def run(module: nn.Module, call: Call, *, grad: bool = False) -> torch.Tensor:
    """Run a module on the meta device with the arguments of a call; returns its hidden states."""
    with torch.enable_grad() if grad else torch.no_grad(), torch.device("meta"), no_reading():
        return first(module(*call.args, **call.kwargs))


def flow_of(block: nn.Module, call: Call) -> Flow:
    """Run a block on the meta device, and note what goes through its submodules."""
    calls: dict[str, Call] = {}
    outputs: dict[str, Any] = {}

    def note(path: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls[path], outputs[path] = Call(path, args, kwargs), first(output)

        return after

    hooks = [m.register_forward_hook(note(path), with_kwargs=True) for path, m in block.named_modules() if path]
    hidden = call.input.detach().requires_grad_() * 1
    try:
        run(block, call.with_input(hidden), grad=True)
    finally:
        for hook in hooks:
            hook.remove()
    linears = tuple(path for path in calls if isinstance(block.get_submodule(path), nn.Linear))
    return Flow(calls, outputs, linears, hidden)
