"""Numbers and moments as people read them. Pure functions."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Final

MISSING: Final = "-"

_UNITS: Final = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86400
_WEEK_S: Final = 7 * _DAY_S
# From here on a date says more than a number of weeks.
_LONG_AGO_S: Final = 31 * _DAY_S


def size(size_bytes: int | None) -> str:
    """A size in steps of 1024.

    >>> size(5), size(1536), size(10 * 1024**3), size(None)
    ('5 B', '1.5 KB', '10.0 GB', '-')
    """
    if size_bytes is None or size_bytes < 0:
        return MISSING
    if size_bytes < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in _UNITS[1:]:
        value /= 1024
        # What would be rounded to 1024.0 is one of the next unit.
        if value < 1023.95 or unit == _UNITS[-1]:
            return f"{value:.1f} {unit}"
    raise AssertionError("the last unit takes everything")


def age(moment: datetime | None, now: datetime) -> str:
    """How long ago, or how soon; a date where that is far away. Moments without a zone are UTC.

    >>> now = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
    >>> age(datetime(2026, 3, 1, 10, tzinfo=timezone.utc), now)
    '2 hours ago'
    >>> age(datetime(2026, 3, 8, 13, tzinfo=timezone.utc), now), age(datetime(2025, 3, 1), now)
    ('in 7 days', '2025-03-01')
    """
    if moment is None:
        return MISSING
    moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    apart_s = (now - moment).total_seconds()
    distance_s = abs(apart_s)
    if distance_s >= _LONG_AGO_S:
        return moment.astimezone(timezone.utc).strftime("%Y-%m-%d")
    if distance_s < _MINUTE_S:
        return "just now" if apart_s >= 0 else "in a moment"
    text = _span(distance_s)
    return f"{text} ago" if apart_s > 0 else f"in {text}"


def _span(seconds: float) -> str:
    for unit_s, name in ((2 * _WEEK_S, "week"), (_DAY_S, "day"), (_HOUR_S, "hour"), (_MINUTE_S, "minute")):
        if seconds >= unit_s:
            return counted(int(seconds // (_WEEK_S if name == "week" else unit_s)), name)
    return counted(int(seconds), "second")


def duration(seconds: float) -> str:
    """A length of time in its one or two largest units.

    >>> duration(0.25), duration(42), duration(125), duration(7260)
    ('0.2 s', '42 s', '2 min 5 s', '2 h 1 min')
    >>> duration(3600), duration(86400), duration(604800), duration(90000)
    ('1 h', '1 day', '7 days', '1 day 1 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        large, small = f"{whole // _MINUTE_S} min", f"{whole % _MINUTE_S} s"
    elif whole < _DAY_S:
        large, small = f"{whole // _HOUR_S} h", f"{whole % _HOUR_S // _MINUTE_S} min"
    else:
        large, small = counted(whole // _DAY_S, "day"), f"{whole % _DAY_S // _HOUR_S} h"
    return large if small.startswith("0 ") else f"{large} {small}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number and its noun.

    >>> counted(1, "run"), counted(25000, "checkpoint"), counted(2, "copy", "copies")
    ('1 run', '25,000 checkpoints', '2 copies')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def yes_no(value: bool | None) -> str:
    """A flag in a word.

    >>> yes_no(True), yes_no(None)
    ('yes', '-')
    """
    return MISSING if value is None else "yes" if value else "no"


def not_shown(total: int, shown: int) -> str:
    """What a list leaves out, and how to see it.

    >>> not_shown(25, 20), not_shown(3, 3)
    ('5 more are not shown; --limit 0 shows all.', '')
    """
    more = total - shown
    if more <= 0:
        return ""
    return f"{more:,} more {'is' if more == 1 else 'are'} not shown; --limit 0 shows all."


def utc_now() -> datetime:
    """The present moment."""
    return datetime.now(timezone.utc)
