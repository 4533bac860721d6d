"""Sections of the page, one function each: time, memory, checkpoints, starts, settings, environment, events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smp.memory.categories import CATEGORIES
from smp.report.html import Html, bar, items, join, table, tag, text
from smp.report.run_files import Attempt, RunFiles, Saved, finite, list_of, table_of
from smp.report.summary import OF_A_STEP, PHASES, phase_totals
from smp.train.arguments import FLAGS
from smp.train.history import default_settings
from smp.units import duration, readable

MOST_ROWS = 200
_MEANING = {
    "data": "wait for the next batch",
    "forward": "and the gathering of parameters",
    "backward": "and the reduction of gradients",
    "optimizer": "clip, update, and the wait for the step's numbers",
    "agreement": "of all ranks: continue, stop, save",
    "logging": "the line of metrics and what follows from it",
    "validation": "",
    "checkpoint": "as far as training waited for it",
    "end": "final model, closing of files",
}
# Settings that change from start to start by themselves.
_OF_A_START = {"resume_from_checkpoint"}
_FACTS = ("world_size", "degrees", "device", "dtype", "backend", "global_batch_size", "hosts", "versions", "commit")


def _none(sentence: str) -> Html:
    return tag("p", sentence, cls="empty")


def _color(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def time_by_phase(run: RunFiles) -> Html:
    """Return the seconds of each phase, in total, as a share, and of a step."""
    totals = dict(list(phase_totals(run).items())[:20])
    if not totals:
        return _none("No time by phase was recorded.")
    total, steps = sum(totals.values()), run.train[-1]["step"] if run.train else 0
    rows = []
    for phase, seconds in totals.items():
        name = join([Html(f'<span class="key c{_color(phase)}">'), phase, Html("</span>")])
        of_step = duration(seconds / steps) if steps and phase in OF_A_STEP else ""
        share = seconds / total
        rows.append(
            (name, duration(seconds), f"{100 * share:.1f} %", of_step, tag("small", _MEANING.get(phase, "")))
        )  # fmt: skip
    parts = bar([(seconds / total, _color(phase)) for phase, seconds in totals.items()])
    shown = table(("phase", "in total", "share", "per step", ""), rows, numbers=(1, 2, 3))
    device = run.attempts[-1].start.get("device") if run.attempts else "cpu"
    note = "Seconds of rank 0's process."
    if device != "cpu":
        note += (
            " On a GPU they are the host's: it runs ahead of the device, whose time shows in the phase that waits for "
            "it, mostly optimizer, validation and checkpoint."
        )
    return join([parts, shown, tag("p", note, cls="note")])


def memory(run: RunFiles) -> Html:
    """Return the bytes of rank 0 by category, predicted at the start and measured where that was asked for."""
    predicted = table_of(run.attempts[-1].start.get("predicted_memory")) if run.attempts else {}
    measured = run.memory[-1] if run.memory else {}
    peak = table_of(measured.get("categories"))
    names = [name for name in dict.fromkeys([*CATEGORIES, *predicted, *peak]) if name in predicted or name in peak][:40]
    pairs = {name: (finite(predicted.get(name)), finite(peak.get(name))) for name in names}
    most = max((size or 0.0 for name, pair in pairs.items() for size in pair if name != "process"), default=0.0)
    if not pairs:
        return _none("No memory by category was recorded.")
    rows: list[tuple[Any, ...]] = []
    for name, (one, other) in pairs.items():
        if not one and not other:
            continue
        bars = join(bar([((size or 0.0) / (most or 1.0), color)]) for size, color in ((one, 9), (other, 0)) if size)
        rows.append((name, _size(one), *([_size(other)] if peak else []), "" if name == "process" else bars))
    sums = [sum(size or 0.0 for size in column) for column in zip(*pairs.values(), strict=True)]
    rows.append(tuple(tag("b", cell) for cell in ("sum", *map(_size, sums[: 2 if peak else 1]), "")))
    head = ["", Html('<span class="key c9">predicted</span>')]
    head += [Html('<span class="key c0">measured</span>')] if peak else []
    shown = table((*head, ""), rows, numbers=(1, 2) if peak else (1,))
    if peak:
        total = finite(measured.get("resident"))
        resident = f"; highest resident memory of the process: {readable(int(total))}" if total else ""
        note = (
            f"Measured at the peak of step {measured.get('step')}, in its {measured.get('phase')}{resident}. Process: "
            f"interpreter and libraries, which the measured categories leave out."
        )
    else:
        note = "Predicted from shapes before the first step; --enable_memory_profiling 1 measures it, too."
    return join([shown, tag("p", note, cls="note")])


def _size(size: float | None) -> str:
    return "" if size is None else readable(int(size)) if 0 <= size < 2**80 else "?"


def checkpoints(run: RunFiles) -> Html:
    """Return the checkpoints that exist: step, size, time, validation loss, and their state."""
    if not run.checkpoints:
        return _none("No checkpoint is here.")
    rated = [(loss, -saved.step) for saved in run.checkpoints if (loss := _val_loss(saved)) is not None]
    best = -min(rated)[1] if rated else None
    rows = []
    for saved in run.checkpoints[-MOST_ROWS:]:
        manifest, loss = saved.manifest, _val_loss(saved)
        marks = dict.fromkeys([*saved.marks, *(["best"] if saved.step == best else [])])
        state = tag("span", "; ".join(saved.problems[:3]) or "complete", cls="bad" if saved.problems else "good")
        rows.append(
            (
                join([f"{saved.step:,} ", *(tag("span", mark, cls="chip") for mark in marks)]),
                readable(manifest.nbytes) if manifest else "",
                "" if loss is None else f"{loss:.4f}",
                _when(manifest.saved_at) if manifest else "",
                manifest.kind if manifest else "",
                state,
                tag("code", saved.path.name),
            )
        )
    note = "State by names and sizes of the files; smp verify reads them."
    shown = table(("step", "size", "val_loss", "saved", "kind", "state", "directory"), rows, numbers=(1, 2))
    return join([shown, tag("p", note, cls="note")])


def _val_loss(saved: Saved) -> float | None:
    return finite(saved.manifest.run.get("val_loss")) if saved.manifest else None


def _when(time: Any) -> Html:
    return tag("time", str(time).replace("T", " ").replace("+00:00", " UTC"))


def _end(attempt: Attempt, *, last: bool) -> Html:
    end = attempt.end
    if end is None:
        return tag("span", "no end yet" if last else "no end recorded: killed", cls="" if last else "bad")
    seconds, status = finite(end.get("seconds")), end.get("status")
    after = f" after {duration(seconds)}" if seconds is not None else ""
    words = {0: "done", 75: "stopped on request", 130: "interrupted"}
    word = words.get(status, f"failed, status {status}") if isinstance(status, int) else "ended"
    cls = "good" if status == 0 else "" if status == 75 else "bad"
    reason = tag("div", end.get("reason"), cls="reason") if end.get("reason") else ""
    return join([tag("span", f"step {end.get('step')}, {word}{after}", cls=cls), reason])


def _differences(before: dict[str, Any], now: dict[str, Any], said: list[str]) -> list[str]:
    """List what differs between two starts, without what is ``said`` already."""
    defaults, found = default_settings(), []
    old, new = table_of(before.get("settings")), table_of(now.get("settings"))
    told = {sentence.split(" ")[0] for sentence in said} | _OF_A_START
    for name in sorted((old.keys() | new.keys()) - told):
        one, other = old.get(name, defaults.get(name)), new.get(name, defaults.get(name))
        if one != other:
            found.append(f"{name} {_value(one)} -> {_value(other)}")
    for name in _FACTS:
        one, other = before.get(name), now.get(name)
        if isinstance(one, dict) and isinstance(other, dict) and name in ("versions", "degrees"):
            keys = [key for key in one | other if one.get(key) != other.get(key)]
            found += [f"{key} {one.get(key, 'none')} -> {other.get(key, 'none')}" for key in keys]
        elif isinstance(one, dict) and isinstance(other, dict) and one.keys() != other.keys():
            gone, came = one.keys() - other.keys(), other.keys() - one.keys()
            found += [f"{word} {_few(keys)}" for word, keys in (("hosts gone:", gone), ("new hosts:", came)) if keys]
        elif one != other:
            found.append(f"{name.replace('_', ' ')} {_value(one)} -> {_value(other)}")
    return found


def _few(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def starts(run: RunFiles) -> Html:
    """Return each start with its end, and what had changed."""
    if not run.attempts:
        return _none("No start was recorded.")
    rows = []
    shown = list(enumerate(run.attempts))[-MOST_ROWS:]
    for index, attempt in shown:
        start = attempt.start
        said = [str(change) for change in list_of(start.get("changes"))]
        others = _differences(run.attempts[index - 1].start, start, said) if index else []
        source = str(start.get("checkpoint") or "").rpartition("/")[2]
        changed = items([tag("b", change) for change in said[:50]] + others[:50]) if said or others else Html("")
        rows.append(
            (
                _when(start.get("time")),
                join([f"step {start.get('step')}", tag("div", tag("code", source)) if source else ""]),
                _end(attempt, last=index == len(run.attempts) - 1),
                changed if index else tag("small", "the first start"),
            )
        )
    note = "Bold: what changes the training since the checkpoint was written. Else: since the start before."
    parts = [table(("started", "from", "ended", "changed"), rows)]
    return join([*parts, tag("p", note, cls="note")] if len(run.attempts) > 1 else parts)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, list):
        return " ".join(map(_value, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(each)}" for key, each in list(value.items())[:32]) or "none"
    return "none" if value is None else str(value)


def settings(run: RunFiles) -> Html:
    """Return the settings: those that differ from their defaults first, the others folded."""
    values = run.settings
    if values is None:
        values = table_of(run.attempts[-1].start.get("settings")) if run.attempts else {}
    if not values:
        return _none("No config.yaml is here.")
    defaults = default_settings()
    rows: dict[bool, list[tuple[Any, ...]]] = {True: [], False: []}
    for name, value in list(values.items())[:1000]:
        known = name in defaults
        differs = not known or value != defaults[name]
        section = FLAGS[name].section if known else "unknown to this version"
        default = _value(defaults[name]) if known else ""
        rows[differs].append((tag("code", name), _value(value), *([default] if differs else []), section))
    changed = table(("setting", "value", "default", "section"), rows[True]) if rows[True] else _none("All defaults.")
    same = table(("setting", "default", "section"), rows[False])
    summary = tag("summary", f"{len(rows[False])} settings at their defaults")
    return join([changed, tag("details", summary, same) if rows[False] else ""])


def environment(run: RunFiles) -> Html:
    """Return versions, hosts, devices and layout of the last start; of the last checkpoint where none is recorded."""
    rows: list[tuple[str, Any]] = []
    if run.attempts:
        start = run.attempts[-1].start
        hosts = table_of(start.get("hosts"))
        if hosts:
            named = ", ".join(f"{host} ({count})" for host, count in list(hosts.items())[:32])
            rows.append((f"hosts: {len(hosts)}", f"{named}{', ...' if len(hosts) > 32 else ''}"))
        names = {"device": "device", "world_size": "processes", "degrees": "layout", "backend": "backend"}
        names |= {"dtype": "computing in", "commit": "commit of smp"}
        rows += [(title, _value(start[name])) for name, title in names.items() if start.get(name) is not None]
        rows += [(str(name), version) for name, version in list(table_of(start.get("versions")).items())[:32]]
        choices = [str(choice) for choice in list_of(start.get("choices"))]
        rows += [("chosen", items(choices[:64]))] if choices else []
    elif manifest := next((saved.manifest for saved in reversed(run.checkpoints) if saved.manifest), None):
        rows = [("processes", manifest.world_size), ("layout", _value(manifest.degrees))]
        rows += [*manifest.versions.items()]
    if not rows:
        return _none("Nothing was recorded.")
    return tag("dl", *(join([tag("dt", name), tag("dd", value)]) for name, value in rows), cls="facts")


def events(run: RunFiles) -> Html:
    """Return steps that were not finite, and warnings and errors of rank 0's log."""
    parts = []
    if run.nonfinite:
        rows = [_nonfinite(line) for line in run.nonfinite[-MOST_ROWS:]]
        head = ("step", "what", "gradient norm", "loss by rank", "parameters")
        parts += [tag("h3", f"Steps that were not finite: {len(run.nonfinite)}"), table(head, rows, numbers=(0,))]
    if run.messages:
        levels = {"W": "warning", "E": "error", "C": "error"}
        rows = [
            (
                tag("time", message.time),
                tag("span", levels[message.level], cls="" if message.level == "W" else "bad"),
                join([message.text, tag("small", f" {message.count} times")]) if message.count > 1 else message.text,
            )
            for message in run.messages
        ]
        parts += [tag("h3", "Warnings and errors of rank 0"), table(("first", "", "message"), rows)]
    if run.notes:
        parts += [tag("h3", "About this page"), items(run.notes)]
    return join(parts) if parts else _none("No warning, and no step that was not finite.")


def _nonfinite(line: dict[str, Any]) -> tuple[Any, ...]:
    ranks = [table_of(each) for each in list_of(line.get("ranks"))]
    losses = ", ".join(f"{each.get('rank')}: {each.get('loss')}" for each in ranks[:8])
    shown = _few({str(name) for each in ranks for name in list_of(each.get("parameters"))})
    what = "update left out" if line.get("action") == "skip" else "the run ended"
    more = ", ..." if len(ranks) > 8 else ""
    return line.get("step"), what, line.get("grad_norm"), f"{losses}{more}", tag("code", text(shown)) if shown else ""
