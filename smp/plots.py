"""Plots of metrics and memory: ``python -m smp.plots RUN_DIR`` draws ``RUN_DIR/metrics.jsonl`` to ``curves.png``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smp.errors import UserError
from smp.units import MIB

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies")
TOKENS, BUSIEST = "experts/tokens", "experts/busiest_share"
DRAWN = ("step", "loss", "val_loss", "lr", "tokens_per_sec", "grad_norm", *REWARDS, BUSIEST)
_TRAIN, _VALIDATION = "#2c6fbb", "#d1495b"


def plot_metrics(metrics_jsonl: Path, png: Path) -> None:
    """Draw loss (training and validation), learning rate, tokens per second and gradient norm over the steps.

    Of preferences also the rewards, and how often the chosen answer has the higher one; of a mixture of experts the
    share of the busiest one, and the share of each in the last step.

    Raises:
        UserError: matplotlib is missing, or the file is missing, broken or holds no training step.
    """
    records = _read(metrics_jsonl)
    tokens = next((r[TOKENS] for r in reversed(records) if TOKENS in r), ())
    train, validation = ([r for r in records if key in r] for key in ("loss", "val_loss"))
    figure = metrics_figure(train, validation, tokens=tokens)
    figure.suptitle(metrics_jsonl.resolve().parent.name)
    _save(figure, png)


def metrics_figure(
    train: Sequence[Mapping[str, Any]],
    validation: Sequence[Mapping[str, Any]],
    marks: Sequence[int] = (),
    *,
    tokens: Sequence[Sequence[int]] = (),
) -> Any:
    """Draw the metrics of :func:`plot_metrics`.

    Args:
        train, validation: lines of the metrics.
        marks: steps at which the run was resumed.
        tokens: of each layer, those of each expert in the last step.

    Raises:
        UserError: matplotlib is missing.
    """
    rows = 2 if all(math.isnan(float(record.get(REWARDS[0], "nan"))) for record in train) else 3
    figure = _figure("curves need", height=3.5 * (rows + bool(tokens)))
    from matplotlib.ticker import EngFormatter, StrMethodFormatter

    upper, lower = figure.subfigures(2, 1, height_ratios=[rows, 1]) if tokens else (figure, None)
    (loss, lr), (speed, norm), *more = upper.subplots(rows, 2, sharex=True)
    curves = list(figure.axes)
    if tokens:
        curves.append(_draw_experts(lower, train, tokens))
    for rewards, accuracy in more:
        _draw(rewards, train, REWARDS[0], title="Rewards", color=_TRAIN, label="chosen")
        _draw(rewards, train, REWARDS[1], title="Rewards", color=_VALIDATION, label="rejected")
        rewards.legend(frameon=False)
        _draw(accuracy, train, REWARDS[2], title="Chosen answer preferred", color=_TRAIN)
    _draw(loss, train, "loss", title="Loss", color=_TRAIN, label="training")
    if validation:
        _draw(loss, validation, "val_loss", title="Loss", color=_VALIDATION, label="validation")
        loss.legend(frameon=False)
    _draw(lr, train, "lr", title="Learning rate", color=_TRAIN)
    _draw(speed, train, "tokens_per_sec", title="Tokens per second", color=_TRAIN)
    _draw(norm, train, "grad_norm", title="Gradient norm, before clipping", color=_TRAIN)
    lr.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in (lr, speed, norm):
        axes.set_ylim(bottom=0)
    for axes in more[-1] if more else (speed, norm):
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for axes in curves:
        axes.vlines(marks, 0, 1, transform=axes.get_xaxis_transform(), color="#444444", lw=0.8, ls=":")
    return figure


def _draw_experts(figure: Any, train: Sequence[Mapping[str, Any]], tokens: Sequence[Sequence[int]]) -> Any:
    """Draw the share of the busiest expert over the steps, whose axes are returned, and all shares of the last one."""
    curve, table = figure.subplots(1, 2)
    _draw(curve, [r for r in train if BUSIEST in r], BUSIEST, title="Share of the busiest expert", color=_TRAIN)
    curve.set_ylim(bottom=0)
    curve.set_xlabel("step")
    shares = [[each / max(sum(layer), 1) for each in layer] for layer in tokens]
    image = table.imshow(shares, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    figure.colorbar(image, ax=table)
    table.set_title("Share of tokens, last step", loc="left", fontsize=11)
    table.set_xlabel("expert")
    table.set_ylabel("layer")
    return curve


def plot_memory(
    seconds: Sequence[float],
    categories: Mapping[str, Sequence[int]],
    marks: Sequence[tuple[str, float]],
    png: Path,
    *,
    xlabel: str = "seconds (profiled: slower than other steps)",
) -> None:
    """Draw bytes by category over one step, stacked.

    Args:
        seconds: of each point.
        categories: bytes at each point.
        marks: phases, and the seconds when they ended.

    Raises:
        UserError: matplotlib is missing.
    """
    figure = _figure("a memory timeline needs", height=5)
    axes = figure.subplots()
    shown = {name: [size / MIB for size in sizes] for name, sizes in categories.items() if any(sizes)}
    axes.stackplot(seconds, *shown.values(), labels=list(shown), step="post", lw=0)
    for ended, moment in marks:
        axes.axvline(moment, color="#444444", lw=0.8, ls=":")
        axes.annotate(f"{ended} |", (moment, 1), xycoords=("data", "axes fraction"), ha="right", va="bottom", size=8)
    axes.set_xlabel(xlabel)
    axes.set_ylabel("MiB")
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], frameon=False, loc="outside right upper")
    _save(figure, png)


def _figure(what: str, *, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"{what} matplotlib: pip install matplotlib") from error
    # Without pyplot the program's own backend and figures are left alone.
    return Figure(figsize=(11, height), layout="constrained")


def _save(figure: Any, png: Path) -> None:
    """Replace the picture in one step: who looks at it meanwhile sees the old one whole."""
    png.parent.mkdir(parents=True, exist_ok=True)
    new = png.with_name(f".{png.name}.tmp")
    figure.savefig(new, dpi=120, format="png")
    new.replace(png)


def _draw(
    axes: Any, records: Sequence[Mapping[str, Any]], key: str, *, title: str, color: str, label: str = ""
) -> None:
    # Markers show single points, of which a line shows nothing; "nan" leaves a gap.
    marker = "o" if len(records) <= 30 else ""
    values = [float(record[key]) for record in records]
    axes.plot([r["step"] for r in records], values, color=color, label=label, marker=marker, markersize=3.5, lw=1.5)
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _read(path: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    broken = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if broken:
                    raise UserError(f"{path}:{broken} is not JSON: remove the line, or give another run")
                try:
                    record = json.loads(line)
                except ValueError:  # the last line may be incomplete, of a run that goes on or was killed
                    broken = number
                    continue
                records.append({key: record[key] for key in (*DRAWN, TOKENS) if key in record})  # a long run has many
                if TOKENS in record and len(records) > 1:
                    records[-2].pop(TOKENS, None)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): give the directory of a run") from error
    if not any("loss" in record for record in records):
        raise UserError(f"{path} contains no training step yet: nothing to draw")
    return records


def main(arguments: list[str]) -> int:
    """Draw the run in ``arguments[0]``; returns the exit status."""
    if len(arguments) != 1:
        print("usage: python -m smp.plots RUN_DIR", file=sys.stderr)
        return 2
    run_dir = Path(arguments[0])
    try:
        plot_metrics(run_dir / "metrics.jsonl", run_dir / "curves.png")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(run_dir / "curves.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
