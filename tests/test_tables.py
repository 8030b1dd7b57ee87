"""The tables in `tests/README.md` name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
LIST = (TESTS / "README.md").read_text("utf-8")
ROWS = re.findall(r"^\| (\d+) \| .+ \| `(test_\w+)` \|$", LIST, re.MULTILINE)
NAMES = {
    name
    for path in TESTS.rglob("test_*.py")
    for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
}


PLACES = re.findall(r"^\| .+ \| `(\w+(?:/\w+)*\.py)::(test_\w+)` \|$", LIST, re.MULTILINE)


def test_the_weak_points_are_numbered_without_gaps() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 69))


def test_every_weak_point_has_a_test() -> None:
    missing = [test for _, test in ROWS if not any(_matches(test, name) for name in NAMES)]
    assert missing == []


def _matches(test: str, name: str) -> bool:
    return name.startswith(test) if test.endswith("_") else name == test


def test_every_other_row_names_a_test() -> None:
    missing = [
        f"{path}::{name}" for path, name in PLACES if f"def {name}(" not in (TESTS / path).read_text("utf-8")
    ]
    assert missing == []
    # Each table has its rows, so that a change of their form does not hide them.
    assert LIST.count("| Result | Test |") == 4
    assert len(PLACES) == sum(line.endswith("` |") and "::" in line for line in LIST.splitlines()) >= 44
