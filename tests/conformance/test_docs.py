"""Every command in README.md and docs/ is run, in the order of its page, in a directory of its own.

A fenced ``bash`` block is run as it stands. A comment in the line before it says otherwise:

- ``<!-- dry run: DIR=... -->``: needs a cluster; the flags are checked by ``--dry_run`` at the same number of
  processes, with the given things in place of the words in capitals.
- ``<!-- tested by tests/test_x.py::test_y -->``: run elsewhere, by that test.
- ``<!-- run by .ci/run -->``: one of the make targets that it calls.
- ``<!-- exit status: 1 -->``: ends with that status, as the page says.

A command that ends in ``# cluster`` is left out: what it starts is tested with stand-ins for the cluster's commands.

A ``python`` block after a line that ends in ``Save as `NAME`:`` is that file.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

import smp
from docs import composition_page, make_images
from smp.train import arguments

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted(ROOT.glob("examples/*.md"))
_FENCE = re.compile(r"(?P<before>[^\n]*)\n\n?```(?P<kind>bash|sh|python)\n(?P<text>.*?)^```", re.S | re.M)


class Block(NamedTuple):
    """A fenced block: its kind, its text, and the line before it."""

    kind: str
    text: str
    before: str

    @property
    def saved_as(self) -> str | None:
        """The file that it is, if it is to be saved."""
        match = re.search(r"[Ss]ave (?:this )?as `([\w./-]+)`:$", self.before)
        return match.group(1) if match else None

    def directive(self, word: str) -> str | None:
        """What a comment before it says after ``word``."""
        match = re.fullmatch(rf"<!-- {word}:?\s*(.*?)\s*-->", self.before.strip())
        return match.group(1) if match else None


def blocks(page: pathlib.Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [Block(m["kind"], m["text"], m["before"]) for m in _FENCE.finditer("\n" + text)]
    fences = len(re.findall(r"^```(?:bash|sh|python)$", text, re.M))
    assert len(found) == fences, f"{page.name}: {fences} blocks, {len(found)} read"
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_one_machine_is_started_by_the_launcher_that_adds_no_traceback(page):
    """torchrun's stands around each sentence with which a start is refused; SMP v2's users know it."""
    text = page.read_text(encoding="utf-8")
    torchrun = re.search(r"torchrun --nproc_per_node \d+ (?:train_lib\.py|-m smp\.train)", text)
    assert torchrun is None or page.name == "smp_v2.md" or "python -m smp.launch.local" in text[: torchrun.start()]


def runnable(page: pathlib.Path) -> list[Block]:
    """What is to be run or written, in order."""
    found = []
    for block in blocks(page):
        elsewhere = block.directive("tested by") is not None or block.directive("run by") is not None
        if block.saved_as or (block.kind != "python" and not elsewhere):
            found.append(block)
    return found


def without_cluster(text: str) -> str:
    """The block without the commands that need a cluster."""
    commands = re.findall(r"(?:[^\n]*\\\n)*[^\n]*\n", text)
    return "".join(command for command in commands if not re.search(r"# cluster\s*$", command))


def as_dry_run(text: str, things: str) -> str:
    """The block's jobs, as dry runs of the same number of processes."""
    for pair in things.split():
        word, _, value = pair.partition("=")
        text = re.sub(rf"\b{word}\b", value, text)

    def planned(match: re.Match[str]) -> str:
        nodes = re.search(r"--nnodes[= ](\d+)", match[1])
        processes = int(re.search(r"--nproc_per_node[= ](\d+)", match[1])[1]) * (int(nodes[1]) if nodes else 1)
        return f"python -m smp.train --dry_run 1 --dry_run_world_size {processes} "

    job = r"(?:torchrun|python -m smp\.launch\.local) (.*?)(?:train_lib\.py|-m smp\.train) "
    return re.sub(job, planned, text, flags=re.S)


