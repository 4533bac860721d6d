"""The page of `smp report` from files of every state: long, begun, killed, of evaluation alone, hostile, unreadable."""

from __future__ import annotations

import base64
import datetime
import html.parser
import json
import random
import re
import sys

import pytest

import smp.cli
from smp.report.page import render
from smp.report.run_files import read_run

NOW = datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC)
START = {
    "event": "start", "time": "2026-01-01T10:00:00+00:00", "step": 0, "checkpoint": None, "max_steps": 9,
    "model": "llama_tiny", "parameters": 2.0e6, "world_size": 2, "device": "cpu", "dtype": "float32",
    "hosts": {"one": 2}, "versions": {"torch": "2.13.0"}, "changes": [], "settings": {"lr": 1e-4},
    "predicted_memory": {"parameters": 2**20, "process": 2**29},
}  # fmt: skip


def line(step, **changed):
    found = {
        "step": step, "loss": 9.0 - step / 10, "lr": 1e-4, "grad_norm": 1.0, "tokens": 100 * step,
        "tokens_per_sec": 1e4, "step_time_s": 0.5, "mfu": None, "mem_peak_gib": 1.5, "host_rss_gib": 1.25,
        "mem_allocated_gib": None, "phase_s": {"data": 0.1, "forward": 0.2, "backward": 0.2, "checkpoint": 0.05},
    }  # fmt: skip
    return found | changed


