"""Seconds of a step from its trace: operations, exchanges and what hides them, and the host's own speed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from smp.plan.devices import DeviceRow
from smp.plan.exchange import exchange_seconds, sent_bytes
from smp.plan.kernels import attention, product, sheet_seconds
from smp.plan.measured import measured
from smp.plan.records import Exchange, Operation, Segment, StepTime

COMPUTE, GATHERS, TENSOR = "compute", "exposed gathers", "tensor-parallel exchanges"
CONTEXT = "context-parallel exchanges"
OTHER, OPTIMIZER, HOST, OFFLOADING = "other exchanges", "optimizer", "host", "offloading"
WAITING = "waiting for other ranks"
PARTS = (COMPUTE, WAITING, GATHERS, TENSOR, CONTEXT, OTHER, OPTIMIZER, HOST, OFFLOADING)


class _Cost(NamedTuple):
    """Seconds of one segment.

    Attributes:
        device: operations.
        exposed: exchanges that the computation waits for, by part.
        gathered: asynchronous ones that this segment's computation hides: parameters of the next block.
        reduced: asynchronous ones that start at its end, and that the next block's backward pass hides.
        host: what the host takes to issue its operations.
        inside, between: bytes sent.
    """

    device: float
    exposed: Mapping[str, float]
    gathered: float
    reduced: float
    host: float
    inside: int
    between: int


class _Model:
    """Seconds of operations and exchanges on one device.

    Args:
        row: of the device.
        local: devices of a host.
        groups: axis -> ranks of its group, and those of them on one host.
        backend: of the exchanges, for measured ones.
        recompute: ``none``, ``full`` or ``selective``.
        tokens: rows of the activations, which tell a weight's gradient from an input's.
    """

    def __init__(
        self,
        row: DeviceRow,
        local: int,
        groups: Mapping[str, tuple[int, int]],
        backend: str,
        recompute: str,
        tokens: int,
    ):
        self._row, self._local, self._groups, self._tokens = row, local, groups, tokens
        found = measured(row, local, backend)
        self._measured = found[0] if found else None
        self.waiting = found[1].waiting if found else 0.0
        self._host = (found[1].host if found else row.host_us)[recompute] * 1e-6

    def _operation(self, operation: Operation, phase: str) -> float:
        if self._measured is None:
            return sheet_seconds(operation, self._row)
        layout = "nt" if phase == "forward" else "nn"
        if (found := product(operation)) and found.inner == self._tokens != found.rows:
            layout = "tn"  # the sum over tokens is a weight's gradient
        return self._measured.seconds(operation, layout)

    def _exchange(self, exchange: Exchange) -> tuple[float, int, int]:
        on_host = min(exchange.ranks, self._groups.get(exchange.axis, (0, self._local))[1])
        seconds = (
            self._measured.exchange(exchange) if self._measured else exchange_seconds(exchange, on_host, self._row)
        )
        return seconds, *sent_bytes(exchange, on_host)

    def cost(self, segment: Segment) -> _Cost:
        """Return what a segment costs.

        What is sent to the next rank is on its way while what came before is attended to.
        """
        exposed: dict[str, float] = defaultdict(float)
        device = gathered = reduced = sending = 0.0
        inside = between = operations = 0
        for event in segment.events:
            if isinstance(event, Operation):
                device += (taken := self._operation(event, segment.phase))
                operations += 1
                if self._row.is_gpu and attention(event):
                    sending = max(0.0, sending - taken)
                continue
            seconds, *sent = self._exchange(event)
            inside, between = inside + sent[0], between + sent[1]
            if event.kind == "send":
                sending += seconds
            elif event.asynchronous and event.kind == "all_gather":
                gathered += seconds
            elif event.asynchronous:
                reduced += seconds
            else:
                exposed[_part(event, segment.phase)] += seconds
        exposed[CONTEXT] += sending
        return _Cost(device, exposed, gathered, reduced, operations * self._host, inside, between)


def _part(exchange: Exchange, phase: str) -> str:
    """Return what a synchronous exchange counts as."""
    if exchange.axis in ("tp", "cp"):
        return TENSOR if exchange.axis == "tp" else CONTEXT
    of_parameters = exchange.axis in ("shard", "replicas", "data") and phase in ("begin", "forward", "backward")
    return GATHERS if of_parameters else OTHER


def _activation_rows(segments: Sequence[tuple[Segment, int]]) -> int:
    """Return the rows that most products of the forward pass have: tokens of a micro-batch."""
    rows: Counter[int] = Counter()
    for segment, count in segments:
        if segment.phase == "forward":
            products = (product(event) for event in segment.events if isinstance(event, Operation))
            rows.update({found.rows: count for found in products if found})
    return rows.most_common(1)[0][0] if rows else 0


def _not_hidden(costs: Sequence[tuple[Segment, _Cost]]) -> float:
    """Return the seconds of asynchronous exchanges that no computation hides.

    As ``fully_shard`` overlaps them: a block's pass hides the gather of the next block, which is issued in it, and the
    reduction that the block before has issued at its end. The last reduction of a backward pass is waited for.
    """
    exposed = pending = 0.0
    for index, (segment, cost) in enumerate(costs):
        exposed += max(0.0, cost.gathered + pending - cost.device)
        following = costs[index + 1][0].phase if index + 1 < len(costs) else None
        pending = cost.reduced if following == segment.phase else 0.0
        exposed += cost.reduced - pending
    return exposed


def step_time(
    segments: Sequence[tuple[Segment, int]],
    row: DeviceRow,
    *,
    local: int,
    groups: Mapping[str, tuple[int, int]],
    backend: str = "smddp",
    recompute: str = "none",
    offloaded: int = 0,
) -> StepTime:
    """Return the seconds of a step of one rank, and where they go.

    On a GPU the host issues operations ahead and exchanges have streams of their own: a segment takes the longer of
    the host's and the device's time, and only what no computation hides of its asynchronous exchanges. On a CPU
    everything takes its turn on the same cores.

    Args:
        segments: in order, each with how often it is repeated one after the other.
        row: of the device.
        local: devices, or processes, of a host.
        groups: axis -> ranks of its group, and those of them on one host; other groups have all ranks of a host.
        backend: ``smddp`` or ``gloo``, for exchanges measured on a CPU.
        recompute: ``none``, ``full`` or ``selective``: what the host's microseconds for an operation hang on.
        offloaded: bytes of activations that go to the host's memory and come back.

    Returns:
        Seconds; parts whose sum they are; bytes that the rank sends.
    """
    model = _Model(row, local, groups, backend, recompute, _activation_rows(segments))
    costs = [pair for segment, count in segments for pair in [(segment, model.cost(segment))] * count]
    parts = dict.fromkeys(PARTS, 0.0)
    for segment, cost in costs:
        parts[OPTIMIZER if segment.phase == "update" else COMPUTE] += cost.device
        for name, seconds in cost.exposed.items():
            parts[name] += seconds
        waited = cost.device + sum(cost.exposed.values())
        parts[HOST] += max(0.0, cost.host - waited) if row.is_gpu else cost.host
    if row.is_gpu:
        parts[GATHERS] += _not_hidden(costs)
        if row.host_link:
            # Out and back, beside the computation on copy engines of their own.
            parts[OFFLOADING] = max(0.0, 2 * offloaded / (row.host_link * row.efficiency.links * 1e9) - parts[COMPUTE])
    else:
        parts[GATHERS] += sum(cost.gathered + cost.reduced for _, cost in costs)
        parts[WAITING] = model.waiting * parts[COMPUTE]
    # Of more processes than were measured each has a smaller share of the cores.
    crowd = max(1.0, local / max(row.tables)) if row.tables and not row.is_gpu else 1.0
    parts = {name: crowd * seconds / row.factor for name, seconds in parts.items() if seconds}
    seconds, (low, high) = sum(parts.values()), row.range
    inside, between = (sum(getattr(cost, side) for _, cost in costs) for side in ("inside", "between"))
    return StepTime(seconds, low * seconds, high * seconds, parts, inside, between, row.described)
