"""The page: its sections put into the template, with a policy that lets nothing run or load."""

from __future__ import annotations

import datetime
import re
from importlib.resources import files

from smp import __version__
from smp.report import sections, summary
from smp.report.html import Html, join, text
from smp.report.run_files import RunFiles, finite

SECTIONS = (
    ("Curves", "curves"), ("Time", "time"), ("Memory", "memory"), ("Checkpoints", "checkpoints"),
    ("Starts and resumes", "starts"), ("Settings", "settings"), ("Environment", "environment"), ("Events", "events"),
)  # fmt: skip


def render(run: RunFiles, *, now: datetime.datetime) -> str:
    """Return the page of a run, one HTML document that needs nothing else.

    Args:
        run: its files.
        now: the time that the page gives as its own.
    """
    steps = (finite(attempt.start.get("step")) for attempt in run.attempts[1:])
    marks = sorted({int(step) for step in steps if step})[-200:]
    body = {
        "curves": summary.curves(run, marks),
        "time": sections.time_by_phase(run),
        "memory": sections.memory(run),
        "checkpoints": sections.checkpoints(run),
        "starts": sections.starts(run),
        "settings": sections.settings(run),
        "environment": sections.environment(run),
        "events": sections.events(run),
    }
    kind, word, sentence = summary.state(run)
    links = join(Html(f'<a href="#{key}">{text(title)}</a>') for title, key in SECTIONS)
    parts = join(Html(f'<section id="{key}"><h2>{text(title)}</h2>{body[key]}</section>') for title, key in SECTIONS)
    written = ""
    if run.written is not None:
        last = datetime.datetime.fromtimestamp(run.written, datetime.UTC)
        written = f" Metrics last written {last:%Y-%m-%d %H:%M:%S} UTC."
    return _fill(
        {
            "title": text(run.path.name or run.path, 120),
            "head": join([Html(f'<span class="state {kind}">'), word, Html("</span> "), summary.headline(run)]),
            "sentence": text(f"{sentence}{written}"),
            "tiles": summary.tiles(run),
            "links": links,
            "sections": parts,
            "foot": text(f"Made by smp {__version__} at {now:%Y-%m-%d %H:%M} UTC from {run.path}"),
        }
    )


def _fill(values: dict[str, str]) -> str:
    """Put values into the template, once: what they hold is not looked at again."""
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)
