"""fp8 by ``torch._scaled_mm`` alone: is it worth building on this GPU? Products of a block of Llama 3 8B, and a block.

Recipes are torchao's: one scale a tensor, one a row, and one a row with the weight's gradient in bf16. Casts are
compiled, scales are found anew at each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.cases import Case
from benchmarks.gpu.timed import Bench, Found
from smp.models.model_config import resolve_model
from smp.models.registry import build_model
from smp.train.arguments import parse_args

ROWS = {"tensorwise": False, "rowwise": True, "rowwise_with_gw_hp": True}
LARGEST = torch.finfo(torch.float8_e4m3fn).max
GOAL = 1.25  # times bf16's speed


def cast(tensor: Tensor, rows: bool) -> tuple[Tensor, Tensor]:
    """Return a matrix in fp8, contiguous, and the factors of its rows, or of all of it, that give it back."""
    largest = tensor.abs().amax(1, keepdim=True) if rows else tensor.abs().amax()
    back = largest.float().clamp(min=1e-12) / LARGEST
    return (tensor.float() / back).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).contiguous(), back


def multiply(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Return ``one @ other.T`` in bf16, of two matrices that were cast."""
    factors = other[1].t() if other[1].ndim else other[1]
    return torch._scaled_mm(one[0], other[0].t(), one[1], factors, out_dtype=torch.bfloat16, use_fast_accum=True)


class Fp8Linear(torch.autograd.Function):
    """Args of ``apply``: input ``(tokens, inputs)``, weight ``(outputs, inputs)``, a name of :data:`ROWS`, ``cast``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str, cast: Callable[..., Any]) -> Tensor:  # type: ignore[override]
        ctx.recipe, ctx.cast = recipe, cast
        ctx.save_for_backward(x, weight)
        return multiply(cast(x.detach(), ROWS[recipe]), cast(weight.detach(), ROWS[recipe]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows, cast = ROWS[ctx.recipe], ctx.cast
        into_input = multiply(cast(gradient, rows), cast(weight.t(), rows))
        if ctx.recipe == "rowwise_with_gw_hp":
            return into_input, gradient.t() @ x, None, None
        return into_input, multiply(cast(gradient.t(), rows), cast(x.t(), rows)), None, None


def _product(bench: Bench, outputs: int, inputs: int, tokens: int) -> dict[str, list[float]]:
    """Return of bf16 and each recipe: seconds of a product with both gradients, of it alone, and how far it is off."""
    make = functools.partial(torch.randn, device=bench.device, dtype=torch.bfloat16)
    x, weight, gradient = make(tokens, inputs), make(outputs, inputs) * inputs**-0.5, make(tokens, outputs)
    compiled, right = torch.compile(cast), x @ weight.t()
    plain: list[Callable[[], Tensor]] = [lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x]
    forward, *backward = map(bench.seconds, plain)
    found = {"bf16": [forward + sum(backward), forward, 0.0]}
    for recipe, rows in ROWS.items():
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()

        def both(recipe: str = recipe, leaves: tuple[Tensor, Tensor] = leaves) -> Tensor:
            y = Fp8Linear.apply(*leaves, recipe, compiled)
            torch.autograd.grad(y, leaves, gradient)
            return y.detach()

        ready = cast(x, rows), cast(weight, rows)
        alone = bench.seconds(functools.partial(multiply, *ready))
        found[recipe] = [bench.seconds(both), alone, float((both() - right).norm() / right.norm())]
    return found


def _products(bench: Bench, shapes: list[tuple[int, int]], tokens: int) -> Found:
    """Time the products of a block."""
    of_shape = {shape: _product(bench, *shape, tokens) for shape in dict.fromkeys(shapes)}
    seconds = {name: [sum(of_shape[s][name][i] for s in shapes) for i in range(2)] for name in ("bf16", *ROWS)}
    found = {"bf16": f"{seconds['bf16'][0] * 1e3:.2f} ms with both gradients, {seconds['bf16'][1] * 1e3:.2f} ms alone"}
    for name in ROWS:
        both, alone = seconds[name]
        off = max(each[name][2] for each in of_shape.values())
        found[name] = (
            f"{both * 1e3:.2f} ms with casts, {_times(seconds['bf16'][0], both)}; forward's alone, cast before,"
        )
        found[name] += f" {alone * 1e3:.2f} ms; off by {off:.1%} of the output's norm"
    return found


def _times(one: float, other: float) -> str:
    ratio = one / other
    return f"{ratio:.2f} times bf16: {'go' if ratio >= GOAL else 'no go'}"


def _block(bench: Bench, case: Case) -> Found:
    """Time a compiled block, forward and backward, nothing recomputed, in bf16 and in each recipe."""
    config = parse_args(case.words())
    resolved = resolve_model(config.model)
    length, width = resolved.sequence_length, resolved.hf_config.hidden_size
    with bench.device:
        model: Any = build_model(resolved.hf_config, attn_implementation="sdpa").to(torch.bfloat16)
    bench.fill(model)
    block = model.model.layers[0]
    hidden = torch.randn(1, length, width, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
    places = torch.arange(length, device=bench.device)[None]
    cosines = model.model.rotary_emb(hidden, places)

    def seconds() -> float:
        torch.compiler.reset()
        compiled = torch.compile(block, fullgraph=True)
        return bench.seconds(
            lambda: compiled(hidden, position_embeddings=cosines, position_ids=places).sum().backward()
        )

    plain = seconds()
    found = {"bf16": f"{plain * 1e3:.2f} ms forward and backward"}
    for recipe in ROWS:
        for layer in (each for each in block.modules() if isinstance(each, nn.Linear)):
            layer.forward = functools.partial(_forward, layer, recipe)  # type: ignore[method-assign]
        taken = seconds()
        found[recipe] = f"{taken * 1e3:.2f} ms, {_times(plain, taken)}"
    return found


def _forward(layer: nn.Linear, recipe: str, x: Tensor) -> Tensor:
    return Fp8Linear.apply(x.flatten(0, -2), layer.weight, recipe, cast).unflatten(0, x.shape[:-1])


def fp8(case: Case, bench: Bench) -> Found:
    """Time both; what one cannot do does not keep the other back."""
    hf_config = resolve_model(parse_args(case.words()).model).hf_config
    width, inner = hf_config.hidden_size, hf_config.intermediate_size
    keys = width // hf_config.num_attention_heads * hf_config.num_key_value_heads
    shapes = [(width, width)] * 2 + [(keys, width)] * 2 + [(inner, width)] * 2 + [(width, inner)]
    parts = {
        "products of a block": lambda: _products(bench, shapes, 64 if case.tiny else case.length),
        "a block": lambda: _block(bench, case),
    }
    torch._dynamo.config.recompile_limit = 64  # a cast of each shape
    found: Found = {}
    for name, part in parts.items():
        try:
            found |= {f"{name}, {key}": value for key, value in part().items()}
        except Exception as error:
            found[name] = f"failed: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
    return {"found": found}
