"""``smp report`` on a run that was stopped and resumed with a changed setting: its page read, opened in Chromium."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import signal
import subprocess
from types import SimpleNamespace

import pytest

import smp.cli
from smp.faults.watchdog import Watchdog
from tests.job import LLAMA, read_metrics, run_job, running_job
from tests.unit.test_report import Page, line, picture, write

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RUN = [
    *LLAMA, "--use_synthetic_data", 1, "--validation_freq", 2, "--checkpoint_freq", 2, "--keep_best", 1,
    "--num_kept_checkpoints", 3,
]  # fmt: skip


def history(run):
    return [json.loads(each) for each in (run / "history.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A run of two processes, stopped by a signal and resumed with another rate, and its page."""
    run = tmp_path_factory.mktemp("report") / "run"
    words = [*RUN, "--output_dir", run, "--enable_memory_profiling", 1]
    with running_job(*words, "--max_steps", 10_000, world_size=2) as job:
        job.wait_until(lambda: (run / "metrics.jsonl").is_file() and len(read_metrics(run)) >= 3)
        job.signal(signal.SIGTERM)
        stopped = job.wait()
    assert stopped.statuses == [75, 75], stopped.output
    step = read_metrics(run)[-1]["step"]
    resumed = [*RUN, "--output_dir", run, "--max_steps", step + 4, "--lr", 5e-4, "--resume_from_checkpoint", "latest"]
    run_job(*resumed, world_size=2).succeeded()
    assert smp.cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    return SimpleNamespace(run=run, step=step, page=page, parsed=Page(page))


def test_the_history_has_each_start_and_its_end(reported):
    events = history(reported.run)
    assert [each["event"] for each in events] == ["start", "memory", "memory", "end", "start", "end"]
    first, _, measured, stopped, second, ended = events
    assert (first["step"], first["checkpoint"], first["world_size"], first["changes"]) == (0, None, 2, [])
    assert first["settings"]["max_steps"] == 10_000 and "seed" not in first["settings"]
    assert sum(first["hosts"].values()) == 2 and {"smp", "torch", "python"} <= first["versions"].keys()
    assert first["predicted_memory"]["parameters"] > 0 and measured["categories"]["parameters"] > 0
    assert (stopped["status"], stopped["step"]) == (75, reported.step) and stopped["seconds"] > 0
    assert second["checkpoint"].endswith(f"llama_v2-{reported.step}steps")
    assert any(change.startswith("lr 0.0001 -> 0.0005") for change in second["changes"])
    assert (ended["status"], ended["step"], ended["reason"]) == (0, reported.step + 4, "")


def test_every_line_has_the_seconds_of_its_phases(reported):
    lines = read_metrics(reported.run)
    for each in lines:
        phases = each["phase_s"]
        assert {"data", "forward", "backward", "optimizer"} <= phases.keys() and "start" not in phases
        step = sum(phases.get(name, 0.0) for name in ("data", "forward", "backward", "optimizer"))
        assert 0 < step <= each["step_time_s"] * 1.05 + 1e-3
        # What follows a step is of the next line, or of the end; one validation is before the first step.
        validated = each["step"] % 2 == 1 and each["step"] != reported.step + 1
        assert ("validation" in phases) == validated
    assert "checkpoint" in history(reported.run)[-1]["phase_s"]


def test_the_page_has_all_parts(reported):
    text = {name: re.sub(r"\s+", " ", content) for name, content in reported.parsed.sections.items()}
    last = reported.step + 4
    assert "run done llama_v2" in text[""] and f"Step {last:,} of {last:,}" in text[""]
    assert picture(reported.parsed)
    for phase in ("data", "forward", "backward", "optimizer", "validation", "checkpoint", "end"):
        assert f" {phase} " in text["time"], phase
    assert "predicted measured" in text["memory"] and "optimizer state" in text["memory"]
    for checkpoint in (reported.run / "checkpoints").glob("*steps"):
        assert checkpoint.name in text["checkpoints"] or checkpoint.is_symlink()
    assert "complete" in text["checkpoints"] and "best" in text["checkpoints"] and "latest" in text["checkpoints"]
    assert f"step {reported.step}, stopped on request" in text["starts"] and f"step {last}, done" in text["starts"]
    assert "lr 0.0001 -> 0.0005" in text["starts"] and f"max_steps 10000 -> {last}" in text["starts"]
    assert "lr 0.0005 0.0001 lr" in text["settings"] and "settings at their defaults" in text["settings"]
    assert "torch" in text["environment"] and "processes 2" in text["environment"]
    assert "Changed since the checkpoint: lr" in text["events"]


