"""Moments are parsed and formatted exactly, the same on every Python."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_sync.types._moment import from_unix_time, parse_moment

NOON = datetime(2026, 1, 31, 12, 0)  # noqa: DTZ001  # naive on purpose
UTC = timezone.utc


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-01-31T12:00:00Z", NOON.replace(tzinfo=UTC)),
        ("2026-01-31t12:00:00z", NOON.replace(tzinfo=UTC)),
        ("2026-01-31 12:00Z", NOON.replace(tzinfo=UTC)),
        (" 2026-01-31T12:00:00Z\n", NOON.replace(tzinfo=UTC)),
        ("2026-01-31T12:00:00-00:00", NOON.replace(tzinfo=UTC)),
        ("2026-01-31T12:00:00+05:30", NOON.replace(tzinfo=timezone(timedelta(hours=5, minutes=30)))),
        ("2026-01-31T12:00:00-0530", NOON.replace(tzinfo=timezone(-timedelta(hours=5, minutes=30)))),
        ("2026-01-31T12:00:00\u221205:30", NOON.replace(tzinfo=timezone(-timedelta(hours=5, minutes=30)))),
        ("2026-01-31T12:00:00.5Z", NOON.replace(microsecond=500_000, tzinfo=UTC)),
        ("2026-01-31T12:00:00,000001Z", NOON.replace(microsecond=1, tzinfo=UTC)),
        ("2026-01-31T12:00:00.123456789Z", NOON.replace(microsecond=123_456, tzinfo=UTC)),
        ("2026-01-31T12:00:00", NOON),
        ("2026-01-31", NOON.replace(hour=0)),
        ("2026-01-31_12:00:00+0530", NOON.replace(tzinfo=timezone(timedelta(hours=5, minutes=30)))),
        ("20000000000", datetime(2603, 10, 11, 11, 33, 20, tzinfo=UTC)),
        ("20000000001", datetime(1970, 8, 20, 11, 33, 20, 1000, tzinfo=UTC)),
        ("1700000000", datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        ("1700000000.5", datetime(2023, 11, 14, 22, 13, 20, 500_000, tzinfo=UTC)),
        ("-20000000001", datetime(1969, 5, 14, 12, 26, 39, 999_000, tzinfo=UTC)),
        ("-5", datetime(1969, 12, 31, 23, 59, 55, tzinfo=UTC)),
    ],
)
def test_text_is_parsed(text: str, moment: datetime) -> None:
    parsed = parse_moment(text)
    assert parsed == moment
    assert parsed.utcoffset() == moment.utcoffset()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "-",
        "nan",
        "2026-13-01",
        "inf",
        "1e9",
        "2026-02-30",
        "2026-1-31",
        "26-01-31",
        "2026-01-31T",
        "2026-01-31T12",
        "2026-01-31T24:00:00Z",
        "2026-01-31T12:60:00Z",
        "2026-01-31T23:59:60Z",
        "2026-01-31T12:00:00.Z",
        "2026-01-31T12:00:00+24:00",
        "2026-01-31T12:00:00+01:60",
        "2026-01-31T12:00:00+5:30",
        "2026-01-31T12:00:00Zulu",
        "2026-01-31T12:00:00Z2026-01-31T12:00:00Z",
        "\u0662\u0660\u0662\u0666-01-31",
        "2026-01-31T12:00:00Z" + "x" * 100_000,
    ],
)
def test_other_text_is_refused_with_a_short_message(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_moment(text)
    assert len(str(caught.value)) < 200


@given(st.datetimes(datetime(1970, 1, 1), datetime(2500, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001
def test_unix_times_in_seconds_are_parsed(moment: datetime) -> None:
    assert abs(from_unix_time(moment.timestamp()) - moment) < timedelta(milliseconds=1)


@given(st.datetimes(datetime(1971, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001
def test_unix_times_in_milliseconds_are_parsed(moment: datetime) -> None:
    assert abs(from_unix_time(moment.timestamp() * 1000) - moment) < timedelta(milliseconds=1)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e300, 1e18])
def test_numbers_beyond_the_calendar_are_refused(number: float) -> None:
    with pytest.raises((ValueError, OverflowError)):
        from_unix_time(number)
