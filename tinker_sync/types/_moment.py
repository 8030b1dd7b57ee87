"""Conversion between datetimes and RFC 3339 text, identical on every supported Python. Pure functions."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

# `re` compiles them at the first use, and sampling does not use them.
_RFC_3339 = (
    r"(\d{4})-(\d\d)-(\d\d)"
    r"(?:[Tt _](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d+))?)?\s*([Zz]|[+\-\u2212]\d\d:?[0-5]\d)?)?"
)
_DIGITS = r"[+-]?\d*\.?\d+"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MOST_SECONDS = 2e10
"""The year 2603. Larger numbers count milliseconds, because the protocol has no later moments."""


def parse_moment(text: str) -> datetime:
    """Parse RFC 3339 text, in which the time, the seconds and the offset may be missing.

    Without an offset the result is naive. Text that is only a number is read as by `from_unix_time`.

    Raises ValueError, or OverflowError for a number beyond the year 9999.

    >>> parse_moment("2026-01-31T12:00:00Z")
    datetime.datetime(2026, 1, 31, 12, 0, tzinfo=datetime.timezone.utc)
    """
    if re.fullmatch(_DIGITS, text, re.ASCII):
        return from_unix_time(float(text))
    match = re.fullmatch(_RFC_3339, text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"not an RFC 3339 moment: {text[:40]!r}")
    year, month, day, hour, minute, second, fraction, offset = match.groups()
    microsecond = int((fraction or "0").ljust(6, "0")[:6])
    parts = (int(year), int(month), int(day), int(hour or 0), int(minute or 0), int(second or 0), microsecond)
    return datetime(*parts, tzinfo=_zone(offset))


def from_unix_time(number: float) -> datetime:
    """Convert seconds since 1970 to a datetime in UTC. A number beyond 20 billion counts milliseconds.

    Raises ValueError or OverflowError for numbers out of range.

    >>> from_unix_time(1_700_000_000) == from_unix_time(1_700_000_000_000)
    True
    """
    seconds = number if abs(number) <= _MOST_SECONDS else number / 1000
    return _EPOCH + timedelta(seconds=seconds)


def _zone(offset: str | None) -> timezone | None:
    if offset is None:
        return None
    if offset in "Zz":
        return timezone.utc
    digits = offset[1:].replace(":", "")
    away = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    return timezone(away if offset[0] == "+" else -away)


def format_moment(moment: datetime) -> str:
    """Return a datetime as RFC 3339 text, with Z for UTC.

    >>> format_moment(datetime(2026, 1, 31, tzinfo=timezone.utc))
    '2026-01-31T00:00:00Z'
    """
    text = moment.isoformat()
    return text[:-6] + "Z" if text.endswith("+00:00") else text