def test_a_run_that_fails_says_why(tmp_path):
    def prepare(rank: int) -> None:
        enter = Watchdog.enter

        def fail(self, phase, step=None):
            enter(self, phase, step)
            if phase == "backward" and self.activity.step == 2:
                raise RuntimeError("the device is on fire")

        Watchdog.enter = fail

    outcome = run_job(*RUN, "--max_steps", 4, "--output_dir", tmp_path / "run", prepare=prepare)
    assert outcome.statuses == [1]
    end = history(tmp_path / "run")[-1]
    assert (end["event"], end["status"], end["step"]) == ("end", 1, 1)
    assert end["reason"] == "RuntimeError: the device is on fire"
    assert smp.cli.main(["report", str(tmp_path / "run")]) == 0
    assert "RuntimeError: the device is on fire" in (tmp_path / "run" / "report.html").read_text()


def test_a_start_that_is_refused_leaves_no_line(reported):
    before = (reported.run / "history.jsonl").read_bytes()
    assert run_job(*RUN, "--max_steps", 4, "--output_dir", reported.run).statuses == [2]
    assert (reported.run / "history.jsonl").read_bytes() == before


def browse(page: pathlib.Path, folder: pathlib.Path, *, width: int = 1400) -> tuple[str, str, list[str]]:
    """Load a page in Chromium; its elements in the end, what its console said, and the requests that it made."""
    log = folder / f"{page.stem}-net.json"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
        "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # its own requests go nowhere
        f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", "--enable-logging=stderr",
        f"--window-size={width},900", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    console = "\n".join(said for said in done.stderr.splitlines() if "CONSOLE" in said)
    # Chromium asks for things of its own; what a page asks for has the page as its initiator.
    events = [json.loads(line.rstrip(",")) for line in log.read_text().splitlines() if '"initiator"' in line]
    asked = {e["params"]["url"] for e in events if e["params"]["initiator"] != "not an origin"}
    return done.stdout, console, sorted(asked)


PROBE = """
<script>
document.body.dataset.found = JSON.stringify({
  drawn: document.querySelector("img").naturalWidth,
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1400, 500])
def test_the_page_opens_in_a_browser(reported, tmp_path, width):
    dom, console, requests = browse(reported.run / "report.html", tmp_path, width=width)
    assert "</html>" in dom and console == "" and requests == []
    # The same page without its policy, which would not let a test's script run either.
    probed = tmp_path / "probed.html"
    probed.write_text(re.sub(r"<meta http-equiv[^>]*>", "", reported.page).replace("</body>", PROBE + "</body>"))
    dom, console, _ = browse(probed, tmp_path, width=width)
    found = json.loads(Page(dom).elements[[tag for tag, _ in Page(dom).elements].index("body")][1]["data-found"])
    assert console == "" and found["wide"] <= 0
    assert found["drawn"] > 1000


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_page_with_a_request_or_an_error_would_be_seen(tmp_path):
    """What the test above looks for is there to be found; the policy stops it."""
    run = write(tmp_path / "run", metrics=[line(1), line(2)])
    assert smp.cli.main(["report", str(run)]) == 0
    bad = '<img src="http://asked.invalid/x.png"><script>console.error("wrong")</script></body>'
    page = (run / "report.html").read_text().replace("</body>", bad)
    free = tmp_path / "free.html"
    free.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page))
    _, console, requests = browse(free, tmp_path)
    assert "wrong" in console and requests == ["http://asked.invalid/x.png"]
    (run / "report.html").write_text(page)
    _, console, requests = browse(run / "report.html", tmp_path)
    assert "wrong" not in console and "Content Security Policy" in console and requests == []
