"""Curves in a terminal: where the columns stand, with blocks and without."""

from __future__ import annotations

import pytest

from tinker_sync.demo.plot import columns, plot, speaks_blocks


def test_a_rising_curve() -> None:
    assert plot([0.0, 1.0, 2.0], rows=2) == [
        "   2.00 ┤  █",
        "        │ ██",
        "   0.00 └───",
        "         1 … 3",
    ]


def test_without_blocks_everything_is_ascii() -> None:
    lines = plot([0.0, 1.0, 2.0], rows=2, blocks=False)
    assert "\n".join(lines).isascii()
    assert lines[0] == "   2.00 |  #"


def test_long_curves_are_averaged_to_fit() -> None:
    lines = plot([float(number) for number in range(1000)], width=50)
    assert {len(line) for line in lines[:-2]} == {59}
    assert lines[-1].endswith("1 … 1000")
    assert columns([1.0, 2.0, 3.0, 4.0, 5.0], 2) == [1.5, 4.0]
    assert columns([1.0, 2.0], 10) == [1.0, 2.0]


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0], [float("nan"), 1.0], [-1.0, 1.0]])
def test_odd_curves_are_drawn(values: list[float]) -> None:
    lines = plot(values, rows=3)
    assert len(lines) == 5


def test_below_zero_the_lowest_is_the_floor() -> None:
    lines = plot([-2.0, 2.0], rows=1)
    assert lines == ["   2.00 ┤ █", "  -2.00 └──", "         1 … 2"]


@pytest.mark.parametrize(("encoding", "can"), [("utf-8", True), ("cp1252", False), ("no-such", False)])
def test_what_an_encoding_can_hold(encoding: str, can: bool) -> None:
    assert speaks_blocks(encoding) is can
