"""The policy answers for every status at every stage."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_sync._base.policy import (
    EMPTY_400,
    FIRST_S,
    LONGEST_S,
    NO_SUCH_CALL,
    Meaning,
    Rule,
    Stage,
    delay_s,
    proves_refusal,
    rule_for,
)

STAGES = tuple(Stage)


@pytest.mark.parametrize("stage", STAGES)
def test_every_status_has_a_rule(stage: Stage) -> None:
    assert all(isinstance(rule_for(status, stage), Rule) for status in (EMPTY_400, *range(100, 1000)))


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, "FINAL FINAL SUSPECT UNWANTED MOVED"),
        (EMPTY_400, "UNTOUCHED UNTOUCHED RETRY UNWANTED MOVED"),
        (402, "BLOCKED BLOCKED BLOCKED RETRY FINAL"),
        (408, "UNTOUCHED UNTOUCHED NO_NEWS RETRY UNTOUCHED"),
        (410, "FINAL FINAL FORGOTTEN UNWANTED MOVED"),
        (429, "UNTOUCHED THROTTLED RETRY RETRY UNTOUCHED"),
        (500, "RETRY RETRY RETRY RETRY RETRY"),
        (501, "FINAL FINAL RETRY RETRY FINAL"),
        (503, "UNTOUCHED UNTOUCHED RETRY RETRY UNTOUCHED"),
        (599, "RETRY RETRY RETRY RETRY RETRY"),
        (418, "FINAL FINAL FINAL UNWANTED FINAL"),
        (302, "FINAL FINAL FINAL UNWANTED FINAL"),
    ],
)
def test_what_a_status_means_at_each_stage(status: int, expected: str) -> None:
    assert [rule_for(status, stage).meaning for stage in STAGES] == [
        Meaning[name] for name in expected.split()
    ]


def test_a_call_that_is_not_offered_is_never_tried_again() -> None:
    for status in NO_SUCH_CALL:
        assert not rule_for(status, Stage.CALL).passes


@pytest.mark.parametrize("body", [{"detail": "no"}, {}, "<h1>no</h1>", None])
def test_only_a_json_error_of_the_server_proves_that_nothing_was_done(body: object) -> None:
    named = isinstance(body, dict) and bool(body)
    proven = {status for status in range(300, 600) if proves_refusal(status, body)}
    assert proven == ({400, 401, 402, 403, 404, 405, 409, 410, 413, 415, 422} if named else {413})


def test_delays_grow_and_have_an_end() -> None:
    delays = [delay_s(failures, draw=1.0, first_s=0.25, longest_s=8.0) for failures in range(1, 2000)]
    assert delays[:6] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert all(earlier <= later for earlier, later in itertools.pairwise(delays))
    assert delays[-1] == 8.0


def test_a_delay_is_shortened_by_a_quarter_at_most_and_a_hint_never() -> None:
    for draw in (0.0, 0.5, 0.999):
        assert 0.75 <= delay_s(2, draw=draw) <= 1.0
        assert 10.0 <= delay_s(2, hint_s=10.0, draw=draw) <= 11.0


DRAWS = st.floats(0, 1)


@given(st.integers(), DRAWS)
def test_delays_stay_within_their_bounds(failures: int, draw: float) -> None:
    assert 0.75 * FIRST_S <= delay_s(failures, draw=draw) <= LONGEST_S


@given(st.integers(1, 50), st.floats(0.001, 1e6), DRAWS)
def test_a_servers_wish_is_a_lower_bound_and_hardly_exceeded(n: int, hint_s: float, draw: float) -> None:
    assert hint_s <= delay_s(n, hint_s=hint_s, draw=draw) <= hint_s + min(1.0, hint_s * 0.1) + 1e-9


def test_an_invalid_hint_is_ignored() -> None:
    for hint_s in (None, 0.0, -5.0, math.nan):
        assert delay_s(3, hint_s=hint_s, draw=1.0) == 2.0
