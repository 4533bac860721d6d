"""What a run comes to: its state in a word, its numbers in tiles, and its curves."""

from __future__ import annotations

import base64
import io
import math
import statistics
from typing import Any

from smp.errors import UserError
from smp.faults.stop import INTERRUPTED, STOPPED
from smp.plots import DRAWN, TOKENS, metrics_figure
from smp.report.html import Html, join, tag
from smp.report.run_files import RunFiles, finite, number, table_of
from smp.units import duration, short

Line = dict[str, Any]
PHASES = ("data", "forward", "backward", "optimizer", "agreement", "logging", "validation", "checkpoint", "end")
OF_A_STEP = PHASES[:4]


def state(run: RunFiles) -> tuple[str, str, str]:
    """Return the state of the run: the class of its colour, a word, and a sentence."""
    if not run.attempts:
        return "unknown", "no record", "It has no history.jsonl: an older version wrote it, or it never began."
    end = run.attempts[-1].end
    if end is None:
        return "running", "running or killed", "Its last start has no end yet."
    status, step, reason = end.get("status"), end.get("step"), end.get("reason")
    if status == 0:
        return "done", "done", f"It ended at step {step} as planned."
    if status in (STOPPED, INTERRUPTED) and not reason:
        return "stopped", "stopped", f"It was asked to stop, at step {step} (exit status {status})."
    return "failed", "failed", f"It failed at step {step} (exit status {status}): {reason}"


def trained_seconds(run: RunFiles) -> float:
    """Return the seconds of all steps that are logged, without validation and checkpoints."""
    total, before = 0.0, 0
    for line in run.train:
        total += max(line["step"] - before, 0) * (finite(line.get("step_time_s")) or 0.0)
        before = line["step"]
    return total


def tiles(run: RunFiles) -> Html:
    """Return the few numbers that a person asks for first."""
    found: list[tuple[str, str, str]] = []  # title, value, note

    def values(lines: list[Line], key: str) -> list[float]:
        return [value for line in lines if (value := finite(line.get(key))) is not None]

    most = run.attempts[-1].start.get("max_steps") if run.attempts else None
    if run.train:
        last = run.train[-1]
        found.append(("Step", f"{last['step']:,}", f"of {most:,}" if type(most) is int else ""))
        loss = number(last.get("loss"))
        found.append(("Training loss", "" if loss is None else f"{loss:.4f}", "of the last step"))
    rated = [(loss, line["step"]) for line in run.validation if (loss := finite(line.get("val_loss"))) is not None]
    if rated:
        best, step = min(rated)
        perplexity = f", perplexity {math.exp(best):,.1f}" if best < 20 else ""
        found.append(("Validation loss", f"{best:.4f}", f"the best, at step {step:,}{perplexity}"))
    if tokens := values(run.train[-1:], "tokens"):
        found.append(("Tokens", short(tokens[0]), "labelled, trained on"))
    if speeds := values(run.train, "tokens_per_sec"):
        found.append(("Tokens per second", short(statistics.median(speeds)), "median"))
    if mfu := values(run.train, "mfu"):
        found.append(("MFU", f"{100 * statistics.median(mfu):.1f} %", "median"))
    if seconds := trained_seconds(run):
        found.append(("Time in steps", duration(seconds), "without validation and checkpoints"))
    if peaks := values(run.train, "mem_peak_gib"):
        found.append(("Highest memory", f"{max(peaks):.2f} GiB", "of rank 0"))
    skipped = sum(line.get("action") == "skip" for line in run.nonfinite)
    if skipped:
        found.append(("Updates left out", str(skipped), "not finite"))
    return tag("dl", *(tag("div", tag("dt", t), tag("dd", v), tag("small", n)) for t, v, n in found), cls="tiles")


def curves(run: RunFiles) -> Html:
    """Return a picture of the metrics, with the steps at which the run was resumed; a sentence where there is none."""
    if not (run.train or run.validation):
        return tag("p", "No step has been logged yet.", cls="empty")
    steps = (finite(attempt.start.get("step")) for attempt in run.attempts[1:])
    marks = sorted({int(step) for step in steps if step})[-200:]
    train, validation = ([_drawn(line) for line in lines] for lines in (run.train, run.validation))
    picture = io.BytesIO()
    try:
        tokens = next((line[TOKENS] for line in reversed(run.train) if TOKENS in line), ())
        metrics_figure(train, validation, marks, tokens=tokens).savefig(picture, dpi=120, format="png")
    except UserError as error:  # no matplotlib
        return tag("p", f"{error}", cls="empty")
    except Exception as error:  # of matplotlib, which has no axis for some numbers
        return tag("p", f"The curves cannot be drawn ({type(error).__name__}: {error}).", cls="empty")
    content = base64.b64encode(picture.getvalue()).decode()
    title = "loss, learning rate, tokens per second and gradient norm over the steps"
    return Html(f'<img alt="{title}" src="data:image/png;base64,{content}">')


def _drawn(line: Line) -> Line:
    found = {key: number(line.get(key)) for key in DRAWN}
    return {**{key: math.nan if value is None else value for key, value in found.items()}, "step": line["step"]}


def phase_totals(run: RunFiles) -> dict[str, float]:
    """Return the seconds of each phase over all that is logged, in the order of a step."""
    totals: dict[str, float] = {}
    for line in [*run.train, *(attempt.end or {} for attempt in run.attempts)]:
        for phase, seconds in table_of(line.get("phase_s")).items():
            totals[str(phase)] = totals.get(str(phase), 0.0) + max(finite(seconds) or 0.0, 0.0)
    known = {phase: totals.pop(phase) for phase in PHASES if phase in totals}
    return {phase: seconds for phase, seconds in (known | totals).items() if seconds > 0}


def headline(run: RunFiles) -> Html:
    """Return the model, its size, the processes and the length in one line."""
    if not run.attempts:
        return Html("")
    start = run.attempts[-1].start
    parts = [start.get("model")]
    if (parameters := finite(start.get("parameters"))) is not None:
        parts.append(f"{short(parameters)} parameters")
    world = start.get("world_size")
    parts.append(f"{world} {'process' if world == 1 else 'processes'} on {start.get('device')}")
    parts.append(f"{start.get('dtype')}")
    parts.append(f"global batch {start.get('global_batch_size')} x {start.get('sequence_length')} tokens")
    return join((part for part in parts if part), " &middot; ")
