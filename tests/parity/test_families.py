"""What docs/models.md says of published families holds of small models with their structure."""

from __future__ import annotations

import pathlib

import pytest

from docs import families_page
from tests.families import FAMILIES
from tests.family_checks import check_family

ROOT = pathlib.Path(__file__).parents[2]
QUICK = "GLM-4.5-Air"  # dense and shared layers beside experts, a bias, and tensors that transformers has no module for


def test_a_family_holds_in_every_part():
    pytest.importorskip("peft")
    found = check_family(QUICK)
    assert {part: how for part, how in found.items() if part != "name" and how[0] != "works"} == {"image": ["none", ""]}


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted({family.number for family in FAMILIES.values()}))
def test_the_page_says_what_holds(number):
    found = [check_family(name) for name, family in FAMILIES.items() if family.number == number]
    assert families_page.row(found) in (ROOT / "docs" / "models.md").read_text().splitlines(), found
