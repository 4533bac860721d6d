"""Initial values by the model's own rules: what its constructors and ``_init_weights`` do to parameters, recorded.

The model is built once more with parameters on the meta device, and the operations that write a parameter are
recorded. Replayed on any part of the parameter, they give its values there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from smp.errors import UserError

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_SAME_VALUES = {"clone", "_to_copy", "constant_pad_nd"}  # the last where it pads by nothing
# Of torch.nn.init; on the meta device they return at once, so that no operation shows them.
_SILENT = ("trunc_normal_", "orthogonal_", "dirac_", "sparse_")


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One operation on the elements ``[start, stop)`` of a parameter, in row-major order.

    Args:
        kind: ``draw`` and ``copy`` replace the values, ``change`` computes new ones from them.
        operation: of ``draw`` and ``change``: called with the values, and with a ``generator`` if it draws.
        values: of ``copy``: all of them, ``(stop - start,)``.
    """

    start: int
    stop: int
    kind: str
    operation: Callable[..., Any] | None = None
    values: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class InitRule:
    """How a parameter gets its initial values: the steps in order, or why they cannot be taken part by part.

    Attributes:
        rows_of: name of a matrix of the model, and the rows of it that the initial values are, in place of steps.
    """

    steps: tuple[Step, ...] = ()
    refusal: str = ""
    rows_of: tuple[str, tuple[int, ...]] | None = None

    def block(self, first: int, size: int, generator: torch.Generator) -> torch.Tensor:
        """Return the values of the elements from ``first``, fp32, ``(size,)``; random ones are drawn in full."""
        values = torch.zeros(size)
        for step in self.steps:
            low, high = max(step.start - first, 0), min(step.stop - first, size)
            if low >= high:
                continue
            part = values[low:high]
            if step.values is not None:
                part.copy_(step.values[first + low - step.start : first + high - step.start])
            elif step.kind == "draw":
                part.copy_(step.operation(torch.empty(size), generator=generator)[low:high])  # type: ignore[misc]
            else:
                step.operation(part)  # type: ignore[misc]
        return values


def drawn(draw: Callable[..., torch.Tensor]) -> InitRule:
    """Return the rule of values that ``draw(values, generator=...)`` fills in."""
    return InitRule((Step(0, sys.maxsize, "draw", draw),))


def _draw_normal(values: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator) -> Any:
    values.normal_(generator=generator).mul_(std)
    return values.add_(mean) if mean else values


# Elements of a tensor that is made on the CPU to be moved to the meta device: hosts refuse much more than they have.
_MOST_EMPTY = 2**28


