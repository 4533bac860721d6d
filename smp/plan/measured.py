"""Seconds of operations and exchanges by interpolation in what `smp plan --calibrate` has measured."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence

from smp.plan.devices import DeviceRow, Tables
from smp.plan.kernels import SLOWER, Product, attention, bytes_of, moved_bytes, product, short_name
from smp.plan.records import Exchange, Operation

OF_ACTIVATIONS = " of activations"  # ends a measured exchange's kind
NEAREST = 4  # measured products that one is interpolated from


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return a value between measured ones: linear in logarithms; beyond the ends in proportion to ``at``.

    Args:
        points: (size, seconds), ascending, above 0.
        at: the size asked for.
    """
    if at <= 0 or not points:
        return 0.0
    index = bisect.bisect([size for size, _ in points], at)
    if index == 0:
        return points[0][1] * min(1.0, at / points[0][0])
    if index == len(points):
        return points[-1][1] * at / points[-1][0]
    (low, first), (high, second) = points[index - 1], points[index]
    weight = math.log(at / low) / math.log(high / low)
    return math.exp(math.log(first) + weight * (math.log(second) - math.log(first)))


def _slower(dtype: str, known: str) -> float:
    """Return the share of a measured dtype's speed that one has which was not measured."""
    return min(1.0, SLOWER.get(dtype, 1.0) / SLOWER.get(known, 1.0))


class Measured:
    """A device's tables for one number of processes.

    Args:
        tables: what was measured.
        backend: of the exchanges.
        on_gpu: the device is a GPU.
    """

    def __init__(self, tables: Tables, backend: str, *, on_gpu: bool = False):
        self._on_gpu = on_gpu
        self._rates: dict[tuple[str, str], list[tuple[tuple[float, float, float], float]]] = defaultdict(list)
        for dtype, layout, rows, inner, columns, seconds in tables.products:
            rate = 2 * rows * inner * columns / seconds
            self._rates[dtype, layout].append(((math.log(rows), math.log(inner), math.log(columns)), rate))
        elementwise = defaultdict(list)
        for name, nbytes, seconds in tables.elementwise:
            elementwise[name].append((float(nbytes), seconds))
        self._elementwise = {name: sorted(points) for name, points in elementwise.items()}
        self._attention = tables.attention
        self._adamw = sorted((float(count), seconds) for count, seconds in tables.adamw)
        exchanges = defaultdict(list)
        for own, kind, nbytes, seconds in tables.exchanges:
            if own == backend:
                exchanges[kind].append((float(nbytes), seconds))
        self._exchanges = {kind: sorted(points) for kind, points in exchanges.items()}

    def seconds(self, operation: Operation, layout: str) -> float:
        """Return an operation's seconds.

        Args:
            operation: what ran.
            layout: of a product's operands: ``nt``, ``nn`` or ``tn``.
        """
        if found := product(operation):
            seconds = self._product(found, layout)
            if short_name(operation) in ("addmm", "baddbmm") and not self._on_gpu:
                # What it is added to is copied to the result first; a GPU adds it as it writes the result.
                seconds += interpolated(self._elementwise.get("copy_", ()), 2 * bytes_of(operation.outputs))
            return seconds
        if fused := attention(operation):
            return self._fused(fused.scores, fused.width, fused.dtype, backward=fused.backward)
        if "fused_adam" in operation.name:
            return interpolated(self._adamw, moved_bytes(operation) / 28)  # seven passes over fp32
        name = short_name(operation)
        shapes = {tensor.shape for tensor in operation.inputs if tensor.shape}
        if len(shapes) > 1 and f"{name} broadcast" in self._elementwise:
            name = f"{name} broadcast"  # a scale of rows, a weight of columns: twice as slow by the byte
        like = "copy_" if "copy" in name or "cat" in name else "add"
        known = next((each for each in (name, name.rstrip("_"), like) if each in self._elementwise), None)
        points = self._elementwise[known] if known else []
        return interpolated(points, float(moved_bytes(operation)))

    def _product(self, found: Product, layout: str) -> float:
        """Interpolate the rate of the nearest shapes, each by the inverse of its distance in logarithms, squared."""
        known = [dtype for dtype in (found.dtype, "float32", "bfloat16") if (dtype, layout) in self._rates]
        if not known:
            return 0.0
        own, slower = self._rates[known[0], layout], _slower(found.dtype, known[0])
        at = tuple(math.log(max(1, size)) for size in found[:3])
        near = sorted((math.dist(at, shape), rate) for shape, rate in own)[:NEAREST]
        weights = [1 / (1e-9 + distance) ** 2 for distance, _ in near]
        rate = sum(w * r for w, (_, r) in zip(weights, near, strict=True)) / sum(weights)
        return found.flops / (rate * slower)

    def _fused(self, scores: float, width: int, dtype: str, *, backward: bool) -> float:
        """Interpolate by the work, scores x width, among heads of the nearest width."""
        own = [line for line in self._attention if line[0] == dtype] or self._attention
        nearest = min((line[2] for line in own), key=lambda size: abs(size - width), default=0)
        own = [line for line in own if line[2] == nearest]
        points = sorted((2.0 * scored * size, (forward, back)[backward]) for _, scored, size, forward, back in own)
        return interpolated(points, 2.0 * scores * width) / (_slower(dtype, own[0][0]) if own else 1.0)

    def exchange(self, exchange: Exchange) -> float:
        """Return an exchange's seconds; one of a kind that was not measured by an all-gather's."""
        kinds = [exchange.kind, "all_gather"]
        if exchange.axis in ("tp", "cp"):
            kinds.insert(0, f"{exchange.kind}{OF_ACTIVATIONS}")
        points: Sequence[tuple[float, float]] = next(filter(None, map(self._exchanges.get, kinds)), [])
        # The smallest one is all latency: a smaller one takes as long.
        return interpolated(points, max(float(exchange.nbytes), points[0][0] if points else 0.0))


def measured(row: DeviceRow, processes: int, backend: str) -> tuple[Measured, Tables] | None:
    """Return a row's tables for the nearest number of processes that was measured, or None where there are none."""
    if not row.tables:
        return None
    count = min(row.tables, key=lambda n: (abs(n - processes), n))
    return Measured(row.tables[count], backend, on_gpu=row.is_gpu), row.tables[count]
