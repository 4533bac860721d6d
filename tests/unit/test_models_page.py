"""docs/models.md names every causal language model of transformers."""

import importlib.metadata
import json
import pathlib
import re
import sys

import pytest

from docs import families_page
from tests.families import FAMILIES
from tests.family_checks import PARTS

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def maker(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "docs")])
    import models_page

    return models_page


def test_the_page_has_every_type(maker):
    text = (ROOT / "docs" / "models.md").read_text()
    if f"transformers {importlib.metadata.version('transformers')}" not in text:
        pytest.skip("the page was made with another version of transformers")
    assert [name for name in maker.all_types() if f"| `{name}` |" not in text] == []


def test_readme_has_the_counts_of_the_page():
    page, readme = ((ROOT / name).read_text() for name in ("docs/models.md", "README.md"))
    counts = {what: int(number) for what, number in re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", page, re.MULTILINE)}
    rows = re.findall(r"^\| `\S+` \|(.*)\|$", page, re.MULTILINE)
    trained = [row.split(" | ") for row in rows if row.count(" | ") == 4]
    assert (counts["types"], counts["work sharded"]) == (len(rows), len(trained))
    assert counts["work tensor parallel"] == sum(row[1] == "✓" for row in trained)
    assert counts["work context parallel"] == sum(row[2] == "✓" for row in trained)
    assert f"[{counts['work sharded']} types](docs/models.md)" in readme
    assert (
        f"{counts['work sharded']} of transformers' {counts['types']} types of causal language models, "
        f"{counts['work tensor parallel']} with tensor parallelism"
    ) in readme


def test_the_page_counts_what_works_and_gives_reasons(maker, tmp_path):
    works = ["works", ""]
    parts = dict.fromkeys(("family", "shard", "tp", "context", "files", "init"), works)
    results = [
        {"type": "good", **parts},
        {"type": "split", **parts, "tp": ["refused", "no plan | none"]},
        {"type": "wrong", **parts, "shard": ["fails", "the loss of step 0 differs by 1.0e+00"]},
        *(
            {
                "type": name,
                "family": ["refused", f"a model of type {name!r} cannot be trained: {why}. docs/models.md x"],
            }
            for name, why in (("m1", "mixture (A)"), ("m2", "mixture (B(2))"))
        ),
    ]
    text = maker.page(json.loads(json.dumps(results)))
    for row in (
        "| types | 5 |",
        "| work sharded | 2 |",
        "| work tensor parallel | 2 |",
        "| work context parallel | 3 |",
        "| work in every part | 1 |",
        "| are refused | 2 |",
        "| fail | 1 |",
        "| the type | mixture | 2 |",
        "| `good` | ✓ | ✓ | ✓ | ✓ | ✓ |",
        "| `split` | ✓ | no plan \\| none | ✓ | ✓ | ✓ |",
        "| `wrong` | **fails**: the loss of step 0 differs by 1.0e+00 | ✓ | ✓ | ✓ | ✓ |",
        "| `m2` | mixture (B(2)) |",
    ):
        assert row in text, row


def test_the_page_has_a_row_of_each_published_family_and_none_that_fails():
    section = families_page.section_of((ROOT / "docs" / "models.md").read_text())
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| family ")]
    names = [name for row in rows for name in row.split(" | ")[0].removeprefix("| ").split(", ")]
    assert len(rows) == 15 and names == [*FAMILIES] and "**fails**" not in section
    assert all(row.count(" | ") == len(PARTS) for row in rows)


def test_a_family_is_a_row_with_what_does_not_hold():
    good = {"name": "A", **{part: ["works", ""] for part in PARTS}, "image": ["none", ""]}
    bad = {**good, "name": "B", "chats": ["fails", "the loss"], "peft": ["refused", "no"]}
    assert families_page.row([good]) == "| A | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | – | ✓ |"
    row = "| A, B | ✓ | ✓ | ✓ | ✓; B: **fails** | ✓ | ✓ | ✓ | – | ✓; B: refused |"
    assert families_page.row([good, bad]) == row
    assert families_page.row([bad]).endswith("| – | B: refused |")


def test_the_section_of_families_stays_where_types_are_tried_again(maker, tmp_path):
    section = f"{families_page.BEGIN}\nit\n{families_page.END}\n"
    (tmp_path / "models.md").write_text(f"# Models\n\n{section}\n## Counts\n")
    result = {"type": "good", **{part: ["works", ""] for part in ("family", *maker.PARTS)}}
    (tmp_path / "results.jsonl").write_text(json.dumps(result) + "\n")
    maker.write(tmp_path / "models.md", tmp_path / "results.jsonl", ["good"])
    assert families_page.section_of((tmp_path / "models.md").read_text()) == section
