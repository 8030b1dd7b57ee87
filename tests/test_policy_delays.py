"""Delays are arithmetic."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tinker_sync._policy import FIRST_S, LONGEST_S, delay_s

DRAWS = st.floats(0, 1)


@given(st.integers(), DRAWS)
def test_delays_stay_within_their_bounds(failures: int, draw: float) -> None:
    assert 0.75 * FIRST_S <= delay_s(failures, draw=draw) <= LONGEST_S


@given(st.integers(1, 50), DRAWS)
def test_delays_do_not_shrink(failures: int, draw: float) -> None:
    assert delay_s(failures, draw=draw) <= delay_s(failures + 1, draw=draw)


@given(st.integers(1, 50), st.floats(0.001, 1e6), DRAWS)
def test_a_servers_wish_is_a_lower_bound_and_hardly_exceeded(n: int, hint_s: float, draw: float) -> None:
    assert hint_s <= delay_s(n, hint_s=hint_s, draw=draw) <= hint_s + min(1.0, hint_s * 0.1) + 1e-9


def test_no_wish_is_no_wish() -> None:
    for hint_s in (None, 0.0, -5.0, math.nan):
        assert delay_s(3, hint_s=hint_s, draw=1.0) == 2.0
