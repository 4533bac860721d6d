"""Curves as inline SVG: few points whatever the length of the run, with the extremes of what each point stands for.

The drawing is stretched to the width of the page, lines keep their width (``non-scaling-stroke``), and labels are
HTML beside it: so it fits every screen and paper without a script.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

MOST_POINTS = 600
_WIDTH, _HEIGHT = 1000, 300
_USUAL = 0.9  # share of the points that an axis which leaves out peaks shows in any case
_FEW = 30  # points up to which each gets a dot
_DECADES = 2.0  # that a curve of positive values spans before its axis is logarithmic
_INFINITE = 1e300  # drawn as not finite: the range of larger values overflows


class Point(NamedTuple):
    """The values of some neighbouring steps: their mean and extremes; NaN where none of them is finite."""

    step: int
    mean: float
    low: float
    high: float
    lost: int  # values that are not finite


@dataclasses.dataclass
class Series:
    """One line of a chart; ``color`` is the number of a colour of the page."""

    name: str
    points: list[Point]
    color: int


@dataclasses.dataclass
class Chart:
    """A chart over the steps.

    Attributes:
        key: of its numbers in the page.
        unit: of its values, shown after the title.
        zero: the axis begins at 0.
        log: the axis is logarithmic, if all values are positive and span decades.
        cut: the axis leaves out the peaks of a few points, such as a slow first step.
    """

    key: str
    title: str
    series: list[Series]
    unit: str = ""
    zero: bool = False
    log: bool = False
    cut: bool = False


def thin(steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS) -> list[Point]:
    """Return at most ``most`` points, each of equally many neighbouring values; the extremes are kept in them."""
    found = []
    count = len(steps)
    number = min(count, most)
    for index in range(number):
        begin, end = index * count // number, (index + 1) * count // number
        finite = [value for value in values[begin:end] if abs(value) < _INFINITE]
        middle = 0 if index == 0 else count - 1 if index == number - 1 else (begin + end) // 2  # the ends stay
        step, lost = steps[middle], end - begin - len(finite)
        if finite:
            mean = math.fsum(value / len(finite) for value in finite)  # of huge values the sum would overflow
            found.append(Point(step, mean, min(finite), max(finite), lost))
        else:
            found.append(Point(step, math.nan, math.nan, math.nan, lost))
    return found


def short(value: float) -> str:
    """Format a number of an axis or a tile: ``0.0001``, ``1.5e-5``, ``820``, ``4.83 k``, ``2.08 M``."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if limit * 0.99995 <= size < 1e15:
            return f"{value / limit:.4g} {unit}"
    text = f"{value:.4g}"
    return text.replace("e-0", "e-").replace("e+0", "e+").replace("e+", "e")


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers in the range, about ``most``."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if span / (power * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [(first + index) * step for index in range(int(math.floor(high / step + 1e-9) - first) + 1)]