@pytest.fixture
def folder(tmp_path):
    """A directory that looks like the repository, where everything that is written is thrown away."""
    for entry in ROOT.iterdir():
        if entry.name not in (".git", "runs", ".venv") and not entry.name.endswith("_cache"):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "lines").mkdir()  # for dry runs
    (tmp_path / "lines" / "a.jsonl").write_text('{"input_ids": [1, 2, 3, 4]}\n' * 64)
    (tmp_path / "hosts.txt").write_text("node1 slots=8\nnode2 slots=8\n")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))}
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def run(text: str, folder: pathlib.Path, status: int = 0) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env=environment(), capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == status, f"{text}\nended with {done.returncode}:\n{said}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.exists() and runnable(page)], ids=lambda path: path.name
)
def test_the_commands_of_a_page_work(page, folder):
    for block in runnable(page):
        if block.saved_as:
            (folder / block.saved_as).write_text(block.text)
        elif (things := block.directive("dry run")) is not None:
            run(as_dry_run(block.text, things), folder)
        else:
            run(without_cluster(block.text), folder, int(block.directive("exit status") or 0))


def _elsewhere(word: str) -> list[str]:
    found = [block.directive(word) for page in PAGES if page.exists() for block in blocks(page)]
    return [text for text in found if text is not None]


def test_what_is_tested_elsewhere_is():
    for named in _elsewhere("tested by"):
        for one in named.split(", "):
            file, _, name = one.partition("::")
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), one


@pytest.mark.slow  # some 300 plans
def test_the_page_of_what_composes_is_current():
    assert (ROOT / "docs" / "composition.md").read_text() == composition_page.page(), "run `make docs`"


@pytest.mark.slow  # three plans
def test_the_pictures_are_current(tmp_path, monkeypatch):
    monkeypatch.setattr(make_images, "IMAGES", tmp_path)
    make_images.main([])
    for made in tmp_path.iterdir():
        assert made.read_bytes() == (ROOT / "docs" / "images" / made.name).read_bytes(), f"{made.name}: run `make docs`"


@pytest.mark.slow
def test_the_demo_speaks(folder):
    """The blocks of the README that need what `make train` leaves."""
    demo = "python -m smp.launch.local --nproc_per_node 2 train_lib.py --config configs/demo.yaml --max_steps 10"
    run(demo, folder)
    readme = blocks(ROOT / "README.md")
    [script] = [block for block in readme if block.saved_as]
    (folder / script.saved_as).write_text(script.text)
    [speaks] = [block for block in readme if "test_the_demo_speaks" in block.before]
    assert "Mr. Darcy" in speaks.text and script.saved_as in speaks.text
    run(speaks.text, folder)


def test_what_ci_runs_is_in_its_script():
    script = (ROOT / ".ci" / "run").read_text() + "\n"
    if "make test-all\n" in script:
        script += "make test\n"  # part of it
    for page in PAGES:
        for block in blocks(page) if page.exists() else ():
            if block.directive("run by") is not None:
                for target in re.findall(r"^make ([\w-]+)", block.text, re.M):
                    assert f"make {target}\n" in script or target in ("test-slow", "docs"), target


def anchors(page: pathlib.Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.smoke
def test_links_lead_somewhere():
    for page in filter(pathlib.Path.exists, PAGES):
        for target in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text()):
            file, _, anchor = target.partition("#")
            linked = (page.parent / file).resolve() if file else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


@pytest.mark.smoke
def test_files_that_a_page_names_exist():
    """``*`` stands for any part of a name, as in a shell; ``::`` is before a test's name."""
    path = re.compile(
        r"(?<![\w./-])(?:smp|tests|benchmarks|examples|configs|docs|data/sample)/[\w./*-]+\.(?:py|md|yaml|c|txt)\b(?:::\w+)?"
    )
    for page in PAGES:
        for found in path.findall(page.read_text()):
            named, _, test = found.partition("::")
            files = list(ROOT.glob(named))
            assert files and (not test or f"def {test}(" in files[0].read_text()), f"{page.name}: {found}"


def test_flags_that_a_page_names_exist():
    """In the column of a table that says what a name of another project is here."""
    for page in sorted((ROOT / "docs").glob("from_*.md")):
        for line in page.read_text().splitlines():
            cells = line.split("|")
            for name in re.findall(r"--(\w+)", cells[2]) if len(cells) > 3 else ():
                assert name in arguments.FLAGS, f"{page.name}: --{name}"
            for name in re.findall(r"`smp\.(\w+)", line):
                assert hasattr(smp, name), f"{page.name}: smp.{name}"
