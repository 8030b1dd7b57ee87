"""The checks of a demo; each of them can fail."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tinker_sync.demo.result import DemoResult, measure_ends

GOOD = DemoResult(
    losses=(4.0, 2.0, 1.0, 0.5, 0.25, 0.2, 0.1, 0.1, 0.1, 0.1),
    rewards=(0.1, 0.1, 0.2, 0.2, 0.5, 0.7, 0.8, 0.9, 0.9, 0.9),
    checkpoint="tinker://run/weights/sorting",
    resumed_at=5,
    lost=(0.2, 0.1, 0.1),
    lost_exactly=True,
    sorted_before=0.0,
    sorted_after=0.8,
    stories_before=(),
    stories_after=(),
    seconds=1.0,
)


def test_a_good_result_passes() -> None:
    assert GOOD.problems == []
    assert GOOD.exit_code == 0
    assert GOOD.repeated == (0.2, 0.1, 0.1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"losses": GOOD.losses[:5] + (2.0,) * 5, "lost": (2.0,)}, "the loss went from 1.55 to 2.00"),
        ({"losses": GOOD.losses[:5] + (float("nan"),) * 5, "lost": ()}, "the loss went from 1.55 to nan"),
        ({"rewards": (0.2,) * 10}, "the reward went from 0.20 to 0.20"),
        ({"rewards": GOOD.rewards[::-1]}, "the reward went from 0.84 to 0.22"),
        ({"sorted_after": 0.4}, "sorted right: 0% before, 40% after"),
        ({"sorted_before": 0.6, "sorted_after": 0.8}, "sorted right: 60% before, 80% after"),
        ({"lost": (0.2, 0.1, 0.1001)}, "repeated, gave other losses"),
    ],
)
def test_each_check_can_fail(change: dict[str, Any], complaint: str) -> None:
    bad = attrs.evolve(GOOD, **change)
    assert len(bad.problems) == 1
    assert complaint in bad.problems[0]
    assert bad.exit_code == 1


@pytest.mark.parametrize(
    "change",
    [
        {"lost": (0.3, 0.1, 0.1), "lost_exactly": False},
        {"sorted_before": 0.95, "sorted_after": 0.95},
        {"rewards": (0.95,) * 10},
    ],
)
def test_exceptions_of_the_checks(change: dict[str, Any]) -> None:
    assert attrs.evolve(GOOD, **change).problems == []


def test_ends_of_short_curves() -> None:
    assert measure_ends([3.0]) == (3.0, 3.0)
    assert measure_ends([3.0, 2.0, 1.0]) == (3.0, 1.0)
    assert measure_ends([6.0, 4.0, 9.0, 2.0, 0.0]) == (5.0, 1.0)