class _Axis(NamedTuple):
    """A range of values, and how it is drawn."""

    low: float
    high: float
    log: bool

    def place(self, value: float) -> float:
        """Return where a value lies, from 0 to 1."""
        if self.log:
            return (math.log10(value) - self.low) / (self.high - self.low)
        # Halved, as the range of huge values overflows.
        return (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)

    @property
    def ticks(self) -> list[float]:
        if not self.log:
            return ticks(self.low, self.high)
        whole = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)
        return [10.0**power for power in whole][:: max(1, len(whole) // 5)]


def _vertical(chart: Chart, values: list[float]) -> _Axis:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if chart.log and low > 1 / _INFINITE and math.log10(high) - math.log10(low) > _DECADES:
        return _Axis(math.floor(math.log10(low)), math.ceil(math.log10(high)), True)
    low = min(low, 0.0) if chart.zero else low
    if chart.cut and values:
        usual = 1.5 * sorted(values)[int(_USUAL * (len(values) - 1))]
        high = usual if low < usual < high / 2 else high
    margin = (high / 2 - low / 2) / 10 or abs(high) / 10 or 1.0
    return _Axis(low if chart.zero and low >= 0 else low - margin, high + margin, False)


def draw(chart: Chart, marks: Sequence[int] = ()) -> str:
    """Return a chart as HTML; without any value it says so.

    Args:
        chart: what to draw.
        marks: steps at which the run was resumed.
    """
    steps = [point.step for series in chart.series for point in series.points]
    values = [v for s in chart.series for p in s.points for v in (p.low, p.high) if math.isfinite(v)]
    lost = sum(point.lost for series in chart.series for point in series.points)
    unit = f' <span class="unit">{escape(chart.unit)}</span>' if chart.unit else ""
    legend = "".join(
        f'<span class="key c{series.color}">{escape(series.name)}</span>'
        for series in chart.series
        if len(chart.series) > 1 and series.points
    )
    note = f'<span class="lost">{lost} not finite</span>' if lost else ""
    head = f"<figcaption><b>{escape(chart.title)}</b>{unit}{legend}{note}</figcaption>"
    if not values:
        return f'<figure class="chart">{head}<p class="empty">Nothing was logged.</p></figure>'
    axis = _vertical(chart, values)
    first, last = min(steps), max(steps)
    across = _Axis(first, last, False) if last > first else _Axis(first - 1, first + 1, False)
    lines = "".join(
        f'<path class="grid" d="M0 {_y(axis, tick)}H{_WIDTH}"/>' for tick in axis.ticks if 0 <= axis.place(tick) <= 1
    )
    lines += "".join(f'<path class="mark" d="M{_x(across, s)} 0V{_HEIGHT}"/>' for s in marks if first <= s <= last)
    drawn = "".join(_curve(series, across, axis) for series in chart.series)
    labels = "".join(
        f'<span class="y" style="bottom:{100 * axis.place(tick):.2f}%">{escape(short(tick))}</span>'
        for tick in axis.ticks
        if -1e-9 <= axis.place(tick) <= 1 + 1e-9
    )
    whole = [tick for tick in ticks(across.low, across.high) if tick == int(tick)]
    labels += "".join(
        f'<span class="x" style="left:{100 * across.place(tick):.2f}%">{escape(short(tick))}</span>' for tick in whole
    )
    log = ' <span class="unit">logarithmic</span>' if axis.log else ""
    log = ' <span class="unit">peaks are cut off</span>' if axis.place(max(values)) > 1 else log
    head = head.replace("</b>", f"</b>{log}", 1)
    name = escape(f"{chart.title} over {len(steps)} points, from step {first} to {last}")
    return (
        f'<figure class="chart" data-key="{escape(chart.key)}" data-range="{across.low} {across.high}">{head}'
        f'<div class="plot"><svg role="img" aria-label="{name}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'preserveAspectRatio="none">{lines}{drawn}</svg>{labels}</div></figure>'
    )


def numbers(chart: Chart) -> list[dict[str, object]]:
    """Return the points of a chart for the script that shows values under the pointer; null is not finite."""
    return [
        {
            "name": series.name,
            "color": series.color,
            "points": [
                [p.step, *([_digits(p.mean)] if not p.low < p.high else map(_digits, (p.mean, p.low, p.high)))]
                for p in series.points
            ],
        }
        for series in chart.series
    ]


def _digits(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _x(axis: _Axis, step: float) -> str:
    return f"{_WIDTH * axis.place(step):.1f}"


def _y(axis: _Axis, value: float) -> str:
    return f"{_HEIGHT * (1 - axis.place(value)):.1f}"


def _curve(series: Series, across: _Axis, axis: _Axis) -> str:
    """Return the band of extremes, the line of means, and dots where a line would show little."""
    runs: list[list[Point]] = [[]]
    for point in series.points:
        if math.isfinite(point.mean):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])  # a gap
    few = len(series.points) <= _FEW
    band, line, dots = "", "", ""
    for run in filter(None, runs):
        upper = [f"{_x(across, p.step)} {_y(axis, p.high)}" for p in run]
        lower = [f"{_x(across, p.step)} {_y(axis, p.low)}" for p in reversed(run)]
        if any(p.low != p.high for p in run):
            band += f"M{'L'.join(upper + lower)}Z"
        means = [f"{_x(across, p.step)} {_y(axis, p.mean)}" for p in run]
        line += f"M{'L'.join(means)}"
        if few or len(run) == 1:
            dots += "".join(f"M{mean}h0" for mean in means)
    color = f"c{series.color}"
    found = f'<path class="band {color}" d="{band}"/>' if band else ""
    found += f'<path class="line {color}" d="{line}"/>' if line else ""
    return found + (f'<path class="dots {color}" d="{dots}"/>' if dots else "")
