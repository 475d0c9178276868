"""Pages that name the test of a promise name one that is there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/faults.md"])
def test_each_test_that_a_page_names_is_there(page):
    named = set(re.findall(r"`(test_\w+)`", (ROOT / page).read_text()))
    there = {name for file in ROOT.glob("tests/*/*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert named
    assert not named - there