def write(run, *, metrics=(), history=(), extra="", **others):
    """A run directory; ``others``: contents of files by name, with __ for a slash and _ for the last dot."""
    run.mkdir(exist_ok=True)
    for name, lines in (("metrics.jsonl", metrics), ("history.jsonl", history)):
        if lines or (extra and name == "metrics.jsonl"):
            (run / name).write_text("".join(json.dumps(each) + "\n" for each in lines) + extra)
    for name, content in others.items():
        path = run / ".".join(name.replace("__", "/").rsplit("_", 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return run


def page_of(run):
    page = render(read_run(run), now=NOW)
    return page, Page(page)


class Page(html.parser.HTMLParser):
    """What a browser makes of the page: elements with attributes, and the text of each section."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.sections, self._stack, self.scripts, self._raw = [], {"": ""}, [""], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "section":
            self._stack.append(dict(attrs)["id"])
            self.sections[self._stack[-1]] = ""
        self._raw = tag if tag in ("script", "style") else ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._raw = ""
        if tag == "section":
            self._stack.pop()

    def handle_data(self, data):
        if self._raw == "script":
            self.scripts[-1] += data
        elif not self._raw:
            self.sections[self._stack[-1]] += data + " "


def picture(parsed):
    """The bytes of the page's one picture."""
    (source,) = [attributes["src"] for tag, attributes in parsed.elements if tag == "img"]
    content = base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True)
    return content.startswith(b"\x89PNG") and content


def test_without_matplotlib_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _, parsed = page_of(write(tmp_path / "run", metrics=[line(1)]))
    assert "curves need matplotlib: pip install matplotlib" in parsed.sections["curves"]


def test_a_page_has_the_numbers_of_the_run(tmp_path):
    resumed = START | {
        "step": 4, "checkpoint": "/x/llama_tiny-4steps", "world_size": 4, "hosts": {"one": 2, "two": 2},
        "changes": ["lr 0.0001 -> 0.001"], "settings": {"lr": 1e-3, "max_steps": 9}, "versions": {"torch": "2.14.0"},
    }  # fmt: skip
    end = {"event": "end", "status": 75, "step": 4, "seconds": 61.0, "phase_s": {"checkpoint": 0.5}, "reason": ""}
    memory = {"event": "memory", "step": 2, "phase": "backward", "categories": {"parameters": 2**21}}
    run = write(
        tmp_path / "mine",
        metrics=[*map(line, range(1, 10)), {"step": 5, "val_loss": 8.25, "val_ppl": 3827.6}],
        history=[START, memory, end, resumed, end | {"status": 0, "step": 9}],
        config_yaml="lr: 0.001\nmax_steps: 9\nmodel: llama_tiny\nseed: 12345\n",
        nonfinite_jsonl=json.dumps({"step": 3, "action": "skip", "grad_norm": "nan", "ranks": [{"rank": 0}]}) + "\n",
        logs__rank0_log="2026-01-01 10:00:00 W [a.py:1] Step 3 is odd\n2026-01-01 10:00:01 I [a.py:1] fine\n"
        "2026-01-01 10:00:02 W [a.py:1] Step 4 is odd\n",
    )
    _, parsed = page_of(run)
    text = {name: re.sub(r"\s+", " ", content) for name, content in parsed.sections.items()}
    assert "mine done llama_tiny" in text[""] and "2 M parameters" in text[""] and "4 processes on cpu" in text[""]
    assert "Validation loss 8.2500 the best, at step 5, perplexity 3,827.6" in text[""]
    assert "Updates left out 1" in text[""] and "Time in steps 4.5 s" in text[""]
    assert picture(parsed)
    assert "data 0.9 s 15.1 % 0.1 s" in text["time"] and "checkpoint 1.45 s" in text["time"]
    assert "parameters 1.0 MiB 2.0 MiB" in text["memory"] and "peak of step 2, in its backward" in text["memory"]
    assert "step 4, stopped on request after 1 min 01 s" in text["starts"] and "step 9, done" in text["starts"]
    for change in ("lr 0.0001 -> 0.001", "torch 2.13.0 -> 2.14.0", "new hosts: two", "max_steps none -> 9"):
        assert change in text["starts"], change
    assert text["starts"].count("lr 0.0001") == 1
    before, _, after = text["settings"].partition("settings at their defaults")
    assert "lr 0.001 0.0001 lr" in before and "seed" in after and "seed" not in before
    assert "hosts: 2 one (2), two (2)" in text["environment"]
    assert "Step 3 is odd 2 times" in text["events"] and "fine" not in text["events"]
    assert "Steps that were not finite: 1" in text["events"] and "update left out" in text["events"]


EMPTY = {
    "curves": "No step",
    "time": "No time",
    "memory": "No memory",
    "checkpoints": "No checkpoint",
    "starts": "No st",
}


@pytest.mark.parametrize(
    ("files", "state", "shown"),
    [
        ({"config_yaml": "lr: 0.1\n"}, "no record", EMPTY),
        ({"metrics_jsonl": "", "history": [START]}, "running or killed", {"curves": "No step", "starts": "no end yet"}),
        ({"metrics": [line(1)], "extra": '{"step": 2, "lo'}, "no record", {"events": "No warning"}),
        ({"metrics": [line(1)], "extra": '{"st\n{"step": 2, "loss": 1.0}\n'}, "no record", {"events": "1 line(s) of"}),
        (
            {"metrics": [{"step": 7, "val_loss": 2.5, "val_ppl": 12.2}]},
            "no record",
            {"": "Validation loss 2.5000 the best, at step 7, perplexity 12.2"},
        ),
        ({"history": [START, START]}, "running or killed", {"starts": "no end recorded: killed"}),
        (
            {"history": [START, {"event": "end", "status": 1, "step": 3, "reason": "the disk is full"}]},
            "failed",
            {"": "failed at step 3 (exit status 1): the disk is full", "starts": "failed, status 1"},
        ),
        ({"history": [START, {"event": "end", "status": 75, "step": 3}]}, "stopped", {"": "asked to stop, at step 3"}),
        ({"metrics": [line(s, loss="nan", grad_norm="inf") for s in (1, 2)]}, "no record", {}),
        ({"config_yaml": "a: [", "metrics": [line(1)]}, "no record", {"events": "config.yaml cannot be read"}),
    ],
)  # fmt: skip
def test_runs_of_every_state_have_a_page(tmp_path, files, state, shown):
    _, parsed = page_of(write(tmp_path / "run", **files))
    text = {name: re.sub(r"\s+", " ", content) for name, content in parsed.sections.items()}
    assert state in text[""]
    for section, part in shown.items():
        assert part in text[section], section


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \"'&{{title}}\u202e\x00 {{data}}"


def test_hostile_files_stay_text(tmp_path):
    start = START | dict.fromkeys(("model", "device", "dtype", "time", "checkpoint", "commit", "step"), EVIL)
    start |= {"hosts": {EVIL: EVIL}, "versions": {EVIL: EVIL}, "changes": [EVIL], "settings": {EVIL: EVIL},
              "choices": [EVIL], "degrees": {EVIL: EVIL}, "checkpoint_dirs": [EVIL, "s3://" + EVIL, 3, None],
              "predicted_memory": {EVIL: 5, "activations": EVIL}}  # fmt: skip
    end = {"event": "end", "status": EVIL, "step": EVIL, "reason": EVIL, "seconds": EVIL, "phase_s": {EVIL: 1}}
    run = write(
        tmp_path / "a<img src=x onerror=alert(1)>&'",
        metrics=[line(1, phase_s={EVIL: 2.0}), line(2, loss=EVIL, tokens=[EVIL]), line(3) | {"step": EVIL}],
        history=[start, {"event": "memory", "step": EVIL, "phase": EVIL, "categories": {EVIL: 1}}, end, start],
        config_yaml=json.dumps({EVIL: EVIL, "lr": {EVIL: EVIL}, "seed": [EVIL]}),
        nonfinite_jsonl=json.dumps({"step": EVIL, "ranks": [{"rank": EVIL, "loss": EVIL, "parameters": [EVIL]}]}),
        logs__rank0_log=f"2026-01-01 10:00:00 W [a] {EVIL}\n",
    )  # fmt: skip
    for name in ("checkpoints/<b>-3steps", "checkpoints/x-4steps"):
        (run / name).mkdir(parents=True)
        (run / name / "manifest.json").write_text(EVIL)
    page, parsed = page_of(run)
    names = [tag for tag, _ in parsed.elements]
    assert "script" not in names and names.count("img") == 1 and picture(parsed) and "b" in names
    assert not [a for _, attributes in parsed.elements for a in attributes if a.startswith("on") or a == "action"]
    assert {href[0] for _, attributes in parsed.elements if (href := attributes.get("href"))} == {"#"}
    assert "\u202e" not in page and "\x00" not in page
    assert "alert(1)" in parsed.sections["starts"] and "<b>-3steps" in parsed.sections["checkpoints"]
    assert page.count("<!DOCTYPE") == 1


@pytest.mark.parametrize(
    "content",
    [b"\x00\xff\xfe" * 50, b"[" * 100_000, b"3\n[]\nnull\n", b'{"event": "start"}\n{"event": "end"}\n',
     b'{"step": 1e999}\n', b'{"step": 5, "loss": 1' + b"0" * 400 + b"}\n", b'{"event": [], "step": {}}\n',
     b'{"step": -1, "loss": true}\n'],
)  # fmt: skip
def test_no_content_of_a_file_breaks_the_page(tmp_path, content):
    names = ("metrics_jsonl", "history_jsonl", "nonfinite_jsonl", "config_yaml", "logs__rank0_log")
    page, _ = page_of(write(tmp_path / "run", **dict.fromkeys(names, content)))
    assert "</html>" in page


SECRET = "s3cr3tVALUE9"


def test_secrets_are_hidden_wherever_they_come_from(tmp_path):
    settings = {"hf_access_token": SECRET, "training_dir": f"https://u:{SECRET}@host/x"}
    run = write(
        tmp_path / "run",
        history=[START | {"settings": settings, "changes": [f"api_key={SECRET}"]}, START],
        config_yaml=json.dumps(settings),
        logs__rank0_log=f"2026-01-01 10:00:00 E [a] token: {SECRET}\n",
    )
    page, _ = page_of(run)
    assert SECRET not in page and page.count("***") >= 4


def test_nothing_may_run_or_load_but_the_page_itself(tmp_path):
    _, parsed = page_of(write(tmp_path / "run", metrics=[line(1), line(2)]))
    policy = next(a["content"] for tag, a in parsed.elements if tag == "meta" and "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:" and not parsed.scripts


@pytest.mark.full
def test_a_long_run_gives_a_small_page(tmp_path):
    random.seed(0)
    lines = [
        line(s, loss=random.random(), grad_norm=random.random(), mem_allocated_gib=3.25) for s in range(1, 100_001)
    ]
    lines += [{"step": s, "val_loss": 1.0 / s} for s in range(100, 100_001, 100)]
    starts = [START | {"step": s} for s in range(0, 100_000, 200)]
    log = "".join(f"2026-01-01 10:00:00 W [a] {'x' * (i % 500)} {i}\n" for i in range(5000))
    page, parsed = page_of(write(tmp_path / "run", metrics=lines, history=starts, logs__rank0_log=log))
    assert len(page.encode()) < 2_000_000
    assert picture(parsed)


def test_the_command_writes_the_page_and_names_it(tmp_path, capsys):
    run = write(tmp_path / "run", metrics=[line(1)])
    assert smp.cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{run / 'report.html'}: ")
    assert smp.cli.main(["report", str(run), "--output", str(tmp_path / "other.html")]) == 0
    assert "</html>" in (tmp_path / "other.html").read_text() and sorted(p.name for p in run.iterdir()) == [
        "metrics.jsonl",
        "report.html",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{}/none"], "does not exist: give the directory of a run"),
        (["{}/file"], "is a file: give the directory of a run"),
        (["{}/empty"], "contains nothing of a run (metrics.jsonl, config.yaml, ...)"),
        (["{}/run", "--output", "{}/empty"], "is a directory: give the name of a file"),
        (["{}/run", "--output", "{}/none/x.html"], "cannot write"),
    ],
)
def test_bad_input_is_a_sentence_and_status_2(tmp_path, capsys, words, sentence):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "run", metrics=[line(1)])
    assert smp.cli.main(["report", *(word.format(tmp_path) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