class LargeOnMeta(TorchDispatchMode):
    """Makes large tensors without values on the meta device, where parameters go: a layer's experts can be 30 GB."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "empty" and math.prod(args[0]) > _MOST_EMPTY:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    """Records, by storage, what is written to tensors on the meta device, and which others hold no values yet."""

    def __init__(self) -> None:
        super().__init__()
        # A reason instead of steps: why the values cannot be computed.
        self._written: dict[StorageWeakRef, list[Step] | str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "device" in (kwargs or {}) and not any(isinstance(a, torch.Tensor) for a in args):
            kwargs = {**kwargs, "device": "cpu"}  # asked for by a parameter's device: values, of which some are made
        name = func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            target = (kwargs or {}).get("out", args[0] if args else None)
            if isinstance(target, torch.Tensor):
                self._write(func, name, target, args[1:], kwargs or {})
        elif isinstance(out, torch.Tensor) and (key := self._key(out)) not in self._written:
            if name in _EMPTY:
                self._written[key] = []
            elif out.is_meta:
                self._written[key] = self._derive(func, name, args, kwargs or {}, out)
        return out

    @staticmethod
    def _key(tensor: torch.Tensor) -> StorageWeakRef:
        return StorageWeakRef(tensor.untyped_storage())

    def _derive(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any, out: torch.Tensor) -> list[Step] | str:
        """Return the steps of a new tensor on the meta device, by the tensor that it is made of."""
        source, *rest = args or (None,)
        if not isinstance(source, torch.Tensor) or source.shape != out.shape:
            return f"aten.{name}"
        if name in _SAME_VALUES:
            return self._copy(source)
        steps = self._copy(source) if source.is_meta and torch.Tag.pointwise in func.tags else f"aten.{name}"
        if isinstance(steps, str) or any(isinstance(a, torch.Tensor) for a in rest):
            return f"aten.{name}"
        change = functools.partial(_bound, func, tuple(rest), kwargs)
        return [*steps, Step(0, out.numel(), "change", lambda values: values.copy_(change(values)))]

    def _copy(self, source: torch.Tensor) -> list[Step] | str:
        """Return the steps that give a new tensor the values of ``source``."""
        known = self._written.get(self._key(source))
        if source.is_meta:
            return list(known) if isinstance(known, list) and _is_full(source) else f"aten.copy_ ({known})"
        values = source.detach().float().reshape(-1)
        return [] if known is not None else [Step(0, source.numel(), "copy", values=values)]

    def _write(self, func: Any, name: str, target: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not target.is_meta:
            self._written.pop(self._key(target), None)  # it has values now
            return
        rest = tuple(a.item() if isinstance(a, torch.Tensor) and not (a.is_meta or a.ndim) else a for a in rest)
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        if name == "copy_" and isinstance(source := rest[0], torch.Tensor):
            steps = self._copy(source if source.is_meta else source.expand(target.shape))
            if isinstance(steps, str) or (source.is_meta and not (_is_full(target) and source.shape == target.shape)):
                self.refuse(target, steps if isinstance(steps, str) else "aten.copy_")
            elif source.is_meta:
                self._written[self._key(target)] = steps
            elif steps:
                self.note(target, "copy", values=steps[0].values)
        elif any(isinstance(a, torch.Tensor) for a in (*rest, *kwargs.values())) or "out" in kwargs:
            self.refuse(target, f"aten.{name}")
        elif name == "normal_":
            self.note(target, "draw", functools.partial(_bound, _draw_normal, rest, kwargs))
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self.note(target, "draw", functools.partial(_bound, func, rest, kwargs))
        elif name in ("fill_", "copy_", "zero_"):
            value = float(rest[0]) if rest else 0.0
            self.note(target, "fill", lambda values: values.fill_(value))
        elif torch.Tag.pointwise in func.tags:
            self.note(target, "change", functools.partial(_bound, func, rest, kwargs))
        elif torch.Tag.inplace_view not in func.tags:
            self.refuse(target, f"aten.{name}")

    def note(
        self,
        target: torch.Tensor,
        kind: str,
        operation: Callable[..., Any] | None = None,
        values: torch.Tensor | None = None,
    ) -> None:
        """Add a step on the elements that ``target`` views; one that replaces all values drops those before."""
        if not target.is_contiguous():
            self.refuse(target, "a write to a part that is not contiguous")
            return
        start = int(target.storage_offset())
        step, key = Step(start, start + target.numel(), kind, operation, values), self._key(target)
        before = self._written.get(key, "unknown")
        if kind != "change" and _is_full(target):
            self._written[key] = [step]
        elif isinstance(before, list):
            before.append(step)

    def refuse(self, target: torch.Tensor, reason: str) -> None:
        self._written[self._key(target)] = reason

    def rule(self, parameter: torch.Tensor) -> InitRule:
        steps = self._written.get(self._key(parameter), "it was not seen being made")
        if isinstance(steps, str):
            return InitRule(refusal=steps)
        covered = 0
        for step in sorted((step for step in steps if step.kind != "change"), key=lambda step: step.start):
            covered = max(covered, step.stop) if step.start <= covered else covered
        return InitRule(tuple(steps)) if covered >= parameter.numel() else InitRule(refusal="nothing sets them")


def _is_full(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor views all of its storage, in order."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _bound(
    operation: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], values: torch.Tensor, **generator: Any
) -> Any:
    return operation(values, *rest, **kwargs, **generator)


@contextlib.contextmanager
def _silent_noted(recorder: _Recorder) -> Iterator[None]:
    """Note the calls of torch.nn.init's functions that do nothing on the meta device."""
    from transformers import initialization

    own, originals = initialization.TORCH_INIT_FUNCTIONS, {name: getattr(nn.init, name) for name in _SILENT}

    def noting(name: str) -> Callable[..., torch.Tensor]:
        original = originals[name]

        @functools.wraps(original)
        def call(tensor: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> torch.Tensor:
            if not tensor.is_meta:
                return original(tensor, *args, generator=generator, **kwargs)
            if name == "trunc_normal_":
                recorder.note(tensor, "draw", functools.partial(_bound, original, args, kwargs))
            else:
                recorder.refuse(tensor, f"torch.nn.init.{name}")
            return tensor

        return call

    try:
        for name in _SILENT:
            own[name] = noting(name)
            setattr(nn.init, name, own[name])
        yield
    finally:
        for name, original in originals.items():
            own[name] = original
            setattr(nn.init, name, original)


class Recorded(NamedTuple):
    """A model with parameters on the meta device, and the rules of their initial values by qualified name.

    Attributes:
        seed: of what was drawn outside of parameters; None: nothing was.
    """

    model: nn.Module
    rules: Mapping[str, InitRule]
    seed: int | None

    def rule(self, name: str) -> InitRule:
        """Return the rule of a parameter; raises UserError for one that has none."""
        rule = self.rules.get(name, InitRule(refusal="the model of transformers has no such parameter"))
        if rule.refusal:
            raise UserError(
                f"the initial values of parameter {name} cannot be drawn in shards ({rule.refusal}): start from "
                f"pretrained weights"
            )
        return rule


def record_rules(build: Callable[[], nn.Module], *, seed: int) -> Recorded:
    """Build a model with parameters on the meta device, and record how each is initialised.

    Args:
        seed: of what the model's code draws outside of parameters. Such values are kept as they are.
    """
    from accelerate import init_empty_weights

    recorder = _Recorder()
    with torch.random.fork_rng(devices=[]), _silent_noted(recorder):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with init_empty_weights(include_buffers=False), LargeOnMeta(), recorder:
            model = build()
        draws = not torch.equal(before, torch.get_rng_state())
    rules = {name: recorder.rule(p) for name, p in model.named_parameters(remove_duplicate=False)}
    return Recorded(model, rules, seed if draws else None)
