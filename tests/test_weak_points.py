"""The list of weak points in `tests/README.md` and the tests that are numbered after it agree."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROWS = re.findall(
    r"^\| (\d+) \| .+ \| `test_w(\d+)_` \|$", (TESTS / "README.md").read_text("utf-8"), re.MULTILINE
)
NUMBERED = re.compile(r"^ *(?:async )?def test_((?:w\d+_)+)", re.MULTILINE)


def numbers_of_tests() -> set[int]:
    names = [name for path in TESTS.rglob("test_*.py") for name in NUMBERED.findall(path.read_text("utf-8"))]
    return {int(number) for name in names for number in re.findall(r"\d+", name)}


def test_the_list_is_complete_and_in_order() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 69))
    assert all(int(number) == int(test) for number, test in ROWS)


def test_every_weak_point_has_a_test_and_every_number_a_weak_point() -> None:
    assert numbers_of_tests() == {int(number) for number, _ in ROWS}
