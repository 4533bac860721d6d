"""What a model makes of its head's outputs, found by giving its own forward outputs that are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from smp.errors import UserError
from smp.models.family import LogitTransform


class _Answers(tuple):
    """Output of a base model: hidden states by index or name, and nothing else."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


class _StandIn:
    """A module, or one inside it, that gives an answer when it is called; its attributes are the module's."""

    def __init__(self, module: nn.Module, answer: Any):
        self.module, self.answer, self.calls = module, answer, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.answer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        return _StandIn(found, self.answer) if isinstance(found, nn.Module) else found


@contextmanager
def _replaced(model: nn.Module, stand_ins: dict[nn.Module, _StandIn]) -> Iterator[None]:
    """Put stand-ins in place of modules of ``model``."""
    modules = [module for module in model.modules() if module not in stand_ins]
    slots = [(m._modules, name, child) for m in modules for name, child in m._modules.items() if child in stand_ins]
    try:
        for children, name, child in slots:
            children[name] = stand_ins[child]  # type: ignore[index,assignment]
        yield
    finally:
        for children, name, child in slots:
            children[name] = child


def _outputs(tokens: int, vocabulary: int, device: torch.device | str) -> torch.Tensor:
    """Return ``(1, tokens or more, vocabulary)``: of both signs, four numbers of each power of two, exact in bf16."""
    sizes = [mantissa * 2.0**power for power in range(-40, 40) for mantissa in (1, 1.25, 1.5, 1.75)]
    values = [0.0, *sizes, *(-size for size in sizes)]
    tokens = max(tokens, -(-len(values) // vocabulary))
    endless = itertools.islice(itertools.cycle(values), tokens * vocabulary)
    return torch.tensor(list(endless), dtype=torch.float64, device=device).view(1, tokens, vocabulary)


def _plain(value: float, rounding: float) -> float:
    """Round to six digits, or to the inverse of such a number, if within ``rounding``, a relative error."""
    guesses = float(f"{value:.6g}"), 1 / float(f"{1 / value:.6g}")
    return next((guess for guess in guesses if abs(guess - value) <= rounding * abs(value)), value)


def _fit(outputs: torch.Tensor, logits: torch.Tensor) -> LogitTransform | None:
    """Return the transform that makes ``logits`` of ``outputs`` but for rounding, if there is one."""
    rounding = 8 * torch.finfo(logits.dtype).eps
    x, y = outputs.double().flatten(), logits.double().flatten()
    sizes = x.abs()
    least, most = sizes.where(sizes > 0, torch.inf).argmin(), sizes.argmax()
    scale, limit = float(y[least] / x[least]), float(y[most].abs())
    if not scale or not limit or not y.isfinite().all():
        return None
    capped = limit < (1 - 2 * rounding) * abs(scale) * float(sizes[most])
    found = LogitTransform(_plain(scale, rounding), _plain(limit, rounding) if capped else None)
    expected = x * found.scale
    if found.cap is not None:
        expected = found.cap * torch.tanh(expected / found.cap)
    return found if ((y - expected).abs() <= rounding * expected.abs()).all() else None


def _run(model: Any, head: Any) -> tuple[torch.Tensor, Any]:
    """Return outputs of the head and the logits that the forward of the model's class makes of them.

    Raises:
        Exception: of any type, of the model's code; RuntimeError: the head is not called once.
    """
    head, embedding = model.get_output_embeddings() if head is None else head, model.get_input_embeddings()
    weight = head.weight
    outputs = _outputs(2, weight.shape[0], "cpu" if weight.is_meta else weight.device)
    hidden = torch.zeros(1, outputs.shape[1], weight.shape[1], dtype=weight.dtype, device=weight.device)
    bases = [child for child in model.children() if any(module is embedding for module in child.modules())]
    in_heads_place = _StandIn(head, outputs.clone())  # which the model may change
    stand_ins = {base: _StandIn(base, _Answers([hidden])) for base in bases} | {head: in_heads_place}
    with torch.no_grad(), _replaced(model, stand_ins):
        found = type(model).forward(model, torch.zeros_like(hidden[..., 0], dtype=torch.int64))
    if in_heads_place.calls != 1:
        raise RuntimeError(f"its head is called {in_heads_place.calls} times")
    return outputs, found[0] if isinstance(found, tuple) else found.logits


def find_logits(model: nn.Module, head: nn.Module | None = None) -> LogitTransform:
    """Find what a causal language model makes of its head's outputs, by its class's forward.

    Its base model and its head are not called, and no parameter is read: the model may be on the meta device, sharded
    or split.

    Args:
        model: of Hugging Face; its forward calls the base model, then the head once.
        head: the output projection; None: ``model.get_output_embeddings()``.

    Raises:
        UserError: neither a scale nor a cap, or a forward that cannot be run so.
    """
    reason, cause = "neither a scale nor a cap by tanh", None
    try:
        outputs, logits = _run(model, head)
        if logits.shape != outputs.shape:
            reason = f"of its head's outputs {tuple(outputs.shape)} it makes {tuple(logits.shape)}"
        elif (transform := _fit(outputs, logits)) is not None:
            return transform
    except Exception as error:  # of the model's code
        reason, cause = " ".join(f"its forward fails without its base model: {error!r}".split())[:200], error
    raise UserError(
        f"the loss in chunks does not know what {type(model).__name__} does with its logits ({reason}): use "
        f"--loss_chunk_tokens 0"
    ) from cause
