"""The page: its sections put into the template, with a policy that forbids scripts and loads."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from importlib.resources import files

from smp import __version__
from smp.report import sections, summary
from smp.report.html import Html, join, text
from smp.report.run_files import RunFiles

SECTIONS: tuple[tuple[str, str, Callable[[RunFiles], Html]], ...] = (
    ("Curves", "curves", summary.curves),
    ("Time", "time", sections.time_by_phase),
    ("Memory", "memory", sections.memory),
    ("Checkpoints", "checkpoints", sections.checkpoints),
    ("Starts and resumes", "starts", sections.starts),
    ("Settings", "settings", sections.settings),
    ("Environment", "environment", sections.environment),
    ("Events", "events", sections.events),
)


def render(run: RunFiles, *, now: datetime.datetime) -> str:
    """Return the page of a run, one self-contained HTML document.

    Args:
        now: the time that the page gives.
    """
    kind, word, sentence = summary.state(run)
    links = join(Html(f'<a href="#{key}">{text(title)}</a>') for title, key, _ in SECTIONS)
    parts = join(
        Html(f'<section id="{key}"><h2>{text(title)}</h2>{section(run)}</section>') for title, key, section in SECTIONS
    )
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
